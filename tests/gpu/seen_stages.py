"""Results of engines with windows on every pipeline stage: reduced, and drawn for ``SEEN.md``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpu_ties import compare
from kvtxn.benchmarks.common.markdown import table

#: Steps without a window.
BYPASSED: Final = "kvtxn_bypassed_windows_total"

HEAD: Final = """## Pipeline stages

`python tests/gpu/try_stages.py --several`: windows on every pipeline stage beside stock over
the same requests (chunked prompts, prefix hits, preemption, aborted requests, blocks that are
used again). Each stage, and each rank of one, has a GPU of its own, and a row here. *On and
off* compares one engine with its windows switched on and off. *Heard of* counts steps with
drafts whose acceptance reached the stage, *gone* their requests that had left by then, whose
drafts are not judged. *Bypassed* steps have no window, so their rows are left as in stock.
*Rejected stay*: rejected drafts that stay in the caches, in stock and with windows. *Lost*:
accepted rows that are not there. *Strays*: layers that a commit changed elsewhere. *Counts*:
kvtxn's are the oracle's, in scenarios without a bypassed step. *After a fault*: so many parts
of a step failed once on each early stage, of so many were counted once, and left stock's
tokens. Of requests that part from stock, *gap* is the most by which stock's best token leads
the one taken instead, in steps of bfloat16. An engine without a stock one beside it (-) is
compared with itself, windows off. *ranks* has two stages of two tensor-parallel ranks, *tp2*
and *tp4* have ranks of one stage, and in *idle* steps of an idle data-parallel rank come
between those of requests: one that writes into a cache, or has a window, fails the scenario.
"""


def stages(folder: Path) -> dict[str, Any]:
    """Reduce the reports that ``try_stages.py`` left in a folder."""
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        name: reduced(report, reports.get(name.partition(".")[0] + ".stock"))
        for name, report in reports.items()
        if any(each["steps"] for each in report.get("stages", ()))
    }


def reduced(report: Mapping[str, Any], stock: Mapping[str, Any] | None) -> dict[str, Any]:
    """Reduce one engine's report; without a stock engine it is compared with itself alone."""
    names = [name for name in report if f"{name}.off" in report]
    other = {name: report[f"{name}.off"] for name in names} if stock is None else stock
    pairs = [(report[name], other[name], report[f"{name}.off"]) for name in names]
    found: dict[str, Any] = {key: report[key] for key in ("machine", "graphs", "attention")}
    found["scenarios"] = names
    found["requests"] = sum(len(ours["tokens"]) for ours, _, _ in pairs)
    found["same"] = None if stock is None else sum(same(ours, each) for ours, each, _ in pairs)
    found["on_and_off"] = sum(same(ours, off) for ours, _, off in pairs)
    if stock is not None and "logits" in pairs[0][0]:
        apart = [compare(dict(ours), dict(each)) for ours, each, _ in pairs]
        found |= {key: max(each[key] for each in apart) for key in ("gap", "noise")}
    found["stages"] = [each | of_stage(rank, pairs) for rank, each in enumerate(report["stages"])]
    faults = report.get("faults", {})
    early = [not each["last"] for each in report["stages"]]
    tokens = other[names[0]]["tokens"]
    found["faults"] = {
        part: recovered(each, tokens, early) for part, each in faults.items() if each["struck"]
    }
    return found


def wrong(engine: Mapping[str, Any]) -> list[str]:
    """Name what an engine's stages break; a step without a window is as in stock."""
    found = []
    for rank, each in enumerate(engine["stages"]):
        clean = not (each["rejected_written"] or each["strays"])
        rules = {
            "no window": each["windows"] > 0,
            "lost rows": not each["lost"],
            "rows that are not a commit's": clean or each["bypassed"],
            "counts differ": each["counts_agree"],
            "fallbacks": not each["fallbacks"],
        }
        found += [f"rank {rank}: {name}" for name, holds in rules.items() if not holds]
    return found


def same(ours: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Count requests that have the same tokens."""
    return sum(a == b for a, b in zip(ours["tokens"], other["tokens"], strict=True))


def of_stage(rank: int, pairs: Any) -> dict[str, Any]:
    """Add up what the oracle and kvtxn counted on one stage."""
    seen, stays, counts, agree = Counter[str](), 0, Counter[str](), True
    for ours, stock, _ in pairs:
        seen.update(ours["oracle"][rank])
        stays += stock["oracle"][rank].get("rejected_written", 0)
        counts.update(ours["kvtxn"][rank])
        agree &= alike(ours["kvtxn"][rank], ours["oracle"][rank])
    names = ("windows", "kept", "rejected", "rejected_written", "lost", "strays", "gone", "heard")
    return {
        **{name: seen[name] for name in names},
        "stays_in_stock": stays,
        "fallbacks": int(counts["kvtxn_fallbacks_total"]),
        "bypassed": int(counts[BYPASSED]),
        "counts_agree": agree,
    }


def alike(counts: Mapping[str, Any], seen: Mapping[str, int]) -> bool:
    """Tell whether kvtxn counted the oracle's rows; a bypassed step's rows it does not count."""
    if counts.get(BYPASSED):
        return True
    kept, rejected = seen.get("kept", 0), seen.get("rejected", 0)
    staged = counts["kvtxn_rows_staged_total"], counts["kvtxn_rows_rejected_total"]
    return staged == (kept + rejected, rejected)


def recovered(fault: Mapping[str, Any], tokens: Any, early: list[bool]) -> bool:
    """Tell whether a fault was counted once by each early worker, lost no row, changed no token."""
    runs = fault["during"], fault["afterwards"]
    counted = [
        [each.get("kvtxn_fallbacks_total", 0) for each in run.get("kvtxn", ())] for run in runs
    ]
    return (
        all(run.get("tokens") == tokens for run in runs)
        and counted == [[int(each) for each in early], [0] * len(early)]
        and not any(each.get("lost") for run in runs for each in run["oracle"])
    )


def shown(name: str) -> str:
    """Name an engine; its policy is a column of its own, unless the engine asked for another."""
    return name.replace(".auto", "", 1)


def _same(engine: Mapping[str, Any]) -> str:
    return "-" if engine["same"] is None else f"{engine['same']} / {engine['requests']}"


def _gap(engine: Mapping[str, Any]) -> str:
    return f"{engine['gap']:.0f}" if "gap" in engine else "-"


def drawn(engines: Mapping[str, Any]) -> str:
    """Draw the table."""
    header = ["engine", "graphs", "GPU", "policy", "same tokens", "gap", "on and off", "windows"]
    header += ["bypassed", "heard of", "gone", "accepted", "rejected stay", "lost", "strays"]
    header += ["counts"]
    header += ["after a fault"]
    rows = []
    for name, each in engines.items():
        for stage in each["stages"]:
            faults = each["faults"].values() if not stage["last"] else ()
            rows.append(
                [
                    *(shown(name), each["graphs"], str(stage["device"]), stage["policy"]),
                    *(_same(each), _gap(each)),
                    f"{each['on_and_off']} / {each['requests']}",
                    *(str(stage["windows"]), str(stage["bypassed"]), str(stage["heard"] or "-")),
                    *(str(stage["gone"]) if not stage["last"] else "-", str(stage["kept"])),
                    f"{stage['stays_in_stock']} -> {stage['rejected_written']}",
                    *(str(stage["lost"]), str(stage["strays"])),
                    "yes" if stage["counts_agree"] else "**no**",
                    f"{sum(faults)} / {len(faults)}" if faults else "-",
                ]
            )
    return table(header, rows)
