"""vLLM's front end: its engines, and the clients that reach their workers.

Programs of kvtxn's start asynchronous engines: see ``start_async``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import attrs

from ....errors import ConfigError
from .hooks import replace_method, when_imported

if TYPE_CHECKING:  # vLLM's processes that register kvtxn import no more than they need
    from ...serving.engine_sizes import EngineSizes
    from .engine_protocols import (
        AsyncClient,
        AsyncEngine,
        Client,
        IterationStats,
        OfflineEngine,
        SchedulerStats,
        SpeculativeConfig,
        VllmConfig,
        VllmEngine,
    )


def hook_engines(
    before_init: Callable[[VllmConfig | None], None], after_init: Callable[[VllmEngine], None]
) -> Callable[[], None]:
    """Call functions around the start of every ``LLMEngine`` and ``AsyncLLM`` of this process.

    Classes that are not imported yet are hooked when they are.

    Args:
        before_init: gets the engine's ``VllmConfig`` before any worker starts, or None if it is no
            argument; an exception of it stops the start.
        after_init: gets the engine once it is up.

    Returns:
        A function that undoes it.
    """

    def around(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: VllmEngine, *args: Any, **kwargs: Any) -> None:
            before_init(args[0] if args else kwargs.get("vllm_config"))
            original(self, *args, **kwargs)
            after_init(self)

        return __init__

    def hook(owner: Any) -> Callable[[], None]:
        return replace_method(owner, "__init__", around, "engines")

    with ExitStack() as undo:
        undo.callback(
            when_imported("vllm.v1.engine.llm_engine", lambda module: hook(module.LLMEngine))
        )
        undo.callback(
            when_imported("vllm.v1.engine.async_llm", lambda module: hook(module.AsyncLLM))
        )
        return undo.pop_all().close


def config_of(engine: VllmEngine) -> VllmConfig:
    """Return the ``VllmConfig`` of an ``LLMEngine`` or ``AsyncLLM``."""
    return engine.vllm_config


def client_of(engine: VllmEngine | OfflineEngine) -> Client:
    """Return the client of an ``LLM``, ``LLMEngine`` or ``AsyncLLM``: its ``engine_core``.

    It outlives the engine's core.
    """
    inner = engine.llm_engine if hasattr(engine, "llm_engine") else engine
    client: Client = inner.engine_core
    return client


def find_client(engine: object) -> Client | None:
    """Return the client of an ``LLM``, ``LLMEngine`` or ``AsyncLLM``; None of other objects."""
    return getattr(getattr(engine, "llm_engine", engine), "engine_core", None)


def ask_engine(engine: object, operation: str, method: str) -> Any:
    """Call a method of every worker of an ``LLM`` or ``LLMEngine``; return the answers by rank.

    Args:
        engine: the engine.
        operation: the caller, for the message.
        method: the method's name.

    Raises:
        ConfigError: it is no engine, or an ``AsyncLLM``, which answers in coroutines alone.
    """
    client = find_client(engine)
    try:
        if client is not None:
            return ask_workers(client, method)
    except NotImplementedError:  # an AsyncLLM's client has coroutines for that
        pass
    name = type(engine).__name__
    ask = "" if client is None else f", or await engine.collective_rpc({method!r})"
    raise ConfigError(
        operation,
        f"a {name} does not answer at once" if ask else "this is no engine",
        expected="an LLM or LLMEngine",
        got=name,
        hint=f"read the server's page at /metrics{ask}",
    )


def shut_down(llm: OfflineEngine) -> None:
    """End the engine of an ``LLM``; its object stays."""
    llm.llm_engine.engine_core.shutdown()


def is_async(client: Client) -> TypeGuard[AsyncClient]:
    """Tell whether the client belongs to an ``AsyncLLM``."""
    from vllm.v1.engine.core_client import AsyncMPClient

    return isinstance(client, AsyncMPClient)


def publishes(client: AsyncClient, engine: VllmEngine) -> bool:
    """Tell whether this process shows the engines' statistics, if the user wants any.

    Of server processes that share the engines, the first one does.
    """
    return int(client.client_index) == 0 and engine.log_stats


def model_name(engine: VllmEngine) -> str:
    """Return the model's name in vLLM's own metrics."""
    return str(engine.vllm_config.model_config.served_model_name)


def is_dead(client: AsyncClient) -> bool:
    """Tell whether the engines of an ``AsyncLLM`` are gone."""
    return bool(client.resources.engine_dead)


def ask_workers(client: Client, method: str) -> list[Any]:
    """Call a worker's method in every rank of an ``LLM``'s engine; return the answers by rank."""
    return list(client.collective_rpc(method))


async def ask_all_workers(client: AsyncClient, method: str) -> dict[int, list[Any]]:
    """Call a worker's method in every rank of every engine, at the same time.

    Returns:
        By the engine's number, the answers by rank.
    """
    numbers = list(client.engine_ranks_managed)
    calls = (
        client._call_utility_async("collective_rpc", method, None, (), None, engine=engine)
        for engine in client.core_engines
    )
    return dict(zip(numbers, await asyncio.gather(*calls), strict=True))


# -- asynchronous engines, as kvtxn's own programs start them --------------------------------


def async_config(engine_args: Mapping[str, object]) -> VllmConfig:
    """Build the ``VllmConfig`` of an asynchronous engine with these arguments; starts nothing."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    config: VllmConfig = AsyncEngineArgs(**engine_args).create_engine_config()
    return config


