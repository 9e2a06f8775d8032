"""Shapes of real models, as caches and windows for the kernel benchmarks."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from ... import LayerRef, TxnConfig
from ...backends.move_rows.acceptance import acceptance_arg
from ...backends.move_rows.launch import MovePlan
from ...backends.triton_executor import TritonExecutor
from ...executor import StagedLayer, Txn
from ...layout import RowLayout
from ..common.model_shapes import BLOCK_SIZE, Case, Rows
from .timer import sets_needed


@attrs.frozen(eq=False)
class Window:
    """Staged rows, slots and acceptance of one window."""

    slots: Tensor
    staged: dict[str, StagedLayer]
    accepted: Tensor


class Workload:
    """A case on the GPU: caches, and enough windows that each finds its data cold.

    Args:
        case: the point of the benchmark to measure.
        blocks: blocks per cache; None makes several times as many as a window needs.
        windows: number of windows; None makes enough that each finds its data cold.
        by_rows: a row's heads lie side by side, so that rows follow each other evenly.

    Attributes:
        refs: the layers; K and V side by side per head, as vLLM lays them out.
        executor: the executor under test.
        windows: windows over distinct slots, rows and counts.
        kept_bytes: bytes that a commit of the average window writes.
        all_bytes: bytes of all rows of the average window.
    """

    def __init__(
        self,
        case: Case,
        blocks: int | None = None,
        windows: int | None = None,
        *,
        by_rows: bool = False,
    ) -> None:
        self.case = case
        model = case.shape
        rows = case.rows
        device = torch.device("cuda")
        blocks = blocks or max(512, 4 * rows // BLOCK_SIZE)
        self.refs = [
            _layer(f"layer.{i}", model, blocks, device, by_rows=by_rows)
            for i in range(model.layers)
        ]
        self.executor = TritonExecutor(self.refs, TxnConfig(max_rows=max(rows, 8)))
        self.layout = RowLayout.build((case.drafts,) * case.requests, (1,) * case.requests, device)
        self.counters = torch.zeros(1, 4, dtype=torch.int64, device=device)
        row_bytes = sum(ref.row_bytes for ref in self.refs)
        self.all_bytes = row_bytes * rows
        cold = sets_needed(int(self.all_bytes * max(0.2, case.accepted)))
        count = windows or min(64, cold)
        generator = torch.Generator().manual_seed(1)
        self.windows = [
            self._window(model, blocks * BLOCK_SIZE, generator, device) for _ in range(count)
        ]
        kept = sum(int(window.accepted.sum()) for window in self.windows) / count
        self.kept_bytes = int(kept * row_bytes)

    def _window(
        self, model: Rows, slots: int, generator: torch.Generator, device: torch.device
    ) -> Window:
        """Draw distinct slots and a share of kept drafts by ``generator``, and rows without it."""
        case, rows = self.case, self.case.rows
        staged = {}
        for ref in self.refs:
            if model.kv_heads:
                fused = (rows, model.kv_heads * 2, model.head_size)
                both = torch.randn(fused, device=device, dtype=torch.bfloat16)
                parts = both.split(model.kv_heads, dim=1)
            else:
                parts = (torch.randn(rows, model.head_size, device=device, dtype=torch.bfloat16),)
            staged[ref.name] = StagedLayer(ref, tuple(parts))
        # The share is exact over the batch, the rows it falls on are random.
        drafts = case.requests * case.drafts
        total = round(case.accepted * drafts)
        kept = torch.zeros(drafts, dtype=torch.int64)
        kept[torch.randperm(drafts, generator=generator)[:total]] = 1
        counts = kept.view(case.requests, case.drafts).sum(1)
        chosen = torch.randperm(slots, generator=generator)[:rows]
        return Window(chosen.to(device), staged, counts.to(device))

    def txn(self, window: Window, policy: str = "deferred") -> Txn:
        """Make a window as executors see it, with every layer staged."""
        return Txn(
            policy,
            tuple(self.refs),
            self.layout,
            self.counters,
            slots={"default": window.slots},
            staged=dict(window.staged),
        )

    def plan(self, window: Window) -> MovePlan:
        """Plan a window's commit with a table of addresses of its own, ready to be captured."""
        plan = self.executor.plan_commit(self.txn(window))
        return attrs.evolve(plan, addresses=plan.addresses.clone())

    def commit(self, window: Window, plan: MovePlan) -> None:
        """Launch a planned commit over the window's slots, where they are."""
        self.executor.use_slots(window.slots)
        acceptance = acceptance_arg(window.accepted, self.layout)
        self.executor.kernel_call(plan, self.layout, self.counters, acceptance).run()


def _layer(name: str, model: Rows, blocks: int, device: torch.device, *, by_rows: bool) -> LayerRef:
    """Make a layer of zeros: a latent one, or K and V side by side per head.

    ``by_rows``: a row's heads are neighbours in memory; else the slots of a head.
    """
    if not model.kv_heads:
        shape: tuple[int, ...] = (blocks, BLOCK_SIZE, model.head_size)
        return LayerRef.latent(name, torch.zeros(shape, device=device, dtype=torch.bfloat16))
    inner = (BLOCK_SIZE, model.kv_heads) if by_rows else (model.kv_heads, BLOCK_SIZE)
    shape = (blocks, *inner, 2 * model.head_size)
    cache = torch.zeros(shape, device=device, dtype=torch.bfloat16)
    if not by_rows:
        cache = cache.permute(0, 2, 1, 3)
    return LayerRef(name, cache[..., : model.head_size], cache[..., model.head_size :])
