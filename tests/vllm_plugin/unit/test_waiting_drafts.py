"""Drafts wait in spare blocks on a GPU: from vLLM's configuration to bytes, for both runners."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from types import SimpleNamespace as Made

import attrs
import numpy
import pytest
import torch
from kernels_here import importing_kernels
from kvtxn.integrations.serving.parts import Parts
from planned_caches import GROUPS, OWN, KVCacheLayout, allocated, cells, planned
from step_rig import DEVICE, anywhere  # noqa: F401  # a fixture

from kvtxn import TxnConfig
from kvtxn.errors import LayerError

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu import windows as gpu_windows
    from kvtxn.integrations.vllm_plugin.gpu.windows import WindowsV1, WindowsV2
    from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
    from kvtxn.integrations.vllm_plugin.policy.rules import decide
    from kvtxn.integrations.vllm_plugin.runners.runner_v1 import AdapterV1
    from kvtxn.integrations.vllm_plugin.runners.runner_v2 import AdapterV2
    from kvtxn.integrations.vllm_plugin.seam import batches
    from kvtxn.integrations.vllm_plugin.seam import engine_config as engine_config
    from kvtxn.integrations.vllm_plugin.seam import layers as attention_layers
    from kvtxn.integrations.vllm_plugin.seam.hooks import swap_class
    from kvtxn.integrations.vllm_plugin.seam.layers import TargetLayer


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


CASES = ["one group", "two groups share their memory", "blocks of different sizes"]
CASES += ["groups of different sizes", "pages of different sizes", "a drafter's group"]


@pytest.mark.parametrize(("version", "kernel_size"), [("v1", 4), ("v2", None)])
@pytest.mark.parametrize("case", CASES)
def test_a_step_whose_drafts_wait(case, kernel_size, version):
    """In spare slots of their group's; of vLLM's blocks accepted rows alone change."""
    config = planned(LBNHC, GROUPS[case])
    runner = hooked(config, version, kernel_size=kernel_size)
    runner.initialize_kv_cache(config)
    assert runner.kvtxn.manager.policy == "deferred"
    assert config == planned(LBNHC, GROUPS[case])
    assert set(runner.caches.spare.first) == set(runner.kvtxn.manager.groups)
    groups = runner.kv_cache_config.kv_cache_groups
    for ref in runner.kvtxn.layers:  # the library is told of vLLM's own blocks alone
        page = groups[int(ref.group.removeprefix("group."))].kv_cache_spec.block_size
        assert len(ref.key_cache) * ref.key_cache.shape[1] == OWN * page
    forward = Forward(runner)
    for number, module in forward.layers:
        hook = module.impl.kvtxn
        assert (hook.steps, hook.ref.name) == (runner.kvtxn, module.layer_name)
        assert hook.spare == runner.caches.spare.first[f"group.{number}"]
        every = torch.arange(len(hook.rows))
        assert cells(hook.rows, every).equal(cells(module.kv_cache, every))
    for names, (found,) in zip(GROUPS[case], runner.attn_groups, strict=True):
        [builder] = found.metadata_builders
        assert builder.kvtxn is (None if names[0].startswith("draft") else runner.kvtxn)
    forward.check()
    forward.check()
    assert runner.kvtxn.manager.snapshot()["kvtxn_windows_total_committed"] == 2


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("case", ["one group", "two groups share their memory"])
def test_caches_without_blocks_of_one_row_are_restored(case, layout, told):
    """Spare blocks are of no use then; where it is seen late, of no harm. By name: no window."""
    config = planned(KVCacheLayout[layout], GROUPS[case])
    if not told:
        config.kv_cache_layout = None
    runner = hooked(config, layout=KVCacheLayout[layout])
    runner.initialize_kv_cache(config)
    if told:
        assert runner.given[0] is config
        assert runner.caches.spare is None
    else:
        assert runner.caches.spare.total > OWN
    assert runner.kvtxn.manager.policy == "undo"
    assert {len(ref.key_cache) for ref in runner.kvtxn.layers} == {OWN}
    assert all(module.impl.kvtxn is None for _, module in Forward(runner).layers)
    Forward(runner).check()
    named = hooked(config, layout=KVCacheLayout[layout], policy="deferred")
    named.initialize_kv_cache(config)
    assert named.kvtxn is None


def test_a_profiling_runs_caches_are_vllms_own():
    """The spare blocks of the caches before are forgotten."""
    config = planned(LBNHC, GROUPS["one group"])
    runner = hooked(config)
    runner.initialize_kv_cache(config)
    assert runner.given[0].num_blocks == runner.caches.spare.total > OWN
    runner.initialize_kv_cache(config, True)
    assert runner.given[1] is config
    assert runner.caches.spare is runner.kvtxn is None


@pytest.mark.parametrize(
    ("policy", "facts", "last", "version"),
    [
        ("undo", {}, True, 3),
        ("direct", {}, True, 3),
        ("auto", {"mla": True}, True, 3),
        ("auto", {"method": None}, True, 3),
        ("auto", {"pipeline_parallel": 2}, False, 3),  # the runner alone knows its stage
        ("auto", {}, True, 2),
        ("deferred", {}, True, None),
    ],
)
def test_where_none_may_wait_the_configuration_is_vllms(policy, facts, last, version):
    """If no drafts may wait, the configuration is vLLM's own object, not a copy."""
    config = planned(LBNHC, GROUPS["one group"])
    runner = hooked(config, policy=policy)
    runner.is_last_pp_rank = last
    runner.vllm_config.facts = attrs.evolve(ENGINE, **facts)
    for module in runner.compilation_config.static_forward_context.values():
        module.impl = Made(vllm_flash_attn_version=version)
    assert runner.caches.caches_planned(config) is config
    assert runner.caches.spare is None


