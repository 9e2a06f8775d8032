"""What ``kvtxn bench vllm`` measured, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from .document import machine_line, table
from .paired import LEVEL, compare
from .vllm_cell import by_policy
from .vllm_options import asked
from .vllm_work import Point

Cell = Mapping[str, Any]


def report(result: Mapping[str, Any]) -> str:
    """A whole result file: speed, latency, what the windows did, and how it was measured."""
    settings, cells = result["settings"], result["cells"]
    parts = [f"# {settings['model']}, {settings['drafter']}, {settings['drafts']} drafts"]
    if cells:
        parts += ["## Speed", speed(cells), method(result)]
    if missing := unmeasured(result):
        parts += ["## Not measured", missing]
    if cells:
        parts += ["## Latency", latency(cells)]
    if any(by_policy(cell) for cell in cells):
        parts += ["## Windows", windows(cells)]
    parts.append(conditions(result))
    return "\n\n".join(parts) + "\n"


def name(cell: Cell) -> list[str]:
    """The first columns: what the load was."""
    rate = cell["acceptance"]
    drafts = "real" if rate is None else f"{100 * rate:.0f} %"
    return [cell["scenario"], str(cell["context"]), str(cell["requests"]), drafts]


def unmeasured(result: Mapping[str, Any]) -> str:
    """Cells that were asked for and are not in the result, and why; "" if all are."""
    names = attrs.fields_dict(Point)
    measured = [{name: cell[name] for name in names} for cell in result["cells"]]
    wanted = [attrs.asdict(point) for point in asked(result["settings"])]
    lines = [f"- {', '.join(load(cell))}" for cell in wanted if cell not in measured]
    if not lines:
        return ""
    why = result["conditions"].get("ended", "the run did not get that far")
    return "\n".join([f"Asked for and not measured ({why}):", "", *lines])


def load(cell: Cell) -> list[str]:
    """What the load was, in words."""
    scenario, context, requests, drafts = name(cell)
    how_many = "1 request" if requests == "1" else f"{requests} requests"
    return [f"{scenario}, {context} tokens of context", how_many, f"{drafts} acceptance"]


_LOAD = ["scenario", "context", "requests", "acceptance"]


def speed(cells: Sequence[Cell]) -> str:
    """Tokens per second, and each policy's as a share of stock's in the same round.

    Beside that its time per token, as a share likewise: the first token of each request left out,
    whose time scatters most. Last, the rounds of all cells together.
    """
    policies = by_policy(cells[0])
    rows = []
    for cell in cells:
        engines = cell["engines"]
        base = engines.get("stock") or engines[policies[0]]
        fast = base["tokens_per_s"]
        spread = (fast["highest"] - fast["lowest"]) / fast["median"]
        row = [*name(cell), f"{fast['median']:.0f}", f"{100 * spread:.0f} %"]
        for policy in policies:
            if compared := engines[policy].get("of_stock"):
                row.append(ratio(compared["tokens_per_s"]))
                row.append(ratio(compared["per_token_ms"]) if compared["per_token_ms"] else "-")
            else:
                row.append(f"{engines[policy]['tokens_per_s']['median']:.0f} tokens/s")
        rows.append([*row, *([same(cell)] if policies else [])])
    if len(cells) > 1 and policies and "stock" in cells[0]["engines"]:
        shares = [share for policy in policies for share in together(cells, policy)]
        rows.append(["all", *[""] * 5, *shares, ""])
    who = "stock" if "stock" in cells[0]["engines"] else policies[0]
    beside = "of stock" if who == "stock" else "alone"
    header = [*_LOAD, f"{who}, tokens/s", f"{who}'s spread"]
    for policy in policies:
        header += [f"{policy}, {beside}", *(["time per token"] if who == "stock" else [])]
    return table([*header, *(["accepted drafts equal"] if policies else [])], rows)


def together(cells: Sequence[Cell], policy: str) -> list[str]:
    """A policy's share of stock's speed and of its time per token over the rounds of all cells."""
    rounds = [
        pair
        for cell in cells
        for pair in zip(
            *(cell["engines"][label]["rounds"] for label in (policy, "stock")), strict=True
        )
    ]
    speeds = [
        (own["generated"] * stock["seconds"]) / (stock["generated"] * own["seconds"])
        for own, stock in rounds
    ]
    times = [
        own["per_token_ms"] / stock["per_token_ms"]
        for own, stock in rounds
        if own.get("per_token_ms") and stock.get("per_token_ms")
    ]
    return [ratio(attrs.asdict(compare(each))) if each else "-" for each in (speeds, times)]


def ratio(compared: Mapping[str, float]) -> str:
    """A ratio with its interval, in bold where that shows a difference."""
    low, high = compared["low"], compared["high"]
    differs = compared["confidence"] >= LEVEL and not low <= 1 <= high
    text = f"{compared['median']:.3f}"
    return f"{f'**{text}**' if differs else text} ({low:.3f} to {high:.3f})"


def same(cell: Cell) -> str:
    """Whether all policies' accepted counts were stock's in every round."""
    found = [engine["of_stock"] for engine in cell["engines"].values() if "of_stock" in engine]
    if not found:
        return "-"
    return "yes" if all(each["same_accepted"] for each in found) else "no"


def method(result: Mapping[str, Any]) -> str:
    """How to read a ratio."""
    ratios = [
        engine["of_stock"]["tokens_per_s"]
        for cell in result["cells"]
        for engine in cell["engines"].values()
        if "of_stock" in engine
    ]
    if not ratios:
        return f"Medians of {result['settings']['rounds']} rounds."
    rounds, sure = ratios[0]["rounds"], 100 * ratios[0]["confidence"]
    text = (
        f"Median of {rounds} rounds' ratios, each of two runs of the same work in one round, and "
        f"an interval that holds the true median with {sure:.1f} % (sign test; the order within "
        "a round rotates)."
    )
    if result["settings"].get("one_engine"):
        text += " Both are one engine, its windows switched on and off."
    if ratios[0]["confidence"] < LEVEL:
        return f"{text} Too few rounds to show a difference: that takes six."
    if len(result["cells"]) > 1:
        text += " The last line takes the rounds of all cells together."
    return f"{text} Bold: the interval leaves 1 out; by chance alone {100 - sure:.0f} % of all do."


def latency(cells: Sequence[Cell]) -> str:
    """Time to first token and per token, 50th and 95th percentile over requests."""
    rows = []
    for cell in cells:
        for label, engine in cell["engines"].items():
            row = [*name(cell), label]
            for what in ("first_token_ms", "per_token_ms"):
                found = engine[what]
                row += [f"{found[p]:.2f}" if found else "-" for p in ("p50", "p95")]
            compared = engine.get("of_stock", {}).get("per_token_ms")
            rows.append([*row, ratio(compared) if compared else "-"])
    header = [*_LOAD, "engine", "first token p50, ms", "p95", "per token p50, ms", "p95"]
    return table([*header, "per token, of stock"], rows)


def windows(cells: Sequence[Cell]) -> str:
    """What the plug-in counted on rank 0 over all measured rounds of a cell."""
    timed = any("host_us" in each for cell in cells for each in cell["engines"].values())
    rows = []
    for cell in cells:
        for label in by_policy(cell):
            engine = cell["engines"][label]
            if not engine["counters"]:  # another stock
                continue
            count = engine["counters"][0]
            staged, kept = count["kvtxn_rows_staged_total"], count["kvtxn_rows_committed_total"]
            rows.append(
                [
                    *(*name(cell), label, f"{count['kvtxn_windows_total']:.0f}"),
                    "-" if engine["coverage"] is None else f"{100 * engine['coverage']:.1f} %",
                    f"{100 * kept / staged:.1f} %" if staged else "-",
                    f"{count['kvtxn_bytes_written_total'] / 2**20:.1f}",
                    f"{count['kvtxn_bytes_avoided_total'] / 2**20:.1f}",
                    _reasons(count, "kvtxn_fallbacks_total"),
                    _reasons(count, "kvtxn_bypassed_windows_total"),
                    *([_host(engine)] if timed else []),
                ]
            )
    header = [*_LOAD, "policy", "windows", "coverage", "drafts accepted", "MiB written"]
    header += ["MiB avoided", "fallbacks", "bypassed"]
    return table([*header, *(["host: begin + commit, us"] if timed else [])], rows)


def clocked(result: Mapping[str, Any]) -> str:
    """What windows take the host, by load and policy: a result that was measured with a clock."""
    rows = []
    for cell in result["cells"]:
        for label in by_policy(cell):
            [found, *_] = cell["engines"][label]["host_us"]
            times = [f"{found[part]:.0f}" for part in ("begin", "commit", "both")]
            rows.append([label, str(cell["requests"]), f"{found['steps']:.0f}", *times])
    header = ["policy", "requests", "steps", "before the forward", "after sampling", "both"]
    return f"{table(header, rows)}\n\nMicroseconds, medians. {machine_line(result['machine'])}."


def _host(engine: Mapping[str, Any]) -> str:
    """Medians of what a window takes the host of rank 0."""
    found = (engine.get("host_us") or [None])[0]
    return f"{found['begin']:.0f} + {found['commit']:.0f}" if found else "-"


def _reasons(count: Mapping[str, float], counter: str) -> str:
    """A counter and, where it is not zero, its reasons."""
    whole = f"{count[counter]:.0f}"
    parts = [
        f"{label.removeprefix(counter)[1:]} {value:.0f}"
        for label, value in count.items()
        if label.startswith(f"{counter}_") and value
    ]
    return f"{whole}: {', '.join(parts)}" if parts else whole


def conditions(result: Mapping[str, Any]) -> str:
    """Where, with what, and what else was going on."""
    facts = result["conditions"]
    lines = [f"{machine_line(result['machine'])}."]
    lines += [f"{label}: `{line}`" for label, line in facts["announced"].items() if line]
    one = facts["engines"] == 1
    engines = "One engine" if one else f"{facts['engines']} engines at once"
    lines.append(
        f"{engines} on {facts['processors']} processors, "
        f"{facts['started']}, {facts['seconds']:.0f} s."
    )
    if facts.get("gpu"):
        lines.append(f"GPU clock, its limit, temperature, power and its limit: {facts['gpu']}.")
    if facts.get("environment"):
        given = " ".join(f"{name}={value}" for name, value in facts["environment"].items())
        lines.append(f"Environment: `{given}`.")
    return "\n\n".join(lines)
