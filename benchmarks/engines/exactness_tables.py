"""Recorded comparisons of engines on a GPU as Markdown; ``pytest tests/gpu`` makes new ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.markdown import machine_line, table

Result = Mapping[str, Any]


def tokens(found: Result) -> str:
    """Tabulate the prompts with equal tokens, and the near-ties at which others part."""
    rows = []
    for engine in found["engines"]:
        if engine.get("compared_with") in (None, engine["task"]["name"]):
            continue
        same = engine["tokens"]
        gaps, noise = same["gaps"], same["noise"]
        rows.append(
            [
                engine["task"]["name"],
                engine["compared_with"],
                f"{same['same']} of {same['prompts']}",
                f"{same['median_gap']:.3f}, {gaps[-1]:.3f}" if gaps else "-",
                f"{noise[1]:.3f}" if noise else "-",
                f"{engine['accepted']} of {engine['drafted']}",
            ]
        )
    header = ["engine", "compared with", "prompts with equal tokens"]
    header += ["best minus second where they part: median, most", "noise, 99 %", "accepted drafts"]
    return f"{table(header, rows)}\n\n{_ranks(found)}{_where(found)}"


def _ranks(found: Result) -> str:
    """Say for each engine with several ranks whether all counted the same, bytes apart."""
    lines = []
    for engine in found["engines"]:
        counts = [_counts(rank) for rank in engine.get("counters_of_ranks", ())]
        if len(counts) > 1:
            same = all(each == counts[0] for each in counts)
            agree = "the same" if same else "DIFFERENT"
            windows = f"{counts[0]['kvtxn_windows_total']:.0f} windows"
            fallbacks = f"{counts[0]['kvtxn_fallbacks_total']:.0f} fallbacks"
            name = engine["task"]["name"]
            lines.append(f"{name}: {len(counts)} ranks counted {agree}, {windows}, {fallbacks}.")
    return " ".join([*lines, ""])


def _counts(rank: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in rank.items() if "bytes" not in name}


def caches(found: Result) -> str:
    """Tabulate changes of the caches around windows, kernels compiled, and memory."""
    rows = []
    engines = {engine["task"]["name"]: engine for engine in found["engines"]}
    for engine in found["engines"]:
        seen = engine.get("watched")
        if seen is None:
            continue
        memory, compiled = engine["memory"], engine["compiled_after_start"]
        more = memory["allocated"] - engines[engine["compared_with"]]["memory"]["allocated"]
        share = more / (memory["row_bytes"] * engine["captured_rows"])
        rows.append(
            [
                engine["task"]["name"],
                f"{seen['windows']} of {seen['steps']}",
                str(seen["rejected"]),
                str(seen["leaks"]),
                str(seen["early"]),
                str(seen["lost"]),
                str(seen["strays"]),
                str(int(engine["counters"].get("kvtxn_fallbacks_total", 0))),
                str(sum("kvtxn" in name for name in compiled)),
                f"{more / 2**20:.2f} MiB, {share:.2f}",
            ]
        )
    header = ["engine", "windows, of steps with drafts", "rejected drafts", "left written"]
    header += ["written early", "accepted but lost", "strays", "fallbacks", "kernels compiled"]
    header += ["memory more than stock, of the largest graph's rows"]
    return f"{table(header, rows)}\n\n{_where(found)}"


def faults(found: Result) -> str:
    """Tabulate runs of an engine in which one stage of a step was made to fail once."""
    rows = []
    for engine in found["engines"]:
        for each in engine.get("faults", ()):
            same = each["tokens"]
            rows.append(
                [
                    f"{engine['task']['name']}, {each['stage']}",
                    str(each["fallbacks"]) if each["calls"] else "did not fail",
                    str(each["resting"]),
                    f"{same['same']} of {same['prompts']}",
                    f"{same['gaps'][-1]:.3f}" if same["gaps"] else "-",
                    str(each["windows_afterwards"]),
                    str(each["fallbacks_afterwards"]),
                ]
            )
    header = ["engine, stage that fails", "fallbacks", "steps at rest", "prompts equal to stock's"]
    header += ["most between best and second", "windows in the next run", "fallbacks there"]
    return f"{table(header, rows)}\n\n{_where(found)}"


def attention(found: Result) -> str:
    """Tabulate attention's errors against float64, in thousandths of the largest value."""
    rows = []
    for row in found["attention"]:
        each = [f"{1000 * row[who][what]:.2f}" for what in ("max", "mean") for who in _WHO]
        each.append("yes" if row["equal"] else "no")
        rows.append([f"{row['requests']}, {row['context']}, {row['rows']}", *each])
    header = ["requests, context, rows of each", "stock, max", "deferred, max"]
    header += ["stock, mean", "deferred, mean", "the same bits"]
    return f"{table(header, rows)}\n\nThousandths of the largest value. {_where(found)}"


_WHO = ("stock", "deferred")


def _where(found: Result) -> str:
    return f"{machine_line(found['machine'])}."
