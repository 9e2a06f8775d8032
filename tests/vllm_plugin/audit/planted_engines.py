"""The processes of engines in which faults are planted, one fault after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import planted_blocks
import planted_bytes
import planted_forwards
import planted_rows
import planted_states
import planted_transfers
from kvtxn.integrations.vllm_plugin.seam import containment
from planting import Fault, Rig, around, texts

ROWS = planted_rows.FAULTS
BLOCKS = planted_blocks.FAULTS
FORWARDS = planted_forwards.FAULTS
STATES = planted_states.FAULTS
SINGLE_STATES = planted_states.OF_WINDOWS
TRANSFERS = planted_transfers.FAULTS
BYTES = planted_bytes.FAULTS

#: Faults after which every text can be right: they make no token wrong before a wrong row is read.
HEALED: tuple[Fault, ...] = (
    planted_rows.lost_write,
    planted_rows.slots_swapped,
    planted_rows.write_into_anothers_block,
    planted_rows.table_shifted,
    planted_rows.anothers_table,
    planted_rows.one_block_in_two_tables,
    planted_rows.wrong_prompt_token,
    planted_rows.wrong_last_token,
    planted_blocks.rollback_one_short,
    planted_blocks.prompt_rows_skipped,
    planted_blocks.hashes_of_another,
    planted_blocks.hashes_swapped,
    planted_blocks.hash_survives,
    planted_blocks.handed_out_twice,
)

#: Those of them that are contained beside a KV connector.
CONNECTED = (
    planted_rows.lost_write,
    planted_rows.write_into_anothers_block,
    planted_rows.table_shifted,
)


def work(
    rig: Rig,
    lengths: tuple[int, int, int, int] = (24, 16, 44, 12),
    enough: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Prompts that repeat themselves, again in a full cache, and more than fit.

    ``lengths``: tokens of the answers, by round; no round begins once it is ``enough``.
    """
    found, usual = [], texts(1, 4, 70)
    for prompts, tokens in zip((usual, usual, texts(2, 8, 60), usual), lengths, strict=True):
        found += [] if enough() else rig.run(prompts, tokens)
    return found


