"""An engine under audit, in its own process: it plays a workload, and reports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

import attrs

from ..serving.engine_process import EngineError, EngineProcess, calling, ending_with
from .client import EngineClient, sentence
from .jobs import STOP, Found, Job, Played, Refused
from .progress import Progress
from .workloads import WORKLOADS

if TYPE_CHECKING:
    from ..vllm_plugin.internals.frontend import EngineSizes

#: Settings of a small engine on a CPU, unless the user's own environment has them.
_DEFAULTS: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
#: The settings of OffloadingConnector for a store that a CPU engine can copy to.
_MEMORY_STORE: Final = {
    "spec_name": "MemoryStoreSpec",
    "spec_module_path": "kvtxn.integrations.vllm_plugin.internals.memory_store",
}
#: vLLM's own words, in the engine's log, of a cache that cannot hold one request.
_TOO_FEW_BLOCKS: Final = "larger than the available KV cache memory"
#: Times the blocks of a model with one group of layers; no more are tried.
_MOST_ROOM: Final = 16
#: The advice for an engine that no workload of this command fits.
_WATCH_IT: Final = (
    'start it with additional_config={"kvtxn": {"audit": "ledger"}}, send it requests of your own, '
    "and ask audit_report(llm)"
)
#: Seconds that the engine may take to start, or until one more request is done.
_PATIENCE: Final = 1800.0
_RANDOM: Final = re.compile(r"-[0-9a-f]{8}$")


def run(job: Job, progress: Progress) -> Found | Refused:
    """Play the workloads in a fresh process; report the requests that are done to ``progress``.

    A SIGINT or SIGTERM while the engine runs ends the workloads early, and the result covers the
    time until then. A second signal ends everything at once, and so does one before the engine
    runs.

    Only vLLM knows how many blocks one request needs, since that depends on the model's groups of
    layers. So an engine with too few blocks is started again with more. Its log says so, and at the
    log level "debug" only the user has the log: then it is not started again.

    Raises:
        EngineError: the engine's process failed; the message ends with its last words.
    """
    while True:
        answer = _run(job, progress)
        if answer is not None:
            return answer
        job = attrs.evolve(job, room=2 * job.room)


def _run(job: Job, progress: Progress) -> Found | Refused | None:
    """Run the engine once, as in ``run``; returns None if the workload gave it too few blocks."""
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
        try:
            answer = process.answer("while it started")
            with _ending_early(process, progress):
                while isinstance(answer, Played):
                    progress.show(answer.workload, answer.done)
                    answer = process.answer("while it ran")
        except EngineError:
            if _has_few_blocks(job) and job.room < _MOST_ROOM and _TOO_FEW_BLOCKS in process.log():
                return None
            raise
    result: Found | Refused = answer
    return result


@contextlib.contextmanager
def _ending_early(process: EngineProcess, progress: Progress) -> Iterator[None]:
    """Make the first SIGINT or SIGTERM in the block end the workloads; the next one acts as usual.

    Only the main thread can hear of signals; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(*_: object) -> None:
        restore()
        progress.interrupt()
        process.send(STOP)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        restore()


def _has_few_blocks(job: Job) -> bool:
    """Return whether a workload says how many blocks the engine has."""
    return "num_gpu_blocks_override" not in job.engine_args and any(
        WORKLOADS[name].few_blocks for name in job.workloads
    )


# -- in the engine's process -----------------------------------------------------------------


def serve(pipe: Connection[tuple[bool, object], Job]) -> None:
    """Play the workloads in the engine's process: report progress, then the result."""
    job = pipe.recv()
    pipe.send((False, asyncio.run(_serve(job, pipe))))


async def _serve(job: Job, pipe: Connection[tuple[bool, object], Job]) -> Found | Refused:
    from ..vllm_plugin.internals import audited, frontend, workers
    from ..vllm_plugin.internals.workers import RECORDING, SNAPSHOT

    arguments = dict(job.engine_args)
    try:
        config = frontend.async_config(arguments)
        sizes = frontend.engine_sizes(config)
        device = frontend.engine_description(config)["device"]
        for name in job.workloads:
            arguments |= _needs(name, arguments, sizes, device, job.room)
        if job.workloads:
            config = frontend.async_config(arguments)
    except Exception as error:  # vLLM's and pydantic's, of any class
        return Refused(f"vLLM refuses these engine arguments: {sentence(error)}")
    why = frontend.says_nothing(config)
    if why is not None:
        return Refused(f"no workload can be played here: {why}; {_WATCH_IT}")
    why = audited.unwatched(config)
    if why is not None:
        return Refused(f"the ledger cannot watch this engine: {why}")
    engine = frontend.start_async(config)
    try:
        if not all(c.get("kvtxn_audit_active") for c in await engine.collective_rpc(SNAPSHOT)):
            return Refused("the ledger does not watch this engine; --log-level debug shows why")
        playing = job.workloads[0] if job.workloads else "prompts"

        def tell(done: int) -> None:
            pipe.send((False, Played(playing, done)))

        async def play() -> None:
            nonlocal playing
            await client.answer(job.prompts)
            for number, name in enumerate(job.workloads, 1):
                playing = name
                # Each has its share of the requests, and at least one round.
                share = -(-job.requests * number // len(job.workloads))
                client.budget = max(client.made + 1, share)
                await WORKLOADS[name].play(client)

        client = EngineClient(engine, sizes, attrs.evolve(job, engine_args=arguments), tell)
        begin = time.perf_counter()
        tell(0)
        interrupted = not await _until_stopped(play(), pipe)
        done = client.done
        await client.settle()
        return Found(
            engine={"vLLM": workers.version(), **frontend.engine_description(config)},
            counters=list(await engine.collective_rpc(SNAPSHOT)),
            recordings=[_named(r) for r in await engine.collective_rpc(RECORDING) if r],
            requests=done if interrupted else client.made,
            aborted=client.aborted,
            failed=client.failed,
            seconds=time.perf_counter() - begin,
            interrupted=interrupted,
        )
    finally:
        engine.shutdown()


async def _until_stopped(work: Awaitable[None], pipe: Connection[tuple[bool, object], Job]) -> bool:
    """Do work until it ends, or until ``STOP`` comes; return whether it ended by itself."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

    def stop() -> None:  # nothing but STOP comes, or the caller is gone
        loop.remove_reader(pipe.fileno())
        task.cancel()

    loop.add_reader(pipe.fileno(), stop)
    try:
        await asyncio.wait([task])
    finally:
        loop.remove_reader(pipe.fileno())
    if task.cancelled():
        return False
    task.result()
    return True


def _needs(
    workload: str, given: Mapping[str, Any], sizes: EngineSizes, device: str, room: int = 1
) -> dict[str, Any]:
    """Return the engine arguments that a workload needs and the user did not give."""
    needs = dict(WORKLOADS[workload].engine_args)
    if WORKLOADS[workload].few_blocks:
        longest = -(-min(sizes.max_length, 1024) // sizes.block_size)
        blocks = max(longest * 3 // 2 + 2, -(-sizes.max_length // sizes.block_size) + 2)
        needs["num_gpu_blocks_override"] = room * blocks
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


def _named(recording: dict[str, Any]) -> dict[str, Any]:
    """Restore the client's names of requests, to which vLLM adds random digits."""

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
