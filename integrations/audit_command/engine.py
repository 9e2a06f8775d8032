"""An engine under audit, in a process of its own: it plays a workload, and reports."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import attrs

from ..serving.engine_process import EngineProcess, calling, ending_with
from .prompts import Prompt
from .workloads import WORKLOADS, Tokens

#: Settings of a small engine on a CPU, unless the user's own environment has them.
_DEFAULTS: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
#: The settings of OffloadingConnector for a store that a CPU engine can copy to.
_MEMORY_STORE: Final = {
    "spec_name": "MemoryStoreSpec",
    "spec_module_path": "kvtxn.integrations.vllm_plugin.internals.memory_store",
}
#: What to do with an engine that no workload of this command fits.
_WATCH_IT: Final = (
    'start it with additional_config={"kvtxn": {"audit": "ledger"}}, send it requests of your own, '
    "and ask audit_report(llm)"
)
#: Seconds that the engine may take to start, or until one more request is done.
_PATIENCE: Final = 1800.0
_RANDOM: Final = re.compile(r"-[0-9a-f]{8}$")
#: Seconds that one request may take before it is given up.
_STUCK: Final = 600.0


@attrs.frozen(kw_only=True)
class Job:
    """An engine and its workloads.

    Attributes:
        engine_args: arguments of the engine; ``additional_config`` asks for the audit.
        workloads: names from ``WORKLOADS``, to be played in turn; none to play ``prompts``.
        prompts: the prompts of the user's file.
        requests: requests to make, at least.
        seed: of the workload's random numbers.
        log_level: log level of kvtxn and vLLM in the engine's process; "debug" shows both logs.
    """

    engine_args: dict[str, Any]
    workloads: tuple[str, ...]
    prompts: tuple[Prompt, ...] = ()
    requests: int = 100
    seed: int = 0
    log_level: str = "error"


@attrs.frozen
class Refused:
    """The answer of an engine's process that did not start an engine: the reason, one sentence."""

    why: str


@attrs.frozen(kw_only=True)
class Found:
    """The result of an engine's workloads.

    Attributes:
        engine: the engine in words, by name of the fact.
        counters: the counters of each rank.
        recordings: the recording of each rank, see ``RecordingLedger.recording``.
        requests: requests made, each turn of a session counted as one.
        aborted: requests that the workload aborted.
        failed: the reasons of requests that the engine refused or did not finish.
        seconds: wall time of the workloads, the engine's start not included.
    """

    engine: dict[str, str]
    counters: list[dict[str, float]]
    recordings: list[dict[str, Any]]
    requests: int
    aborted: int
    failed: list[str]
    seconds: float


def run(job: Job, progress: Callable[[int], None]) -> Found | Refused:
    """Play the workloads in a fresh process; ``progress`` is told how many requests are done.

    Raises:
        EngineError: the engine's process failed; the message ends with its last words.
    """
    environment = {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}
    process = EngineProcess(
        calling(f"{__package__}.engine", "serve"),
        name="audited",
        operation="audit",
        timeout=_PATIENCE,
        environment=environment | {"VLLM_LOGGING_LEVEL": job.log_level.upper()},
        quiet=job.log_level != "debug",  # the engine's log would hide the progress bar
        rest="--log-level debug shows the rest",
    )
    with ending_with([process]):
        process.send(job)
        while isinstance(answer := process.answer("while it ran"), int):
            progress(answer)
    result: Found | Refused = answer
    return result


# -- in the engine's process -----------------------------------------------------------------


def serve(pipe: Connection[Any, Any]) -> None:
    """Play the workloads in the engine's process: report progress, then the result."""
    job: Job = pipe.recv()
    pipe.send((False, asyncio.run(_serve(job, lambda done: pipe.send((False, done))))))


