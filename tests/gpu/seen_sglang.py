"""The ledger beside SGLang on GPUs: engines, faults, cost and kernels, reduced and drawn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvtxn.benchmarks.common.markdown import table

ENGINES: Final = """## SGLang

The options of these scripts were environment variables when they ran; the commands are given as
they are now. `python tests/gpu/sglang_engines.py OUT`: small engines of SGLang with the ledger
beside them. *Recorded* engines have the recorder of the seam, too. *Same tokens* counts tokens that
an engine of the same model gives without kvtxn, of so many; - had none to compare with. *Bytes
compared* counts checksums of rows. *Wrong* is how many violations were reported, though nothing
was planted.
"""
FAULTS: Final = """### Faults beside SGLang

`python tests/gpu/sglang_engines.py OUT faults faults-eagle faults-tree`: a plug-in plants faults in
running engines, one after the other. *Found* is the kind of the violation that names the fault, and
*violations* how many name it. The columns behind it say whether the violation names what was
planted. *Named* means that the violation names one, and that the script knows none to compare it
with. *Writer* is the request that wrote the row; - is a row that nobody wrote.
"""
CONTAINED: Final = """### Faults contained beside SGLang

The same with `"on_violation": "contain"`. *Contained* is how often blocks were taken out and their
readers computed again, and *given up* how many requests ended since they read wrong rows again.
Texts of all others are compared with those of the engine without kvtxn and without faults.
"""
COST: Final = """### Cost beside SGLang

`python tests/gpu/sglang_cost.py OUT`: engines with the weights' shapes of Llama 3 8B, stock, with
the ledger, and with SGLang's own KV canary, by turns on one GPU. Tokens a second are of whole
batches, prompts included; the first token is a batch's that ends there. Ratios are to stock in the
same round: the median, and the bounds without the largest and the smallest fifth.
"""
RINGS: Final = """### SGLang's replay ring beside kvtxn's kernels

`python tests/gpu/sglang_rings.py OUT`: what a step of gated delta nets launches, in microseconds.
The {layers} layers have {value_heads} heads of {value_size} x {key_size} numbers. SGLang reads the
state at the ring's beginning and the ring's rows, and folds the rows into the state once the ring
is full; kvtxn moves each state at each commit. *k* is the number of drafts. Times are medians of
{rounds} rounds; ratios have their 20th and 80th percentile. *GB moved* is what each must read and
write in a step, each number once.
"""
MAMBA: Final = """### Mamba-2: SGLang's states of each draft beside kvtxn's kernels

`python tests/gpu/sglang_mamba.py OUT`: what a verify step and its commit launch for Mamba-2 layers
of Nemotron-H 8B, in microseconds, without the convolution. SGLang writes the state behind each
draft, and copies the last accepted one; kvtxn keeps the drafts' rows, and takes the accepted ones
in. *Beside the states* is what the running requests need beyond one state each, in MiB.
"""


def _by_kind(name: str, kind: str, ranks: int) -> str:
    """Name an engine of a run."""
    recorded = ", recorded" if kind == "recorded" else ""
    return f"{name}{recorded}" + (f", {ranks} ranks" if ranks > 1 else "")


def engines(report: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce what ``sglang_engines.py`` wrote; an engine that ran out of time is left out."""
    found = {}
    for each in report["engines"]:
        if not each["ok"] or each["kind"] == "plain" or not each.get("active"):
            continue
        name = _by_kind(each["engine"], each["kind"], report["extra"].get("tp_size", 1))
        same = each.get("same") or {}
        found[name] = {
            **_where(report),
            "rows": int(each["rows"]),
            "steps": int(each["steps"]),
            "unjudged": int(each["unjudged"]),
            "bytes": int(each.get("bytes") or 0),
            "wrong": each["violations"],
            "tokens": same.get("tokens", 0),
            "same": same.get("first_equal", 0),
            "contained": each.get("contained", 0),
            "given_up": each.get("given_up") or 0,
            "faults": [_fault(fault) for fault in each.get("faults", ())],
        }
    return found


def _where(report: Mapping[str, Any]) -> dict[str, str]:
    return {key: report[key] for key in ("machine", "command")}


