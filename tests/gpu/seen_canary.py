"""The ledger and SGLang's KV canary on the same planted faults, reduced and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from kvtxn.benchmarks.common.markdown import words
from seen_sglang import drawn_commands
from sglang_engines import RING_ROWS

HEAD: Final = f"""### The KV canary on the same faults

`python tests/gpu/sglang_canary.py OUT`: the same plug-in plants the same faults in engines with the
ledger, with `--kv-canary log`, and with *all checks* of the canary: `--kv-canary-real-data all`,
`--kv-canary-sweep-interval 16`, `SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT=1` and
`SGLANG_KV_CANARY_ENABLE_MHA_V=1`. Each run has a process of its own, so its faults hit other
requests and slots. The ledger's column has the kind of the violation. The canary's columns have the
reasons of the first alarm that names the fault's slot; *by position* is an alarm that names the
position or the one behind it. Alarms like those before the fault do not count. The canary had room
for {RING_ROWS} alarms in place of the 1024 that it names by default.
"""
#: By kind of a run, the name of its column.
COLUMNS: Final = {"ledger": "ledger", "canary": "canary", "strict": "canary, all checks"}
MISSED: Final = "**not found**"
ABSENT: Final = "not planted"
#: Of a cell: nothing was found in it, for one reason or another.
NOISY: Final = "false alarms from the start"


def canary(report: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce what ``sglang_canary.py`` wrote: by engine, its kinds of runs, and its faults."""
    found: dict[str, Any] = {}
    for row in report["engines"]:
        if _is_cut(row) and not row.get("canary", {"installed": True})["installed"]:
            continue  # when it started
        place = {key: report[key] for key in ("machine", "command")}
        engine = found.setdefault(row["engine"], {**place, "runs": {}, "faults": {}})
        engine["runs"][row["kind"]] = _run(row)
        for fault in _faults(row):
            engine["faults"].setdefault(fault["fault"], {})[row["kind"]] = _cell(fault)
    return found


def _is_cut(row: Mapping[str, Any]) -> bool:
    """Tell whether an engine still ran when the time of all was over."""
    return not row["ok"] and row.get("exit") is None


