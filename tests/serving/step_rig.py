"""A model runner's side of steps on a GPU, without vLLM: caches, slots, and a forward by indexing.

The kernels run on the GPU where there is one, else through Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from kernels_here import ON_GPU, importing_kernels
from torch.utils._python_dispatch import TorchDispatchMode

from kvtxn import LayerRef, TransactionManager, TxnConfig
from kvtxn.captured_launches import LayoutLaunches
from kvtxn.config import Policy

with importing_kernels():
    import kvtxn.backends.move_rows.kernel as triton_kernels
    import kvtxn.backends.triton_executor as triton_executor
    from kvtxn.integrations.serving.graph_steps import GraphSteps
    from kvtxn.integrations.vllm_plugin.seam.gpu_cache_layout import waiting_rows

DEVICE = "cuda" if ON_GPU else "cpu"
__all__ = ["DEVICE", "ON_GPU", "BrokenLaunches", "Calls", "Rig", "anywhere", "triton_kernels"]

HEADS, SIZE, BLOCK, BLOCKS = 2, 8, 4, 8
MAX_ROWS = 16
#: Where drafts wait; the block between is another group's.
SPARE = (BLOCKS + 1) * BLOCK


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """The executor may be asked for by name on a CPU, where the interpreter runs it."""
    monkeypatch.setattr(
        triton_executor.TritonExecutor, "unavailable", classmethod(lambda cls, device: None)
    )


class BrokenLaunches(LayoutLaunches):
    """Stands for the prepared launches of a plan; none of them works."""

    def __init__(self, error=RuntimeError) -> None:
        self.error = error

    def save(self) -> None:
        raise self.error("a test made this fail")

    def commit(self, sampled) -> None:
        raise self.error("a test made this fail")


class Calls(TorchDispatchMode):
    """Counts what torch is asked for; each takes the host some time."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def refs_over(caches) -> list[LayerRef]:
    """Layers over caches in vLLM's shape, a row's keys before its values."""
    planes = [cache.transpose(1, 2).split(SIZE, -1) for cache in caches]
    return [LayerRef(f"layer.{i}", key, value) for i, (key, value) in enumerate(planes)]


class Rig:
    """A runner's side: caches packed as vLLM's are, slots, and a forward by plain indexing.

    Where drafts wait there are blocks for them behind the runner's own, ``SPARE`` the first slot,
    in the caches that the forward has; the steps are told of the runner's own blocks alone.

    Attributes:
        caches: the runner's own blocks.
    """

    def __init__(self, policy: Policy, on_error: str = "fallback", **settings: Any) -> None:
        self.spare = 1 + MAX_ROWS // BLOCK if policy == "deferred" else 0
        shape = (BLOCKS + self.spare, BLOCK, HEADS, 2 * SIZE)
        whole = [torch.randn(shape, device=DEVICE).transpose(1, 2) for _ in range(2)]
        self.caches = [cache[:BLOCKS] for cache in whole]
        self._behind = [cache[BLOCKS:] for cache in whole]
        self._whole = refs_over(whole)
        refs = refs_over(self.caches)
        given = {"backend": "triton", "max_rows": MAX_ROWS, "on_error": on_error} | settings
        config = TxnConfig(policy=policy, **given)
        self.manager = TransactionManager(refs, config)
        self.slots = torch.full((1, 32), -1, dtype=torch.int64, device=DEVICE)
        rows = None
        if self.spare:
            rows = {ref.name: waiting_rows(ref, SPARE, MAX_ROWS) for ref in self._whole}
        self.steps = self.make(rows)

    def make(self, rows) -> GraphSteps:
        """Make the steps, with drafts waiting in these rows."""
        return GraphSteps(self.manager, self.slots, query_len=4, rows=rows)

    def begin(self, drafts, lengths, prefilling=None, *more) -> None:
        """Plan a step; request r has the block r, from its start on."""
        rows = [r * BLOCK + i for r, length in enumerate(lengths) for i in range(length)]
        self.slots.fill_(-1)
        self.slots[0, : len(rows)] = torch.tensor(rows)
        late = prefilling or [False] * len(lengths)
        self.plan(*(numpy.array(each) for each in (drafts, lengths, late)), *more)

    def plan(self, *batch) -> None:
        """Give the steps a batch, whose slots are in place."""
        self.steps.begin(*batch)

    def forward(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Write every row, as the attention does; drafts that wait go where they wait."""
        count = int((self.slots[0] >= 0).sum())
        made = []
        for ref in self._whole:
            rows = torch.randn(2, count, HEADS, SIZE, device=DEVICE)
            for row in range(count):
                slot = int(self.slots[0, row])
                if self.spare and int(self.steps.windows.position[row]) >= 0:
                    slot = SPARE + row
                for plane, cache in enumerate((ref.key_cache, ref.value_cache)):
                    cache[slot // BLOCK, slot % BLOCK] = rows[plane, row]
            made.append((rows[0], rows[1]))
        self._waiting = [cache.clone() for cache in self._behind]
        return made

    def break_launches(self) -> None:
        """Let the launches of the window that is open fail, and whole again those of later ones."""
        plan, own = self.steps.window.plan, self.steps.window.plan.launches
        begin = self.steps.windows.begin

        def mended(wanted, *rest):
            plan.launches = own
            return begin(wanted, *rest)

        plan.launches = BrokenLaunches()
        self.steps.windows.begin = mended

    def commit(self, sampled) -> None:
        """Tokens sampled per request."""
        self.steps.commit(torch.tensor(sampled, dtype=torch.int32, device=DEVICE))

    def expect(self, before, made, drafts, lengths, sampled) -> None:
        """Every byte: settled and accepted rows are new, all others as before.

        No row that waits is touched.
        """
        assert all(map(torch.equal, self._behind, self._waiting))
        for cache, old, ref, rows in zip(self.caches, before, self.steps.layers, made, strict=True):
            got = cache.clone()
            cache.copy_(old)
            row = 0
            for request, length in enumerate(lengths):
                for i in range(length):
                    kept = i - (length - drafts[request]) < sampled[request] - 1
                    if kept:
                        ref.key_cache[request, i] = rows[0][row]
                        ref.value_cache[request, i] = rows[1][row]
                    row += 1
            assert torch.equal(cache, got)

    def count(self, name: str) -> float:
        """A counter."""
        return self.manager.snapshot().get(f"kvtxn_{name}", 0)