def find(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Plant faults until each has struck, and report what the audit found of each.

    Where bytes are watched, all rounds are run: no other text may be wrong.
    """
    rig = Rig(llm)

    def enough() -> bool:
        return rig.watch.scrub is None and rig.struck is not None and bool(rig.found())

    healthy = work(rig)
    report: dict[str, Any] = {"healthy": rig.found(), "found": {}}
    for fault in engine["faults"]:
        rig.clear()
        with fault(rig):
            found = work(rig, enough=enough)
        texts_of = zip(rig.ran, found, healthy[: len(found)], strict=True)
        report["found"][fault.__name__] = _of_fault(rig) | {
            "failed": rig.failed,
            "other_texts": [name for name, text, right in texts_of if text != right],
        }
    rig.clear()
    report["again"] = [work(rig) == healthy, rig.found()]
    report["compared"] = 0 if rig.watch.scrub is None else rig.watch.scrub.compared
    return report


def _of_fault(rig: Rig) -> dict[str, Any]:
    """Return where a fault has struck, and the first violations."""
    struck = None if rig.struck is None else attrs.asdict(rig.struck)
    return {"struck": struck, "violations": rig.found()[:10]}


def _later(rig: Rig) -> dict[str, Any]:
    """Say where a fault has struck, and what of the first violations after it explains them."""
    fields = ("kind", "step", "request", "position", "found", "written_step", "written_request")
    struck = None if rig.struck is None else attrs.asdict(rig.struck)
    after = [v for v in rig.found() if struck is not None and v["step"] > struck["step"]]
    return {"struck": struck, "later": [{k: v.get(k) for k in fields} for v in after[:5]]}


def find_afterwards(llm: Any, faults: Iterable[Fault]) -> dict[str, Any]:
    """Plant faults in an engine that has worked."""
    rig, report = Rig(llm), {}
    for fault in faults:
        rig.clear()
        with fault(rig):
            rig.run(texts(3, 3, 70), 24)
        report[fault.__name__] = _of_fault(rig)
    return report


def _note(names: list[str], found: set[str], *args: Any) -> None:
    """Note the requests that are computed again."""
    names.extend(found)


@attrs.frozen
class Moment:
    """When a client hangs up, and which one.

    Attributes:
        call: the scheduler's method around which it does.
        after: it does so after the method, not before.
        reader: it is the client whose request read a wrong row; another one of the step if False.
    """

    call: str
    after: bool
    reader: bool

    def __str__(self) -> str:
        who = "the reader" if self.reader else "another"
        return f"{who} leaves {'after' if self.after else 'before'} {self.call}"


#: Every moment between two forwards. The first one is the step whose wrong reads are contained:
#: vLLM has the step's tokens, and not yet looked at them.
MOMENTS: tuple[Moment, ...] = tuple(
    Moment(call, after, reader)
    for reader in (False, True)
    for call, after in (
        ("update_from_output", False),
        ("update_from_output", True),
        ("schedule", False),
        ("schedule", True),
    )
)


class HangUp:
    """Lets one client hang up, at a moment of the first step whose wrong reads are contained.

    Args:
        rig: the engine's.
        moment: when, and who; None: nobody.

    Attributes:
        left: the request whose client hung up; None until then.
    """

    def __init__(self, rig: Rig, moment: Moment | None) -> None:
        self._rig = rig
        self._moment = moment
        self._who: str | None = None
        self.left: str | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wait for the moment while the engine runs."""
        moment = self._moment
        if moment is None:
            yield
            return
        leave = {"after" if moment.after else "before": self._leave}
        scheduler = self._rig.scheduler
        with (
            around(scheduler, moment.call, **leave),
            around(scheduler, "update_from_output", self._choose),
        ):
            yield

    def _choose(self, scheduler_output: Any, output: Any) -> None:
        """Choose who leaves, in the first step that read something wrong."""
        wrong = containment.marks(output)
        if wrong is None or self._who is not None or self._moment is None:
            return
        names = reversed(list(scheduler_output.num_scheduled_tokens))
        reader = self._moment.reader
        self._who = next((name for name in names if (name in wrong.requests) is reader), None)

    def _leave(self, *args: Any) -> None:
        """Abort the request, once it is chosen."""
        if self._who is not None and self.left is None:
            self.left = self._who
            self._rig.engine.abort_request([self.left], internal=True)


def contain_while_clients_leave(
    llm: Any, engine: dict[str, Any], folder: Path, moments: Iterable[Moment] = MOMENTS
) -> dict[str, Any]:
    """Contain faults beside a KV connector, whose failed loads end requests by vLLM's default.

    The first fault comes with every moment at which a client can hang up, the others with the one
    that vLLM's own handling of failed loads does not survive.
    """
    rig, report = Rig(llm), {}
    prompts = texts(1, 6, 70)
    right = rig.run(prompts, 40)
    some = tuple(moments)
    for fault in CONNECTED:
        for moment in (None, *(some if fault is CONNECTED[0] else some[:1])):
            rig.clear()
            hang_up = HangUp(rig, moment)
            with fault(rig), hang_up.watching():
                found = rig.run(prompts, 40)
            left = None if hang_up.left is None else hang_up.left.rpartition("-")[0]
            said = zip(rig.ran, found, right, strict=True)
            report[f"{fault.__name__}, {moment or 'all stay'}"] = {
                "violations": len(rig.found()) if rig.struck else 0,
                "ended": rig.failed,
                "left": left,
                "wrong": [name for name, text, own in said if text != own and name != left],
            }
    return report


def _prompt_logprobs(rig: Rig) -> tuple[bool, list[list[float]]]:
    """Run one request; tells if a fault has struck, and returns the logprobs of its prompt."""
    from vllm import SamplingParams

    rig.clear()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    rig.engine.add_request("scored", {"prompt_token_ids": texts(4, 1, 70)[0]}, params)
    found: list[list[float]] = []
    while rig.engine.has_unfinished_requests():
        for output in rig.engine.step():
            scored = (output.prompt_logprobs or [])[1:]
            found = [[each.logprob for each in ranked.values()] for ranked in scored]
    return rig.struck is not None, found


def contain(
    llm: Any, engine: dict[str, Any], folder: Path, faults: Iterable[Fault] = HEALED
) -> dict[str, Any]:
    """Compare the texts of an engine with faults with those of the same engine without."""
    rig = Rig(llm)
    report: dict[str, Any] = {"stock": work(rig), "healed": {}, "logged": {}}
    for fault in faults:
        rig.clear()
        again: list[str] = []
        note = partial(_note, again)
        with fault(rig), around(containment, "contain", after=note):
            found = work(rig)
        report["healed"][fault.__name__] = {
            "texts": found,
            "violations": len(rig.found()) if rig.struck else 0,
            "contained": len(again),
            **_later(rig),
        }
    report["prompt_logprobs"] = [_prompt_logprobs(rig)]
    with planted_rows.wrong_prompt_token(rig):
        report["prompt_logprobs"].append(_prompt_logprobs(rig))
    rig.watch.on_violation = "log"
    for fault in faults:
        rig.clear()
        with fault(rig):
            report["logged"][fault.__name__] = work(rig)
        if report["logged"][fault.__name__] != report["stock"]:
            break
    return report
