"""The kernel of Mamba-2 layers as a compiler makes it for a GPU, looked at on any machine."""

from __future__ import annotations

import pytest
from compiled_elsewhere import compiled_facts


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Facts by kernel and dtype of the states."""
    return compiled_facts("compiled_mamba.py", tmp_path_factory.mktemp("triton"))


def test_states_are_multiplied_where_they_were_loaded(compiled):
    """16 bytes at once, then on to tensor cores: a state of 16 rows would need 16 reads or more."""
    for name, words in (("verify fp32", 16), ("verify bf16", 8)):
        assert compiled[name]["wide_loads"] >= words
        assert compiled[name]["from_shared"] < 8


def test_products_are_of_exact_pieces(compiled):
    """Three products for a float32 number, one for a bfloat16 one; and one of B with C."""
    for name in ("verify", "verify many"):
        assert compiled[f"{name} fp32"]["products"] == 8 * (3 + 1)
        assert compiled[f"{name} bf16"]["products"] == 8 * (1 + 1)


def test_programs_of_several_tiles_load_ahead(compiled):
    """A tile of 16 rows is 16 words of a thread (bfloat16: 8); two come before the loop."""
    for name, words in (("verify many fp32", 16), ("verify many bf16", 8)):
        assert compiled[name]["ahead"] >= 3 * words
