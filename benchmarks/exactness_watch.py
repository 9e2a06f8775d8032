"""Looks at every byte of the caches around each step of an engine, and injects faults.

What may change is worked out here from the batch and from what was sampled, by plain loops: it
shares nothing with the code under test but the places where that is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import torch
from torch import Tensor

#: Where a fault can be injected -> the policies that come by there.
STAGES: Final = {
    "plan": ("deferred", "undo"),
    "save": ("undo",),
    "show": ("deferred",),
    "attend": ("deferred",),
    "commit": ("deferred", "undo"),
}


class InjectedFault(Exception):
    """Not one of kvtxn's own errors."""


@attrs.define
class Seen:
    """What was counted; rows are rows of one layer's keys or values.

    Attributes:
        steps: forwards with drafts.
        windows: those of them that had a window.
        drafts: draft tokens in windows.
        rejected: of these, not accepted.
        leaks: rejected draft rows that the commit left changed.
        early: under ``deferred``, draft rows that changed before the commit.
        lost: accepted draft rows that hold another thing than what the forward made.
        strays: rows that changed and belong to no token of the batch.
    """

    steps: int = 0
    windows: int = 0
    drafts: int = 0
    rejected: int = 0
    leaks: int = 0
    early: int = 0
    lost: int = 0
    strays: int = 0


class CacheWatch:
    """Watches the steps of one runner, which has one KV-cache group.

    Args:
        steps: the plug-in's, of a runner on a GPU.
        slots: the runner's slot mapping, int64 ``[n]``.
    """

    def __init__(self, steps: Any, slots: Tensor) -> None:
        self.seen = Seen()
        self._steps, self._slots = steps, slots
        self._caches = [c for ref in steps.layers for c in (ref.key_cache, ref.value_cache)]
        self._batch: tuple[list[int], list[int]] | None = None
        self._before: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at each step while this is open."""
        begin, commit = self._steps.begin, self._steps.commit

        def watched_begin(drafts: Any, lengths: Any, prefilling: Any) -> None:
            begin(drafts, lengths, prefilling)
            self._batch = None
            if drafts is not None and int(drafts.sum()):
                self._batch = (drafts.tolist(), lengths.tolist())
                self.seen.steps += 1
                self._before = [cache.clone() for cache in self._caches]

        def watched_commit(sampled: Tensor) -> None:
            window = self._steps.step is not None and not self._steps.step.direct
            if window and self._batch is not None:
                self._look(sampled, commit)
            else:
                commit(sampled)

        self._steps.begin, self._steps.commit = watched_begin, watched_commit
        try:
            yield
        finally:
            del self._steps.begin, self._steps.commit

    def _look(self, sampled: Tensor, commit: Callable[[Tensor], None]) -> None:
        assert self._batch is not None
        kept: list[int] = []
        rejected: list[int] = []
        total = 0
        for drafts, length, count in zip(*self._batch, sampled.tolist(), strict=True):
            first = total + length - drafts
            kept += range(first, first + min(drafts, count - 1))
            rejected += range(first + min(drafts, count - 1), total + length)
            total += length
        slots = self._slots[:total]
        allowed = torch.zeros(self._num_slots, dtype=torch.bool, device=slots.device)
        allowed[slots] = True
        allowed[slots[rejected]] = False
        made = self._made(slots, kept)
        between = self._changed()
        commit(sampled)
        after = self._changed()
        seen = self.seen
        seen.windows += 1
        seen.drafts += len(kept) + len(rejected)
        seen.rejected += len(rejected)
        for early, late in zip(between, after, strict=True):
            seen.leaks += int(late[slots[rejected]].sum())
            late[slots[rejected]] = False
            seen.strays += int((late & ~allowed).sum())
            if self._steps.deferred:
                seen.early += int(early[slots[kept + rejected]].sum())
        for wanted, cache in zip(made, self._caches, strict=True):
            now = _rows(cache, slots[kept])
            seen.lost += int((_bits(now) != _bits(wanted)).flatten(1).any(1).sum())

    def _made(self, slots: Tensor, kept: list[int]) -> list[Tensor]:
        """The accepted rows as the forward made them."""
        if not self._steps.deferred:
            return [_rows(cache, slots[kept]) for cache in self._caches]
        window = self._steps.window
        return [window.rows_of(ref, i)[kept] for ref in self._steps.layers for i in (0, 1)]

    @property
    def _num_slots(self) -> int:
        return int(self._caches[0].shape[0] * self._caches[0].shape[1])

    def _changed(self) -> list[Tensor]:
        """By slot of each cache, whether it differs from what it was before the forward."""
        pairs = zip(self._caches, self._before, strict=True)
        return [(_bits(now) != _bits(old)).flatten(2).any(2).flatten() for now, old in pairs]


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def _bits(values: Tensor) -> Tensor:
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.itemsize])


@contextmanager
def fault(steps: Any, stage: str, after: int) -> Iterator[list[int]]:
    """Let one stage fail once.

    Args:
        steps: the plug-in's.
        stage: one of ``STAGES``; the attention fails outside of graphs.
        after: calls of the stage that go well before.

    Yields:
        The calls so far, in a list of one.
    """
    owner, name = {
        "plan": (steps, "_plan"),
        "save": (steps.window, "save"),
        "show": (steps.window, "show"),
        "attend": (steps, "waits"),
        "commit": (steps.window, "commit"),
    }[stage]
    real, calls = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == after + 1:
            raise InjectedFault(stage)
        return real(*args, **kwargs)

    setattr(owner, name, failing)
    try:
        yield calls
    finally:
        delattr(owner, name)
