"""The engine of a soak, in its own process: rounds of mixed requests, and samples in between.

A sample is taken where nothing runs: there no request may be left, every block has to be free, no
window may be open, and memory is what stays.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import attrs

from ...integrations.audit_command.workloads import WORKLOADS
from ...integrations.vllm_plugin.seam.measuring import give_back, occupied
from .client import Account, Said, SoakClient, Tell

#: Short requests that are made, one after another, until the engine has given every block back.
_PATIENCE: Final = 20
#: Workloads whose texts are not compared: vLLM 0.32.0 and older reads wrong rows after a stop, in
#: stock as well, see integrations/FAULTS.md; the rows stay in the prefix cache.
_NOT_COMPARED: Final = ("sessions",)

#: Counters of kvtxn that a sample has, summed over ranks.
_COUNTED: Final = {
    "windows": "kvtxn_windows_total",
    "committed": "kvtxn_windows_total_committed",
    "fell_back": "kvtxn_fallbacks_total",
    "bypassed": "kvtxn_bypassed_windows_total",
    "rows_staged": "kvtxn_rows_staged_total",
    "rows_committed": "kvtxn_rows_committed_total",
    "rows_rejected": "kvtxn_rows_rejected_total",
}


@attrs.frozen(kw_only=True)
class Piece:
    """A piece of a soak.

    Attributes:
        engine_args: arguments of the engine, ``additional_config`` included.
        workloads: names of ``WORKLOADS``, which run at the same time.
        requests: requests of each workload in a round, at least.
        seconds: the piece ends after the round in which this time is over.
        every: least seconds between two samples.
        patience: seconds after which a request counts as lost.
        seed: of all random numbers.
    """

    engine_args: dict[str, Any]
    workloads: tuple[str, ...]
    requests: int
    seconds: float
    every: float
    patience: float
    seed: int


def serve(pipe: Connection[Any, Any]) -> None:
    """Play a piece in the engine's process.

    Send that it started, then samples and texts, last {}.
    """
    piece: Piece = pipe.recv()
    asyncio.run(_soak(piece, lambda told: pipe.send((False, told))))
    pipe.send((False, {}))


async def _soak(piece: Piece, tell: Tell) -> None:
    """Start the engine of a piece, tell what it is, play the piece, and stop the engine."""
    from ...integrations.vllm_plugin.seam import frontend, workers

    config = frontend.async_config(piece.engine_args)
    counts = frontend.StepCounts()
    running: Any = frontend.start_async(config, counts)
    try:
        about = {"vLLM": workers.version(), **frontend.engine_description(config)}
        tell({"engine": about})
        soak = _Soak(running, frontend.engine_sizes(config), counts, piece)
        await soak.run(tell)
    finally:
        frontend.stop_async(running)


class _Soak:
    """Plays rounds on an engine.

    Args:
        running: vLLM's ``AsyncLLM``.
        sizes: its sizes.
        counts: its ``StepCounts``.
        piece: the piece.
    """

    def __init__(self, running: Any, sizes: Any, counts: Any, piece: Piece) -> None:
        self._engine, self._counts, self._piece = running, counts, piece
        self._account = Account()
        seeds = range(piece.seed * 1000, piece.seed * 1000 + 900, 9)
        self._clients = {
            name: SoakClient(
                running, sizes, seed, self._account, piece.patience,
                keeps=name not in _NOT_COMPARED, engine_args=piece.engine_args,
            )
            for name, seed in zip(piece.workloads, seeds, strict=False)
        }  # fmt: skip
        self._busy, self._played, self._rounds = 0.0, 0, 0

    async def run(self, tell: Tell) -> None:
        """Play rounds, two at least, until the time is over; tell samples in between."""
        begin, at, now = time.monotonic(), 0.0, 0.0
        await self._play()  # memory that the first requests allocate once must not count as growth
        tell({"sample": await self._sample(begin)})
        while now < self._piece.seconds:
            await self._play()
            now = time.monotonic() - begin
            if now - at >= self._piece.every or now >= self._piece.seconds:
                at = now
                tell({"said": await self._asked_again()})
                tell({"sample": await self._sample(begin)})

    async def _play(self) -> None:
        """Run the requests of all workloads at the same time; note the seconds and tokens of it."""
        begin, before = time.monotonic(), self._counts.tokens
        plays = []
        for name, client in self._clients.items():
            client.budget = client.made + self._piece.requests
            plays.append(WORKLOADS[name].play(client))
        await asyncio.gather(*plays)
        self._busy += time.monotonic() - begin
        self._played += self._counts.tokens - before
        self._rounds += 1

    async def _asked_again(self) -> list[Said]:
        """Repeat the requests that were kept, all at once, with an empty prefix cache.

        Returns them with the new text behind the earlier ones.
        """
        await self._rest()
        pairs = [(client, said) for client in self._clients.values() for said in client.kept()]
        answers = await asyncio.gather(
            *(client.ask(said.prompt, said.most, among=said.among) for client, said in pairs)
        )
        for client, _ in pairs:
            client.kept()
        both = zip(pairs, answers, strict=True)
        return [attrs.evolve(said, texts=[*said.texts, answer]) for (_, said), answer in both]

    async def _rest(self) -> tuple[int, bool]:
        """Wait until the engine has given every block back, as long as short requests may take.

        Returns:
            The blocks that requests can have and that are not free; whether the prefix cache could
            be cleared, which an engine refuses while a block is in use.
        """
        from ...integrations.vllm_plugin.seam import frontend

        blocks, client = frontend.usable_blocks(self._engine), next(iter(self._clients.values()))
        missing, cleared = blocks, False
        for _ in range(_PATIENCE):
            await client.ask(client.phrase(4), 2)
            missing = round(self._counts.used * blocks)
            if not missing and not self._counts.requests:
                cleared = bool(await self._engine.reset_prefix_cache())
                if cleared:
                    break
            await asyncio.sleep(0.05)
        return missing, cleared

    async def _sample(self, begin: float) -> dict[str, Any]:
        """Bring the engine to rest, and return a sample.

        Counts, blocks and windows left, memory.
        """
        from ...integrations.vllm_plugin.seam.workers import SNAPSHOT

        missing, cleared = await self._rest()
        workers = list(await self._engine.collective_rpc(occupied))
        ranks: list[Mapping[str, float]] = list(await self._engine.collective_rpc(SNAPSHOT))
        account, counts, use = self._account, self._counts, host_use()
        return {
            "at": round(time.monotonic() - begin, 3),
            "busy": round(self._busy, 3),
            "played": self._played,
            "rounds": self._rounds,
            **{name: getattr(account, name) for name in ("asked", "finished", "aborted", "lost")},
            "why": account.why,
            **{name: getattr(counts, name) for name in _STEPS},
            "running": counts.requests,
            "missing": missing,
            "cleared": cleared,
            "active": min((int(rank.get("kvtxn_active", 0)) for rank in ranks), default=0),
            **{
                name: int(sum(rank.get(counter, 0) for rank in ranks))
                for name, counter in _COUNTED.items()
            },
            "open": sum(worker["open"] for worker in workers),
            **{name: sum(each[name] for each in workers) for name in ("device", "graphs")},
            "host": use.memory,
            "cpu": round(use.cpu, 2),
        }


@attrs.frozen
class HostUse:
    """The memory and time that this process and all that it started take of the host.

    Attributes:
        memory: bytes that no file backs.
        cpu: processors' seconds so far, without those of processes that have ended.
    """

    memory: int
    cpu: float


def host_use() -> HostUse:
    """Return the bytes and the processor seconds of this process and of all its descendants.

    The bytes are memory of their own, without files; memory that this process's allocator can give
    back is given back before.
    """
    give_back()
    parents, sizes, ticks = dict[int, int](), dict[int, int](), dict[int, int]()
    for process in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            facts = dict(line.split(":", 1) for line in lines)
            after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            parents[process] = int(facts["PPid"])
            sizes[process] = int(facts.get("RssAnon", "0").split()[0]) << 10
            ticks[process] = sum(map(int, after_name[_TIMES]))
    family, more = set[int](), {os.getpid()}
    while more:
        family |= more
        more = {process for process, parent in parents.items() if parent in more} - family
    used = sum(ticks[process] for process in family) / os.sysconf("SC_CLK_TCK")
    return HostUse(sum(sizes[process] for process in family), used)


#: In the user's and in the system's code: fields 14 and 15 of a process's ``stat``, from 3 on.
_TIMES: Final = slice(11, 13)
#: vLLM's counters that a sample has.
_STEPS: Final = ("steps", "tokens", "preempted", "drafted", "accepted", "cached", "loaded")