def test_whose_attention_takes_blocks_of_one_row():
    """All of the target's layers have to; what a drafter has does not matter."""
    ours = Made(impl=Made(vllm_flash_attn_version=3, kvtxn=None))

    def runner(*modules):
        found = {str(i): module for i, module in enumerate(modules)} | {"draft": Made(impl=None)}
        return Made(
            compilation_config=Made(static_forward_context=found),
            speculator=Made(draft_attn_layer_names={"draft"}),
        )

    assert attention_layers.all_take_slots(runner(ours, ours))
    others = [Made(impl=Made(vllm_flash_attn_version=each, kvtxn=None)) for each in (2, 4, None)]
    others += [Made(), Made(impl=None), Made(impl=Made(vllm_flash_attn_version=3))]  # vLLM's class
    for other in others:
        assert not attention_layers.all_take_slots(runner(ours, other))


@pytest.mark.parametrize("policy", ["auto", "deferred"])
def test_an_error_leaves_the_configuration_to_vllm(policy, monkeypatch):
    """After an error the caches have no spare blocks: "auto" goes on, "deferred" is refused."""
    config = planned(LBNHC, GROUPS["one group"])
    runner = hooked(config, policy=policy, on_error="fallback")
    runner.initialize_kv_cache(config)
    assert runner.caches.spare is not None

    def broken(*_):
        raise LayerError("vllm", "no blocks", expected="some", got="none")

    monkeypatch.setattr(gpu_windows, "with_spare_blocks", broken)
    runner.initialize_kv_cache(config)
    assert runner.given[1] is config
    assert runner.caches.spare is None
    layers, facts = target_layers(runner)
    facts = runner.caches.facts(layers, facts)
    assert not facts.spare_blocks
    if policy == "deferred":
        assert runner.kvtxn is None
    else:
        assert runner.kvtxn.manager.policy == "undo"
        assert "no spare KV-cache blocks could be added" in decide("auto", facts).reason
        Forward(runner).check()
    runner = hooked(config, policy=policy)
    with pytest.raises(LayerError, match="no blocks"):
        runner.initialize_kv_cache(config)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: {"cache": layer.cache[:, :, :4]},  # a gap between its blocks
        lambda layer: {"impl": Made(vllm_flash_attn_version=2, kvtxn=None)},
        lambda layer: {"impl": Made(vllm_flash_attn_version=3)},  # not hooked: vLLM's own class
        lambda layer: {"impl": Made()},  # another backend's
    ],
)
def test_one_layer_that_cannot_wait_is_enough(change):
    """All do, or none: its accepted rows would be lost at the commit."""
    config = planned(LBNHC, GROUPS["one group"])
    runner = hooked(config)
    runner.initialize_kv_cache(config)
    layers, facts = target_layers(runner)
    assert runner.caches.facts(layers, facts).spare_blocks
    layers[1] = attrs.evolve(layers[1], **change(layers[1]))
    assert not runner.caches.facts(layers, facts).spare_blocks
