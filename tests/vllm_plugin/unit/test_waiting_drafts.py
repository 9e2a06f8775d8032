"""Drafts wait in spare blocks on a GPU: from vLLM's configuration to bytes, for both runners."""

from __future__ import annotations

from types import SimpleNamespace as Made

import attrs
import pytest
import torch
from kernels_here import importing_kernels
from planned_caches import GROUPS, OWN, KVCacheLayout, cells, planned
from spare_rig import ENGINE, LBNHC, Forward, hooked, known, target_layers  # noqa: F401
from step_rig import anywhere  # noqa: F401  # a fixture

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu import windows as gpu_windows
    from kvtxn.integrations.vllm_plugin.internals import layers as attention_layers
    from kvtxn.integrations.vllm_plugin.policy.rules import decide

from kvtxn.errors import LayerError

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


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_what_was_held_for_rows_is_let_go_when_they_get_room(policy):
    """In the caches, before these are allocated; or beside them, once the steps come."""
    config = planned(LBNHC, GROUPS["one group"])
    runner = hooked(config, policy=policy)
    runner.caches.room = torch.empty(8)
    runner.initialize_kv_cache(config, True)
    assert runner.room_then is runner.caches.room is not None
    runner.initialize_kv_cache(config)
    assert (runner.room_then is None) == (policy == "deferred")
    assert runner.caches.room is None


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
