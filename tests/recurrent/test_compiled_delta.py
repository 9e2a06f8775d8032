"""The kernels of gated delta nets as a compiler makes them for a GPU, looked at on any machine."""

from __future__ import annotations

import pytest
from compiled_elsewhere import compiled_facts


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Facts by kernel and dtype of the states."""
    return compiled_facts("compiled_delta.py", tmp_path_factory.mktemp("triton"))


def test_verify_multiplies_states_where_they_were_loaded(compiled):
    """16 bytes at once, then on to tensor cores: a state of 16 rows would need 16 reads or more."""
    for name in ("verify fp32", "verify bf16"):
        assert compiled[name]["wide_loads"] >= 16
        assert compiled[name]["from_shared"] < 8


def test_verify_multiplies_exact_pieces(compiled):
    """Three products for a float32 number, one for a bfloat16 one; and one of keys with keys."""
    assert compiled["verify fp32"]["products"] == 16 * (3 + 1)
    assert compiled["verify bf16"]["products"] == 16 * (1 + 1)


def test_programs_of_several_tiles_load_ahead(compiled):
    """A tile of 16 rows is 16 words of a thread (bfloat16: 8); two come before the loop."""
    for name, words in (("verify many fp32", 16), ("verify many bf16", 8)):
        assert compiled[name]["ahead"] == 3 * words
        assert compiled[name]["products"] == compiled[name.replace(" many", "")]["products"]


def test_commit_moves_states_in_wide_words(compiled):
    """16 bytes per thread at once: 8 words per thread of float32, 4 of bfloat16."""
    for name, words in (("advance fp32", 8), ("advance bf16", 4)):
        assert compiled[name]["wide_loads"] >= words
        assert compiled[name]["wide_stores"] == words
