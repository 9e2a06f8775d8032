"""The replay oracle: a cache in plain Python that only ever sees the rows it should hold.

It shares no code with the library. A word is a Python int, a memory a list of
them, a write an assignment; equality is exact and covers every word of every
memory, guard pages and the gaps of strided views included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .caches import TestCache

#: One row of one layer: the words of each plane.
Row = list[list[int]]


class Replay:
    """What the memories of some layers must hold.

    Args:
        caches: the layers; their present content is where the replay starts.
    """

    def __init__(self, caches: Iterable[TestCache]) -> None:
        self._caches = {cache.name: cache for cache in caches}
        self._memory = {
            name: [_ints(memory) for memory in cache.memories]
            for name, cache in self._caches.items()
        }

    def copy(self) -> Replay:
        """A second replay that starts where this one stands."""
        twin = Replay(())
        twin._caches = self._caches
        twin._memory = {
            name: [list(words) for words in parts] for name, parts in self._memory.items()
        }
        return twin

    def write(self, layer: str, slot: int, row: Row) -> None:
        """Put a row into a slot; -1 is padding and goes nowhere."""
        if slot == -1:
            return
        for plane, words in zip(self._caches[layer].planes, row, strict=True):
            memory = self._memory[layer][plane.memory]
            for place, word in zip(plane.words(slot), words, strict=True):
                memory[place] = word

    def read(self, layer: str, slot: int) -> Row:
        """The row a slot holds; padding holds nothing."""
        if slot == -1:
            return []
        return [
            [self._memory[layer][plane.memory][place] for place in plane.words(slot)]
            for plane in self._caches[layer].planes
        ]

    def adopt(self, layer: str, slot: int, row: Row) -> None:
        """Where bytes may be old or new word by word, accept either; complain of anything else.

        Raises:
            AssertionError: a word of the row is neither what it was nor what was staged.
        """
        if slot == -1:
            return
        actual = [_ints(memory) for memory in self._caches[layer].memories]
        for plane, words in zip(self._caches[layer].planes, row, strict=True):
            memory = self._memory[layer][plane.memory]
            for place, word in zip(plane.words(slot), words, strict=True):
                now = actual[plane.memory][place]
                if now not in (memory[place], word):
                    raise AssertionError(
                        f"{layer}: slot {slot} holds neither its old nor its staged row"
                    )
                memory[place] = now

    def impose(self) -> None:
        """Copy what must be in the memories into them: how a test makes up a past."""
        for name, cache in self._caches.items():
            for memory, words in zip(cache.memories, self._memory[name], strict=True):
                memory.copy_(torch.tensor(words, dtype=memory.dtype))

    def differences(self) -> list[str]:
        """Where the real memories are not what they must be; empty is what passes."""
        found = []
        for name, cache in self._caches.items():
            for index, memory in enumerate(cache.memories):
                actual, expected = _ints(memory), self._memory[name][index]
                if actual != expected:
                    found.append(_describe(cache, index, actual, expected))
        return found


def _ints(memory: Tensor) -> list[int]:
    words: list[int] = memory.tolist()
    return words


def _describe(cache: TestCache, index: int, actual: Sequence[int], expected: Sequence[int]) -> str:
    """One sentence on a memory that differs: how much, and whose words they are."""
    wrong = {i for i, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1]}
    slots = [
        slot
        for slot in range(cache.num_slots)
        for plane in cache.planes
        if plane.memory == index and wrong.intersection(plane.words(slot))
    ]
    inside = {
        place
        for slot in slots
        for plane in cache.planes
        if plane.memory == index
        for place in plane.words(slot)
    }
    outside = len(wrong - inside)
    return (
        f"{cache.name} ({cache.spec.layout}, {cache.spec.fmt.name}), memory {index}: "
        f"{len(wrong)} words differ, in slots {sorted(set(slots))}"
        + (f", {outside} of them in gaps or guard pages" if outside else "")
    )
