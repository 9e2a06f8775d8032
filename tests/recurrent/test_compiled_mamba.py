"""The kernel of Mamba-2 layers as a compiler makes it for a GPU, looked at on any machine."""

from __future__ import annotations

import pytest
from compiled_elsewhere import compiled_facts


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Facts by dtype of the states."""
    return compiled_facts("compiled_mamba.py", tmp_path_factory.mktemp("triton"))


def test_states_are_multiplied_where_they_were_loaded(compiled):
    """16 bytes at once, then on to tensor cores: a state of 16 rows would need 16 reads or more."""
    for state, words in (("fp32", 16), ("bf16", 8)):
        assert compiled[state]["wide_loads"] >= words
        assert compiled[state]["from_shared"] < 8


def test_products_are_of_exact_pieces(compiled):
    """Three products for a float32 number, one for a bfloat16 one; and one of B with C."""
    assert compiled["fp32"]["products"] == 8 * (3 + 1)
    assert compiled["bf16"]["products"] == 8 * (1 + 1)
