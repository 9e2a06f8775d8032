"""Public faults of SGLang that were tried: what the engines showed, reduced and drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
from kvtxn.benchmarks.common.markdown import words
from seen_sglang import drawn_commands

HEAD: Final = """### Public faults of SGLang

`python tests/gpu/sglang_known.py OUT`: small engines answer the same prompts *cold*, from the GPU's
cache (*cached*), and twice after other prompts have driven them out of it (*evicted*, *again*).
Tokens *from the host* and *from storage* came back from there. *Alarms* are the KV canary's. The
ledger judges rows and states that come back. What the models answer follows from the last token
alone, so that texts would not show a lost state.
"""


@attrs.frozen
class Trial:
    """A public fault, and the engines that were made to show it.

    Attributes:
        issue: of sgl-project/sglang.
        subject: what was reported.
        source: what the sources of 0.5.23 say of it.
        engines: of ``sglang_models.KNOWN``.
    """

    issue: int
    subject: str
    source: str
    engines: tuple[str, ...]


TRIALS: Final = (
    Trial(
        39830,
        "a hybrid answers wrongly once a whole prompt comes back from the host",
        "side states of a slot travel to the host (`mem_cache/pool_host/mamba.py`), which is the "
        "fix #39862. The thread says of what is left that the restored bytes are right and the "
        "answer is not; its cause is not known",
        ("next-hicache",),
    ),
    Trial(
        33656,
        "the KV canary reports rows at wrong positions where HiCache is on",
        "DeepSeek-V4 needs FlashMLA and DeepGEMM, which these engines do not have. The canary's "
        "words of a slot do not travel to the host and back (no hook in `mem_cache/`), in any "
        "pool. So rows that come back are held against the words of rows that were there before",
        ("hicache",),
    ),
    Trial(
        34043,
        "states are zero after a hit of the radix tree, where a prefill's graph runs with drafts",
        "fixed: a prefill's graph keeps states with drafts, too "
        "(`prefill_cuda_graph_runner.py`, `_is_mamba_track_enabled`). No drafts are here",
        ("next-graph",),
    ),
    Trial(
        37160,
        "LMCache's keys leave the client's salt out",
        "fixed: `lmcache_unified_radix_cache.py` hands the salt on, and keys of HiCache's storage "
        "begin with it (`mem_cache/utils.py`, `storage_namespace_seed`). LMCache was not run",
        ("salts",),
    ),
)
#: Of a leg: prompt tokens that were not computed, and where they came from.
PLACES: Final = ("cached", "host", "storage")
#: kvtxn's log line of an engine that is not watched.
INACTIVE: Final = re.compile(r"""audit_inactive.* why=(['"])(.*?)\1 effect=""")


def known(report: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce what ``sglang_known.py`` wrote, by engine."""
    found: dict[str, Any] = {}
    for row in report["engines"]:
        place = {key: report[key] for key in ("machine", "command")}
        engine = found.setdefault(row["engine"], {**place, "runs": {}})
        canary = row.get("canary") or {}
        failed = (
            None if row["ok"] else str((row.get("wrong") or ["no error in its log"])[-1])[-200:]
        )
        engine["runs"][row["kind"]] = {
            "ok": row["ok"],
            "failed": canary.get("refused") or failed,
            "ledger": _ledger(row),
            "legs": row["legs"],
            "alarms": canary.get("legs"),
            "violations": len(row.get("violations") or ()),
        }
    return found


def _ledger(row: Mapping[str, Any]) -> str | None:
    """Say whether the ledger watched an engine: its reason if not; None where it was not asked."""
    if row["kind"] != "ledger":
        return None
    if row.get("active"):
        return f"{row['rows']} rows read, {len(row.get('violations') or ())} violations"
    match = INACTIVE.search("\n".join(row.get("log") or ()))
    return f"left out, as {match[2]}" if match else "says nothing"


# -- the pages ------------------------------------------------------------------------


def drawn(found: Mapping[str, Any]) -> str:
    """Tabulate the legs of each engine, and what kvtxn said of it."""
    rows = [
        [name, kind, *cells]
        for name, engine in found.items()
        for kind, run in engine["runs"].items()
        for cells in _legs(run)
    ]
    header = ["engine", "run", "leg", "cached", "from the host", "from storage"]
    said = [
        f"- {name}: {engine['runs']['ledger']['ledger']}."
        for name, engine in found.items()
        if "ledger" in engine["runs"]
    ]
    trials = [
        f"- sgl-project/sglang#{trial.issue}, {trial.subject}. In 0.5.23: {trial.source}."
        for trial in TRIALS
        if set(trial.engines) & set(found)
    ]
    parts = ["\n".join(trials), words([*header, "alarms"], rows)]
    parts += ["The ledger, by engine:", "\n".join(said), drawn_commands(found)]
    return "\n\n".join(part for part in parts if part)


def _legs(run: Mapping[str, Any]) -> Iterable[list[str]]:
    """Write a run's legs; one line if it failed before the first."""
    if not run["legs"]:
        yield [f"does not start: {run['failed']}", *["-"] * 4]
    for name, leg in run["legs"].items():
        alarms = "-" if run["alarms"] is None else str(run["alarms"].get(name, 0))
        yield [name, *(str(leg[key]) for key in PLACES), alarms]
