"""Rings and states in the Triton executor, beside the torch executor, cell by cell."""

from __future__ import annotations

import random

import pytest
import torch

from kvtxn import LayerRef, TransactionManager, TxnConfig
from kvtxn.testing import registered

#: Settled and draft rows per request.
SHAPES = {
    "alike": ((1, 1), (6, 6)),
    "uneven": ((2, 0, 1), (7, 3, 0)),
    "many-settled": ((9, 1), (2, 4)),
    "only-settled": ((7, 2), (0, 0)),
}
RING = 4


def build(backend: str, policy: str, device: str) -> TransactionManager:
    """A paged layer, a ring and a state, over the same numbers every time."""
    torch.manual_seed(3)
    layers = [
        LayerRef("rows", *torch.randn(2, 9, 5, 1, 6, device=device), group="rows"),
        LayerRef.ring(
            "ring", *torch.randn(2, 4, 4, 2, 8, device=device), window=RING, group="ring"
        ),
        LayerRef.recurrent(
            "state",
            torch.randn(5, 3, 4, device=device).bfloat16(),
            torch.randn(5, 4, 2, 2, device=device).permute(0, 2, 1, 3),
            group="state",
        ),
    ]
    return TransactionManager(layers, TxnConfig(policy=policy, backend=backend))


def run(manager: TransactionManager, shape: str, form: str) -> list[list[object]]:
    """One window and everything it leaves, counters included."""
    settled, drafts = SHAPES[shape]
    rng, device = random.Random(5), manager.device
    lengths = [a + b for a, b in zip(settled, drafts, strict=True)]
    positions = [(r, 3 + i) for r, n in enumerate(lengths) for i in range(n)]
    slots = {
        "rows": rng.sample(range(45), len(positions)),
        "ring": [-1 if rng.random() < 0.1 else r * RING + p % RING for r, p in positions],
        "state": rng.sample(range(5), len(lengths)),
    }
    slots["state"][-1] = -1
    on_device = {group: torch.tensor(values).to(device) for group, values in slots.items()}
    counts = [rng.randint(0, n) for n in drafts]
    accepted = torch.tensor(counts)
    if form == "mask":
        accepted = torch.tensor([rng.random() < 0.5 for _ in positions])
    with manager.window(list(drafts), on_device, list(settled)) as window:
        for ref in manager.layers.values():
            parts = [
                torch.randn(len(positions), *plane.staged_shape, device=device).to(
                    plane.format.dtype
                )
                for plane in ref.planes
            ]
            window.stage(ref, parts if ref.states else parts[0], *parts[1:] * (not ref.states))
        if form == "abort":
            window.abort()
        else:
            window.commit(accepted.to(device))
    memories = [plane.cells.tolist() for ref in manager.layers.values() for plane in ref.planes]
    return [*memories, manager.metrics.rows.tolist()]


@pytest.mark.parametrize("form", ["counts", "mask", "abort"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", ["deferred", "direct"])
def test_the_same_bytes_as_torch(triton_executor, kernel_device, policy, shape, form):
    """Laps, padding and all: the last kept row of each slot is in it."""
    with registered(triton_executor) as name:
        ours = run(build(name, policy, kernel_device), shape, form)
    assert ours == run(build("torch", policy, kernel_device), shape, form)
