"""What kvtxn takes from vLLM's front end: its engines, and the clients that reach their workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any


def hook_engines(after_init: Callable[[Any], None]) -> Callable[[], None]:
    """Run something for every engine of this process, ``LLMEngine`` or ``AsyncLLM``, once it is up.

    Returns:
        Undoes it.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    originals = {owner: owner.__init__ for owner in (LLMEngine, AsyncLLM)}
    for owner, original in originals.items():
        owner.__init__ = _followed_by(original, after_init)

    def undo() -> None:
        for owner, original in originals.items():
            owner.__init__ = original

    return undo


def _followed_by(original: Any, after_init: Callable[[Any], None]) -> Any:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after_init(self)

    return __init__


def client_of(engine: Any) -> Any:
    """The client of an ``LLM``, ``LLMEngine`` or ``AsyncLLM``; it outlives the engine's core."""
    return getattr(engine, "llm_engine", engine).engine_core


def is_async(client: Any) -> bool:
    """Whether the client belongs to an ``AsyncLLM``."""
    from vllm.v1.engine.core_client import AsyncMPClient

    return isinstance(client, AsyncMPClient)


def speaks_for_all(client: Any) -> bool:
    """Whether this is the first of the processes that share the engines."""
    return int(client.client_index) == 0


def counts_nothing(engine: Any) -> bool:
    """Whether the user wants no statistics."""
    return not engine.log_stats


def model_name(engine: Any) -> str:
    """The model's name in vLLM's own metrics."""
    return str(engine.vllm_config.model_config.served_model_name)


def is_dead(client: Any) -> bool:
    """Whether an ``AsyncLLM``'s engines are gone."""
    return bool(client.resources.engine_dead)


async def call_workers(client: Any, method: str) -> dict[int, list[Any]]:
    """Call a worker's method in every rank of every engine that the client reaches.

    Returns:
        By the engine's number: what its ranks gave.
    """
    numbers = list(client.engine_ranks_managed)
    calls = (
        client._call_utility_async("collective_rpc", method, None, (), None, engine=engine)
        for engine in client.core_engines
    )
    return dict(zip(numbers, await asyncio.gather(*calls), strict=True))
