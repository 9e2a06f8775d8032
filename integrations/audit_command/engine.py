"""An engine under audit, in its own process: it plays a workload, and reports."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Iterator
from multiprocessing.connection import Connection
from typing import Final

import attrs

from ..serving.engine_process import EngineError, EngineProcess, calling, ending_with
from .audited import Front
from .client import EngineClient
from .jobs import STOP, Found, Job, Played, Refused
from .progress import Progress
from .workloads import WORKLOADS

#: vLLM's own words, in the engine's log, of a cache that cannot hold one request.
_TOO_FEW_BLOCKS: Final = "larger than the available KV cache memory"
#: Times the blocks of a model with one group of layers; no more are tried.
_MOST_ROOM: Final = 16
#: Seconds that the engine may take to start, or until one more request is done.
_PATIENCE: Final = 1800.0


def front(name: str) -> Front:
    """Return the module for a kind of engine, "sglang" or else vLLM; imports no engine."""
    if name == "sglang":
        from . import sglang_engine

        return sglang_engine
    from . import vllm_engine

    return vllm_engine


def run(job: Job, progress: Progress) -> Found | Refused:
    """Play the workloads in a fresh process; show the requests that are done by ``progress``.

    A SIGINT or SIGTERM while the engine runs ends the workloads early, and the result covers the
    time until then. A second signal ends everything at once, and so does one before the engine
    runs.

    Only vLLM knows how many blocks one request needs, since that depends on the model's groups of
    layers. So an engine with too few blocks is started again with twice as many, up to 16 times.
    Its log says so, and at the log level "debug" only the user has the log: then it is not started
    again.

    Returns:
        The findings; or why the engine was not started or is not watched.

    Raises:
        EngineError: the engine's process failed; the message ends with its last words.
    """
    while True:
        answer = _run(job, progress)
        if answer is not None:
            return answer
        job = attrs.evolve(job, room=2 * job.room)


def _run(job: Job, progress: Progress) -> Found | Refused | None:
    """Run the engine once, as in ``run``; return None if the workload gave it too few blocks.

    An engine that has 16 times the blocks fails instead, with an EngineError.
    """
    process = EngineProcess(
        calling(f"{__package__}.engine"),
        name="audited",
        operation="audit",
        timeout=_PATIENCE,
        environment=front(job.engine).environment(job),
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

    Only the main thread can hear of signals; in another one nothing changes. The handlers of before
    are put back at the end.
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
    """Tell whether a workload chooses how many blocks the engine has, and the user does not."""
    return "num_gpu_blocks_override" not in job.engine_args and any(
        WORKLOADS[name].few_blocks for name in job.workloads
    )


# -- in the engine's process -----------------------------------------------------------------


def serve(pipe: Connection[tuple[bool, object], Job]) -> None:
    """Play the workloads in the engine's process: send progress, then the findings or the refusal.

    Args:
        pipe: brings the job.
    """
    job = pipe.recv()
    pipe.send((False, asyncio.run(_serve(job, pipe))))


async def _serve(job: Job, pipe: Connection[tuple[bool, object], Job]) -> Found | Refused:
    """Start an engine, play a job, and stop the engine; return the findings or why there are none.

    Progress is sent over the pipe. The user's prompts are made first, then each workload makes its
    share of the requests. ``STOP`` on the pipe ends this early.
    """
    audited = await front(job.engine).start(job)
    if isinstance(audited, Refused):
        return audited
    try:
        if not all(each.get("kvtxn_audit_active") for each in await audited.counters() or [{}]):
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

        given = attrs.evolve(job, engine_args=audited.arguments)
        client = EngineClient(audited.engine, audited.requests, audited.sizes, given, tell)
        begin = time.perf_counter()
        tell(0)
        interrupted = not await _until_stopped(play(), pipe)
        done = client.done
        await client.settle()
        return Found(
            engine=audited.facts,
            counters=await audited.counters(),
            recordings=await audited.recordings(),
            requests=done if interrupted else client.made,
            aborted=client.aborted,
            failed=client.failed,
            seconds=time.perf_counter() - begin,
            interrupted=interrupted,
        )
    finally:
        audited.stop()


async def _until_stopped(work: Awaitable[None], pipe: Connection[tuple[bool, object], Job]) -> bool:
    """Do work until it ends, or until ``STOP`` comes, which cancels it.

    Returns:
        True if it ended by itself.

    Raises:
        Exception: what the work raised.
    """
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
