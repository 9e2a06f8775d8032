"""Launches of ``move_rows``: arranged from a job, and remembered where they recur."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..executor import SampledIds
from ..layout import RowLayout
from . import triton_kernels as kernels
from . import triton_select as which
from .jobs import Job, Launch, Repeated
from .tiling import tile_for

#: What a launch takes of the acceptance: its kind, as ``triton_select`` numbers it, the tensor, and
#: the kernel's ``columns``, ``placeholder`` and ``vocabulary``.
Given = tuple[int, Tensor, int, int, int]

#: A vocabulary that no id is beyond.
_NO_LIMIT: Final = 2**63 - 1


def acceptance_of(accepted: Tensor | SampledIds | None, layout: RowLayout) -> Given:
    """What the kernel is to be told of the acceptance.

    Args:
        accepted: counts, mask, ids or, for ``layout.tree``, paths; None where there is none.
        layout: the rows.
    """
    if accepted is None:
        return which.NOTHING, layout.position, 0, 0, 0
    if isinstance(accepted, SampledIds):
        limit = _NO_LIMIT if accepted.vocab_size is None else accepted.vocab_size
        ids = accepted.ids
        return which.IDS, ids.contiguous(), ids.shape[1], accepted.placeholder, limit
    if accepted.ndim == 2:
        tree = layout.tree
        assert tree is not None  # a path is committed to a tree window only
        columns = accepted.shape[1]
        return which.PATH, accepted.contiguous(), columns, tree.table.data_ptr(), tree.depth
    if accepted.dtype is torch.bool:
        return which.MASK, accepted.view(torch.uint8).contiguous(), 0, 0, 0
    return which.COUNTS, accepted.contiguous(), 0, 0, 0


#: Launches that are remembered; beyond, all are forgotten.
_MAX_RECURRING: Final = 256


class Launches:
    """Makes the launches of one executor.

    Args:
        limits: as ``move_rows`` takes them, on the device.
        groups: how many there are.
        overwrites: whether any is one of rings or states.

    Attributes:
        programs: programs that fill the device; 1 where there is none.
    """

    def __init__(self, limits: Tensor, groups: int, *, overwrites: bool) -> None:
        self._limits = limits
        self._groups = groups
        self._overwrites = overwrites
        self._shapes: WeakKeyDictionary[RowLayout, tuple[int, int]] = WeakKeyDictionary()
        self._recurring: dict[tuple[object, ...], tuple[Repeated, Job, RowLayout]] = {}
        self.programs = 1
        if limits.device.type == "cuda":
            device = torch.cuda.get_device_properties(limits.device)
            self.programs = 10 * device.multi_processor_count

    def make(
        self,
        job: Job,
        known: int,
        layout: RowLayout,
        counters: Tensor,
        given: Given,
        slots: Tensor,
        *,
        count: bool,
    ) -> None:
        """Launch; a launch that differs from an earlier one in the acceptance alone is quick.

        Args:
            job: what to move.
            known: bits of the groups that have slots.
            layout: the rows; only ``num_rows``, ``request`` and ``position`` are read.
            counters: int64 ``[lines, 4]``.
            given: the acceptance.
            slots: int64 ``[num_groups, n]``, or ``[n]``.
            count: whether to add to the counters.
        """
        facts = (job, known, layout, counters, given, slots)
        if job.direct is not None:  # its addresses are arguments, and those do not recur
            self.arranged(*facts, count=count).run()
            return
        # Objects by their identity, which is theirs for as long as they are kept beside it.
        key = (
            *(id(job.plan), id(job.table), job.select, job.to_cache, id(layout), id(counters)),
            *(id(slots), known, count, given[0], given[1].dtype, *given[2:]),
        )
        found = self._recurring.get(key)
        if found is None:
            if len(self._recurring) >= _MAX_RECURRING:
                self._recurring.clear()
            launch = self.arranged(*facts, count=count)
            found = self._recurring[key] = (Repeated(launch), job, layout)
        found[0].run(given[1])

    def arranged(
        self,
        job: Job,
        known: int,
        layout: RowLayout,
        counters: Tensor,
        given: Given,
        slots: Tensor,
        *,
        count: bool,
    ) -> Launch:
        """What ``make`` launches."""
        kind, counts, columns, placeholder, vocabulary = given
        num_rows, plan = layout.num_rows, job.plan
        num_planes = 0 if plan is None else plan.num_planes
        tile = tile_for(plan, num_rows, self.programs)
        first, second = job.direct or (0, 0)
        uniform = self._uniform(layout)
        arguments = (
            self._limits if plan is None else plan.table,
            job.table,
            first,
            second,
            slots,
            self._limits,
            layout.request,
            layout.position,
            counts,
            counters,
            num_rows,
            num_planes,
            slots.stride(0),
            known,
            columns,
            placeholder,
            vocabulary,
            max(1, sum(uniform)),
            uniform[1],
        )
        constants = {
            "SELECT": job.select,
            "ACCEPT": kind,
            "TO_CACHE": job.to_cache,
            "COUNT": count,
            "UNIFORM": uniform != (0, 0),
            "DIRECT": job.direct is not None,
            "GROUPS": self._groups,
            "OVERWRITES": self._overwrites,
            "WIDE": plan is not None and plan.wide,
            "NARROW": 1 if plan is None else plan.narrow,
            "UNITS": 0 if plan is None else plan.row_units,
            "RUN": 0 if plan is None else plan.run_units,
            "BLOCK": 0 if plan is None else plan.block_size,
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "TAIL": tile.tail,
            "CHUNK": tile.chunk,
            "ONCE": tile.once,
        }
        grid = (tile.programs, num_planes + count, 1)
        return Launch(kernels.move_rows, grid, arguments, constants, tile.warps)

    def _uniform(self, layout: RowLayout) -> tuple[int, int]:
        """Draft and settled rows of every request, where all are alike; else zeros."""
        found = self._shapes.get(layout)
        if found is None:
            alike = len({*zip(layout.draft_len, layout.settled, strict=True)}) == 1
            found = (layout.draft_len[0], layout.settled[0]) if alike else (0, 0)
            self._shapes[layout] = found
        return found
