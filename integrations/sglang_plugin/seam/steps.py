"""Reads SGLang's forwards for the ledger: rows, and the slots they are written to and read from.

Everything stays on the device. Numbers are copied into buffers of our own, in the order of the
forward's stream: SGLang may write into its tensors again before the step's outcome is known, and a
step whose tensors stay where they are is launched with the arguments of the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Final

import attrs
import torch
from torch import Tensor

from ....errors import KVTxnError
from ....host_values import to_device
from ...serving.step import BatchRows, Rows
from .pools import SlotSpace
from .protocols import (
    ForwardBatch,
    GenerationBatchResult,
    Req,
    ReqToTokenPool,
    SpecInput,
)

#: Kinds of steps that are remembered; beyond, all are forgotten.
MAX_REMEMBERED: Final = 2048

#: Modes of a forward that computes a prompt's tokens, that decodes, and that verifies drafts.
_EXTEND: Final = ("EXTEND", "MIXED")
_DECODE: Final = "DECODE"
_VERIFY: Final = "TARGET_VERIFY"


@attrs.frozen(eq=False)
class ForwardStep:
    """A forward of requests; see ``PlannedStep``.

    Attributes:
        batch: SGLang's.
        requests: the requests, in the order of the batch.
        keeps_states: it may be a step that decodes and keeps states for the tree.
    """

    batch: ForwardBatch = attrs.field(repr=False)
    requests: list[Req] = attrs.field(repr=False)
    keeps_states: bool = True

    @property
    def extends(self) -> bool:
        """True if requests may be new: the forward computes tokens of prompts."""
        return self.batch.forward_mode.name in _EXTEND

    @property
    def drafts(self) -> int:
        """Draft rows of each request; 0 unless the forward verifies drafts."""
        spec = self.batch.spec_info
        verifies = self.batch.forward_mode.name == _VERIFY and spec is not None
        return int(spec.draft_token_num) - 1 if verifies and spec is not None else 0

    def names(self) -> list[str]:
        """Return the requests' names; empty for one whose rows are beams, as they decode.

        SGLang moves such a request's rows between its lines of the table and those of beams, which
        have no request. No other request reads them.
        """
        if self.extends:
            return [req.rid for req in self.requests]
        # Older releases search no beams.
        return ["" if getattr(req, "beam_group", None) else req.rid for req in self.requests]

    def going_on(self) -> set[int]:
        """Return the numbers of the requests whose prompt goes on: nothing is sampled for them.

        Empty unless the forward has prompts.
        """
        if not self.extends:
            return set()
        before, new = self.batch.extend_prefix_lens_cpu, self.batch.extend_seq_lens_cpu
        assert before is not None  # of every step with prompts
        assert new is not None
        return {
            number
            for number, (req, *lengths) in enumerate(zip(self.requests, before, new, strict=True))
            if sum(lengths) < len(req.origin_input_ids) + len(req.output_ids)
        }

    def rows(self) -> BatchRows:
        """Refuse: windows alone ask for this, and kvtxn opens none in SGLang.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("no window is opened over a step of SGLang's")

    def alike(self, rows: int) -> int:
        """Return 0: it is not known."""
        return 0

    def name(self) -> object:
        """Return SGLang's batch, by which the step is known afterwards."""
        return self.batch

    def outputs(self) -> Tensor:
        """Refuse: a search for NaN alone asks for this, and none is made in SGLang.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("nothing reads the outputs of a step of SGLang's")


@attrs.frozen(eq=False)
class _Buffers:
    """Copies of the tensors of a step: int64 ``[capacity]`` each, slots for each space."""

    tokens: Tensor
    positions: Tensor
    parents: Tensor
    slots: tuple[Tensor, ...]

    @classmethod
    def of(cls, capacity: int, spaces: int, device: torch.device) -> _Buffers:
        """Allocate zeroed buffers for so many rows, in so many spaces of slots."""
        with torch.inference_mode(False):  # steps write into them in inference mode or not
            every = torch.zeros(3 + spaces, capacity, dtype=torch.int64, device=device)
        tokens, positions, parents, *slots = every.unbind()
        return cls(tokens, positions, parents, tuple(slots))


class StepReader:
    """Reads the forwards of a target's runner.

    Args:
        pool: has the table of slots.
        spaces: the spaces of slots that the table names.
        requests: the most requests of a step.
        device: of all tensors.
        trees: drafts form trees.
    """

    def __init__(
        self,
        pool: ReqToTokenPool,
        spaces: Sequence[SlotSpace],
        requests: int,
        device: torch.device,
        *,
        trees: bool = False,
    ) -> None:
        self._trees: Final = trees
        self._pool: Final = pool
        self._spaces: Final = spaces
        maps = {each.group.name: each.slot_map for each in spaces}
        self._maps: Final = {name: each for name, each in maps.items() if each is not None}
        self._requests: Final = requests
        self._device: Final = device
        self._known: Final[dict[tuple[str, int, int, int], Rows]] = {}
        self._buffers: _Buffers | None = None
        with torch.inference_mode(False):
            #: Where the requests' rows begin, by rows per request; the first is of prompts.
            self._starts: Final[dict[int, Tensor]] = {0: self._ints(requests + 1)}
            self._drafts: Final[dict[int, Tensor]] = {}
            self._first: Final = self._ints(requests)
            self._ones: Final = self._ints(requests) + 1
            self._lines: Final = self._ints(requests)

    def _ints(self, number: int) -> Tensor:
        """Return zeros on the device, int64 ``[number]``."""
        return torch.zeros(number, dtype=torch.int64, device=self._device)

    # -- a forward ---------------------------------------------------------------------------

    def rows(self, step: ForwardStep) -> Rows:
        """Copy the rows of the forward that comes next into buffers, and return them.

        Steps of the same kind and size share one ``Rows``, whose tensors the next call overwrites.
        Rows of beams, which lie behind those of the requests, are left out.

        Args:
            step: the forward.

        Raises:
            KVTxnError: its mode is unknown, its tensors do not fit together, it has more requests
                than the table, or drafts form a tree and ``trees`` is False.
        """
        batch, number, names = step.batch, len(step.requests), step.names()
        each, mode = self._rows_of_each(step), batch.forward_mode.name
        beams = len(batch.seq_lens) - number if "" in names else 0
        total = self._check(batch, number, each, beams)
        buffers, size = self._buffers_for(total)
        key = mode, number, each, size
        rows = self._known.get(key)
        if rows is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            rows = self._known[key] = self._new(names, each, buffers, size)
        own = buffers.tokens, buffers.positions, *buffers.slots
        numbers = batch.out_cache_loc[:total]
        slots = (space.slots(numbers) for space in self._spaces)
        torch._foreach_copy_(
            [*(copy[:total] for copy in own), self._lines[:number]],
            [
                *(batch.input_ids[:total], batch.positions[:total], *slots),
                batch.req_pool_indices[:number],
            ],
        )
        self._place_requests(batch, number)
        if rows.parents is not None:
            assert batch.spec_info is not None  # of every step with drafts
            parents = rows_before(batch.spec_info, number)
            buffers.parents[:total].copy_(parents.view(-1))
        if rows.names != names:
            rows = self._known[key] = attrs.evolve(rows, names=names)
        return rows

    def _rows_of_each(self, step: ForwardStep) -> int:
        """Return the rows of each request; 0 if requests differ, as with prompts.

        Raises:
            KVTxnError: the forward's mode is unknown, or drafts form a tree and ``trees`` is False.
        """
        mode = step.batch.forward_mode.name
        if mode == _VERIFY:
            if not self._trees and getattr(step.batch.spec_info, "topk", 1) != 1:
                raise KVTxnError("forward", "drafts form a tree, and the settings say a chain")
            return step.drafts + 1
        if mode == _DECODE:
            return 1
        if mode in _EXTEND:
            return 0
        raise KVTxnError(
            "forward", "a step of an unknown kind has written rows",
            expected=f"one of {', '.join((*_EXTEND, _DECODE, _VERIFY))}", got=mode,
            hint="nothing that is read from now on can be judged",
        )  # fmt: skip

    def _check(self, batch: ForwardBatch, number: int, each: int, beams: int) -> int:
        """Return the number of rows, without beams' rows.

        Args:
            batch: the forward's.
            number: of requests.
            each: rows of each request; 0 if requests differ.
            beams: rows behind those of the requests, which no request of the batch stands for.

        Raises:
            KVTxnError: the tensors are of different numbers of requests or rows, or there are more
                requests than the table has lines.
        """
        total = len(batch.input_ids) - beams
        named = len(batch.rids or ())
        told = {len(batch.req_pool_indices) - beams, len(batch.seq_lens) - beams}
        per_request = {named, number, *told}
        per_row = {total, len(batch.positions) - beams, len(batch.out_cache_loc) - beams}
        if len(per_request) > 1 or len(per_row) > 1 or (each and total != number * each):
            raise KVTxnError(
                "forward", "the step's tensors are of different numbers of requests or rows",
                got=f"{sorted(per_request)} requests, {sorted(per_row)} rows",
                hint="nothing that is read from now on can be judged",
            )  # fmt: skip
        if number > self._requests:
            raise KVTxnError(
                "forward", "the step has more requests than the table has lines",
                expected=f"at most {self._requests}", got=number,
            )  # fmt: skip
        return total

    def _buffers_for(self, total: int) -> tuple[_Buffers, int]:
        """Return buffers with room for so many rows, and a power of 2 of rows that a step looks at.

        Larger buffers than before are made anew, and all known steps forgotten.
        """
        size = 1 << max(total - 1, 0).bit_length()
        buffers = self._buffers
        if buffers is None or len(buffers.tokens) < size:
            self._known.clear()
            buffers = self._buffers = _Buffers.of(
                max(size, self._requests), len(self._spaces), self._device
            )
        return buffers, size

    def _new(self, names: list[str], each: int, buffers: _Buffers, size: int) -> Rows:
        """Return rows that are views of the buffers.

        Args:
            names: the requests.
            each: rows of each request; 0 if requests differ.
            buffers: the buffers.
            size: how much of them is looked at.
        """
        number, groups = len(names), [space.group.name for space in self._spaces]
        if each not in self._starts:
            with torch.inference_mode(False):
                steps = torch.arange(self._requests + 1, device=self._device)
                self._starts[each] = steps * each
                self._drafts[each] = self._ones * (each - 1)
        return Rows(
            names=names,
            starts=self._starts[each][: number + 1],
            first=self._first[:number],
            tokens=buffers.tokens[:size],
            drafts=self._drafts[each][:number] if each > 1 else None,
            slots={name: own[:size] for name, own in zip(groups, buffers.slots, strict=True)},
            tables=dict.fromkeys(groups, self._pool.req_to_token),
            block_maps=self._maps,
            table_lines=self._lines[:number],
            positions=buffers.positions[:size],
            parents=buffers.parents[:size] if self._trees and each > 1 else None,
            buffers=object(),
        )

    def paddings(self, drafts: int) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        """Yield rows, counts and ids like those of each kind of step, of requests without names.

        Kinds are one and two requests, with prompts, and that decode or verify drafts. What the
        tensors of the rows hold is not set.

        Args:
            drafts: the drafts of a verify step; 0 without drafts.
        """
        for number, each in product((1, min(2, self._requests)), {0, drafts + 1}):
            total = number * max(each, 1)
            buffers, size = self._buffers_for(total)
            kind = torch.int32 if each > 1 else torch.int64
            ids = torch.zeros(number, max(each, 1), dtype=kind, device=self._device)
            counts = self._ones[:number].to(torch.int32) if each > 1 else self._ones[:number]
            yield self._new([""] * number, each, buffers, size), counts, ids

    def _place_requests(self, batch: ForwardBatch, number: int) -> None:
        """Compute on the device the position of each request's first row, and where its rows begin.

        Where its rows begin is computed only with prompts; else it follows from their number.
        """
        first, mode = self._first[:number], batch.forward_mode.name
        if mode == _DECODE:
            torch.sub(batch.seq_lens[:number], 1, out=first)
        elif mode == _VERIFY:
            first.copy_(batch.seq_lens)
        else:
            assert batch.extend_seq_lens is not None  # of every step with prompts
            torch.sub(batch.seq_lens, batch.extend_seq_lens, out=first)
            starts = self._starts[0][1 : number + 1]
            torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int64, out=starts)

    def moves(self, source: Tensor, target: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return which slots rows are copied from and to, by group; see ``Ledger.carry``.

        Args:
            source: int64 ``[n]``, as the table has them; read now.
            target: likewise; padding, slot 0, stands for no row.
        """
        padding = target == 0
        return {
            space.group.name: (space.slots(source), space.slots(target).masked_fill(padding, -1))
            for space in self._spaces
        }

    # -- its outcome -------------------------------------------------------------------------

    def outcome(
        self, step: ForwardStep, result: GenerationBatchResult
    ) -> tuple[Tensor, Tensor] | None:
        """Return what a step has sampled: ids and their numbers; None without requests.

        A step that samples nothing has numbers of 0; with drafts, None is returned for it.

        Args:
            step: the step.
            result: as the model worker returned it, before it is copied to the host.

        Returns:
            int ``[num_requests, n]``, the accepted drafts and the next token of each request, and
            anything behind them; int ``[num_requests]``, how many these are.

        Raises:
            KVTxnError: a step with drafts has no counts of accepted ones.
        """
        ids, number = result.next_token_ids, len(step.requests)
        if not number:
            return None
        if not isinstance(ids, Tensor) or step.batch.is_prefill_only:
            none = self._first[:number] * 0
            return None if step.drafts else (none[:, None], none)
        ids = ids.view(number, -1)
        if step.drafts:
            if result.accept_lens is None:
                raise KVTxnError("run_batch", "a step with drafts has no counts of accepted ones")
            return ids, result.accept_lens
        return ids, self._sampled_ones(step, number)

    def _sampled_ones(self, step: ForwardStep, number: int) -> Tensor:
        """Return 1 for each request, and 0 for one whose prompt goes on, int64 ``[number]``."""
        going_on = step.going_on()
        if not going_on:
            return self._ones[:number]
        counts = [0 if request in going_on else 1 for request in range(number)]
        return to_device(counts, self._device, torch.int64)


def rows_before(spec: SpecInput, requests: int) -> Tensor:
    """Return the draft that each row of a tree follows, see ``Rows.parents``.

    A tree says the first row that follows each row, and the next one that follows the same row. So
    from each row one goes back to the first of its siblings, by jumps of twice the length, and from
    there to the row that they follow.

    Args:
        spec: of the step; see ``SpecInput``.
        requests: their number.

    Returns:
        int64 ``[requests, rows]``: -1 for a row behind the root, -2 for the root.
    """
    width = spec.draft_token_num
    children = spec.retrieve_next_token.view(requests, width)
    own = torch.arange(width, device=children.device).expand(requests, width)

    def inverted(following: Tensor) -> Tensor:
        """Return the row that leads to each row; -1 where none does."""
        found = own.new_full((requests, width + 1), -1)
        where = following.long().clamp(max=width)
        return found.scatter_(1, torch.where(where < 0, width, where), own)[:, :width]

    before = inverted(spec.retrieve_next_sibling.view(requests, width))
    eldest = torch.where(before < 0, own, before)
    for _ in range(width.bit_length()):
        eldest = eldest.gather(1, eldest)
    return inverted(children).gather(1, eldest) - 1
