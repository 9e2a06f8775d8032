"""KV-cache groups whose rows are not those of single positions are left out, by name and kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.vllm_plugin.seam import audited_requests, audited_states

kinds = pytest.importorskip("vllm.v1.kv_cache_interface")

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum  # noqa: E402

SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
MORE = {
    "CircularBufferSpec": {},
    "HiddenStateCacheSpec": {"num_kv_heads": 1},
    "RSWASpec": {"rswa_window": 32},
    "SinkFullAttentionSpec": {"sink_len": 16},
    "CrossAttentionSpec": {},
}


def runner_of(*specs):
    return runner_with([(spec, [f"layer.{number}"]) for number, spec in enumerate(specs)])


def runner_with(found):
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in found]
    config = SimpleNamespace(kv_cache_groups=groups, num_blocks=9)
    return SimpleNamespace(kv_cache_config=config)


@pytest.mark.parametrize("kind", [name for name in MORE if hasattr(kinds, name)])
def test_a_group_of_another_kind_is_named_with_its_kind(kind, monkeypatch):
    monkeypatch.setattr(audited_requests, "draft_layers", lambda runner: ())
    other = getattr(kinds, kind)(**SIZES | MORE[kind])
    runner = runner_of(kinds.FullAttentionSpec(**SIZES), other)
    watched = audited_requests.row_groups(runner)
    assert [*watched] == ["group.0"]
    assert audited_requests.groups_left_out(runner, watched) == [f"group.1 ({kind})"]


def test_a_models_first_layer_has_rows_without_context(monkeypatch):
    """A drafter of the EAGLE kind counts its layers after the model's."""
    monkeypatch.setattr(audited_requests, "draft_layers", lambda runner: ())
    spec = kinds.FullAttentionSpec(**SIZES)
    names = [
        ["model.layers.0.self_attn.attn"],
        ["model.layers.1.self_attn.attn"],
        ["model.layers.0.self_attn.attn", "model.layers.2.self_attn.attn"],
        ["language_model.model.layers.10.self_attn.attn"],
        ["draft_model.model.layers.0.self_attn.attn"],
    ]
    watched = audited_requests.row_groups(runner_with([(spec, each) for each in names]))
    assert [group.context_free for group in watched.values()] == [True, False, False, False, True]


@pytest.mark.parametrize("kind", ["MAMBA1", "MAMBA2", "GDN_ATTN", "SHORT_CONV", "LINEAR"])
def test_states_whose_metadata_nobody_can_read_are_left_out(kind, monkeypatch):
    """Else they would count as watched, and no state of theirs would ever be compared."""
    monkeypatch.setattr(audited_requests, "draft_layers", lambda runner: ())
    kind = MambaAttentionBackendEnum[kind]
    states = kinds.MambaSpec(
        block_size=16, shapes=((2, 2),), dtypes=(torch.float32,), mamba_type=kind
    )
    runner = runner_of(kinds.FullAttentionSpec(**SIZES), states)
    runner.cache_config = SimpleNamespace(mamba_cache_mode="none")
    runner.speculative_config = None
    watched = audited_states.state_groups(runner)
    left_out = audited_requests.groups_left_out(
        runner, [*audited_requests.row_groups(runner), *watched]
    )
    assert ([*watched], left_out) == (
        ([], ["group.1 (MambaSpec)"]) if kind.name == "LINEAR" else (["group.1"], [])
    )
