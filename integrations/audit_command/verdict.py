"""The verdict of an audit in plain sentences."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs

from ...audit.digest import EMBEDDED
from ...audit.repeated_work import WHY_UNUSED
from ...audit.violation import DIFFERENCES, VERBS
from ...cli import WIDTH
from .jobs import Found

#: The fields of a ``Violation``, as its ``as_dict`` returns them.
Told: TypeAlias = Mapping[str, Any]

#: Violations that are described one by one; the HTML page has all of them.
TOLD: Final = 8

#: By kind: the sentence's subject, for one violation and for several.
MEANING: Final[Mapping[str, str]] = {
    "unwritten": "rows were read that nobody had written",
    "rejected": "rows of rejected drafts were read",
    "foreign": "rows of other tokens were read",
    "state": "a step went on from a state that was not its own",
    "published": "blocks were published under a hash that is not their own",
    "exported": "rows left through a connector that must not leave, or not under that hash",
    "imported": "a connector brought rows of other tokens",
    "changed": "bytes changed after they were written",
    "ranks": "ranks wrote different rows",
    "stale": "rows that earlier weights had computed were read",
    "weights": "weights changed, and nobody had said so",
}

#: By finding: the fault of a row that a connector brought.
_BROUGHT: Final[Mapping[str, str]] = {
    "unwritten": "nobody had written it when it was stored",
    "rejected": "what was stored was a draft that was rejected",
    "foreign": "what was stored was a row of other tokens",
    "draft": "what was stored was a draft that nobody had accepted yet",
    "bytes": "its bytes are not those that were stored",
}

#: By finding: the fault, to be added to a sentence that names the writer.
_AFTER_THAT: Final[Mapping[str, str]] = {
    "rejected": ", a draft that was rejected",
    "draft": ", a draft that nobody had accepted yet",
    "bytes": ", and its bytes have changed since",
    "owner": ": the state of the same tokens, but of another request",
    "stale": ", by weights that have changed since",
}

#: By finding: the fault, if the writer is not known.
_UNKNOWN_WRITER: Final[Mapping[str, str]] = {
    "unwritten": "nobody had written it since its block was handed out",
    "draft": "it was the row of a draft that nobody had accepted yet",
    "bytes": "its bytes are not those that were written, by whom is not known any more",
}

_HEALTHY, _WRONG, _NOTHING, _PARTLY = "healthy", "violations", "nothing read", "not all judged"

#: By reason: the requests of steps that the ledger could not judge.
_UNJUDGED: Final[Mapping[str, str]] = {
    "malformed": "did not fit the ledger, which left them out",
    "unresolved": "had drafts, and nobody said how many of them were accepted",
}


@attrs.frozen(kw_only=True)
class Verdict:
    """The findings of an audit, in words and as an exit code.

    Attributes:
        word: "healthy", "violations", "nothing read" or "not all judged".
        headline: one sentence.
        kinds: number of violations by kind, none that is 0.
        sentences: more sentences, each on its own.
        exit_code: 0 healthy, 1 violations, 2 if nothing was read, if not all could be judged, or if
            the audit was interrupted or ended before the engine did.
    """

    word: str
    headline: str
    kinds: dict[str, int]
    sentences: list[str]
    exit_code: int

    def __str__(self) -> str:
        """Return the verdict as lines of ``WIDTH`` columns at most."""
        lines = [textwrap.fill(self.headline, WIDTH)]
        lines += [
            textwrap.fill(sentence, WIDTH, initial_indent="- ", subsequent_indent="  ")
            for sentence in self.sentences
        ]
        return "\n".join(lines)


def judge(
    counters: Sequence[Mapping[str, float]],
    violations: Sequence[Told],
    requests: int,
    failed: int = 0,
    *,
    interrupted: bool = False,
) -> Verdict:
    """Judge an engine by what its ranks counted: sum it up in words, with an exit code.

    It is 1 with violations; 2 if no row or state was read, or without violations not all of it was
    judged, a request failed or the user interrupted; else 0. The first ``TOLD`` violations get a
    sentence each.

    Args:
        counters: the counters of each rank.
        violations: the violations of all ranks, as flat dicts.
        requests: requests that came to their end.
        failed: requests that did not.
        interrupted: the user ended the audit early; an engine is not called healthy then.
    """
    rows = _total(counters, "rows_checked_total")
    states = _total(counters, "states_checked_total")
    steps = max((int(each.get("kvtxn_audit_steps_total", 0)) for each in counters), default=0)
    wrong = _total(counters, "violations_total")
    prefix = "kvtxn_audit_violations_total_"
    kinds: Counter[str] = Counter()
    for each in counters:
        kinds.update(
            {k.removeprefix(prefix): int(v) for k, v in each.items() if k.startswith(prefix) and v}
        )
    seen = ((rows, "row"), (states, "state"))
    read = " and ".join(_count(number, noun) for number, noun in seen if number)
    early = "Interrupted, so far: " if interrupted else ""
    during = f"in {_count(steps, 'step')} of {_count(requests, 'request')}"
    unjudged = _ended(counters) + _unwatched(counters) + _unjudged(counters)
    if not rows and not states:
        headline = f"{early}Nothing was judged: no row or state was read {during}."
        return Verdict(word=_NOTHING, headline=headline, kinds={}, sentences=unjudged, exit_code=2)
    compared = _compared(counters) + _unverified(counters) + _stale(counters)
    compared += _repeated(counters) + _unused(counters)
    if not wrong and (unjudged or failed or interrupted):
        unjudged += [f"{_count(failed, 'request')} failed."] if failed else []
        headline = (
            f"{early}Not all was judged: {read} were read {during}, and no wrong one was found."
        )
        unjudged += compared
        return Verdict(word=_PARTLY, headline=headline, kinds={}, sentences=unjudged, exit_code=2)
    if not wrong:
        headline = f"Healthy: {read} were read {during}, and every one was the right one."
        return Verdict(word=_HEALTHY, headline=headline, kinds={}, sentences=compared, exit_code=0)
    headline = f"{early}{_count(wrong, 'violation')}: {read} were read {during}."
    sentences = [f"{kind}, {number:,}: {MEANING[kind]}." for kind, number in kinds.items()]
    sentences += [tell(violation) for violation in violations[:TOLD]]
    if wrong > len(violations[:TOLD]):
        sentences.append(f"{wrong - len(violations[:TOLD]):,} more are not told here.")
    sentences += unjudged + compared
    return Verdict(
        word=_WRONG, headline=headline, kinds=dict(kinds), sentences=sentences, exit_code=1
    )


def judge_found(found: Found) -> Verdict:
    """Judge an engine by what its workloads found, see ``judge``."""
    failed = len(found.failed)
    ended = found.requests - failed
    return judge(found.counters, found.violations, ended, failed, interrupted=found.interrupted)


def _ended(counters: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence on each rank whose audit ended early: its later reads were not compared."""
    name = "kvtxn_audit_active"
    return [
        f"The audit of rank {rank} ended by an error after {_count(steps, 'step')}, and what was "
        "read later was not compared; --log-level debug shows the error."
        for rank, each in enumerate(counters)
        if not each.get(name, 1)
        for steps in [int(each.get("kvtxn_audit_steps_total", 0))]
    ]