async def _serve(job: Job, tell: Callable[[int], None]) -> Found | Refused:
    from ..vllm_plugin.audit.report import RECORDING
    from ..vllm_plugin.internals import async_engine, audited, workers
    from ..vllm_plugin.metrics.snapshots import SNAPSHOT

    arguments = dict(job.engine_args)
    try:
        config = async_engine.config_of(arguments)
        sizes = async_engine.sizes(config)
        device = async_engine.description(config)["device"]
        for name in job.workloads:
            arguments |= _needs(name, arguments, sizes, device)
        if job.workloads:
            config = async_engine.config_of(arguments)
    except Exception as error:  # vLLM's and pydantic's, of any class
        return Refused(f"vLLM refuses these engine arguments: {_sentence(error)}")
    why = async_engine.says_nothing(config)
    if why is not None:
        return Refused(f"no workload can be played here: {why}; {_WATCH_IT}")
    why = audited.unwatched(config)
    if why is not None:
        return Refused(f"the ledger cannot watch this engine: {why}")
    engine: Any = async_engine.start(config)
    try:
        if not all(c.get("kvtxn_audit_active") for c in await engine.collective_rpc(SNAPSHOT)):
            return Refused("the ledger does not watch this engine; --log-level debug shows why")
        client = EngineClient(engine, sizes, attrs.evolve(job, engine_args=arguments), tell)
        begin = time.perf_counter()
        await client.answer(job.prompts)
        for number, name in enumerate(job.workloads, 1):
            # Each has its share of the requests, and at least one round.
            share = -(-job.requests * number // len(job.workloads))
            client.budget = max(client.made + 1, share)
            await WORKLOADS[name].play(client)
        await client.settle()
        return Found(
            engine={"vLLM": workers.version(), **async_engine.description(config)},
            counters=list(await engine.collective_rpc(SNAPSHOT)),
            recordings=[_named(r) for r in await engine.collective_rpc(RECORDING) if r],
            requests=client.made,
            aborted=client.aborted,
            failed=client.failed,
            seconds=time.perf_counter() - begin,
        )
    finally:
        engine.shutdown()


def _needs(workload: str, given: Mapping[str, Any], sizes: Any, device: str) -> dict[str, Any]:
    """Return the engine arguments that a workload needs and the user did not give."""
    needs = dict(WORKLOADS[workload].engine_args)
    if WORKLOADS[workload].few_blocks:
        longest = -(-min(sizes.max_length, 1024) // sizes.block_size)
        needs["num_gpu_blocks_override"] = max(
            longest * 3 // 2 + 2, -(-sizes.max_length // sizes.block_size) + 2
        )
    if WORKLOADS[workload].offloads:
        needs["kv_transfer_config"] = offloading(device, 1 << 26)
    return {name: value for name, value in needs.items() if name not in given}


def offloading(device: str, store: int) -> dict[str, Any]:
    """Return the settings of an OffloadingConnector with a store in memory.

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


def _sentence(error: Exception) -> str:
    """Return an error as one line: pydantic's own message, or the first line of ``str(error)``."""
    listed = getattr(error, "errors", None)
    if callable(listed):
        return str(listed()[0]["msg"])
    return str(error).partition("\n")[0] or type(error).__name__


def _named(recording: dict[str, Any]) -> dict[str, Any]:
    """Give requests the names that the client gave them: vLLM puts random digits behind each."""

    def own(name: str | None) -> str | None:
        return name and _RANDOM.sub("", name)

    return {
        **recording,
        "requests": [{**life, "name": own(life["name"])} for life in recording["requests"]],
        "violations": [
            {**v, "request": own(v["request"]), "written_request": own(v["written_request"])}
            for v in recording["violations"]
        ],
    }


class EngineClient:
    """A ``Client`` of a workload; see there.

    Args:
        engine: vLLM's ``AsyncLLM``.
        sizes: its sizes.
        job: the job, with all arguments that the engine was started with.
        tell: is told how many requests are done.

    Attributes:
        aborted: requests that the workload aborted.
        failed: the reasons of requests that failed.
    """

    def __init__(self, engine: Any, sizes: Any, job: Job, tell: Callable[[int], None]) -> None:
        self.chance = random.Random(job.seed)
        self.max_length = sizes.max_length
        self.block_size = sizes.block_size
        self.budget = job.requests
        self.made = 0
        self.aborted = 0
        self.failed: list[str] = []
        self._engine = engine
        self._tell = tell
        self._connected = job.engine_args.get("kv_transfer_config") is not None
        self._urgent = job.engine_args.get("scheduling_policy") == "priority"
        self._chance = random.Random(job.seed)
        self._done = 0
        # Special ids, such as an image's, are among the highest of a vocabulary.
        self._ids = range(min(3, sizes.vocabulary - 1), max(4, sizes.vocabulary // 2))

    def phrase(self, count: int) -> Tokens:
        """Return random token ids, int ``[count]``."""
        return self.chance.choices(self._ids, k=count)

    def fitted(self, prompt: Sequence[int], most: int) -> tuple[Tokens, int]:
        """Return a prompt and a number of output tokens that fit the engine together."""
        most = max(1, min(most, self.max_length // 2))
        return list(prompt)[: self.max_length - most - 1], most

    async def ask(
        self,
        prompt: Sequence[int],
        most: int,
        *,
        abort: int | None = None,
        among: Sequence[int] | None = None,
    ) -> Tokens:
        """Make a request; see ``Client.ask``."""
        from vllm import TokensPrompt

        text, most = self.fitted(prompt, most)
        number = self._number()
        kind = "request" if abort is None else "aborted"
        given = TokensPrompt(prompt_token_ids=text)
        return await self._listen(f"{kind} {number}", given, _sampling(most, among), abort)

    async def talk(
        self,
        turns: Sequence[tuple[Sequence[int], int]],
        *,
        among: Sequence[int] | None = None,
        stop: int | None = None,
    ) -> list[Tokens]:
        """Make a streaming session; see ``Client.talk``."""
        from ..vllm_plugin.internals import async_engine

        outputs: list[Tokens] = []
        numbers = [self._number() for _ in turns]
        name, ended = f"session {numbers[0]}", asyncio.Event()

        async def inputs() -> Any:
            for tokens, most in turns:
                outputs.append([])
                yield async_engine.session_input(tokens, _sampling(most, among, stop))
                await ended.wait()
                ended.clear()

        try:
            first = _sampling(turns[0][1], among, stop)
            stream = self._engine.generate(inputs(), first, name, **self._urgency())
            async with asyncio.timeout(_STUCK):
                async for output in stream:
                    outputs[-1] += output.outputs[0].token_ids
                    if output.outputs[0].finish_reason is not None:
                        ended.set()
        except Exception as error:
            self.failed.append(f"{name}: {_sentence(error)}")
        for _ in turns:
            self._end()
        return outputs

    async def reset(self, *, running: bool = False) -> None:
        """Clear the prefix cache; see ``Client.reset``."""
        if running and self._connected:
            return  # vLLM 0.32.0 ends with an AssertionError if a connector's load is on its way
        try:
            await self._engine.reset_prefix_cache(reset_running_requests=running)
        except Exception as error:  # of the engine's process, of any class
            self.failed.append(f"reset: {_sentence(error)}")

    async def answer(self, prompts: Sequence[Prompt]) -> None:
        """Make the requests of the user's file, eight at a time."""
        gate = asyncio.Semaphore(8)

        async def one(prompt: Prompt) -> None:
            async with gate:
                name = f"line {prompt.line}"
                self._number()
                await self._listen(name, prompt.given(), _sampling(prompt.max_tokens), None)

        await asyncio.gather(*map(one, prompts))

    async def settle(self) -> None:
        """Make one last short request, so that the engine is told of the ends of all others.

        It is none of the workload's, so it counts only if it fails.
        """
        failed = len(self.failed)
        await self.ask(self.phrase(4), 2)
        self.made -= failed == len(self.failed)

    async def _listen(self, name: str, given: Any, sampling: Any, abort: int | None) -> Tokens:
        """Make a request and collect its output tokens; a failure is noted, not raised."""
        tokens: Tokens = []
        try:
            stream = self._engine.generate(given, sampling, name, **self._urgency())
            async with asyncio.timeout(_STUCK):
                async for output in stream:
                    tokens += output.outputs[0].token_ids
                    ended = output.outputs[0].finish_reason
                    if ended not in (None, "length", "stop"):
                        self.failed.append(f"{name}: ended with {ended!r}")
                    if abort is not None and len(tokens) >= abort:
                        self.aborted += 1
                        await self._engine.abort(name)
                        await stream.aclose()
                        break
        except Exception as error:
            self.failed.append(f"{name}: {_sentence(error)}")
        self._end()
        return tokens

    def _urgency(self) -> dict[str, int]:
        """Return a request's priority, of an engine that has any."""
        return {"priority": self._chance.randint(0, 3)} if self._urgent else {}

    def _number(self) -> int:
        self.made += 1
        return self.made

    def _end(self) -> None:
        self._done += 1
        self._tell(self._done)


def _sampling(most: int, among: Sequence[int] | None = None, stop: int | None = None) -> Any:
    """Return greedy sampling of ``most`` tokens, or up to ``stop``, handed over as they come."""
    from vllm import SamplingParams

    from ..vllm_plugin.internals import async_engine

    return SamplingParams(
        temperature=0.0,
        max_tokens=most,
        ignore_eos=True,
        output_kind=async_engine.deltas(),
        stop_token_ids=None if stop is None else [stop],
        allowed_token_ids=None if among is None else sorted({*among}),
    )
