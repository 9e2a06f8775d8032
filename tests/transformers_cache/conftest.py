"""These tests need transformers, which comes with vLLM."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import tiny_models


@pytest.fixture(scope="session")
def models():
    """The tiny models by name, built once."""
    return {kind: tiny_models.build(kind) for kind in ("llama", "mistral", "gemma3")}
