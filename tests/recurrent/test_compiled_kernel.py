"""The kernel as a compiler makes it for a GPU, looked at on any machine."""

from __future__ import annotations

import pytest
from compiled_elsewhere import compiled_facts


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Facts by variant."""
    return compiled_facts("compiled_kernel.py", tmp_path_factory.mktemp("triton"))


def test_it_rounds_products_and_sums_apart(compiled):
    """No fused multiply-add, nothing flushed to zero: so the bytes are the reference's."""
    for name, found in compiled.items():
        assert (found["fused"], found["flushed"]) == (0, 0), name


def test_states_move_in_wide_words(compiled):
    """16 bytes at once, where a state lies so; never where it does not."""
    for name in ("float32", "bfloat16"):
        assert compiled[name]["wide_loads"] >= 2
        assert compiled[name]["wide_stores"] >= 2
    assert compiled["odd"]["wide_loads"] == compiled["odd"]["wide_stores"] == 0


def test_a_past_is_read_before_it_is_written(compiled):
    """By a barrier: a tap that one thread overwrites is another one's to read."""
    assert compiled["past"]["barriers_before_store"] == 1
