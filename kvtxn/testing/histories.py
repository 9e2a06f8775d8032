"""Requests as lists of tokens, and the content of rings and states that follows from them.

A list of tokens knows nothing of windows: an accepted token is appended, a rejected one is
not. The content of every kind of cache follows from it by definition: a paged cache holds all
tokens, a ring the last ``ring_size`` of them, a state the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from .batches import Batch
from .naive import attention, finite_parts
from .oracle import Replay, Row
from .rig import Rig

#: The words that one token stores, by layer.
Token = dict[str, Row]


class Histories:
    """Some requests over the caches of a rig.

    Args:
        rig: its caches belong to the requests: paged slots and rings are dealt out here.
        requests: the number of requests.

    Attributes:
        past: by request, its tokens so far.
        room: number of tokens that every request has slots for in the paged layers.
    """

    def __init__(self, rig: Rig, requests: int) -> None:
        self._rig = rig
        self.past: list[list[Token]] = [[] for _ in range(requests)]
        self._base = rig.truth_now()
        self._blocks: dict[str, list[int]] = {}
        specs = {cache.spec.group: cache.spec for cache in rig.caches}
        self._specs = specs
        smallest = {
            g: min(c.spec.num_blocks for c in rig.caches if c.spec.group == g) for g in specs
        }
        for group, blocks in smallest.items():
            self._blocks[group] = rig.rng.sample(range(blocks), blocks)
        self.room = min(
            (
                smallest[group] // requests * spec.block_size
                for group, spec in specs.items()
                if spec.kind == "paged"
            ),
            default=10**6,
        )

    def table(self, group: str) -> list[list[int]]:
        """Return the blocks of each request in a group: equal shares, distinct."""
        each = len(self._blocks[group]) // len(self.past)
        return [self._blocks[group][r * each : (r + 1) * each] for r in range(len(self.past))]

    def slot(self, group: str, request: int, position: int) -> int:
        """Return the slot of a request's token: by position, in a ring modulo its size.

        A state has one slot for all tokens.
        """
        spec, blocks = self._specs[group], self.table(group)[request]
        if spec.kind == "recurrent":
            return blocks[0]
        place = position % spec.ring_size if spec.kind == "ring" else position
        return blocks[place // spec.block_size] * spec.block_size + place % spec.block_size

    def batch(self, shape: tuple[Sequence[int], Sequence[int]], *, finite: bool = False) -> Batch:
        """Make rows that continue every request by so many settled and draft tokens.

        None is padding. ``finite``: their content is numbers of ordinary size, and no random bits.
        The past stays as it is.
        """
        plain = self._rig.batch(shape, padding=0.0)
        if finite:
            plain = self._with_numbers(plain)
        slots: dict[str, list[int]] = {}
        for group in self._specs:
            slots[group] = [
                self.slot(group, request, len(self.past[request]) + row)
                for request, pair in enumerate(zip(*shape, strict=True))
                for row in range(sum(pair))
            ]
        return attrs.evolve(plain, slots=slots)

    def _with_numbers(self, batch: Batch) -> Batch:
        """Return the same rows with new content: numbers of ordinary size, for attention."""
        tensors, rows = {}, {}
        for cache in self._rig.caches:
            parts = finite_parts(cache, batch.num_rows, self._rig.rng)
            tensors[cache.name] = tuple(part.to(self._rig.device) for part in parts)
            rows[cache.name] = cache.rows(parts)
        return attrs.evolve(batch, tensors=tensors, rows=rows)

    def tokens(self, batch: Batch, wanted: Callable[[int], bool]) -> list[list[Token]]:
        """Return, by request, the tokens of those rows of a batch whose numbers are ``wanted``."""
        found: list[list[Token]] = [[] for _ in self.past]
        for row, (request, _) in enumerate(batch.owners):
            if wanted(row):
                found[request].append({name: rows[row] for name, rows in batch.rows.items()})
        return found

    def settled(self, batch: Batch) -> list[list[Token]]:
        """Return, by request, the settled tokens of a batch."""
        return self.tokens(batch, lambda row: not batch.drafts[row])

    def extend(self, batch: Batch, kept: Sequence[bool]) -> None:
        """Append the settled and the kept tokens of a batch to the requests' past.

        No cache is touched.
        """
        happened = self.tokens(batch, lambda row: kept[row] or not batch.drafts[row])
        for past, tokens in zip(self.past, happened, strict=True):
            past += tokens

    def forget(self, request: int) -> None:
        """End a request and begin another in its place, without a past.

        The bytes in the caches stay.
        """
        self._base = self._rig.truth_now()
        self.past[request] = []

    def adopt_paged(self, batch: Batch) -> None:
        """After a fallback, accept the old or the staged word in a window's paged slots.

        As in stock, rejected drafts may have stayed there.
        """
        for cache in self._rig.caches:
            if cache.spec.kind == "paged":
                slots = batch.slots[cache.spec.group]
                for slot, row in zip(slots, batch.rows[cache.name], strict=True):
                    self._base.adopt(cache.name, slot, row)

    def expected(self, settled: Sequence[Sequence[Token]] = ()) -> Replay:
        """Work out the content of the caches only from the lists of tokens.

        Args:
            settled: by request, tokens that an aborted window wrote, to rows and rings alone.
        """
        truth = self._base.copy()
        for cache in self._rig.caches:
            spec = cache.spec
            lines = self.past
            if settled and spec.kind != "recurrent":
                lines = [[*past, *more] for past, more in zip(lines, settled, strict=True)]
            for request, past in enumerate(lines):
                alive = {"paged": len(past), "ring": spec.ring_size, "recurrent": 1}[spec.kind]
                for position in range(max(0, len(past) - alive), len(past)):
                    slot = self.slot(spec.group, request, position)
                    truth.write(cache.name, slot, past[position][cache.name])
        return truth

    def impose(self) -> None:
        """Write the content that follows from the past into caches and oracle, without windows."""
        self._rig.truth = self.expected()
        self._rig.truth.impose()

    def check(self, when: str, settled: Sequence[Sequence[Token]] = ()) -> None:
        """Compare every word of every memory with the lists; AssertionError on a difference.

        The rig's oracle becomes the content that follows from the lists.

        Args:
            when: for the message.
            settled: see ``expected``.
        """
        self._rig.truth = self.expected(settled)
        self._rig.check(when)


def attend_and_compare(
    rig: Rig,
    shape: tuple[Sequence[int], Sequence[int]],
    past: Sequence[int],
    tolerance: float,
    forest: Sequence[Sequence[int]] | None = None,
) -> None:
    """Make up a past, attend to a ring in a window after it, and compare with sums over all tokens.

    The window is aborted; then, unless the policy is ``direct``, the caches are compared, too. A
    difference is an AssertionError.

    Args:
        rig: has one layer, a ring.
        shape: settled and draft tokens of each request.
        past: tokens before the window, by request.
        tolerance: the allowed error.
        forest: parents of each request's drafts; a draft sees its own branch only.
    """
    histories, cache = Histories(rig, len(past)), rig.caches[0]
    before = histories.batch((past, (0,) * len(past)), finite=True)
    histories.extend(before, [False] * before.num_rows)
    histories.impose()
    batch = histories.batch(shape, finite=True)
    generator = torch.Generator().manual_seed(sum(past))
    heads, size = 2 * cache.spec.heads, cache.spec.size
    query = torch.randn(batch.num_rows, heads, size, generator=generator)
    table = torch.tensor(histories.table("default"), dtype=torch.int32, device=rig.device)
    seq_lens = rig.accepted([n + a + b for n, a, b in zip(past, *shape, strict=True)])
    with rig.open(batch, forest) as window:
        rig.stage(window, batch)
        out = window.attend(rig.refs[0], query.to(rig.device), table, seq_lens)
        window.abort()
    stored = [
        [token[cache.name] for token in (*old, *new)]
        for old, new in zip(histories.past, histories.tokens(batch, lambda _: True), strict=True)
    ]
    expected = attention(
        cache,
        stored,
        batch,
        query,
        sliding_window=cache.spec.window or cache.spec.ring_size,
        forest=forest,
    )
    wrong = (out.double().cpu() - expected).abs()
    assert float(wrong.max()) <= tolerance * 10, f"attention is off by {float(wrong.max()):.3g}"
    if rig.policy != "direct":
        histories.extend(batch, [False] * batch.num_rows)
        histories.check("after attention and abort")
