"""vLLM's configuration: the facts that ``policy.rules`` decides by, and sizes.

``kvtxn doctor`` judges engines that do not run yet, and so takes facts of recurrent layers from the
configuration. A running engine reads its layers, in ``state_layers`` and ``held_states``, and what
these say counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

import attrs
import torch

from ..policy import release_records, supported, wants
from ..policy.engine_facts import (
    GATED_DELTA,
    MAMBA2,
    OLMO_DELTA,
    OTHER_STATES,
    SHORT_CONV,
    EngineFacts,
)
from ..policy.settings import asked_states
from ..policy.state_rules import TOKENS
from . import backends, workers
from .engine_protocols import ModelConfig, SpeculativeConfig, TextConfig, TransferConfig, VllmConfig
from .runner_protocols import Runner


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
    """Return the most rows that requests with drafts can have in one step, by the configuration."""
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
    """Return a ``VllmConfig``'s facts; ``layers.target_layers`` adds those of the loaded model.

    Of a release that is not listed, nothing but its number and the device is read, unless the user
    sets ``unchecked``. What ``recurrent="auto"`` chooses by is read where it is set on a GPU.
    """
    number, unchecked = workers.version(), wants(config.additional_config, "unchecked", True)
    if not supported.is_listed(number) and not unchecked:
        return EngineFacts(version=number, device=config.device_config.device_type)

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
        head_size=None if on_gpu else _head_size(model),
        recurrent=_states(model),
        states=asked_states(config.additional_config),
        unchecked=unchecked,
        cached_states=getattr(config.cache_config, "mamba_cache_mode", "none") != "none",
        microbatches=parallel.use_ubatching,
        adaptive=on_gpu and _adapts(speculation),
        cascade=release_records.number(number) < (0, 32)
        and not getattr(model, "disable_cascade_attn", True),
        graph_writes=on_gpu and _writes_elsewhere(config, mla=model.use_mla),
    )
    return attrs.evolve(facts, **_room(config)) if on_gpu and facts.states == "auto" else facts


def _room(config: VllmConfig) -> dict[str, Any]:
    """Read the facts by which ``recurrent="auto"`` chooses on a GPU, as fields of ``EngineFacts``.

    The gain in requests is computed for gated delta nets alone.
    """
    model = config.model_config
    found: dict[str, Any] = {
        "model": model.hf_text_config.model_type,
        "most_requests": int(config.scheduler_config.max_num_seqs),
    }
    if _states(model) != GATED_DELTA:
        return found
    tokens = min(TOKENS, int(model.max_model_len))
    gain = one_state_gain(config, drafts(config), tokens)
    dtype = configured_state_dtype(config)
    return {**found, "state_dtype": dtype, "gain": round(gain, 2), "gain_tokens": tokens}


def _writes_elsewhere(config: VllmConfig, *, mla: bool) -> bool:
    """Tell whether rows are written where kvtxn cannot give them other slots.

    They are in breakable graphs, in Inductor's partition, and, of latents, fused with the rotary
    embedding.
    """
    from vllm import envs

    compilation = config.compilation_config
    return (
        bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))
        or bool(compilation.use_inductor_graph_partition)
        or (mla and bool(getattr(compilation.pass_config, "fuse_rope_kvcache_cat_mla", False)))
    )


def runner_facts(runner: Runner) -> EngineFacts:
    """Return the facts that a runner knows before it has caches, with its pipeline stage."""
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
    """Name the kind of a model's recurrent layers by its type; None without any.

    ``OTHER_STATES`` for a type that is not in ``_STATES``.
    """
    if not (model.is_hybrid or getattr(model, "has_inner_state", False)):
        return None
    return _STATES.get(model.hf_text_config.model_type, OTHER_STATES)


def _head_size(model: ModelConfig) -> int | None:
    """Return the numbers of an attention head.

    None for latent rows, and for models without attention.
    """
    without_attention = _states(model) is not None and not model.is_hybrid
    return None if model.use_mla or without_attention else int(model.get_head_size())


def connector_names(transfer: TransferConfig | None) -> Iterator[str]:
    """Name the KV connectors of a ``KVTransferConfig``; a MultiConnector's own in its place.

    A connector that is known by its name has another one if a module outside of vLLM has it, or if
    it stores elsewhere, or hands over other rows, than kvtxn was checked with. No name without a
    connector.
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
    """Tell whether an engine may change the number of drafts from step to step."""
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
    """Return the facts of a ``VllmConfig`` whose model is not loaded.

    Facts of the model are guessed by ``FROM_MODEL`` and ``expected_states``; on a GPU those of
    attention and of the cache's layout are added. Of a release that is not listed, they are those
    of ``config_facts``.
    """
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
    """Tell whether row will follow row in the caches, before there are any.

    ``gpu_cache_layout.has_rows_in_line`` reads it off the caches. Rows are in line in the layout
    that vLLM chooses, but the user's environment or a KV connector may ask for another one. A
    connector that kvtxn was not checked with is not asked.
    """
    from vllm import envs
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    asked = getattr(envs, "VLLM_KV_CACHE_LAYOUT", None)
    connectors = tuple(connector_names(config.kv_transfer_config))
    if asked is None and connectors and not supported.unchecked_connector("cuda", connectors):
        asked = get_kv_connector_cache_layout(config)
    return asked in (None, "NHD") or "BN" in asked


