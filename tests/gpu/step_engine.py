"""Stands for an engine on a GPU whose scenarios are steps: kvtxn's own steps, without vLLM.

The oracle of these tests and their worker extension run on it as on vLLM's V2 runner, the kernels
through Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cache_oracle
import numpy
import torch
from kernels_here import importing_kernels
from step_rig import BLOCK, BLOCKS, DEVICE, HEADS, SIZE, SPARE, Rig

with importing_kernels():
    from gpu_oracle import Watch

#: Drafts, and tokens sampled, of each request; the steps of a scenario.
BATCHES = [([3, 3], [2, 4]), ([2], [1]), ([3, 1], [4, 2]), ([3, 3], [1, 3])] * 3


def write(ref: Any, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write a layer's keys and values to these slots."""
    for cache, part in zip((ref.key_cache, ref.value_cache), rows, strict=True):
        cache[slots // BLOCK, slots % BLOCK] = part


class Tables:
    """The slots of a rig, whole again in each step."""

    def __init__(self, rig: Rig) -> None:
        self.slot_mappings = rig.slots

    def compute_slot_mappings(self) -> None:
        """Nothing: the rig fills them."""


class Runner:
    """vLLM's V2 runner as far as the oracle knows it; under stock a rig's steps are not asked."""

    is_last_pp_rank = True

    def __init__(self, policy: str) -> None:
        self.rig = Rig("undo" if policy == "stock" else policy)  # type: ignore[arg-type]
        self.kvtxn = None if policy == "stock" else self.rig.steps
        self.block_tables = Tables(self.rig)
        layers = {f"layer.{i}": SimpleNamespace(kv_cache=c) for i, c in enumerate(self.rig.caches)}
        self.compilation_config = SimpleNamespace(
            static_forward_context=layers, max_cudagraph_capture_size=16
        )
        groups = [SimpleNamespace(layer_names=list(layers))]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=BLOCKS))
        self.cudagraph_manager = SimpleNamespace(run_fullgraph=lambda: None)

    def get_model(self) -> Any:
        """Return the model: its layers are the rig's."""
        layers = self.compilation_config.static_forward_context
        return SimpleNamespace(modules=lambda: list(layers.values()))

    def prepare_attn(self, batch: Any) -> None:
        """Compute slots, and begin a window if there are any."""
        lengths = batch.num_scheduled_tokens.tolist()
        rows = [r * BLOCK + i for r, length in enumerate(lengths) for i in range(length)]
        self.rig.slots.fill_(-1)
        self.rig.slots[0, : len(rows)] = torch.tensor(rows)
        self.block_tables.compute_slot_mappings()
        if self.kvtxn is not None:
            prefilling = numpy.zeros(len(lengths), dtype=bool)
            self.kvtxn.begin(batch.num_draft_tokens_per_req, batch.num_scheduled_tokens, prefilling)

    def forward(self) -> None:
        """Write each layer's rows, as outside of graphs: where drafts wait, the layer notes it."""
        own = self.rig.slots[0]
        own = own[own >= 0]
        for ref in self.rig._whole:
            rows = torch.randn(2, len(own), HEADS, SIZE, device=DEVICE)
            if self.kvtxn is None or not (self.kvtxn.deferred and self.kvtxn.waits):
                write(ref, own, rows)
                continue
            drafts = self.kvtxn.windows.position[: len(own)] >= 0
            waiting = SPARE + torch.arange(len(own), device=DEVICE)
            write(ref, torch.where(drafts, waiting, own), rows)
            try:
                self.kvtxn.note_staged(self.rig.manager.layers[ref.name])
            except Exception as error:
                self.kvtxn.fall_back(error)
                write(ref, own, rows)

    def postprocess_sampled(
        self, idx_mapping: Any, sampled_tokens: Any, num_sampled: Any, *_: Any
    ) -> None:
        """Commit."""
        if self.kvtxn is not None:
            self.kvtxn.commit(num_sampled)


class Worker(Watch):
    """A worker with that runner."""

    def __init__(self, policy: str) -> None:
        self.model_runner = Runner(policy)

    def describe(self) -> dict[str, Any]:
        """Describe it as a report does."""
        return {"machine": "none", "ahead": False, "attention": "none", "runner": "v2"}

    def step(self, drafts: list[int], sampled: list[int]) -> list[int]:
        """Run one step; returns a number of each row that was kept, as it is in the cache."""
        runner = self.model_runner
        lengths = [count + 1 for count in drafts]
        batch = SimpleNamespace(
            num_draft_tokens=sum(drafts),
            num_draft_tokens_per_req=numpy.array(drafts),
            query_start_loc_np=numpy.array([0, *numpy.cumsum(lengths)]),
            num_scheduled_tokens=numpy.array(lengths),
        )
        runner.prepare_attn(batch)
        runner.forward()
        counts = torch.tensor(sampled, dtype=torch.int32, device=DEVICE)
        runner.postprocess_sampled(None, None, counts, None)
        caches = runner.rig.caches
        kept = [(r, i) for r, count in enumerate(sampled) for i in range(count)]
        return [int(1000 * cache[r, :, i].sum()) for cache in caches for r, i in kept]


class StepEngine:
    """vLLM's ``LLM`` as far as ``gpu_child.run`` knows it."""

    def __init__(self, policy: str) -> None:
        self.worker = Worker(policy)

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of the worker."""
        return [getattr(self.worker, name)(*args)]

    def reset_prefix_cache(self) -> None:
        """Nothing."""

    def get_metrics(self) -> list[Any]:
        """No counters."""
        return []

    def snapshots(self) -> list[dict[str, float]]:
        """Return kvtxn's counters, as of the only rank."""
        return [self.worker.model_runner.rig.manager.snapshot()]


def steps(engine: Any) -> list[list[int]]:
    """Run the scenario; rows are drawn from a seeded generator, the same in every run."""
    torch.manual_seed(1)
    tokens = [engine.llm.worker.step(*batch) for batch in BATCHES]
    engine.prompts += [[number] for number in range(len(tokens))]
    engine.logprobs += [[[[token, 1.0]] for token in each] for each in tokens]
    return tokens


@contextmanager
def rows_as_on_a_gpu() -> Iterator[None]:
    """Let the oracle read rows as they lie on a GPU."""
    words, planes = cache_oracle.words, cache_oracle.gpu_planes
    with mock.patch.object(cache_oracle, "planes", lambda cache: planes(words(cache))):
        yield
