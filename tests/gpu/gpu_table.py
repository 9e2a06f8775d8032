"""The record of the engines on GPUs, and the page that is drawn from it.

python tests/gpu/gpu_table.py RECORD.json COMMIT   takes over a record that a run left, and draws
python tests/gpu/gpu_table.py                      draws again

Each release of vLLM has a record and a page of its own: ``grid.json`` and ``GRID.md`` are those of
the release that has every kind of engine, and another one's names say which it is.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
for folder in (".", "..", "../vllm_plugin/grid", "../vllm_plugin/serve"):
    sys.path.insert(0, str(HERE / folder))

from gpu_jobs import JOBS, NOT_HERE, STOCK, scenarios  # noqa: E402
from gpu_ties import compare, pairs  # noqa: E402

RECORD = HERE / "grid.json"
PAGE = HERE / "GRID.md"
MAIN_RELEASE = "0.32.0"
SEEN = ("windows", "rejected", "rejected_written", "strays", "early", "lost", "graphs")

HEAD = """# vLLM {release} on a GPU

What `pytest tests/gpu` showed on {machine}, commits {commits},
drawn by `python tests/gpu/gpu_table.py`: tiny models with random weights in bfloat16; `trained` is
a trained one; torch.compile and CUDA graphs as vLLM sets them, each engine in a process of its own.

*windows* (*graphs*: replayed whole) and *rejected* rows are those that an oracle saw that reads the
caches on the device around each step and knows nothing of kvtxn; *left* is how many rejected rows
were still there after it, *lost* how many accepted rows were not in each layer, *strays* how many
layers had changed anywhere else, *early* how many draft rows were in the cache before their commit;
*bypassed* steps have no window, so their rows are left as in stock. So that a row counts as written
though it comes to the bytes that were in its place before, the oracle puts others there first.
*accepted* of *drafted* rows are vLLM's own counts. *same tokens*: requests of all scenarios, the
first one also without the oracle, whose tokens are those of a stock engine with the same attention.
*switched*: requests of which one and the same engine says the same with its windows switched off,
that is, as stock, to the last bit of every logit.

*noise* is the most that a logit differs by from stock's after the same tokens, and *gap*, of the
requests that part from stock, the most by which stock's best token leads the one taken instead; in
steps of bfloat16 at the size of the best logit (1/16 from 8 to 16). Drafts of EAGLE and Medusa are
accepted by lot here, and where those part nothing leads: *noise* says that the logits do not part.
"-": an older run, which did not look at this.

All is stock's to the bit wherever the same requests share a step, which *switched* shows. Which
requests share a step depends on time where vLLM schedules ahead of the GPU, most of all in the
engine *apart*, whose requests come from another process; in engines called *steady* it does not.
Besides, each engine compiles kernels of its own, whatever its policy, and a
near-tie falls as they sum; the best two logits of random models are often equal. So stock parts
from stock, too: see the end.
"""


def cell(ours: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """Compare a scenario of one policy with stock's."""
    both = pairs(ours, stock)
    seen = ours.get("oracle", [])
    counts = ours["kvtxn"][-1]
    return {
        "requests": len(both),
        "same": sum(b is not None and stock["tokens"][a] == ours["tokens"][b] for a, b in both),
        **{key: ours["stats"][key] for key in ("drafted", "accepted", "preemptions")},
        "stock_accepted": stock["stats"]["accepted"],
        "hits": ours["hits"],
        "cached": ours["cached"],
        "ranks": len(ours["kvtxn"]),
        "ranks_agree": all(rank == seen[0] for rank in seen),
        **{key: seen[-1].get(key, 0) for key in SEEN if seen},
        **(compare(ours, stock) if "logits" in ours and "logits" in stock else {}),
        **({"switched": identical(ours, ours["off"])} if "off" in ours else {}),
        "fallbacks": counts.get("kvtxn_fallbacks_total", 0),
        "counted": counts.get("kvtxn_windows_total_committed", 0),
        "bypassed": {
            key.removeprefix("kvtxn_bypassed_windows_total_"): value
            for key, value in counts.items()
            if key.startswith("kvtxn_bypassed_windows_total_") and value
        },
    }


def identical(ours: dict[str, Any], off: dict[str, Any]) -> int:
    """Requests of which an engine says the same, logits included, with its windows off."""
    keys = ("prompts", "tokens", "logits")
    here, there = (zip(*(found[key] for key in keys), strict=True) for found in (ours, off))
    return sum(a == b for a, b in zip(here, there, strict=False))