def _faults(row: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if _is_cut(row):  # nobody may have read the last ones
        return ()
    faults = row["canary"]["faults"] if "canary" in row else row.get("faults") or ()
    return (fault for fault in faults if fault["fault"] != "error")


def _run(row: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce one engine's run; ``failed`` says why one that started did not play its load."""
    said = row.get("canary", {})
    kept = ("alarms", "before", "rows", "skipped", "dropped", "installed", "refused")
    failed = None if row["ok"] else str((row.get("wrong") or ["no error in its log"])[-1])[-200:]
    if _is_cut(row):
        failed = "cut off when the time of all engines was over"
    return {"ok": row["ok"], "failed": failed, **{key: said[key] for key in kept if key in said}}


def _cell(fault: Mapping[str, Any]) -> str | None:
    """Say how an auditor named a fault; None if it did not."""
    if "heard" not in fault:
        return fault["found"][0]["kind"] if fault["exact"] else None
    if not fault["heard"]:
        return None
    reasons = fault["said"].replace("verify_", "").replace("_", " ").replace("+", ", ")
    return reasons if fault["at"] == "slot" else f"{reasons}; by {fault['at']}"


# -- the pages ------------------------------------------------------------------------


def cell(engine: Mapping[str, Any], fault: str, kind: str) -> str:
    """Say in a few words whether a run of an engine found a fault."""
    run = engine["runs"].get(kind)
    if run is None or run.get("refused"):
        return "-"
    if kind not in engine["faults"][fault]:
        return ABSENT
    if run.get("before"):
        return NOISY
    return engine["faults"][fault][kind] or MISSED


def drawn(found: Mapping[str, Any]) -> str:
    """Tabulate planted faults, then engines in which nothing was planted, or that did not start."""
    faults = [
        [name, fault.replace("_", " "), *(cell(engine, fault, kind) for kind in COLUMNS)]
        for name, engine in found.items()
        for fault in engine["faults"]
    ]
    engines = [
        [name, COLUMNS[kind], start(run), *_counts(run)]
        for name, engine in found.items()
        for kind, run in engine["runs"].items()
        if kind != "ledger"
    ]
    parts = [words(["engine", "fault", *COLUMNS.values()], faults)]
    parts.append(
        "Engines with the canary. *Before a fault* are the alarms until the first fault is "
        "planted; of an engine without faults, all alarms. *Rows* are verified or written, over "
        "all launches."
    )
    header = ["engine", "run", "starts", "alarms", "before a fault", "rows", "steps not verified"]
    parts += [words(header, engines), drawn_commands(found)]
    return "\n\n".join(parts)


def start(run: Mapping[str, Any]) -> str:
    """Say whether an engine started with the canary, and how it ended if it did not end well."""
    if run.get("refused"):
        return f"no: {run['refused'].partition(';')[0]}"
    if not run.get("installed"):
        return f"no: {run['failed']}"
    return "yes" if run["ok"] else f"yes; {run['failed']}"


def _counts(run: Mapping[str, Any]) -> list[str]:
    if not run.get("installed") or run.get("refused"):
        return ["-"] * 4
    alarms = f"{run['alarms']}{' and more' if run['dropped'] else ''}"
    return [alarms, *(str(run[key]) for key in ("before", "rows", "skipped"))]


def _some(names: Iterable[str]) -> str:
    """List names, or say that there are none."""
    return ", ".join(names) or "none"


def measured(found: Mapping[str, Any]) -> str:
    """Say what of the comparison was measured."""
    if not found:
        return (
            "Of this page the time alone was measured, by engines of SGLang that took turns. All "
            "else is read from\nthe sources."
        )
    return (
        "Of this page the time was measured, by engines of SGLang that took turns, and the faults "
        "that are found.\nAll else is read from the sources."
    )


def summary(found: Mapping[str, Any]) -> str:
    """Draw the section of the comparison page: faults found by each, false alarms, refusals."""
    engines = {name: each for name, each in found.items() if each["faults"]}
    if not engines:
        return ""
    rows = [[name, *_tally(each)] for name, each in engines.items()]
    sound = {
        f"{name}, {COLUMNS[kind]}" if kind == "strict" else name: run
        for name, engine in found.items()
        for kind, run in engine["runs"].items()
        if kind != "ledger"
    }
    alarmed = [f"{name} ({run['before']})" for name, run in sound.items() if run.get("before")]
    refused = [f"{name} ({_why(run)})" for name, run in sound.items() if run.get("refused")]
    parts = [
        "## The same faults",
        "A plug-in planted the same faults in engines with the ledger and with the canary. [The "
        "table](../tests/gpu/SEEN.md#the-kv-canary-on-the-same-faults)\nhas each fault, and what "
        "was said of it.",
        words(["engine", "faults", *COLUMNS.values()], rows),
        f"Found by the ledger and not by the canary: {_parted(engines, ('ledger',), 'canary')}.",
        "Found by the ledger and not with all checks of the canary: "
        f"{_parted(engines, ('ledger',), 'strict')}.",
        "Found by the canary and not by the ledger: "
        f"{_parted(engines, ('canary', 'strict'), 'ledger')}.",
        f"Engines in which the canary raises false alarms: {_some(alarmed)}.",
        f"Engines that do not start with the canary: {_some(refused)}.",
    ]
    return "\n\n".join(parts)


def _tally(engine: Mapping[str, Any]) -> list[str]:
    """Count by kind of run the faults that it found, and the faults that were planted in it."""
    counts = []
    for kind in COLUMNS:
        cells = [cell(engine, fault, kind) for fault in engine["faults"]]
        planted = [each for each in cells if each not in (ABSENT, "-")]
        told = f"{sum(each != MISSED for each in planted)} / {len(planted)}" if planted else "-"
        counts.append(NOISY if NOISY in planted else told)
    return [str(len(engine["faults"])), *counts]


def _parted(engines: Mapping[str, Any], finders: Sequence[str], other: str) -> str:
    """List the faults that one of some kinds of runs found, and that another kind missed."""
    nothing, missed = {MISSED, NOISY, ABSENT, "-"}, {}
    for name, engine in engines.items():
        for fault in engine["faults"]:
            found = {cell(engine, fault, kind) for kind in finders} - nothing
            if found and cell(engine, fault, other) == MISSED:
                missed.setdefault(fault.replace("_", " "), []).append(name)
    return _some(f"{fault} ({', '.join(names)})" for fault, names in missed.items())


def _why(run: Mapping[str, Any]) -> str:
    """Name the class of a cache that the canary has no way for, or what failed."""
    said = str(run["refused"])
    return said.partition("pool class ")[2].partition(";")[0] or said.partition(":")[0]


#: The generated parts of ``KV_CANARY.md``.
SECTIONS: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "canary-measured": measured,
    "canary-faults": summary,
}
