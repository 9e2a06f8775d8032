"""Launching ``move_rows``: from a plan to a call of the kernel, remembered if it may recur."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...layout import RowLayout
from ..launching import repeated_launch
from ..launching.kernel_call import KernelCall
from . import kernel as kernels
from .acceptance import AcceptanceArg
from .launch import CachedLaunch, MovePlan
from .tile_sizes import tile_for

#: A launch, and what holds the objects that its key names.
Remembered = tuple[CachedLaunch, MovePlan, RowLayout]

#: Bytes of the host that one prepared launch takes, about: its arguments, and their packed copy.
LAUNCH_BYTES: Final = 8 << 10

#: Bytes that the launches of one executor may take: some thousand layouts of up to 256 rows.
MOST_BYTES: Final = 16 << 20


class LaunchCache:
    """Prepared launches by key. The one that was added first goes first, and is prepared anew.

    Args:
        most_bytes: the bound.

    Attributes:
        most_bytes: as given.
        nbytes: bytes of the launches that are kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._kept: dict[Hashable, tuple[Remembered, int]] = {}

    def __len__(self) -> int:
        """Count the launches that are kept."""
        return len(self._kept)

    def get(self, key: Hashable) -> Remembered | None:
        """Return the launch of a key, or None."""
        found = self._kept.get(key)
        return None if found is None else found[0]

    def add(self, key: Hashable, launch: Remembered, tensors: Iterable[Tensor]) -> None:
        """Keep a launch whose key has none; drop the oldest ones if there are too many bytes.

        Args:
            key: names the launch.
            launch: is kept whatever its size.
            tensors: kept until the launch is dropped; their bytes count as well.
        """
        nbytes = LAUNCH_BYTES + sum(tensor.nbytes for tensor in tensors)
        while self._kept and self.nbytes + nbytes > self.most_bytes:
            _, dropped = self._kept.pop(next(iter(self._kept)))
            self.nbytes -= dropped
        self._kept[key] = launch, nbytes
        self.nbytes += nbytes


class MoveLauncher:
    """Makes the launches of one executor.

    Args:
        limits: int64 ``[num_groups]`` on the device, slots of the smallest cache of each group.
        reuse: int64 ``[num_groups]`` on the device, see ``kvtxn.layers.SlotKind``.
        overwrites: some group is one of rings or states.

    Attributes:
        programs: programs that fill the GPU; 1 without a GPU.
    """

    def __init__(self, limits: Tensor, reuse: Tensor, *, overwrites: bool) -> None:
        self._limits = limits
        self._reuse = reuse
        self._groups = limits.shape[0]
        self._overwrites = overwrites
        self._uniform: WeakKeyDictionary[RowLayout, tuple[int, int]] = WeakKeyDictionary()
        self._launches = LaunchCache()
        self.programs = 1
        if limits.device.type == "cuda":
            device = torch.cuda.get_device_properties(limits.device)
            self.programs = 10 * device.multi_processor_count
            repeated_launch.works(limits.get_device())  # now: a launch does not wait for the device

    def launch(
        self,
        plan: MovePlan,
        layout: RowLayout,
        counters: Tensor,
        acceptance: AcceptanceArg,
        slots: Tensor,
        *,
        count: bool,
    ) -> None:
        """Launch; quick if an earlier launch differed in the acceptance's address at most.

        The launch is kept for such later ones, unless ``plan`` passes its addresses directly.

        Args:
            plan: the rows to move.
            layout: the rows; ``num_rows``, ``request``, ``position`` and ``tree`` are read.
            counters: int64 ``[lines, 4]``, see ``Txn.count``.
            acceptance: the acceptance, as ``acceptance_arg`` returns it.
            slots: int64 ``[num_groups, n]``, or ``[n]`` for one group.
            count: True adds the window's rows to ``counters``.
        """
        if plan.direct is not None:  # its addresses are arguments that differ in every window
            self.call(plan, layout, counters, acceptance, slots, count=count).run()
            return
        # Objects by identity: what is kept holds them, so no other object gets their id.
        key = (
            *(id(plan.planes), id(plan.addresses), plan.select, plan.to_cache, plan.known),
            *(id(layout), id(counters), id(slots), count),
            *(acceptance.kind, acceptance.tensor.dtype, acceptance.columns),
            *(acceptance.placeholder, acceptance.vocabulary),
        )
        found = self._launches.get(key)
        if found is None:
            call = self.call(plan, layout, counters, acceptance, slots, count=count)
            found = (CachedLaunch(call), plan, layout)
            held = (plan.addresses, layout.request, layout.position, layout.is_draft)
            self._launches.add(key, found, held)
        found[0].run(acceptance.tensor)

    def call(
        self,
        plan: MovePlan,
        layout: RowLayout,
        counters: Tensor,
        acceptance: AcceptanceArg,
        slots: Tensor,
        *,
        count: bool,
        kept: Tensor | None = None,
    ) -> KernelCall:
        """Arrange the call that ``launch`` makes, with the same arguments; launch nothing.

        A launch that does not count may keep slots: ``kept``, int64 ``[num_groups, num_rows or
        more]``, the last dimension contiguous, gets those of the rows.
        """
        planes = plan.planes
        tile = tile_for(planes, layout.num_rows, self.programs)
        num_planes = 0 if planes is None else planes.num_lines
        drafts, settled = self._alike(layout)
        first, second = plan.direct or (0, 0)
        tree = layout.tree
        arguments = {
            "planes": self._limits if planes is None else planes.table,
            "addresses": plan.addresses,
            "first_address": first,
            "second_address": second,
            "slots": slots,
            "limits": self._limits,
            "reuse": self._reuse,
            "request": layout.request,
            "position": layout.position,
            "accepted": acceptance.tensor,
            "trees": layout.position if tree is None else tree.table,
            "counters": counters,
            "kept": slots if kept is None else kept,
            "num_rows": layout.num_rows,
            "num_planes": num_planes,
            "slot_stride": slots.stride(0),
            "kept_stride": 0 if kept is None else kept.stride(0),
            "known": plan.known,
            "columns": acceptance.columns,
            "placeholder": acceptance.placeholder,
            "vocabulary": acceptance.vocabulary,
            "depth": 0 if tree is None else tree.depth,
            "per_request": max(1, drafts + settled),
            "settled": settled,
            "SELECT": plan.select,
            "ACCEPT": acceptance.kind,
            "TO_CACHE": plan.to_cache,
            "COUNT": count,
            "KEEP": kept is not None,
            "UNIFORM": drafts + settled > 0,
            "DIRECT": plan.direct is not None,
            "GROUPS": self._groups,
            "OVERWRITES": self._overwrites,
            "WIDE": planes is not None and planes.wide,
            "NARROW": 1 if planes is None else planes.narrow,
            "UNITS": 0 if planes is None else planes.row_units,
            "RUN": 0 if planes is None else planes.run_units,
            "BLOCK": 0 if planes is None else planes.block_size,
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "TAIL": tile.tail,
            "CHUNK": tile.chunk,
            "ONCE": tile.once,
        }
        grid = (tile.programs, num_planes + (count or kept is not None), 1)
        return KernelCall(kernels.move_rows, grid, arguments, tile.warps)

    def _alike(self, layout: RowLayout) -> tuple[int, int]:
        """Return how many draft and settled rows every request has; zeros if requests differ.

        Worked out once for each layout.
        """
        found = self._uniform.get(layout)
        if found is None:
            alike = len({*zip(layout.draft_len, layout.settled, strict=True)}) == 1
            found = (layout.draft_len[0], layout.settled[0]) if alike else (0, 0)
            self._uniform[layout] = found
        return found
