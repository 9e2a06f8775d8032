"""Results of ``kvtxn bench vllm`` as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from ..common.markdown import machine_line, table
from ..common.paired_stats import LEVEL, compare
from .audits import complaints
from .cell import NEW_PROMPTS, by_policy, first_tokens
from .load import COLUMNS, Point, load, name
from .options import asked

Cell = Mapping[str, Any]

_PARTS: Final = ("taken", "formula", "slots", "positions", "checksums", "constant")

_COUNTED: Final = (
    "Of each whole cell (its first round and those for the first token and the clock included), "
    "summed over ranks. A request of a step is not judged if what the engine told of it is "
    "malformed, or if nobody said which of its drafts were kept."
)
_MEMORY: Final = (
    "Bytes of each audit on its device, and by the formula: 8 per slot and state of each group, 8 "
    "per request and position, 8 per slot and layer where bytes are compared, and a constant "
    "(the latest writers, and violations that wait to be read)."
)


def report(result: Mapping[str, Any]) -> str:
    """Return a result as a Markdown page: speed, latency, counts of windows, audit, and conditions.

    Sections without content are left out.
    """
    settings, cells = result["settings"], result["cells"]
    parts = [f"# {settings['model']}, {settings['drafter']}, {settings['drafts']} drafts"]
    if cells:
        parts += ["## Speed", speed(cells), method(result)]
    if missing := unmeasured(result):
        parts += ["## Not measured", missing]
    if cells:
        parts += ["## Latency", latency(cells)]
    if any("kvtxn_windows_total" in count for cell in cells for count in _counters(cell)):
        parts += ["## Windows", windows(cells)]
    if any("audit" in engine for cell in cells for engine in cell["engines"].values()):
        parts += ["## Audit", audit(result)]
    parts.append(conditions(result))
    return "\n\n".join(parts) + "\n"


def unmeasured(result: Mapping[str, Any]) -> str:
    """Return Markdown that lists the requested cells without a result, and why; "" for none."""
    names = attrs.fields_dict(Point)
    measured = [{name: cell[name] for name in names} for cell in result["cells"]]
    wanted = [attrs.asdict(point) for point in asked(result["settings"])]
    lines = [f"- {', '.join(load(cell))}" for cell in wanted if cell not in measured]
    if not lines:
        return ""
    why = result["conditions"].get("ended", "the run did not get that far")
    return "\n".join([f"Asked for and not measured ({why}):", "", *lines])


def speed(cells: Sequence[Cell]) -> str:
    """Return a table of stock's tokens per second, and each policy's share in the same round.

    Beside it stands the share of stock's time per token, without each request's first token, whose
    time scatters most. Last, the rounds of all cells together.
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
                row.append(ratio(compared["per_token_ms"]) if compared.get("per_token_ms") else "-")
            else:
                row.append(f"{engines[policy]['tokens_per_s']['median']:.0f} tokens/s")
        rows.append([*row, *([same(cell)] if policies else [])])
    if len(cells) > 1 and policies and "stock" in cells[0]["engines"]:
        shares = [share for policy in policies for share in together(cells, policy)]
        rows.append(["all", *[""] * 5, *shares, ""])
    who = "stock" if "stock" in cells[0]["engines"] else policies[0]
    beside = "of stock" if who == "stock" else "alone"
    header = [*COLUMNS, f"{who}, tokens/s", f"{who}'s spread"]
    for policy in policies:
        header += [f"{policy}, {beside}", *(["time per token"] if who == "stock" else [])]
    return table([*header, *(["accepted drafts equal"] if policies else [])], rows)


def headline(result: Mapping[str, Any]) -> str:
    """Return one sentence on the result of the 8B model with EAGLE, which was run on a GPU.

    It gives the throughput of ``deferred`` as a share of stock's: the median over the rounds of all
    cells, and its interval.
    """
    cells, machine = result["cells"], result["machine"]
    share = together(cells, "deferred")[0].replace("*", "")
    rounds = sum(len(cell["engines"]["stock"]["rounds"]) for cell in cells)
    return (
        f"**{share.split()[0]} times vLLM's own tokens per second**: "
        f"an 8B model with EAGLE on an {machine['gpu'].removeprefix('NVIDIA ')}, policy `deferred` "
        f"({share.partition(' ')[2].strip('()')}, {rounds} rounds over {len(cells)} loads)."
    )


def together(cells: Sequence[Cell], policy: str) -> list[str]:
    """Compare a policy's speed and time per token with stock's over the rounds of all cells.

    Returns two texts, as ``ratio`` shows them; a dash where no round has such times.
    """
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
    return [_joint(each) for each in (speeds, times)]


