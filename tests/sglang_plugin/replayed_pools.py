"""Pools of a recorded engine of SGLang, as far as the plug-in looks into them."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def named(name: str) -> object:
    """An object of a class of this name."""
    return type(name, (), {})()


def nothing(*args: object, **named: object) -> None:
    """Stands for what SGLang does to rows and states: only the plug-in hears of it."""


def allocator_of(engine: dict) -> object:
    """The allocator of slots, with the pool of rows.

    Args:
        engine: the first event of a recording.
    """
    allocator = named(engine["slots"])
    allocator.size, allocator.page_size = engine["size"], engine["page"]
    pool = named(engine["rows"])
    pool.move_kv_cache = nothing
    allocator.get_kvcache = lambda: pool
    if windows := engine.get("windows"):
        allocator.size_full, allocator.size_swa = windows["size_full"], windows["size_swa"]
        for name, kind in windows["inside"].items():
            setattr(pool, name, named(kind))
        pool.layers_mapping = {number: (0, slides) for number, slides in windows["layers"]}
        length = allocator.size_full + allocator.page_size + 1
        pool.full_to_swa_index_mapping = torch.zeros(length, dtype=torch.int64)
    if states := engine.get("states"):
        pool.full_kv_pool = named(states["inside"])
        pool.full_attention_layer_id_mapping = dict.fromkeys(states["layers"], 0)
    return allocator


def table_of(engine: dict) -> object:
    """The table of requests, with the pool of states of a hybrid."""
    table = named(engine["table_class"])
    table.req_to_token = torch.zeros(*engine["table"], dtype=torch.int32)
    if states := engine.get("states"):
        table.mamba_allocator = SimpleNamespace(size=states["slots"])
        table.mamba_pool = SimpleNamespace(copy_from=nothing)
        lines, _ = engine["table"]
        table.req_index_to_mamba_index_mapping = torch.zeros(lines, dtype=torch.int32)
    return table


def runner_of(engine: dict) -> SimpleNamespace:
    """The target's runner, with the attention of a hybrid."""
    runner = SimpleNamespace(is_draft_worker=False, device="cpu", model=torch.nn.Linear(2, 2))
    if windows := engine.get("windows"):
        runner.sliding_window_size = windows["window"]
    if states := engine.get("states"):
        runner.attn_backend = SimpleNamespace(
            linear_attn_backend=named(states["linear"]),
            update_mamba_state_after_mtp_verify=nothing,
        )
    return runner


def config_of(engine: dict) -> SimpleNamespace:
    """The model's configuration: of a hybrid, the rows from one state of a prompt to the next."""
    states = engine.get("states")
    text = SimpleNamespace(mamba_chunk_size=states["chunk"]) if states else None
    return SimpleNamespace(hf_text_config=text)
