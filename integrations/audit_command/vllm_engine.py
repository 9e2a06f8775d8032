"""vLLM under audit: how it is started and asked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..serving.engine_sizes import EngineSizes
from .audited import Audited
from .jobs import Job, Refused, renamed, sentence
from .workloads import WORKLOADS

#: Settings of a small engine on a CPU, unless the user's own environment has them.
_DEFAULTS: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
#: The settings of OffloadingConnector for a store that a CPU engine can copy to.
_MEMORY_STORE: Final = {
    "spec_name": "MemoryStoreSpec",
    "spec_module_path": "kvtxn.integrations.vllm_plugin.seam.memory_store",
}
#: The advice for an engine that no workload of this command fits.
_WATCH_IT: Final = (
    'start it with additional_config={"kvtxn": {"audit": "ledger"}}, send it requests of your own, '
    "and ask audit_report(llm)"
)
_RANDOM: Final = re.compile(r"-[0-9a-f]{8}$")


def environment(job: Job) -> dict[str, str]:
    """Return variables of the engine's process: the log level, and defaults of a small CPU engine.

    A default gives way to the variable of this process.
    """
    found = {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}
    return found | {"VLLM_LOGGING_LEVEL": job.log_level.upper()}


class VllmRequests:
    """The objects that vLLM is asked with; see ``Requests``."""

    def prompt(self, given: str | Sequence[int]) -> object:
        """Return a text as it is, and token ids as a ``TokensPrompt``."""
        from vllm import TokensPrompt

        return given if isinstance(given, str) else TokensPrompt(prompt_token_ids=list(given))

    def sampling(
        self, most: int, among: Sequence[int] | None = None, stop: int | None = None
    ) -> object:
        """Return greedy ``SamplingParams`` that stream new tokens, and ignore the end of text.

        Args:
            most: output tokens.
            among: the only tokens that the output may have; None: any.
            stop: a token that ends the output before; None: none.
        """
        from vllm import SamplingParams

        from ..vllm_plugin.seam import frontend

        return SamplingParams(
            temperature=0.0,
            max_tokens=most,
            ignore_eos=True,
            output_kind=frontend.deltas(),
            stop_token_ids=None if stop is None else [stop],
            allowed_token_ids=None if among is None else sorted({*among}),
        )

    def turn(self, tokens: Sequence[int], sampling: object) -> object:
        """Return an input of a streaming session, with these tokens and sampling parameters."""
        from ..vllm_plugin.seam import frontend

        return frontend.session_input(list(tokens), sampling)


async def start(job: Job) -> Audited | Refused:
    """Start an ``AsyncLLM`` with the job's arguments and what its workloads need besides.

    Returns:
        The engine, with the calls that read and stop it; or why there is none: vLLM refuses the
        arguments, its requests cannot be played, or the ledger cannot watch it.

    Raises:
        Exception: whatever vLLM raises while an accepted configuration starts.
    """
    from ..vllm_plugin.seam import audited_requests, frontend, workers
    from ..vllm_plugin.seam.workers import RECORDING, SNAPSHOT

    arguments = dict(job.engine_args)
    try:
        config = frontend.async_config(arguments)
        sizes = frontend.engine_sizes(config)
        device = frontend.engine_description(config)["device"]
        for name in job.workloads:
            arguments |= needs(name, arguments, sizes, device, job.room)
        if job.workloads:
            config = frontend.async_config(arguments)
    except Exception as error:  # vLLM's and pydantic's, of any class
        return Refused(f"vLLM refuses these engine arguments: {sentence(error)}")
    why = frontend.says_nothing(config)
    if why is not None:
        return Refused(f"no workload can be played here: {why}; {_WATCH_IT}")
    why = audited_requests.unwatched(config)
    if why is not None:
        return Refused(f"the ledger cannot watch this engine: {why}")
    engine = frontend.start_async(config)

    async def counters() -> list[dict[str, float]]:
        return list(await engine.collective_rpc(SNAPSHOT))

    async def recordings() -> list[dict[str, Any]]:
        return [_named(each) for each in await engine.collective_rpc(RECORDING) if each]

    return Audited(
        engine=engine,
        requests=VllmRequests(),
        sizes=sizes,
        arguments=arguments,
        facts={"vLLM": workers.version(), **frontend.engine_description(config)},
        counters=counters,
        recordings=recordings,
        stop=engine.shutdown,
    )


def needs(
    workload: str, given: Mapping[str, Any], sizes: EngineSizes, device: str, room: int = 1
) -> dict[str, Any]:
    """Return the engine arguments that a workload needs and the user did not give.

    Args:
        workload: its name.
        given: the user's arguments, which always win.
        sizes: of the engine without these arguments.
        device: "cpu" or "cuda"; the kind of memory that rows are offloaded to depends on it.
        room: so many times the blocks are made that a workload short of blocks asks for.
    """
    needs = dict(WORKLOADS[workload].engine_args)
    if WORKLOADS[workload].few_blocks:
        longest = -(-min(sizes.max_length, 1024) // sizes.block_size)
        blocks = max(longest * 3 // 2 + 2, -(-sizes.max_length // sizes.block_size) + 2)
        needs["num_gpu_blocks_override"] = room * blocks
    if WORKLOADS[workload].offloads:
        needs["kv_transfer_config"] = offloading(device, 1 << 26)
    return {name: value for name, value in needs.items() if name not in given}


def offloading(device: str, store: int) -> dict[str, Any]:
    """Return settings of an OffloadingConnector for prompts and outputs, with a store in memory.

    On a CPU they name kvtxn's own store.

    Args:
        device: the type of the engine's device.
        store: bytes of the store.
    """
    extra = {"cpu_bytes_to_use": store, "offload_prompt_only": False}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra | (_MEMORY_STORE if device == "cpu" else {}),
    }


def _named(recording: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a recording with the client's names of requests.

    vLLM adds random digits to them.
    """
    return renamed(recording, lambda name: _RANDOM.sub("", name))
