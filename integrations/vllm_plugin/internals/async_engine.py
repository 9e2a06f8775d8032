"""vLLM's asynchronous engine: its start, its sizes, and inputs of streaming sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from .protocols.engine import (
    AsyncEngine,
    IterationStats,
    SchedulerStats,
    SpeculativeConfig,
    VllmConfig,
)


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


def config_of(engine_args: Mapping[str, object]) -> VllmConfig:
    """Build the ``VllmConfig`` of an asynchronous engine with these arguments; starts nothing."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    config: VllmConfig = AsyncEngineArgs(**engine_args).create_engine_config()
    return config


def says_nothing(config: VllmConfig) -> str | None:
    """Say why an engine with this ``VllmConfig`` generates no tokens; None if it does."""
    if config.model_config.runner_type == "pooling":
        return "it is a pooling engine, which gives one vector for a text"
    return None


def sizes(config: VllmConfig) -> EngineSizes:
    """Read an engine's sizes from its ``VllmConfig``."""
    model = config.model_config
    return EngineSizes(
        int(model.get_vocab_size()), int(model.max_model_len), int(config.cache_config.block_size)
    )


def description(config: VllmConfig) -> dict[str, str]:
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


def _drafts(speculation: SpeculativeConfig) -> str:
    return f"{speculation.num_speculative_tokens} by {speculation.method}"


@attrs.define
class StepCounts:
    """The steps of a running engine, by vLLM's own counts.

    Attributes:
        steps: steps so far.
        tokens: generated tokens so far.
        preempted: requests that were preempted so far.
        drafted: draft tokens so far.
        accepted: accepted draft tokens so far.
        cached: tokens of prompts that the prefix cache had so far.
        loaded: tokens of prompts that a connector had so far.
        requests: requests that the scheduler has, after the last step.
        used: share of the cache's blocks that are in use, after the last step.
    """

    steps: int = 0
    tokens: int = 0
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    loaded: int = 0
    requests: int = 0
    used: float = 0.0

    def add(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Count one step: vLLM's ``SchedulerStats`` and ``IterationStats``, None without any."""
        if scheduler is not None:
            self.steps += 1
            self.requests = scheduler.num_running_reqs + scheduler.num_waiting_reqs
            self.used = float(scheduler.kv_cache_usage)
            self.cached += scheduler.prefix_cache_stats.hits
            if scheduler.connector_prefix_cache_stats is not None:
                self.loaded += scheduler.connector_prefix_cache_stats.hits
            if scheduler.spec_decoding_stats is not None:
                self.drafted += scheduler.spec_decoding_stats.num_draft_tokens
                self.accepted += scheduler.spec_decoding_stats.num_accepted_tokens
        if iteration is not None:
            self.tokens += iteration.num_generation_tokens
            self.preempted += iteration.num_preempted_reqs


def start(config: VllmConfig, counts: StepCounts | None = None) -> AsyncEngine:
    """Start an ``AsyncLLM``; its engine core has a process of its own.

    Args:
        config: its ``VllmConfig``.
        counts: is told of every step; None: the engine makes no statistics.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    engine: AsyncEngine
    if counts is None:
        engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    else:
        engine = AsyncLLM.from_vllm_config(config, stat_loggers=[partial(_Listener, counts)])
    return engine


def stop(engine: AsyncEngine) -> None:
    """End an ``AsyncLLM`` and its processes."""
    engine.shutdown()


class _Listener:
    """Adds what an engine says of its steps to counts; as vLLM's ``StatLoggerBase``.

    Args:
        counts: the counts.
        config: the engine's ``VllmConfig``.
        number: the engine's number.
    """

    def __init__(self, counts: StepCounts, config: VllmConfig, number: int = 0) -> None:
        self._counts = counts

    def record(
        self,
        scheduler: SchedulerStats | None,
        iteration: IterationStats | None,
        *others: Any,
        **more: Any,
    ) -> None:
        """Count a step."""
        self._counts.add(scheduler, iteration)

    def log(self) -> None:
        """Log nothing."""

    def log_engine_initialized(self) -> None:
        """Log nothing."""

    def record_sleep_state(self, *state: Any) -> None:
        """Count nothing."""


def blocks(engine: AsyncEngine) -> int:
    """Return the number of an ``AsyncLLM``'s blocks that requests can have."""
    return int(engine.vllm_config.cache_config.num_gpu_blocks or 0) - 1  # one belongs to nobody


def session_input(tokens: Sequence[int], sampling: object) -> object:
    """Make the input of one turn of a streaming session."""
    from vllm import TokensPrompt
    from vllm.engine.protocol import StreamingInput

    return StreamingInput(
        prompt=TokensPrompt(prompt_token_ids=list(tokens)), sampling_params=sampling
    )


def deltas() -> object:
    """Return the setting of ``SamplingParams.output_kind`` that gives each token once."""
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.DELTA
