"""An SGLang engine as a client in the same process drives it: requests, flushes, the report."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import attrs

from ...serving.engine_sizes import EngineSizes
from . import hook_points
from .protocols import ServedEngine

#: The end of a request's name: SGLang aborts every request whose name begins with the given one.
_END: Final = "."


@attrs.frozen
class Part:
    """A part of an output: the tokens since the last part.

    Attributes:
        token_ids: the tokens.
        finish_reason: ``"length"``, ``"stop"`` or ``"abort"`` at the end; None before.
    """

    token_ids: list[int]
    finish_reason: str | None


@attrs.frozen
class Output:
    """An output of a request.

    Attributes:
        outputs: its parts, of which there is one.
    """

    outputs: list[Part]


class Frontend:
    """An engine of SGLang's, to be asked from within an event loop.

    Args:
        engine: SGLang's.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self._engine: Final = engine

    async def generate(
        self,
        prompt: Mapping[str, Any],
        sampling_params: Mapping[str, Any],
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[Output, None]:
        """Make a request; yields its outputs as they come, each with the tokens since the last.

        A caller that leaves early, after an abort, waits until SGLang has ended the request.

        Args:
            prompt: ``prompt`` or ``input_ids``.
            sampling_params: as SGLang takes them.
            request_id: the client's name.
            priority: of no effect: the engine has none.
        """
        stream = await self._engine.async_generate(
            **prompt, sampling_params=dict(sampling_params), rid=request_id + _END, stream=True
        )
        seen = 0
        try:
            async for chunk in stream:
                tokens, reason = list(chunk["output_ids"]), chunk["meta_info"].get("finish_reason")
                yield Output([Part(tokens[seen:], reason and str(reason["type"]))])
                seen = len(tokens)
        finally:
            async for _ in stream:
                pass

    async def abort(self, request_id: str) -> None:
        """Let SGLang end a request early, by the client's name; does not wait for its end."""
        self._engine.tokenizer_manager.abort_request(rid=request_id + _END)

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> object:
        """Flush the radix tree and return SGLang's answer; SGLang refuses while requests run.

        With ``reset_running_requests`` do nothing and return None: SGLang cannot preempt them.
        """
        if reset_running_requests:
            return None
        return await self._engine.tokenizer_manager.flush_cache()

    async def report(self) -> dict[str, Any] | None:
        """Return the ledger's report, of the first rank; None if nothing is watched."""
        first, *_ = await self._engine.tokenizer_manager.get_internal_state()
        found: dict[str, Any] | None = first.get("kvtxn")
        return found

    def sizes(self) -> EngineSizes:
        """Return the engine's sizes; a page of none is one token."""
        manager = self._engine.tokenizer_manager
        arguments = manager.server_args
        model = manager.model_config
        return EngineSizes(
            int(model.vocab_size), int(model.context_len), max(int(arguments.page_size or 1), 1)
        )

    def stop(self) -> None:
        """End the engine and its processes."""
        self._engine.shutdown()


def own_name(name: str) -> str:
    """Return the client's name of a request, given SGLang's, which has one character more."""
    return name.removesuffix(_END)


def start(arguments: Mapping[str, Any]) -> Frontend:
    """Start an engine of SGLang's with these arguments, and wait for it.

    Its scheduler has a process of its own.
    """
    import sglang

    return Frontend(sglang.Engine(**arguments))


def facts(arguments: Mapping[str, Any], sizes: EngineSizes) -> dict[str, str]:
    """Return facts of an engine in words, by their heading, for a report.

    Args:
        arguments: the engine's.
        sizes: its sizes.
    """
    method: object = arguments.get("speculative_algorithm")
    return {
        "SGLang": hook_points.release() or "unknown",
        "model": str(arguments["model_path"]),
        "device": str(arguments.get("device") or "cuda"),
        "drafts": "none" if method is None else str(method),
        "prefix caching": "off" if arguments.get("disable_radix_cache") else "on",
        "page": str(sizes.block_size),
    }


def prompt(given: str | Sequence[int]) -> dict[str, object]:
    """Return a text, or token ids, as the arguments by which SGLang takes a prompt."""
    return {"prompt": given} if isinstance(given, str) else {"input_ids": list(given)}


#: Added to the logit of a token that the output may have: no other token comes near it.
_BIAS: Final = 10_000.0


def sampling(most: int, among: Sequence[int] | None, stop: int | None) -> dict[str, object]:
    """Return parameters of greedy sampling as SGLang takes them.

    Args:
        most: output tokens.
        among: the only tokens that the output may have; None: any.
        stop: a token that ends the output; None: none does, the model's own neither.
    """
    found: dict[str, object] = {"temperature": 0.0, "max_new_tokens": most}
    found |= {"ignore_eos": True} if stop is None else {"stop_token_ids": [stop]}
    if among is not None:
        found["logit_bias"] = {str(token): _BIAS for token in sorted({*among})}
    return found
