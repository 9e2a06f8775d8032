"""A model runner on a GPU whose drafts may wait: a stand-in, with caches as vLLM has them.

The steps' kernels run on the GPU where there is one, else through Triton's interpreter.
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from types import SimpleNamespace as Made

import attrs
import numpy
import pytest
import torch
from kernels_here import importing_kernels
from planned_caches import OWN, KVCacheLayout, allocated, cells
from step_rig import DEVICE

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu.windows import WindowsV1, WindowsV2
    from kvtxn.integrations.vllm_plugin.internals import batches
    from kvtxn.integrations.vllm_plugin.internals import config as engine_config
    from kvtxn.integrations.vllm_plugin.internals import layers as attention_layers
    from kvtxn.integrations.vllm_plugin.internals.hooks import swap_class
    from kvtxn.integrations.vllm_plugin.internals.layers import TargetLayer
    from kvtxn.integrations.vllm_plugin.policy.engine import EngineFacts
    from kvtxn.integrations.vllm_plugin.seam.runner_v1 import AdapterV1
    from kvtxn.integrations.vllm_plugin.seam.runner_v2 import AdapterV2

from kvtxn.integrations.serving.parts import Parts

from kvtxn import TxnConfig

__all__ = ["ENGINE", "LBNHC", "Forward", "hooked", "known", "target_layers"]

ROWS, VOCAB = 9, 50
ENGINE = EngineFacts(device="cuda", runner="v2", dtype="bfloat16")
LBNHC = KVCacheLayout.LBNHC


class Own:
    """Stands for vLLM's runner of either kind: allocates what it is told to."""

    def __init__(self, layout=LBNHC, kernel_size=None) -> None:
        self.layout, self.kernel_size, self.given = layout, kernel_size, []
        self.vllm_config = Made(facts=ENGINE)
        self.decode_query_len = self.uniform_decode_query_len = 4
        self.compilation_config = Made(static_forward_context={})
        self.speculator = Made(draft_attn_layer_names=set())
        self.attn_groups = []

    def load_model(self, config) -> None:
        """Layers with an attention of FlashAttention 3's."""
        for group in config.kv_cache_groups:
            for name in group.layer_names:
                impl = Made(
                    kvtxn=None,
                    vllm_flash_attn_version=3,
                    kv_cache_dtype="auto",
                    alibi_slopes=None,
                    sinks=None,
                    scale=0.5,
                    sliding_window=(-1, -1),
                    logits_soft_cap=0,
                )
                module = Made(impl=impl, layer_name=name, kv_cache=None)
                self.compilation_config.static_forward_context[name] = module
                if name.startswith("draft"):
                    self.speculator.draft_attn_layer_names.add(name)
            builder = Made(kvtxn=None)
            self.attn_groups.append(
                [Made(layer_names=group.layer_names, metadata_builders=[builder])]
            )
        count = len(config.kv_cache_groups)
        slots = torch.full((count, 32), -1, dtype=torch.int64, device=DEVICE)
        self.block_tables = Made(slot_mappings=slots)
        tables = [Made(slot_mapping=Made(gpu=line)) for line in slots]
        self.input_batch = Made(vocab_size=VOCAB, block_table=tables)

    def initialize_kv_cache(
        self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None
    ):
        self.given.append(kv_cache_config)
        self.room_then = self.caches.room
        self.kv_cache_config = deepcopy(kv_cache_config)
        caches = allocated(self.kv_cache_config, self.layout, self.kernel_size, DEVICE)
        for name, cache in caches.items():
            module = self.compilation_config.static_forward_context[name]
            module.kv_cache, module.impl.head_size = cache, cache.shape[3] // 2


