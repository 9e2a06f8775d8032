"""vLLM's asynchronous engine: its start, its sizes, and inputs of streaming sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from . import Foreign


@attrs.frozen
class EngineSizes:
    """The numbers of an engine by which a workload chooses its prompts.

    Attributes:
        vocabulary: number of token ids.
        max_length: tokens of a request, prompt and output together.
        block_size: tokens per block of the KV cache.
    """

    vocabulary: int
    max_length: int
    block_size: int


def config_of(engine_args: Mapping[str, Any]) -> Foreign:
    """Build the ``VllmConfig`` of an asynchronous engine with these arguments; starts nothing."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(**engine_args).create_engine_config()


def sizes(config: Any) -> EngineSizes:
    """Read an engine's sizes from its ``VllmConfig``."""
    model = config.model_config
    return EngineSizes(
        int(model.get_vocab_size()), int(model.max_model_len), int(config.cache_config.block_size)
    )


def description(config: Any) -> dict[str, str]:
    """Describe an engine in words, for a report."""
    speculation, transfer = config.speculative_config, config.kv_transfer_config
    return {
        "model": str(config.model_config.served_model_name),
        "device": str(config.device_config.device_type),
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "drafts": "none" if speculation is None else _drafts(speculation),
        "prefix caching": "on" if config.cache_config.enable_prefix_caching else "off",
        "connector": "none" if transfer is None else str(transfer.kv_connector),
    }


def _drafts(speculation: Any) -> str:
    return f"{speculation.num_speculative_tokens} by {speculation.method}"


def start(config: Any) -> Foreign:
    """Start an ``AsyncLLM``; its engine core has a process of its own."""
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def session_input(tokens: Sequence[int], sampling: Foreign) -> Foreign:
    """Make the input of one turn of a streaming session."""
    from vllm import TokensPrompt
    from vllm.engine.protocol import StreamingInput

    return StreamingInput(
        prompt=TokensPrompt(prompt_token_ids=list(tokens)), sampling_params=sampling
    )


def deltas() -> Foreign:
    """Return the setting of ``SamplingParams.output_kind`` that gives each token once."""
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.DELTA