def says_nothing(config: VllmConfig) -> str | None:
    """Say in a sentence why an engine with this ``VllmConfig`` generates no tokens.

    None if it does: all but pooling engines.
    """
    if config.model_config.runner_type == "pooling":
        return "it is a pooling engine, which gives one vector for a text"
    return None


def engine_sizes(config: VllmConfig) -> EngineSizes:
    """Read an engine's vocabulary, longest request and block size from its ``VllmConfig``."""
    from ...serving.engine_sizes import EngineSizes

    model = config.model_config
    return EngineSizes(
        int(model.get_vocab_size()), int(model.max_model_len), int(config.cache_config.block_size)
    )


def engine_description(config: VllmConfig) -> dict[str, str]:
    """Describe an engine for a report: strings by name, such as "drafts": "3 by ngram".

    These are model, device, runner, drafts, prefix caching and connector.
    """
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
    """Describe speculation as "3 by ngram": the most drafts, and the method."""
    return f"{speculation.num_speculative_tokens} by {speculation.method}"


@attrs.define
class StepCounts:
    """The steps of a running engine, by vLLM's own counts.

    Attributes:
        steps: the steps that the scheduler reported.
        tokens: generated tokens.
        preempted: requests put back, each as often as it was.
        drafted: drafts that were verified.
        accepted: drafts that were accepted.
        cached: tokens that the prefix cache had.
        loaded: tokens that a connector had.
        requests: requests that ran or waited at the last step.
        used: part of the KV cache in use at the last step, 0 to 1.
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
        """Add one step; ``requests`` and ``used`` are replaced by the step's.

        Args:
            scheduler: vLLM's ``SchedulerStats``; None without any.
            iteration: vLLM's ``IterationStats``; None without any.
        """
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


def start_async(config: VllmConfig, counts: StepCounts | None = None) -> AsyncEngine:
    """Start an ``AsyncLLM``; its engine core has a process of its own.

    Args:
        config: the engine's.
        counts: each step is added to it; None: the engine counts nothing.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    engine: AsyncEngine
    if counts is None:
        engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    else:
        engine = AsyncLLM.from_vllm_config(config, stat_loggers=[partial(_Listener, counts)])
    return engine


def stop_async(engine: AsyncEngine) -> None:
    """End an ``AsyncLLM`` and its processes."""
    engine.shutdown()


class _Listener:
    """Adds what an engine says of its steps to counts; as vLLM's ``StatLoggerBase``."""

    def __init__(self, counts: StepCounts, config: VllmConfig, number: int = 0) -> None:
        self._counts = counts

    def record(
        self,
        scheduler: SchedulerStats | None,
        iteration: IterationStats | None,
        *others: Any,
        **more: Any,
    ) -> None:
        """Add a step to the counts; further arguments of vLLM's are not used."""
        self._counts.add(scheduler, iteration)

    def log(self) -> None:
        """Log nothing."""

    def log_engine_initialized(self) -> None:
        """Log nothing."""

    def record_sleep_state(self, *state: Any) -> None:
        """Count nothing."""


def usable_blocks(engine: AsyncEngine) -> int:
    """Return the number of an ``AsyncLLM``'s blocks that requests can have: all but one."""
    return int(engine.vllm_config.cache_config.num_gpu_blocks or 0) - 1  # one belongs to nobody


def session_input(tokens: Sequence[int], sampling: object) -> object:
    """Make vLLM's ``StreamingInput`` of one turn of a session, from its token ids."""
    from vllm import TokensPrompt
    from vllm.engine.protocol import StreamingInput

    return StreamingInput(
        prompt=TokensPrompt(prompt_token_ids=list(tokens)), sampling_params=sampling
    )


def deltas() -> object:
    """Return the setting of ``SamplingParams.output_kind`` that gives each token once."""
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.DELTA
