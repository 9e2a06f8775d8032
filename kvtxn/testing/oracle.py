"""The replay oracle: a cache in plain Python that is given only the rows it should hold.

It shares no code with the library. A word is a Python int, a memory a list of words, a write an
assignment. Equality is exact and covers every word of every memory, with guard pages and the gaps
of strided views.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .caches import TestCache

#: One row of one layer: the words of each plane.
Row = list[list[int]]


class Replay:
    """The content that the memories of some layers must have.

    Args:
        caches: the layers; the replay starts from their present content.
    """

    def __init__(self, caches: Iterable[TestCache]) -> None:
        self._caches = {cache.name: cache for cache in caches}
        self._memory = {
            name: [_ints(memory) for memory in cache.memories]
            for name, cache in self._caches.items()
        }

    def copy(self) -> Replay:
        """Make a second replay that starts from the content of this one."""
        twin = Replay(())
        twin._caches = self._caches
        twin._memory = {
            name: [list(words) for words in parts] for name, parts in self._memory.items()
        }
        return twin

    def write(self, layer: str, slot: int, row: Row) -> None:
        """Put a row into a slot of the replay; -1 is padding and is not written."""
        if slot == -1:
            return
        for plane, words in zip(self._caches[layer].planes, row, strict=True):
            memory = self._memory[layer][plane.memory]
            for place, word in zip(plane.words(slot), words, strict=True):
                memory[place] = word

    def read(self, layer: str, slot: int) -> Row:
        """Return the row in a slot of the replay; an empty list for padding."""
        if slot == -1:
            return []
        return [
            [self._memory[layer][plane.memory][place] for place in plane.words(slot)]
            for plane in self._caches[layer].planes
        ]

    def adopt(self, layer: str, slot: int, row: Row) -> None:
        """Take each word of a row as it is in the real memory, if that is the old or the new one.

        Padding is left alone.

        Raises:
            AssertionError: a word of the row is neither the old one nor the staged one.
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
        """Write the replay's content into the real memories, for tests that make up a past."""
        for name, cache in self._caches.items():
            for memory, words in zip(cache.memories, self._memory[name], strict=True):
                memory.copy_(torch.tensor(words, dtype=memory.dtype))

    def differences(self) -> list[str]:
        """Describe each real memory that differs from the replay; an empty list passes."""
        found = []
        for name, cache in self._caches.items():
            for index, memory in enumerate(cache.memories):
                actual, expected = _ints(memory), self._memory[name][index]
                if actual != expected:
                    found.append(_describe(cache, index, actual, expected))
        return found


def _ints(memory: Tensor) -> list[int]:
    """Return the words of a memory as Python ints."""
    words: list[int] = memory.tolist()
    return words


def _describe(cache: TestCache, index: int, actual: Sequence[int], expected: Sequence[int]) -> str:
    """Return a sentence on the words of a memory that differ, and on the slots they belong to."""
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
