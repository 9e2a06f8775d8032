"""Fixtures of the plug-in's unit tests."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def lines(monkeypatch):
    """Lines of the ``kvtxn`` logger."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    monkeypatch.setattr(logging.getLogger("kvtxn"), "handlers", [handler])
    return said