def _fault(fault: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the first violation that fits a fault with what was planted."""
    planted = fault["planted"]
    if not fault["exact"]:
        return {"fault": fault["fault"], "found": None}
    asked, slot = planted.get("request"), planted.get("slot")
    # Of two states that were swapped, the one that the planter has noted.
    violation = next((each for each in fault["found"] if each.get("slot") == slot), None)
    violation = violation or fault["found"][0]
    requests = None if asked is None else [asked, planted.get("other")]
    writer = violation.get("written_request")
    return {
        "fault": fault["fault"],
        "found": violation["kind"],
        "violations": fault["exact"],
        "request": _names(requests, violation.get("request")),
        "position": _names(planted.get("position"), violation.get("position")),
        "slot": _names(slot, violation.get("slot")),
        "writer": "-" if writer is None else _names(planted.get("writer"), writer),
    }


def _names(planted: Any, found: Any) -> str:
    """Say whether a violation names one of the planted things."""
    if planted is None:  # a request that begins with a state has no position yet
        return "-" if found is None else "named"
    return "yes" if found in (planted if isinstance(planted, list) else [planted]) else "no"


def cost(report: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce what ``sglang_cost.py`` wrote: medians, and ratios to stock round by round."""
    found = {}
    for cell in report["cells"]:
        rows = cell["rows"]
        found[f"{cell['requests']} requests"] = {
            **_where(report),
            **{key: cell[key] for key in ("requests", "context", "tokens")},
            "rounds": len(rows["stock"]),
            "same": sum(len(set(each.values())) == 1 for each in cell["digests"]),
            "compared": len(cell["digests"]),
            "engines": {
                name: {
                    "rate": statistics.median(each["generated"] / each["seconds"] for each in ours),
                    "first": statistics.median(each["first"] for each in ours),
                    "rate_ratio": _spread(
                        [a["seconds"] / b["seconds"] for a, b in _pairs(rows["stock"], ours)]
                    ),
                    "first_ratio": _spread(
                        [b["first"] / a["first"] for a, b in _pairs(rows["stock"], ours)]
                    ),
                }
                for name, ours in rows.items()
            },
        }
    return found


def _pairs(stock: Sequence[Any], ours: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(stock, ours, strict=True)


def _spread(ratios: list[float]) -> list[float]:
    """Return the median, and the bounds without the outer fifths."""
    ratios, outer = sorted(ratios), len(ratios) // 5
    return [statistics.median(ratios), ratios[outer], ratios[-1 - outer]]


def rings(report: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce what ``sglang_rings.py`` wrote, of cells in which both were near the recurrence."""
    found = {}
    for cell in report["cells"]:
        times = cell["us_per_step"]
        if not all(each["ok"] for each in cell["check"].values()) or "ratio" not in times:
            continue
        name = f"k {cell['drafts']}, {cell['requests']} requests, ring {cell['ring_length']}"
        sides = ("kvtxn", "sglang")
        found[name] = {
            **_where(report),
            **{key: cell[key] for key in ("drafts", "requests", "ring_length", "layers")},
            **{key: report["shape"][key] for key in ("value_heads", "value_size", "key_size")},
            "rounds": times["ratio"]["rounds"],
            "microseconds": {side: times[side]["median"] for side in sides},
            "ratio": [times["ratio"][key] for key in ("median", "p20", "p80")],
            "bytes": {side: cell["bytes_per_step"][side]["step"] for side in sides},
            "folds": cell["ring"]["folds_per_request_and_step"],
            "parts": {
                part: each["ratio"]["median"] for part, each in cell.get("parts", {}).items()
            },
        }
    return found


def mamba(report: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce what ``sglang_mamba.py`` wrote, of cells in which both were near the recurrence."""
    return {
        f"k {cell['drafts']}, {cell['requests']} requests": {
            **_where(report),
            **{key: cell[key] for key in ("drafts", "requests", "beside_mib")},
            **{side: cell["us_per_step"][side]["median"] for side in ("kvtxn", "sglang")},
            "ratio": [cell["us_per_step"]["ratio"][key] for key in ("median", "p20", "p80")],
            "parts": {part: each["ratio"]["median"] for part, each in cell["parts"].items()},
        }
        for cell in report["cells"]
        if all(each["ok"] for each in cell["check"].values())
    }


# -- the page -------------------------------------------------------------------------


def drawn_engines(found: Mapping[str, Any]) -> str:
    """Tabulate engines without faults, and those with them."""
    clean = {name: each for name, each in found.items() if not each["faults"]}
    rows = [
        [
            *(name, str(each["rows"]), str(each["steps"]), str(each["bytes"] or "-")),
            *(str(each["wrong"]), f"{each['same']} / {each['tokens']}" if each["tokens"] else "-"),
        ]
        for name, each in clean.items()
    ]
    header = ["engine", "rows read", "steps", "bytes compared", "wrong", "same tokens"]
    total = {key: sum(each[key] for each in clean.values()) for key in ("rows", "wrong", "tokens")}
    says = f"Together {total['rows']} rows read, {total['wrong']} wrong, and {total['tokens']}"
    parts = [table(header, rows), f"{says} tokens compared.", FAULTS + drawn_faults(found)]
    parts += [CONTAINED + contained] if (contained := drawn_contained(found)) else []
    return "\n\n".join([*parts, drawn_commands(found)])


def drawn_contained(found: Mapping[str, Any]) -> str:
    """Tabulate engines that went on after faults; empty if there are none."""
    rows = [
        [
            *(name, str(each["contained"]), str(each["given_up"])),
            f"{each['same']} / {each['tokens']}",
        ]
        for name, each in found.items()
        if each.get("contained")
    ]
    return "\n" + table(["engine", "contained", "given up", "same tokens"], rows) if rows else ""


def drawn_faults(found: Mapping[str, Any]) -> str:
    """Tabulate planted faults, a line each."""
    columns = ("request", "position", "slot", "writer")
    rows = [
        [
            *(name, fault["fault"].replace("_", " "), fault["found"] or "**not found**"),
            *(str(fault.get("violations", "-")), *(fault.get(column, "-") for column in columns)),
        ]
        for name, each in found.items()
        for fault in each["faults"]
    ]
    return "\n" + table(["engine", "fault", "found", "violations", *columns], rows)


def drawn_commands(found: Mapping[str, Any]) -> str:
    """List machines and commands, each once."""
    return "\n".join(
        dict.fromkeys(f"- {each['machine']}: `{each['command']}`" for each in found.values())
    )


def drawn_cost(found: Mapping[str, Any]) -> str:
    """Tabulate engines by turns."""
    rows = [
        [
            *(name, str(cell["requests"]), f"{each['rate']:.0f}"),
            "-" if name == "stock" else ratio(each["rate_ratio"]),
            f"{1000 * each['first']:.0f} ms",
            "-" if name == "stock" else ratio(each["first_ratio"]),
            f"{cell['same']} / {cell['compared']}",
        ]
        for cell in found.values()
        for name, each in cell["engines"].items()
    ]
    cells = {f"{cell['context']} tokens, {cell['tokens']} more" for cell in found.values()}
    rounds = "Prompts of " + " and ".join(sorted(cells)) + " of each request; "
    rounds += f"{next(iter(found.values()))['rounds']} rounds."
    header = ["engine", "requests", "tokens/s", "of stock's", "first token", "of stock's"]
    header += ["rounds of the same tokens"]
    return f"{table(header, rows)}\n\n{rounds}\n\n{drawn_commands(found)}"


def ratio(spread: Sequence[float]) -> str:
    """Write a median with its bounds."""
    return "{:.3f} ({:.3f} to {:.3f})".format(*spread)


def rings_head(found: Mapping[str, Any]) -> str:
    """Say what the columns are."""
    return RINGS.format_map(next(iter(found.values()))) if found else ""


def drawn_rings(found: Mapping[str, Any]) -> str:
    """Tabulate steps of both kernels."""
    rows = [
        [
            *(str(cell["drafts"]), str(cell["requests"]), str(cell["ring_length"])),
            *(f"{cell['microseconds'][side]:.0f}" for side in ("kvtxn", "sglang")),
            ratio(cell["ratio"]),
            *(f"{cell['parts'][p]:.2f}" if cell["parts"] else "-" for p in ("verify", "commit")),
            " / ".join(f"{cell['bytes'][side] / 1e9:.2f}" for side in ("kvtxn", "sglang")),
            f"{cell['folds']:.2f}",
        ]
        for cell in found.values()
    ]
    header = ["k", "requests", "ring", "kvtxn", "SGLang", "kvtxn / SGLang", "of verify"]
    header += ["of commit", "GB moved, kvtxn / SGLang", "folds a step"]
    return f"{table(header, rows)}\n\n{drawn_commands(found)}"


def drawn_mamba(found: Mapping[str, Any]) -> str:
    """Tabulate steps of both kernels, and what they keep."""
    rows = [
        [
            *(str(cell[key]) for key in ("drafts", "requests")),
            *(f"{cell[side]:.0f}" for side in ("kvtxn", "sglang")),
            *(ratio(cell["ratio"]), *(f"{cell['parts'][p]:.2f}" for p in ("verify", "commit"))),
            " / ".join(f"{cell['beside_mib'][side]:.0f}" for side in ("kvtxn", "sglang")),
        ]
        for cell in found.values()
    ]
    header = ["k", "requests", "kvtxn", "SGLang", "kvtxn / SGLang", "of verify", "of commit"]
    drawn = table([*header, "beside the states, kvtxn / SGLang"], rows)
    return f"{drawn}\n\n{drawn_commands(found)}"