def _unwatched(counters: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence on unwatched KV-cache groups, if there are any.

    Pipeline stages may differ; the largest number of a rank counts.
    """
    number = max((int(each.get("kvtxn_audit_unwatched_groups", 0)) for each in counters), default=0)
    if not number:
        return []
    return [
        f"The ledger does not watch {_count(number, 'KV-cache group')} of this engine, whose rows "
        "or states were not compared; --log-level debug names them."
    ]


def _compared(counters: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence on the number of rows and states whose bytes were compared.

    Empty if no rank was to compare bytes.
    """
    name = "bytes_compared_total"
    if not any(f"kvtxn_audit_{name}" in each for each in counters):
        return []
    number = _total(counters, name)
    return [f"The bytes of {number:,} of them were compared with their checksums."]


def _unverified(counters: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence on the rows and states that were taken for right uncompared, if any."""
    number = _total(counters, "rows_unverified_total")
    if not number:
        return []
    return [
        f"{number:,} of the rows and states that a connector or a storage brought were taken for "
        "right: nobody can vouch for where they are from."
    ]


def _stale(counters: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence on the rows, and one on the states, that earlier weights had computed.

    Each has the numbers by age in epochs, summed over ranks; those without any are left out.
    """
    found = []
    for what in ("rows", "states"):
        prefix = f"kvtxn_audit_{what}_read_by_age_"
        ages: Counter[str] = Counter()
        for each in counters:
            ages.update({k.removeprefix(prefix): int(v) for k, v in each.items() if prefix in k})
        del ages["0"]
        if by_age := ", ".join(f"{number:,} of age {age}" for age, number in ages.items()):
            found.append(f"{what.title()} of earlier weights, by age in epochs: {by_age}.")
    return found


def _repeated(counters: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence on requests that were begun again, if any were; all ranks did the same."""
    restarts, idle, rows = (
        max((int(each.get(f"kvtxn_audit_{name}", 0)) for each in counters), default=0)
        for name in (
            "requests_restarted_total",
            "restarts_without_token_total",
            "rows_recomputed_total",
        )
    )
    if not restarts:
        return []
    spun = f", {idle:,} of them without a token since the last time" if idle else ""
    return [
        f"Requests were put back and begun again {_count(restarts, 'time')}{spun}: "
        f"{_count(rows, 'row')} had to be computed again."
    ]


def _unused(counters: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence on lost reuse of the prefix cache, with the reasons, if any was lost.

    All ranks lost the same; the rank with the most is read.
    """
    name = "kvtxn_audit_cached_rows_unused_total"
    lost = max(counters, key=lambda each: each.get(name, 0), default={})
    rows = {why: int(lost.get(f"{name}_{why}", 0)) for why in WHY_UNUSED}
    said = [f"{number:,} as {WHY_UNUSED[why]}" for why, number in rows.items() if number]
    if not said:
        return []
    total = _count(sum(rows.values()), "row")
    return [f"{total} that the prefix cache had were computed again: {'; '.join(said)}."]


def _unjudged(counters: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence for each reason why requests of steps were not judged; with numbers."""
    counts = {reason: _total(counters, f"unjudged_total_{reason}") for reason in _UNJUDGED}
    return [
        f"{_count(number, 'request')} of steps {_UNJUDGED[reason]}."
        for reason, number in counts.items()
        if number
    ]


def tell(violation: Told) -> str:
    """Return a sentence on one violation, in words that depend on its kind and finding.

    It says who read which row, and who had written that, as far as it is known.
    """
    request, found = violation["request"] or "a request", violation["found"]
    begin = f"In step {violation['step']} {request}"
    if violation["kind"] == "ranks":
        return f"In step {violation['step']} two ranks wrote different rows."
    if violation["kind"] == "weights":
        return (
            f"In step {violation['step']} the {violation['weights']}'s weights had changed, and "
            "nobody had said so."
        )
    if found == "count":
        return (
            f"{begin} was told a number of accepted drafts that is not the sampler's, at its "
            f"position {violation['position']}."
        )
    if found == "length":
        return (
            f"{begin} read more or fewer rows than it has, from its position "
            f"{violation['position']} on."
        )
    if found == "nan":
        came = "" if violation["slot"] is None else f", which came from {_place(violation)}"
        return f"{begin} put out a NaN at its position {violation['position']}{came}."
    what = "the state before its first token"
    if violation["position"] is not None:
        what = f"its position {violation['position']}, tokens {_in_text(violation['expected'])}"
    said = f"{begin} {VERBS.get(violation['kind'], 'read')} {_place(violation)} as {what}"
    stored = violation["brought"] and violation["written_position"] is not None
    if violation["kind"] == "imported" and found in _BROUGHT and not stored:
        return f"{said}: {_BROUGHT[found]}."
    if violation["written_step"] is None:
        return f"{said}: {_UNKNOWN_WRITER.get(found, 'its writer is not known any more')}."
    return f"{said}; {_written(violation)}{_differs(violation)}{_AFTER_THAT.get(found, '')}."


def _written(violation: Told) -> str:
    """Return a phrase for the write of a row: request, step, position and tokens, if known."""
    writer = violation["written_request"] or "a request whose name is not known any more"
    who = "the same request" if writer == violation["request"] else writer
    said = f"{who} had written it"
    if violation["brought"]:
        said = f"{who} had stored it"
        if violation["written_position"] is None:
            said = f"a connector had brought it for {who}"
    said += f" in step {violation['written_step']}"
    if violation["written_position"] is not None:
        said += f" for position {violation['written_position']}"
    if violation["written_for"]:
        said += f", tokens {_in_text(violation['written_for'])}"
    return said


def _differs(violation: Told) -> str:
    """Return a phrase for the difference, behind a comma; "" if positions and tokens show it."""
    differs = violation["differs"]
    return "" if differs in (None, "position", "tokens") else f", {DIFFERENCES[differs]}"


def _in_text(tokens: Sequence[int]) -> str:
    """Return tokens as "...[1 2 3]", the end of a prefix; "(embedded)" for embedded content."""
    words = ("(embedded)" if token >= EMBEDDED else str(token) for token in tokens)
    return f"...[{' '.join(words)}]"


def _place(violation: Told) -> str:
    """Return the place of a violation in words: slot, block, group and layer, as far as known.

    Of a recurrent state the state's slot is named.
    """
    group, slot = violation["group"] or "the cache", violation["slot"]
    if slot is None:
        return f"a place outside of {group}"
    if violation["kind"] == "state":
        return f"state {slot} of {group}"
    layer = "" if violation["layer"] is None else f", layer {violation['layer']},"
    return f"slot {slot} (block {violation['block']}) of {group}{layer}"


def _total(counters: Sequence[Mapping[str, float]], name: str) -> int:
    """Return the sum over ranks of the audit's counter of this name; 0 where it is missing."""
    return int(sum(each.get(f"kvtxn_audit_{name}", 0) for each in counters))


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, "1 row" or "2,000 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
