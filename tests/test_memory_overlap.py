"""Views of one memory, against the addresses of all their elements."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtxn import LayerError, LayerRef, TransactionManager
from kvtxn.memory_overlap import overlap, overlaps_itself

views = st.tuples(
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.permutations([0, 1, 2]),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.integers(0, 60),
)


def addresses(tensor):
    """Of all elements, in the order of their indices."""
    places = itertools.product(*(range(size) for size in tensor.shape))
    steps = [sum(i * s for i, s in zip(at, tensor.stride(), strict=True)) for at in places]
    return [tensor.data_ptr() + step * tensor.element_size() for step in steps]


def view(drawn, strides=None):
    """A view whose strides clear what is below them, by some room more."""
    sizes, order, room, start = drawn
    if strides is None:
        strides, below = [0] * 3, 0
        for dim in order:
            strides[dim] = below + 1 + room[dim]
            below += (sizes[dim] - 1) * strides[dim]
    return MEMORY.as_strided(sizes, strides, start)


MEMORY = torch.zeros(4096)


@settings(max_examples=300, deadline=None)
@given(views, views)
def test_with_the_same_strides_it_is_known(first, second):
    one = view(first)
    other = view(second, one.stride())
    if not overlaps_itself(one) and not overlaps_itself(other):
        shared = bool({*addresses(one)} & {*addresses(other)})
        assert overlap(one, other) is overlap(other, one) is shared


def test_what_begins_at_one_place_overlaps():
    """Whatever the strides, and the size of an element."""
    one = MEMORY.as_strided((4, 6), (6, 1))
    for other in (one.t(), one[:, ::2], one.view(torch.float16), one[:1, :1]):
        assert overlap(one, other) is overlap(other, one) is True
    with pytest.raises(LayerError, match="the same memory"):
        LayerRef("a", cache := torch.zeros(3, 4, 4, 8), cache.transpose(1, 2))


@settings(max_examples=200, deadline=None)
@given(views, st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_a_view_that_overlaps_itself_is_never_missed(drawn, strides):
    assert not overlaps_itself(view(drawn))
    odd = view(drawn, strides)
    if len({*addresses(odd)}) < odd.numel():
        assert overlaps_itself(odd)


@pytest.mark.parametrize("dim", range(4))
def test_parts_of_one_memory_lie_apart(dim):
    """However they lie between each other: as halves of rows, every other block or slot."""
    memory = torch.zeros(8, 6, 4, 16)
    halves = memory.chunk(2, dim)
    turns = [memory[(slice(None),) * dim + (slice(first, None, 2),)] for first in (0, 1)]
    for one, other in (halves, turns):
        assert not overlap(one, other)
        layers = [LayerRef("a", one, one.clone()), LayerRef("b", other, other.clone())]
        TransactionManager(layers)
    assert overlap(memory, halves[1])
    assert overlap(memory[1:], memory[:-1])