def plain_facts() -> EngineFacts:
    """Return the facts of the plainest speculating engine on this machine, with this vLLM.

    The runner is vLLM's choice for the device; FlashAttention's version is there on a listed GPU.
    """
    device, number = workers.device_type(), workers.version()
    runner = supported.RUNNERS.get(device, (EngineFacts().runner,))[-1]  # vLLM's own choice
    on_gpu = device == "cuda" and number in supported.GPU_RELEASES
    return EngineFacts(
        version=number,
        device=device,
        runner=runner,
        flash=backends.flash_version() if on_gpu else None,
    )


#: The first release in which FlashInfer's kernel of prompts leaves states in their middle.
_LEAVES: Final = (0, 33)

#: Values of the setting ``gdn_prefill_backend`` with which vLLM may take FlashInfer's kernel.
_MAY_BE_FLASHINFER: Final = ("auto", "flashinfer")

#: Most rows of a request that kvtxn's kernels take.
MOST_REPLAYED: Final = 16

#: Why kvtxn cannot hold the states of some layers.
NO_ATTENTION: Final = "the model has no layers of attention"
NOT_TRITON: Final = "vLLM's backend of Mamba-2 layers is not Triton: leave mamba_backend out"
OWN_REPLAY: Final = "vLLM's own replay of Mamba-2 layers is on: leave use_replayssm out"


def too_many(kind: str | None) -> str:
    """Return the sentence that requests have more drafts than kvtxn's kernels of a kind take."""
    return f"kvtxn's kernels of {kind} take at most {MOST_REPLAYED - 1} drafts"


def expected_states(config: VllmConfig, facts: EngineFacts) -> dict[str, Any]:
    """Read the facts of a model's recurrent layers off its configuration.

    Returns:
        Fields of ``EngineFacts``; empty unless windows would hold states. On a CPU the dtype alone,
        of gated delta nets and Mamba-2 layers.
    """
    if facts.recurrent is None or facts.states == "off":
        return {}
    found: dict[str, Any] = {}
    if facts.recurrent in (GATED_DELTA, MAMBA2):
        found["state_dtype"] = configured_state_dtype(config)
    if facts.device != "cuda":
        return found
    found["odd_states"] = _odd(config, facts)
    if facts.recurrent == GATED_DELTA:
        found["inner_states"] = _leaves_inner_states(config, facts)
    return found


def _leaves_inner_states(config: VllmConfig, facts: EngineFacts) -> bool:
    """Tell whether prompts will leave states in their middle for the prefix cache.

    They do since vLLM 0.33 in mode "align", if vLLM takes FlashInfer's kernel, by the setting
    ``gdn_prefill_backend`` and by the GPU.
    """
    given = config.additional_config
    asked = given.get("gdn_prefill_backend", "auto") if isinstance(given, dict) else "auto"
    aligned = getattr(config.cache_config, "mamba_cache_mode", "none") == "align"
    if release_records.number(facts.version) < _LEAVES or not aligned:
        return False
    return str(asked).strip().lower() in _MAY_BE_FLASHINFER and _takes_flashinfer(config)


