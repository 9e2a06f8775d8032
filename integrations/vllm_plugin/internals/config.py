"""vLLM's configuration: the facts that ``policy.rules`` decides by, and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

import attrs

from ..policy import releases, supported, wants
from ..policy.engine import (
    GATED_DELTA,
    MAMBA2,
    OLMO_DELTA,
    OTHER_STATES,
    SHORT_CONV,
    EngineFacts,
)
from ..policy.settings import asked_states
from ..policy.state_rules import TOKENS
from . import backends, state_share, workers
from .expected_states import expected_states
from .protocols.engine import ModelConfig, SpeculativeConfig, TextConfig, TransferConfig, VllmConfig
from .protocols.runners import Runner


def config_from(engine_args: Mapping[str, Any]) -> VllmConfig:
    """Build the ``VllmConfig`` of an engine with these arguments; reads the model's files."""
    from vllm.engine.arg_utils import EngineArgs

    config: VllmConfig = EngineArgs(**engine_args).create_engine_config()
    return config


# -- sizes --------------------------------------------------------------------------


def drafts(config: VllmConfig) -> int:
    """Return the most drafts that a request has in one step; 0 if the engine does not speculate."""
    speculation = config.speculative_config
    return int(speculation.num_speculative_tokens) if speculation is not None else 0


def most_window_rows(config: VllmConfig) -> int:
    """Return the most rows that requests with drafts can have in one step."""
    return (drafts(config) + 1) * int(config.scheduler_config.max_num_seqs)


def window_rows(config: VllmConfig) -> int:
    """Return the default of ``max_rows`` on a GPU, by which buffers are sized.

    That is the most rows that requests with drafts can have in one step. Where it is far more than
    the largest captured graph has, buffers would be out of proportion; so rows and tables together
    take no more memory than the rows of two such graphs; but one request always has room.
    """
    most = most_window_rows(config)
    captured = int(config.compilation_config.max_cudagraph_capture_size or 0)
    room = max(captured * 15 // 8, drafts(config) + 1)  # 1/8 is left for the tables
    return min(most, room) if captured else most


# -- facts --------------------------------------------------------------------------


def config_facts(config: VllmConfig) -> EngineFacts:
    """Read a ``VllmConfig``; ``layers.target_layers`` adds facts of the loaded model.

    Of a release that was not checked, nothing but its number and the device is read, unless the
    user sets ``unchecked``.
    """
    number, unchecked = workers.version(), wants(config.additional_config, "unchecked", True)
    if not supported.is_listed(number) and not unchecked:
        return EngineFacts(version=number, device=config.device_config.device_type)
    from vllm import envs

    parallel, model = config.parallel_config, config.model_config
    speculation, on_gpu = config.speculative_config, config.device_config.device_type == "cuda"
    context = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    facts = EngineFacts(
        version=number,
        device=config.device_config.device_type,
        runner="v2" if config.use_v2_model_runner else "v1",
        method=None if speculation is None else speculation.method,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=config.cache_config.cache_dtype,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=context,
        connectors=tuple(connector_names(config.kv_transfer_config)),
        mla=model.use_mla,
        recurrent=_states(model),
        states=asked_states(config.additional_config),
        unchecked=unchecked,
        cached_states=getattr(config.cache_config, "mamba_cache_mode", "none") != "none",
        microbatches=parallel.use_ubatching,
        adaptive=on_gpu and _adapts(speculation),
        batch_invariant=bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)),
        cascade=releases.number(number) < (0, 32)
        and not getattr(model, "disable_cascade_attn", True),
        graph_writes=on_gpu and _writes_elsewhere(config, mla=model.use_mla),
    )
    return attrs.evolve(facts, **_room(config)) if on_gpu and facts.states == "auto" else facts


def _room(config: VllmConfig) -> dict[str, Any]:
    """Read the facts by which ``recurrent="auto"`` chooses on a GPU."""
    model = config.model_config
    found: dict[str, Any] = {
        "model": model.hf_text_config.model_type,
        "most_requests": int(config.scheduler_config.max_num_seqs),
    }
    if _states(model) != GATED_DELTA:
        return found
    tokens = min(TOKENS, int(model.max_model_len))
    gain = state_share.one_state_gain(config, drafts(config), tokens)
    dtype = state_share.state_dtype(config)
    return {**found, "state_dtype": dtype, "gain": round(gain, 2), "gain_tokens": tokens}


def _writes_elsewhere(config: VllmConfig, *, mla: bool) -> bool:
    """Tell whether rows are written where kvtxn cannot give them other slots."""
    from vllm import envs

    compilation = config.compilation_config
    return (
        bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))
        or bool(compilation.use_inductor_graph_partition)
        or (mla and bool(getattr(compilation.pass_config, "fuse_rope_kvcache_cat_mla", False)))
    )


def runner_facts(runner: Runner) -> EngineFacts:
    """Read the facts that a runner knows before it has caches."""
    last = bool(getattr(runner, "is_last_pp_rank", True))
    return attrs.evolve(config_facts(runner.vllm_config), last_stage=last)