def record(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Reduce the engines' reports to a record, by job and policy; errors stay as they are."""
    found: dict[str, Any] = {}
    for engine, report in reports.items():
        name, _, policy = engine.rpartition(".")
        stock = reports.get(f"{name}.stock", {"error": "no stock engine"})
        error = report.get("error") or stock.get("error")
        kept = {key: report.get(key) for key in ("attention", "runner", "graphs", "ahead", "cache")}
        if error is not None:
            kept["error"], kept["log"] = error, report.get("log", "")[-3000:]
        else:
            kept["cells"] = {
                each: cell(report[each], stock[each]) for each in ["unwatched", *scenarios(name)]
            }
            if "memory" in report:
                kept["inside"] = inside(report, stock, scenarios(name)[0])
            if name == "tp2" and "error" not in reports.get("trained.stock", {"error": ""}):
                alone = reports["trained.stock"]["novels"]["tokens"]
                both = zip(report["novels"]["tokens"], alone, strict=True)
                kept["as_alone"] = sum(a == b for a, b in both)
                counts = report["unwatched"]["kvtxn"]
                same = policy != "stock" and all(each == counts[0] for each in counts)
                kept["ranks"] = len(counts) if same else 0
        found.setdefault(name, {})[policy] = kept
    machines = {report["machine"] for report in reports.values() if "machine" in report}
    machine = " and ".join(sorted(machines))
    return {"machine": machine, "jobs": {name: found[name] for name in JOBS if name in found}}


def inside(report: dict[str, Any], stock: dict[str, Any], name: str) -> dict[str, Any]:
    """Reduce an engine's memory, late compilations and failed stages."""
    tokens = stock[name]["tokens"]

    def number(found: dict[str, Any], key: str) -> int:
        return int(found["kvtxn"][-1].get(f"kvtxn_{key}", 0))

    return {
        "memory": report["memory"],
        "more": report["memory"]["allocated"] - stock["memory"]["allocated"],
        "compiled": sum("kvtxn" in name for name in report["compiled"]),
        "faults": {
            stage: {
                "calls": found["calls"],
                "fallbacks": number(found["during"], "fallbacks_total"),
                "resting": number(found["during"], "bypassed_windows_total_resting"),
                "requests": len(tokens),
                "same": sum(map(list.__eq__, found["during"]["tokens"], tokens)),
                "lost": found["during"]["oracle"][-1].get("lost", 0),
                "windows_afterwards": number(found["afterwards"], "windows_total_committed"),
                "fallbacks_afterwards": number(found["afterwards"], "fallbacks_total"),
            }
            for stage, found in report["faults"].items()
        },
    }


def looked_inside(name: str, policy: str, found: dict[str, Any]) -> list[str]:
    """Say how much memory an engine takes more than stock, and how each failed stage ended."""
    memory = found["memory"]
    share = found["more"] / (memory["row_bytes"] * memory["captured_rows"])
    lines = [
        f"- {name}, `{policy}`: {found['more'] / 2**20:.2f} MiB more than stock, {share:.2f} of "
        f"the largest graph's rows; {found['compiled']} kernels compiled after the start."
    ]
    for stage, each in found["faults"].items():
        lines.append(
            f"- {name}, `{policy}`, {stage} fails once: {each['fallbacks']} fallbacks, "
            f"{each['resting']} steps at rest, {each['same']} of {each['requests']} requests have "
            f"stock's tokens, {each['lost']} rows lost; then {each['windows_afterwards']} windows, "
            f"{each['fallbacks_afterwards']} fallbacks."
        )
    return lines


def bypassed(cells: list[dict[str, Any]]) -> str:
    """Steps without a window, by reason."""
    reasons = Counter[str]()
    for each in cells:
        reasons.update({reason: int(count) for reason, count in each["bypassed"].items()})
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "0"


def most(key: str, cells: list[dict[str, Any]]) -> str:
    """The largest of some cells, or "-" where they do not say."""
    return f"{max(cell[key] for cell in cells):g}" if all(key in cell for cell in cells) else "-"


def switched(cells: list[dict[str, Any]]) -> str:
    """Requests that are the same to the bit in one engine."""
    return str(sum(cell["switched"] for cell in cells)) if "switched" in cells[0] else "-"


def line(name: str, policy: str, found: dict[str, Any]) -> str:
    """Draw the row of an engine under one policy."""
    cells = found["cells"]
    watched = [cells[each] for each in cells if each != "unwatched"]

    def total(key: str, among: list[dict[str, Any]] = watched) -> int:
        return int(sum(cell.get(key, 0) for cell in among))

    every = list(cells.values())
    marked = all("lost" in cell for cell in watched)
    looked = [*(str(total(key)) for key in ("rejected", "rejected_written"))]
    looked += [str(total("lost")) if marked else "-", str(total("strays"))]
    looked.append(str(total("early")) if policy == "deferred" else "")
    windows = f"{total('windows')} ({total('graphs')})"
    if not watched:  # a run without the oracle
        windows = str(total("counted", every))
        looked = ["-"] * 4 + ["-" if policy == "deferred" else ""]
    columns = [
        f"{name}, {found['runner'].upper()}, {found['attention']}",
        f"`{policy}`",
        f"{total('same', every)} / {total('requests', every)}",
        *(most(key, every) for key in ("gap", "noise")),
        switched(every),
        f"{total('accepted', every)} / {total('drafted', every)}",
        windows,
        *looked,
        bypassed(watched or every),
        str(total("fallbacks", every)),
    ]
    return f"| {' | '.join(columns)} |"


def agreement(name: str, policy: str, found: dict[str, Any]) -> str:
    """Say how far two stock engines agree."""
    cells = list(found["cells"].values())
    same, all_ = (sum(cell[key] for cell in cells) for key in ("same", "requests"))
    who = (
        name
        if policy == "again"
        else f"{name}, {found['attention']} next to {JOBS[name]['attention']}"
    )
    ties = "; ".join(f"{key} {most(key, cells)}" for key in ("gap", "noise"))
    return f"- {who}: {same} of {all_} requests have the same tokens; {ties}."


def draw(grid: dict[str, Any]) -> str:
    """Draw the page from the record."""
    head = (
        "| engine | policy | same tokens | gap | noise | switched | accepted / drafted "
        "| windows (graphs) "
    )
    lines = [
        f"{head}| rejected | left | lost | strays | early | bypassed | fallbacks |",
        "|---|---|" + "---:|" * 13,
    ]
    notes, failed, again, within = [], [], [], []
    for name, policies in grid["jobs"].items():
        notes.append(f"- {name}: {JOBS[name]['says']}; {', '.join(scenarios(name))}.")
        for policy, found in policies.items():
            if "error" in found:
                failed.append(f"- {name}, `{policy}`: {found['error']}")
            elif policy in STOCK:
                again += [agreement(name, policy, found)] if policy != "stock" else []
            else:
                lines.append(line(name, policy, found))
                within += looked_inside(name, policy, found["inside"]) if "inside" in found else []
    for policy, found in grid["jobs"].get("tp2", {}).items():
        if "as_alone" in found:
            requests = found["cells"]["unwatched"]["requests"]
            same = f"{found['as_alone']} of {requests}"
            ranks = f"; {found['ranks']} ranks counted the same" if found.get("ranks") else ""
            notes.append(
                f"- tp2, {policy}: {same} requests have the tokens of stock on one GPU{ranks}."
            )
    out = [name for name in JOBS if name not in grid["jobs"]]
    notes += [f"\nNot in this record: {', '.join(out)}."] if out else []
    if again:
        notes += ["", "Stock next to stock:", "", *again]
    if within:
        notes += ["", "Looked at inside:", "", *within]
    commits = ", ".join(grid["commits"])
    parts = [
        HEAD.format(release=release_of(grid), machine=grid["machine"], commits=commits),
        *lines,
        "\nThe engines, and their scenarios:\n",
    ]
    return "\n".join([*parts, *notes, *(["\nDid not run:\n", *failed] if failed else []), ""])


def release_of(grid: dict[str, Any]) -> str:
    """The release of vLLM that a record's machine ran."""
    return str(grid["machine"]).rpartition("vLLM ")[2]


def record_for(release: str) -> Path:
    """The path of a release's record."""
    return RECORD if release == MAIN_RELEASE else HERE / f"grid-{release}.json"


def page_for(record: Path) -> Path:
    """The path of the page that is drawn from a record."""
    return record.with_name(record.name.replace("grid", "GRID")).with_suffix(".md")


def records() -> list[Path]:
    """The paths of all records, the main one first."""
    return [RECORD, *sorted(HERE.glob("grid-*.json"))]


def taken_over(grid: dict[str, Any], new: dict[str, Any], commit: str) -> dict[str, Any]:
    """Return a record with the engines of another run put in, policy by policy.

    An engine whose attention was not installed keeps what an earlier run said of it, if any did.
    """
    jobs = dict(grid["jobs"])
    for name, policies in new["jobs"].items():
        known = jobs.get(name, {}) | {
            each: {"commit": commit, **found}
            for each, found in policies.items()
            if NOT_HERE not in found.get("error", "")
        }
        jobs[name] = {policy: known[policy] for policy in sorted(known)}
    jobs = {name: jobs[name] for name in JOBS if jobs.get(name)}
    commits = {found["commit"] for policies in jobs.values() for found in policies.values()}
    return {"machine": new["machine"], "commits": sorted(commits), "jobs": jobs}


def take(path: Path, commit: str) -> None:
    """Take over the record that a run of this commit left at ``path``."""
    new = json.loads(path.read_text())
    place = record_for(release_of(new))
    grid = json.loads(place.read_text()) if place.exists() else {"jobs": {}}
    place.write_text(json.dumps(taken_over(grid, new, commit), indent=1) + "\n")


def redraw() -> None:
    """Draw the page of each record."""
    for path in records():
        page_for(path).write_text(draw(json.loads(path.read_text())))


def main() -> None:
    """Take a record over, if one is named, and draw all pages."""
    if len(sys.argv) > 1:
        take(Path(sys.argv[1]), sys.argv[2])
    redraw()


if __name__ == "__main__":
    main()