def _joint(ratios: Sequence[float]) -> str:
    """Show the median ratio of many rounds with its interval; a dash without any round."""
    return ratio(attrs.asdict(compare(ratios))) if ratios else "-"


def ratio(compared: Mapping[str, float]) -> str:
    """Show a ratio with its interval, in bold where the interval shows a difference."""
    low, high = compared["low"], compared["high"]
    differs = compared["confidence"] >= LEVEL and not low <= 1 <= high
    text = f"{compared['median']:.3f}"
    return f"{f'**{text}**' if differs else text} ({low:.3f} to {high:.3f})"


def same(cell: Cell) -> str:
    """Say whether every policy accepted as many drafts as stock in every round: "yes" or "no".

    A dash without a comparison.
    """
    found = [engine["of_stock"] for engine in cell["engines"].values() if "of_stock" in engine]
    if not found:
        return "-"
    return "yes" if all(each["same_accepted"] for each in found) else "no"


def method(result: Mapping[str, Any]) -> str:
    """Return sentences that say how the result's ratios were measured, and how sure they are.

    Without ratios, only how many rounds there were.
    """
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
    if ratios[0]["confidence"] < LEVEL:
        return f"{text} Too few rounds to show a difference: that takes six."
    if len(result["cells"]) > 1:
        text += " The last line takes the rounds of all cells together."
    return f"{text} Bold: the interval leaves 1 out; by chance alone {100 - sure:.0f} % of all do."


def latency(cells: Sequence[Cell]) -> str:
    """Return a Markdown table of ms to the first token and per token, a row per cell and engine.

    Of each: the 50th and 95th percentile over requests, and the ratio to stock, which is each
    round's median over its requests by stock's in the same round. "-" stands for what was not
    measured. With several cells, a last row for each policy has the ratios of all cells' rounds
    together. Below the table stands of which prompts the first tokens are.
    """
    rows = []
    for cell in cells:
        for label, engine in cell["engines"].items():
            row = [*name(cell), label]
            compared = engine.get("of_stock", {})
            for what in ("first_token_ms", "per_token_ms"):
                found = engine[what]
                row += [f"{found[p]:.2f}" if found else "-" for p in ("p50", "p95")]
                row.append(ratio(compared[what]) if compared.get(what) else "-")
            rows.append(row)
    policies = by_policy(cells[0])
    if len(cells) > 1 and "stock" in cells[0]["engines"]:
        for policy in policies:
            first = [
                share
                for cell in cells
                for share in first_tokens(cell["engines"][policy], cell["engines"]["stock"])
            ]
            blank = ["", ""]
            shares = [*blank, _joint(first), *blank, together(cells, policy)[1]]
            rows.append(["all", "", "", "", policy, *shares])
    header = [*COLUMNS, "engine", "first token p50, ms", "p95", "of stock"]
    found = table([*header, "per token p50, ms", "p95", "of stock"], rows)
    return "\n\n".join([found, *_prompts(cells)])


def _prompts(cells: Sequence[Cell]) -> list[str]:
    """Say of which prompts the first tokens are; nothing of results that do not say it."""
    engines = [engine for cell in cells for engine in cell["engines"].values()]
    if new := {len(engine[NEW_PROMPTS]) for engine in engines if engine.get(NEW_PROMPTS)}:
        return [
            f"First tokens are those of {max(new)} rounds of their own, each with new prompts and "
            "two tokens per request."
        ]
    if all(NEW_PROMPTS in engine for engine in engines):
        return ["First tokens are those of prompts in the prefix cache, but for mixed loads."]
    return []


def windows(cells: Sequence[Cell]) -> str:
    """Return a table of the plug-in's counters of rank 0 over all measured rounds of each cell.

    Engines without windows have no row. A column has the host's time where it was measured.
    """
    timed = any("host_us" in each for cell in cells for each in cell["engines"].values())
    rows = []
    for cell in cells:
        for label in by_policy(cell):
            engine = cell["engines"][label]
            count: Mapping[str, float] = next(iter(engine["counters"]), {})
            if "kvtxn_windows_total" not in count:  # stock, or an audit without windows
                continue
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
    header = [*COLUMNS, "policy", "windows", "coverage", "drafts accepted", "MiB written"]
    header += ["MiB avoided", "fallbacks", "bypassed"]
    return table([*header, *(["host: begin + commit, us"] if timed else [])], rows)