def _takes_flashinfer(config: VllmConfig) -> bool:
    """Tell whether vLLM takes FlashInfer's kernel of prompts on this GPU, if the setting lets it.

    It does on compute capability 9.0, and on 10.x and 12.x with CUDA 13 for keys of 128 numbers.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    major = 0 if capability is None else int(capability.major)
    if major == 9:
        return bool(capability.minor == 0)
    cuda = int((torch.version.cuda or "0").partition(".")[0])
    keys = getattr(config.model_config.hf_text_config, "linear_key_head_dim", None)
    return major in (10, 12) and cuda >= 13 and keys == 128


def _odd(config: VllmConfig, facts: EngineFacts) -> str | None:
    """Say in a sentence what rules out windows over these layers, by the configuration.

    None if nothing does.
    """
    if not config.model_config.is_hybrid:
        return NO_ATTENTION
    if facts.recurrent == MAMBA2 and config.mamba_config.backend.value != "triton":
        return NOT_TRITON
    if facts.recurrent == MAMBA2 and getattr(config.cache_config, "use_replayssm", False):
        return OWN_REPLAY
    replayed = facts.states == "fast" and facts.recurrent in (GATED_DELTA, MAMBA2)
    return too_many(facts.recurrent) if replayed and drafts(config) >= MOST_REPLAYED else None


#: Bytes of a number, by the name of its dtype or cache format; formats of eight bits have one.
_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}

#: A page of attention has a multiple of so many tokens, on a GPU.
_TOKENS: Final = 16


def configured_state_dtype(config: VllmConfig) -> str:
    """Name the dtype of the states of gated delta nets or Mamba-2 layers, by the configuration.

    "auto" is the dtype of convolutions' pasts.
    """
    asked = str(config.cache_config.mamba_ssm_cache_dtype)
    return _past_dtype(config) if asked == "auto" else asked


def one_state_gain(config: VllmConfig, drafts: int, tokens: int) -> float:
    """Return how many times as many requests fit with one state block each as in stock.

    Every page of a hybrid's cache has the same bytes: a state with its past, or the rows of as many
    tokens of attention as need that much room. So requests are counted in pages, whose rows are
    rounded up to vLLM's blocks. Where the prefix cache keeps states, each request has one more. A
    drafter's layers are left out.

    Args:
        config: the engine's.
        drafts: of each step, so many state blocks stock has besides.
        tokens: of each request.

    Returns:
        1.0 or more; 1.0 if the model's configuration does not name its layers, or has no attention
        beside them.
    """
    model: Any = config.model_config.hf_text_config  # settings of a hybrid's alone
    cache = config.cache_config
    kinds = list(getattr(model, "layer_types", None) or ())
    states, attention = kinds.count("linear_attention"), kinds.count("full_attention")
    if not states or not attention:
        return 1.0
    taps = model.linear_conv_kernel_dim - 1 + drafts
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    past = taps * (2 * keys + values) * _BYTES[_past_dtype(config)]
    state = values * model.linear_key_head_dim * _BYTES[configured_state_dtype(config)]
    heads, size = config.model_config.get_total_num_kv_heads(), config.model_config.get_head_size()
    number = str(cache.cache_dtype)
    number = _model_dtype(config) if number == "auto" else number
    row = 2 * heads * size * _BYTES.get(number, 1)
    page = math.ceil((past + state) / row / _TOKENS) * _TOKENS
    rows = attention * math.ceil(tokens / page)
    own = 1 if cache.mamba_cache_mode == "none" else 2  # "align" keeps one at a block's end
    return float((states * (own + drafts) + rows) / (states * own + rows))


def _past_dtype(config: VllmConfig) -> str:
    """Name the dtype of convolutions' pasts, by the configuration; "auto" is the model's."""
    asked = str(config.cache_config.mamba_cache_dtype)
    return _model_dtype(config) if asked == "auto" else asked


def _model_dtype(config: VllmConfig) -> str:
    """Name the model's dtype, such as "bfloat16"."""
    return str(config.model_config.dtype).removeprefix("torch.")
