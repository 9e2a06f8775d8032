"""SGLang under audit: how it is started and asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..sglang_plugin.seam import frontend
from ..sglang_plugin.settings import WHERE
from .audited import Audited
from .jobs import Job, Refused, renamed, sentence
from .workloads import WORKLOADS

#: Workloads that need what SGLang does not have, or what the ledger does not follow there.
NOT_PLAYED: Final[Mapping[str, str]] = {
    "sessions": "the ledger was not seen beside SGLang's sessions",
    "offload": "it needs a KV connector of vLLM's",
}
#: vLLM's names of arguments that workloads need, and SGLang's.
_NAMES: Final = {"max_num_seqs": "max_running_requests"}


def environment(job: Job) -> dict[str, str]:
    """Return variables of the engine's process: the job's settings, which ask for the audit."""
    return {WHERE: job.settings}


class SGLangRequests:
    """The objects that SGLang is asked with; see ``Requests``."""

    def prompt(self, given: str | Sequence[int]) -> object:
        """Return the arguments of a request for a text, or for token ids."""
        return frontend.prompt(given)

    def sampling(
        self, most: int, among: Sequence[int] | None = None, stop: int | None = None
    ) -> object:
        """Return greedy sampling parameters as SGLang takes them; see ``Requests``."""
        return frontend.sampling(most, among, stop)

    def turn(self, tokens: Sequence[int], sampling: object) -> object:
        """Refuse a streaming session.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NOT_PLAYED["sessions"])


async def start(job: Job) -> Audited | Refused:
    """Start an SGLang engine with the job's arguments and what its workloads need besides.

    Returns:
        The engine, with the calls that read and stop it; or why there is none: a workload cannot be
        played there, or the engine did not start, whatever it raised.
    """
    for name in job.workloads:
        if name in NOT_PLAYED:
            return Refused(f"the workload {name!r} cannot be played here: {NOT_PLAYED[name]}")
    arguments = {"log_level": job.log_level, **job.engine_args}
    for name in job.workloads:
        arguments |= needs(name, arguments, job.room)
    try:
        engine = frontend.start(arguments)
    except Exception as error:  # SGLang's, of any class
        return Refused(f"SGLang refuses these engine arguments: {sentence(error)}")
    sizes = engine.sizes()

    async def counters() -> list[dict[str, float]]:
        found = await engine.report()
        return [] if found is None else [found["counters"]]

    async def recordings() -> list[dict[str, Any]]:
        found = await engine.report()
        recording = found and found.get("recording")
        return [renamed(recording, frontend.own_name)] if recording else []

    return Audited(
        engine=engine,
        requests=SGLangRequests(),
        sizes=sizes,
        arguments=arguments,
        facts=frontend.facts(arguments, sizes),
        counters=counters,
        recordings=recordings,
        stop=engine.stop,
    )


def needs(workload: str, given: Mapping[str, Any], room: int = 1) -> dict[str, Any]:
    """Return the engine arguments that a workload needs and the user did not give.

    Args:
        workload: its name.
        given: the user's arguments, which always win.
        room: so many times the slots are made that a workload short of blocks asks for.
    """
    found = {_NAMES[name]: value for name, value in WORKLOADS[workload].engine_args.items()}
    if WORKLOADS[workload].few_blocks:
        longest = min(int(given.get("context_length") or 1024), 1024)
        found["max_total_tokens"] = room * (longest * 3 // 2 + 64)
    return {name: value for name, value in found.items() if name not in given}
