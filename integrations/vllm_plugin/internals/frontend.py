"""vLLM's front end: its engines, and the clients that reach their workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeGuard

from ....errors import ConfigError, KVTxnError
from .hooks import when_imported

if TYPE_CHECKING:  # vLLM's processes that register kvtxn import no more than they need
    from .protocols.engine import AsyncClient, Client, OfflineEngine, VllmConfig, VllmEngine


def hook_engines(
    before_init: Callable[[VllmConfig | None], None], after_init: Callable[[VllmEngine], None]
) -> Callable[[], None]:
    """Call functions around the start of every ``LLMEngine`` and ``AsyncLLM`` of this process.

    Args:
        before_init: gets the engine's ``VllmConfig`` before any worker starts, or None if it is no
            argument; an exception of it stops the start.
        after_init: gets the engine once it is up.

    Returns:
        A function that undoes the hook.

    Raises:
        KVTxnError: engines are hooked already.
    """

    def hook(owner: Any) -> Callable[[], None]:
        original = owner.__init__
        if hasattr(original, "kvtxn_hook"):
            raise KVTxnError(
                "hook_engines", "vLLM's engines are hooked already", hint="unhook first"
            )
        owner.__init__ = _between(before_init, original, after_init)

        def undo() -> None:
            owner.__init__ = original

        return undo

    with ExitStack() as undo:
        undo.callback(
            when_imported("vllm.v1.engine.llm_engine", lambda module: hook(module.LLMEngine))
        )
        undo.callback(
            when_imported("vllm.v1.engine.async_llm", lambda module: hook(module.AsyncLLM))
        )
        return undo.pop_all().close


def _between(
    before: Callable[[VllmConfig | None], None],
    original: Callable[..., None],
    after: Callable[[VllmEngine], None],
) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: VllmEngine, *args: Any, **kwargs: Any) -> None:
        before(args[0] if args else kwargs.get("vllm_config"))
        original(self, *args, **kwargs)
        after(self)

    __init__.kvtxn_hook = True  # type: ignore[attr-defined]
    return __init__


def config_of(engine: VllmEngine) -> VllmConfig:
    """Return the ``VllmConfig`` of an ``LLMEngine`` or ``AsyncLLM``."""
    return engine.vllm_config


def client_of(engine: VllmEngine | OfflineEngine) -> Client:
    """Return the client of an ``LLM``, ``LLMEngine`` or ``AsyncLLM``; it outlives the core."""
    inner = engine.llm_engine if hasattr(engine, "llm_engine") else engine
    client: Client = inner.engine_core
    return client


def find_client(engine: object) -> Client | None:
    """Return the client of an engine; None if the object is no engine."""
    return getattr(getattr(engine, "llm_engine", engine), "engine_core", None)


def ask_engine(engine: object, operation: str, method: str) -> Any:
    """Call a method of every worker of an ``LLM`` or ``LLMEngine``; returns the answers by rank.

    Args:
        engine: the engine.
        operation: the call, for the message.
        method: the worker's method.

    Raises:
        ConfigError: it is an ``AsyncLLM``, which answers later, or something else.
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
    """Tell whether this process shows the engines' statistics.

    The first of the server processes that share the engines does, if the user wants any.
    """
    return int(client.client_index) == 0 and engine.log_stats


def model_name(engine: VllmEngine) -> str:
    """Return the model's name in vLLM's own metrics."""
    return str(engine.vllm_config.model_config.served_model_name)


def is_dead(client: AsyncClient) -> bool:
    """Tell whether the engines of an ``AsyncLLM`` are gone."""
    return bool(client.resources.engine_dead)


def ask_workers(client: Client, method: str) -> list[Any]:
    """Call a worker's method in every rank of an ``LLM``'s engine; returns the answers by rank."""
    return list(client.collective_rpc(method))


async def ask_all_workers(client: AsyncClient, method: str) -> dict[int, list[Any]]:
    """Call a worker's method in every rank of every engine that an ``AsyncLLM``'s client reaches.

    Returns:
        By the engine's number: the answers by rank.
    """
    numbers = list(client.engine_ranks_managed)
    calls = (
        client._call_utility_async("collective_rpc", method, None, (), None, engine=engine)
        for engine in client.core_engines
    )
    return dict(zip(numbers, await asyncio.gather(*calls), strict=True))