def target_layers(runner):
    """Descriptions as vLLM's own layers give them."""
    found = []
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            module = runner.compilation_config.static_forward_context[name]
            if not name.startswith("draft"):
                shape = (module.kv_cache.shape[1], module.kv_cache.shape[3] // 2)
                where = name, f"group.{number}", module, module.impl, module.kv_cache
                found.append(TargetLayer(*where, shape, torch.bfloat16))
    facts = attrs.evolve(runner.vllm_config.facts, attention="FLASH_ATTN", flash=3)
    return found, facts


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Facts about the engine."""
    monkeypatch.setattr(engine_config, "config_facts", lambda config: config.facts)
    monkeypatch.setattr(attention_layers, "target_layers", target_layers)


def hooked(config, version="v2", policy="auto", on_error="raise", **options):
    """A runner that became one of ours, with its model."""
    runner = Own(**options)
    runner.load_model(config)
    adapter, windows = {"v1": (AdapterV1, WindowsV1), "v2": (AdapterV2, WindowsV2)}[version]
    swap_class(runner, adapter)
    windows = windows(runner)
    runner.caches, runner.kvtxn_parts = windows.caches, Parts([windows.caches, windows])
    runner.kvtxn_undo, runner.kvtxn_on_trial = ExitStack(), False
    runner.kvtxn_rank, runner.kvtxn_required = 0, False
    runner.kvtxn_config = TxnConfig(
        policy=policy, backend="triton", max_rows=ROWS, on_error=on_error
    )
    return runner


class Forward:
    """Two requests of which group g has block 2 r + g, and all bytes that are vLLM's."""

    drafts, lengths, sampled = (3, 1), (4, 2), (2, 1)
    kept = (0, 1, 4)  # rows of the batch: of the first request's drafts one is accepted

    def __init__(self, runner) -> None:
        self.runner, self.steps = runner, runner.kvtxn
        groups = runner.kv_cache_config.kv_cache_groups
        modules = runner.compilation_config.static_forward_context
        self.slots = []
        for number, group in enumerate(groups):
            size = group.kv_cache_spec.block_size
            places = [(r, i) for r, length in enumerate(self.lengths) for i in range(length)]
            self.slots.append([(2 * r + number % 2) * size + i + 2 for r, i in places])
            runner.block_tables.slot_mappings[number, : len(places)] = torch.tensor(self.slots[-1])
        self.layers = [
            (number, modules[name])
            for number, group in enumerate(groups)
            for name in group.layer_names
            if not name.startswith("draft")
        ]
        storage = self.layers[0][1].kv_cache.untyped_storage()
        self.bytes = torch.empty(0, dtype=torch.int16, device=DEVICE).set_(storage)
        self.bytes.random_()
        self.theirs = torch.zeros(len(self.bytes), dtype=torch.bool)
        for group in groups:
            for name in group.layer_names:
                own = torch.arange(OWN * group.kv_cache_spec.block_size)
                self.theirs[cells(modules[name].kv_cache, own).flatten()] = True

    def begin(self) -> None:
        """Plan it, as the runner does."""
        batch = [numpy.array(each) for each in (self.drafts, self.lengths, (False, False))]
        if hasattr(self.steps, "begin_among"):
            groups = list(self.steps.manager.groups)
            self.steps.begin_among(*batch, batches.slots_of_groups(self.runner, groups))
        else:
            self.steps.begin(*batch)

    def write(self, after) -> None:
        """New rows of every layer: drafts where they wait; ``after`` gets those that are kept."""
        waits = self.steps.windows.position if self.steps.deferred else torch.full((ROWS,), -1)
        for number, module in self.layers:
            for row, slot in enumerate(self.slots[number]):
                led = module.impl.kvtxn.spare + row if int(waits[row]) >= 0 else slot
                there, own = cells(module.kv_cache, torch.tensor([led, slot]))
                new = torch.randint(1000, there.shape, dtype=torch.int16, device=DEVICE)
                self.bytes[there] = new
                if row in self.kept:
                    after[own] = new

    def commit(self) -> None:
        """Sampled ids."""
        if hasattr(self.steps, "commit_ids"):
            ids = [[7] * count + [-1] * (4 - count) for count in self.sampled]
            self.steps.commit_ids(torch.tensor(ids, device=DEVICE))
        else:
            self.steps.commit(torch.tensor(self.sampled, dtype=torch.int32, device=DEVICE))

    def check(self) -> None:
        """One step, and every byte of the blocks that vLLM hands out, of all groups."""
        after = self.bytes.clone()
        self.begin()
        assert self.steps.waits
        self.write(after)
        self.commit()
        assert self.bytes[self.theirs].equal(after[self.theirs])