def clocked(result: Mapping[str, Any]) -> str:
    """Return a table of the host time of windows or audits, in microseconds, of rank 0.

    The result has to come from a run with ``--clock``.
    """
    rows = []
    for cell in result["cells"]:
        for label in by_policy(cell):
            [found, *_] = cell["engines"][label]["host_us"]
            times = [*(f"{found[part]:.0f}" for part in ("begin", "commit")), both(found)]
            rows.append([label, str(cell["requests"]), f"{found['steps']:.0f}", *times])
    header = ["policy", "requests", "steps", "before the forward", "after sampling", "both"]
    known = any("(" in row[-1] for row in rows)
    says = f"Microseconds, medians{' (quartiles)' if known else ''}."
    return f"{table(header, rows)}\n\n{says} {machine_line(result['machine'])}."


def _counters(cell: Cell) -> list[Mapping[str, float]]:
    """List the counters of every engine and rank of a cell."""
    return [count for engine in cell["engines"].values() for count in engine["counters"]]


def _host(engine: Mapping[str, Any]) -> str:
    """Return the median times of windows on the host of rank 0, "begin + commit".

    A dash if unknown.
    """
    found = (engine.get("host_us") or [None])[0]
    return f"{found['begin']:.0f} + {found['commit']:.0f}" if found else "-"


def _reasons(count: Mapping[str, float], counter: str) -> str:
    """Show a counter and, where it is not zero, its reasons."""
    whole = f"{count[counter]:.0f}"
    parts = [
        f"{label.removeprefix(counter)[1:]} {value:.0f}"
        for label, value in count.items()
        if label.startswith(f"{counter}_") and value
    ]
    return f"{whole}: {', '.join(parts)}" if parts else whole


def conditions(result: Mapping[str, Any]) -> str:
    """Return Markdown on the machine, the engines' lines in the log, and the run's conditions."""
    facts = result["conditions"]
    lines = [f"{machine_line(result['machine'])}."]
    lines += [f"{label}: `{line}`" for label, line in facts["announced"].items() if line]
    engines = "One engine" if facts["engines"] == 1 else f"{facts['engines']} engines at once"
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


def audit(result: Mapping[str, Any]) -> str:
    """Return a table of rows read and violations by cell, and of the host's time if measured.

    Below it stand the violations in words, and the memory, where there are such.
    """
    cells = result["cells"]
    engines = [
        (cell, label, engine)
        for cell in cells
        for label, engine in cell["engines"].items()
        if "audit" in engine
    ]
    timed = any("host_us" in engine for _, _, engine in engines)
    rows = []
    for cell, label, engine in engines:
        found = engine["audit"]
        row = [*name(cell), label]
        row += [str(found[each]) for each in ("steps", "rows", "states")]
        row += [_kinds(found), str(found["unjudged"])]
        rows.append([*row, *(_host_of_audit(engine) if timed else [])])
    header = [*COLUMNS, "audit", "steps", "rows read", "states read", "violations", "not judged"]
    header += ["host: before the forward, us", "after it, us", "both, us"] if timed else []
    parts = [table(header, rows), _COUNTED]
    if wrong := complaints(cells):
        parts.append("\n".join(f"- **The audit found:** {each}" for each in wrong))
    if known := _memory(result["conditions"].get("audit_memory", {})):
        parts += [known, _MEMORY]
    return "\n\n".join(parts)


def _kinds(found: Mapping[str, Any]) -> str:
    """Show the number of violations and, where there are some, their kinds."""
    if not found["violations"]:
        return "0"
    kinds = ", ".join(f"{kind} {count}" for kind, count in found["kinds"].items())
    return f"**{found['violations']}**: {kinds}"


def _host_of_audit(engine: Mapping[str, Any]) -> list[str]:
    """Return an audit's median times in a step on the host of rank 0.

    Before the forward, after, both. Three dashes if they were not measured.
    """
    clocked = next(iter(engine.get("host_us") or ()), None)
    if clocked is None:
        return ["-"] * 3
    return [*(f"{clocked[part]:.0f}" for part in ("begin", "commit")), both(clocked)]


def both(clocked: Mapping[str, float]) -> str:
    """Show the host's time before and after the forward: its median and, if known, quartiles."""
    whole = f"{clocked['both']:.0f}"
    if "lower" not in clocked:  # a result from before they were written
        return whole
    return f"{whole} ({clocked['lower']:.0f} to {clocked['upper']:.0f})"


def _memory(ranks_of: Mapping[str, Any]) -> str:
    """Tabulate the bytes that each engine's audit takes, by rank; "" without any."""
    rows = [
        [label, str(rank), *(str(taken[part]) for part in _PARTS)]
        for label, ranks in ranks_of.items()
        for rank, taken in enumerate(ranks)
        if taken is not None
    ]
    header = ["audit", "rank", "bytes", "by the formula", "slots", "positions", "checksums"]
    return table([*header, "constant"], rows) if rows else ""