#: Model types, by the kind of their recurrent layers; see ``state_layers.kind_of``.
_STATES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), GATED_DELTA),
    "olmo_hybrid": OLMO_DELTA,
    **dict.fromkeys(("mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1"), MAMBA2),
    **dict.fromkeys(("lfm2", "lfm2_moe"), SHORT_CONV),
}


def _states(model: ModelConfig) -> str | None:
    """Name the kind of a model's recurrent layers; None without any."""
    if not (model.is_hybrid or getattr(model, "has_inner_state", False)):
        return None
    return _STATES.get(model.hf_text_config.model_type, OTHER_STATES)


def connector_names(transfer: TransferConfig | None) -> Iterator[str]:
    """Name the KV connectors of a ``KVTransferConfig``, those that a MultiConnector has for it.

    A connector that is known by its name has another one if a module outside of vLLM has it, or if
    it stores elsewhere, or hands over other rows, than kvtxn was checked with.
    """
    name = getattr(transfer, "kv_connector", None)
    if name is None:
        return
    module = getattr(transfer, "kv_connector_module_path", None)
    more = getattr(transfer, "kv_connector_extra_config", None) or {}
    store = more.get("kv_offload_backend", "cpu")
    if module is not None:
        yield f"{module}.{name}" if name in supported.CONNECTORS else name
    elif name == "MultiConnector" and more.get("connectors"):
        for each in more["connectors"]:
            yield from connector_names(SimpleNamespace(**each))
    elif name == "SimpleCPUOffloadConnector" and store != "cpu":
        yield f"{name} with kv_offload_backend {store!r}"
    elif name == "NixlConnector" and more.get("bidirectional_kv_xfer"):
        yield f"{name} with bidirectional_kv_xfer"
    else:
        yield name


def _adapts(speculation: SpeculativeConfig | None) -> bool:
    """Tell whether the number of drafts changes from step to step."""
    return speculation is not None and bool(
        speculation.enable_adaptive_verification
        or speculation.num_speculative_tokens_per_batch_size is not None
    )


#: Settings of models whose layers may have sinks.
_SINKS: Final = (
    "attention_sinks",
    "add_swa_attention_sink_bias",
    "add_full_attention_sink_bias",
)

#: Facts of a loaded model that its configuration gives away in most cases.
FROM_MODEL: Final[Mapping[str, Callable[[TextConfig], bool]]] = {
    "kv_sharing": lambda model: bool(getattr(model, "num_kv_shared_layers", 0)),
    "sinks": lambda model: (
        model.model_type == "gpt_oss" or any(bool(getattr(model, name, False)) for name in _SINKS)
    ),
    "alibi": lambda model: model.model_type == "bloom" or bool(getattr(model, "alibi", False)),
}


def expected_facts(config: VllmConfig) -> EngineFacts:
    """Read a ``VllmConfig``; guess facts of its model, which is not loaded, by ``FROM_MODEL``."""
    facts = config_facts(config)
    if not supported.is_listed(facts.version) and not facts.unchecked:
        return facts
    model = config.model_config.hf_text_config
    changes: dict[str, Any] = {fact: says(model) for fact, says in FROM_MODEL.items()}
    if facts.device == "cuda" and (facts.version in supported.GPU_RELEASES or facts.unchecked):
        named = config.attention_config.backend
        changes["attention"] = named and named.name
        changes["block_size"] = config.cache_config.block_size
        if changes["attention"] in (None, "FLASH_ATTN") and not facts.mla:
            changes["flash"] = backends.flash_version(config.attention_config.flash_attn_version)
        changes["spare_blocks"] = _rows_in_line(config)
    changes |= expected_states(config, facts)
    return attrs.evolve(facts, **changes)


def _rows_in_line(config: VllmConfig) -> bool:
    """Tell whether row will follow row in the caches; ``kv_cache.has_rows_in_line`` reads them.

    They do in the layout that vLLM chooses by itself, but the user's environment or a KV
    connector may ask for another one.
    """
    from vllm import envs
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    asked = getattr(envs, "VLLM_KV_CACHE_LAYOUT", None)
    connectors = tuple(connector_names(config.kv_transfer_config))
    if asked is None and connectors and not supported.unchecked_connector("cuda", connectors):
        asked = get_kv_connector_cache_layout(config)
    return asked in (None, "NHD") or "BN" in asked


def plain_facts() -> EngineFacts:
    """Return the facts of the plainest speculating engine on this machine, with this vLLM."""
    device, number = workers.device_type(), workers.version()
    runner = supported.RUNNERS.get(device, (EngineFacts().runner,))[-1]  # vLLM's own choice
    on_gpu = device == "cuda" and number in supported.GPU_RELEASES
    return EngineFacts(
        version=number,
        device=device,
        runner=runner,
        flash=backends.flash_version() if on_gpu else None,
    )
