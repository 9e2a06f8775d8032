"""The generated parts of documents: ``python -m kvtxn.benchmarks.documents``, in the root.

Each stands between a pair of markers, ``<!-- name -->`` and ``<!-- /name -->``,
and is made from the code or from a result file. Nothing between them is typed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .. import window_transitions
from ..audit.findings import AUDIT_FAMILIES
from ..integrations.audit_command.verdict import MEANING
from ..integrations.vllm_plugin.policy import state_rules, supported
from ..metrics import FAMILIES
from . import dashboard
from .common.machine import RESULTS
from .common.markdown import machine_line, table, words
from .engines import capacity
from .engines import report as vllm_report
from .host import engine_step
from .kernels import backends, recurrent
from .soak import verdict as soak


def load(name: str) -> dict[str, Any]:
    """Read a result file, by its name without ``.json``."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def host() -> str:
    """Return a table of the host time of an idle window on a CPU, per policy."""
    return _host_table("policy", [("", "host-cpu")])


def host_gpu() -> str:
    """Return a table of the host time of an idle window on a GPU machine, per executor."""
    names = (("`triton`, layer by layer", "triton"), ("`cudagraph`, layer by layer", "cudagraph"))
    return _host_table("", [(what, f"h200-host-{name}") for what, name in names])


def _host_table(first: str, results: Sequence[tuple[str, str]]) -> str:
    """Return a table of results of ``kvtxn bench host``, in microseconds.

    The last result's machine stands below it.

    Args:
        first: the header of the first column.
        results: pairs of the first cell, "" for the policy, and the result's name.
    """
    rows, parts = [], ("begin", "stage", "commit", "all")
    for what, name in results:
        result = load(name)
        for r in result["rows"]:
            rows.append([what or r["policy"], str(r["requests"]), *(f"{r[p]:.0f}" for p in parts)])
    header = [first, "requests", "begin", f"stage, {result['layers']} layers", "commit", "all"]
    return f"{table(header, rows)}\n\nMicroseconds. {machine_line(result['machine'])}."


def kernels() -> str:
    """Return a table of one commit's GPU time for all layers, beside stock's writes and a copy."""
    result = load("h200-kernels")
    by_rows: dict[int, dict[float, dict[str, float]]] = {}
    for row in result["rows"]:
        by_rows.setdefault(row["rows"], {})[row["accepted"]] = row["us"]
    rows = [
        [
            str(count),
            f"{at[1.0]['stock']:.0f}",
            f"{at[1.0]['commit']:.1f}",
            f"{at[1.0]['floor']:.1f}",
            f"{at[0.3]['commit']:.1f}",
            f"{at[0.0]['commit']:.1f}",
            f"{at[0.3]['undo']:.0f}",
        ]
        for count, at in sorted(by_rows.items())
    ]
    header = ["rows", "stock, 32 writes", "commit all drafts", "copy of equal bytes"]
    header += ["commit 30 %", "commit none", "undo 30 %, on top of stock"]
    return f"{table(header, rows)}\n\nMicroseconds. {machine_line(result['machine'])}."


#: Ways in which attention reads a window, and their names in the table.
_WAYS: Final = {
    "slots": "stock's calls by slot",
    "own": "`w.attend`'s kernel",
}


def attention() -> str:
    """Return a table of 32 layers' attention that reads the window, and of stock's."""
    result = load("h200-attention")
    ways = [way for way in _WAYS if way in result["rows"][0]["us"]]
    rows = []
    for row in result["rows"]:
        us = row["us"]
        times = [f"{us['attention']:.0f}", f"{us['stock']:.0f}"]
        for way in ways:
            times += [f"{us[way]:.0f}", f"{us[way] / us['stock']:.3f}"]
        rows.append([f"{row['requests']}, {row['context']}", *times])
    header = ["requests, context", "attention alone", "stock: write + attention"]
    for way in ways:
        header += [f"{_WAYS[way]} + commit", "of stock"]
    return f"{table(header, rows)}\n\nMicroseconds. {machine_line(result['machine'])}."


def models() -> str:
    """Return a table of one commit of all drafts in windows of other models.

    Beside stock's writes and a copy of equal bytes, in microseconds.
    """
    result = load("h200-models")
    rows = []
    for row in result["rows"]:
        if row["accepted"] == 1.0:
            us = row["us"]
            stock = f"{us['stock']:.0f}" if "stock" in us else "-"
            times = [stock, f"{us['commit']:.1f}", f"{us['floor']:.1f}"]
            times.append(f"{us['commit'] / us['floor']:.2f}")
            rows.append([row["model"], str(row["layers"]), str(row["rows"]), *times])
    header = ["model", "layers", "rows", "stock writes", "commit all drafts"]
    header += ["copy of equal bytes", "of the copy"]
    return f"{table(header, rows)}\n\nMicroseconds. {machine_line(result['machine'])}."


def sanitizer() -> str:
    """Return a table of compute-sanitizer's complaints, a row per executor and kernel family.

    A line below it names families that were run again at another commit.
    """
    result = load("h200-sanitizer")
    by_family: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        said = f"{row['complaints']} in {row['passed']} cases" if row["clean"] else "not clean"
        by_family.setdefault((row["executor"], row["family"]), {})[row["tool"]] = said
    tools = sorted({row["tool"] for row in result["rows"]})
    rows = [
        [f"`{executor}`", family, *(said.get(tool, "-") for tool in tools)]
        for (executor, family), said in by_family.items()
    ]
    header = ["executor", "family", *tools]
    again = [row for row in result["rows"] if "commit" in row]
    later = sorted({f"`{row['family']}` at {row['commit']}" for row in again})
    text = f"{table(header, rows)}\n\nComplaints. {machine_line(result['machine'])}"
    return f"{text}; {', '.join(later)}." if later else f"{text}."


def vllm_speed(*names: str) -> str:
    """Return tables of whole engines' tokens per second, relative to stock's in the same rounds.

    Each stands between its model and drafts, and its method, cells not measured, and machine.

    Args:
        names: results, without ``.json``, in the order of the tables.
    """
    parts = []
    for name in names:
        result = load(name)
        settings = result["settings"]
        parts.append(f"{settings['model']}, {settings['drafter']}, k = {settings['drafts']}:")
        parts += [vllm_report.speed(result["cells"]), vllm_report.method(result)]
        parts += [missing] if (missing := vllm_report.unmeasured(result)) else []
        more = f"`kvtxn bench report benchmarks/results/{name}.json`"
        parts.append(f"{machine_line(result['machine'])}. Latency and windows: {more}.")
    return "\n\n".join(parts)


def speed() -> str:
    """Return the guide's sentence on throughput under ``deferred`` as a share of stock's."""
    result = load("h200-vllm-llama3-8b-eagle-joint")
    return vllm_report.headline(result)


def headline() -> str:
    """Return the README's line on a full hybrid: tokens per second at equal memory."""
    cell, held, exact, fast = _equal_memory()
    gpu = load("h200-vllm-qwen3.5-9b-equal-memory")["machine"]["gpu"].removeprefix("NVIDIA ")
    return (
        f"- **{exact:.1f} to {fast:.1f} times vLLM's tokens per second** where recurrent states "
        f"fill the cache: {cell['requests']} requests of Qwen3.5-9B on an {gpu}, in a KV cache in "
        f"which stock holds {held}. kvtxn keeps one state per request in place of one per draft. "
        "[How](docs/vllm.md#hybrids)."
    )


def hybrids() -> str:
    """Return the guide's sentences on hybrids: at equal memory, and the kernels' time."""
    cell, held, exact, fast = _equal_memory()
    return (
        f"In a KV cache in which stock holds {held} requests of "
        f"Qwen3.5-9B, {cell['requests']} of them ran with **{exact:.1f} times stock's tokens per "
        f"second** with `exact`, and {fast:.1f} times with `fast`. "
        f"{recurrent.sentence(load('h200-recurrent'))}"
    )


def _equal_memory() -> tuple[dict[str, Any], int, float, float]:
    """Return the cell of a full hybrid, the requests that stock holds, and two ratios to stock.

    The ratios are those of ``exact`` and of ``fast``.
    """
    result = load("h200-vllm-qwen3.5-9b-equal-memory")
    [cell] = result["cells"]
    exact, fast = (
        cell["engines"][name]["of_stock"]["tokens_per_s"]["median"] for name in ("exact", "fast")
    )
    return cell, result["settings"]["equal_cache"], exact, fast


def states_chosen() -> str:
    """Return the rule of ``recurrent="auto"`` in words, and two tables of numbers behind it."""
    times, held = state_rules.EXACT_OF_STOCK, state_rules.HELD_OF_STOCK
    counts = list(next(iter(times.values())))
    header = ["the states' kernels of a verify step, part of stock's time", "1 request"]
    rows = [
        [f"vLLM's {kernel} kernel", *(f"{result[count]:.2f}" for count in counts)]
        for kernel, result in times.items()
    ]
    lengths = list(dict.fromkeys(tokens for tokens, _ in held))
    room = [
        [f"prefix cache {'on' if cached else 'off'}"]
        + [f"{held[tokens, cached]:.2f}" for tokens in lengths]
        for cached in dict.fromkeys(cached for _, cached in held)
    ]
    return "\n\n".join(
        [
            state_rules.rule_in_words(),
            table([*header, *(str(count) for count in counts[1:])], rows),
            table(["times as many requests", *(f"of {n} tokens" for n in lengths)], room),
        ]
    )


def releases() -> str:
    """Return the releases of vLLM that were checked, as one line of a list.

    On GPUs, one GPU, CPUs.
    """
    several, some = supported.MORE_GPU_RELEASES, supported.GPU_RELEASES
    places = {
        "GPUs": several,
        "one GPU": [release for release in some if release not in several],
        "CPUs": supported.RELEASES,
    }
    said = [f"{_listed(versions)} on {place}" for place, versions in places.items() if versions]
    return f"- Releases of vLLM: {'; '.join(said)}."


def violations() -> str:
    """Return a table of the kinds of violations, and the meaning of each."""
    return words(["kind", "it means"], [[f"`{kind}`", said] for kind, said in MEANING.items()])


def metrics() -> str:
    """Return the metrics of a vLLM engine, and the labels that each has of its own."""
    from ..integrations.vllm_plugin.engine_calls import ACTIVE

    rows = []
    for family in (ACTIVE, *FAMILIES, *AUDIT_FAMILIES):
        labels = [family.label] if family.label else []
        labels += ["rank"] if family.per_rank else []
        rows.append([f"`{family.name}`", ", ".join(f"`{label}`" for label in labels), family.help])
    return words(["metric", "labels", "meaning"], rows)


def panels() -> str:
    """Return the dashboard with the metrics of a vLLM engine."""
    from ..integrations.vllm_plugin.engine_calls import ACTIVE

    return dashboard.as_json(ACTIVE)


def _listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them: "a, b and c".

    Raises:
        ValueError: there is none.
    """
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


#: The documents that have generated parts, from the root of the repo.
DOCUMENTS: Final = (
    Path("README.md"),
    Path("benchmarks/README.md"),
    *(
        Path(f"docs/{name}.md")
        for name in ("ledger", "vllm", "vllm-metrics", "vllm-states", "windows")
    ),
)

#: Marker -> the function that generates the part between the markers.
SECTIONS: Final[dict[str, Callable[[], str]]] = {
    "headline": headline,
    "speed": speed,
    "states": window_transitions.as_markdown,
    "releases": releases,
    "violations": violations,
    "metrics": metrics,
    "queries": dashboard.as_promql,
    "host": host,
    "kernels": kernels,
    "models": models,
    "sanitizer": sanitizer,
    "attention": attention,
    "host-gpu": host_gpu,
    "vllm-gpu": lambda: vllm_speed("h200-vllm-llama3-8b-eagle-joint", "h200-vllm-host-bound-ngram"),
    "vllm-gpu-first-token": lambda: vllm_report.latency(
        load("h200-vllm-llama3-8b-eagle-joint")["cells"]
    ),
    "vllm-gpu-host": lambda: vllm_report.clocked(load("h200-vllm-host-bound-ngram")),
    "vllm-cpu-audit": lambda: vllm_speed("cpu-vllm-ledger"),
    "vllm-cpu-smol": lambda: vllm_speed("cpu-vllm-smol"),
    "steps": lambda: engine_step.report(load("h200-steps")),
    "backends-blocks": lambda: backends.report(load("h200-backends-blocks")),
    "backends": lambda: "\n\n".join(
        make(load("h200-backends")) for make in (backends.report, backends.bits)
    ),
    "recurrent": lambda: recurrent.report(load("h200-recurrent")),
    "recurrent-bfloat16": lambda: recurrent.report(load("h200-recurrent-bfloat16")),
    "recurrent-mamba2": lambda: recurrent.report(load("h200-recurrent-mamba2")),
    "recurrent-k7": lambda: recurrent.report(load("h200-recurrent-k7")),
    "capacity": lambda: capacity.report(load("capacity-scheduler")),
    "capacity-gpu": lambda: capacity.report(load("h200-capacity")),
    "hybrids": hybrids,
    "states-auto": states_chosen,
    "soak": lambda: soak.report([load(name) for name in ("h200-soak-ngram", "cpu-soak")]),
    "vllm-gpu-hybrid": lambda: vllm_speed("h200-vllm-qwen3.5-9b"),
    "vllm-gpu-hybrid-host": lambda: vllm_report.clocked(load("h200-vllm-qwen3.5-9b")),
    "vllm-gpu-hybrid-memory": lambda: vllm_speed("h200-vllm-qwen3.5-9b-equal-memory"),
    "vllm-gpu-hybrid-mamba2": lambda: vllm_speed("h200-vllm-nemotron-h-8b"),
    "vllm-gpu-hybrid-mamba2-host": lambda: vllm_report.clocked(load("h200-vllm-nemotron-h-8b")),
    "vllm-gpu-audit": lambda: vllm_speed("h200-vllm-llama3-8b-audit"),
    "vllm-gpu-audit-connector": lambda: vllm_speed("h200-vllm-llama3-8b-audit-connector"),
    "vllm-gpu-audit-time": lambda: vllm_report.latency(load("h200-vllm-llama3-8b-audit")["cells"]),
    "vllm-gpu-audit-rows": lambda: vllm_report.audit(load("h200-vllm-llama3-8b-audit")),
}


def fill(text: str, sections: Mapping[str, Callable[[], str]] = SECTIONS) -> str:
    """Return ``text`` with every marked part that has a name in ``sections`` generated anew.

    Args:
        text: a document. A part lies between the lines ``<!-- NAME -->`` and ``<!-- /NAME -->``.
        sections: makes the text of each part, by name. Names without a mark are not made.
    """
    for name, make in sections.items():
        if f"<!-- {name} -->" in text:
            before, _, rest = text.partition(f"<!-- {name} -->\n")
            rest = rest.partition(f"<!-- /{name} -->")[2]
            text = f"{before}<!-- {name} -->\n{make()}\n<!-- /{name} -->{rest}"
    return text


def main() -> None:
    """Rewrite the documents named on the command line, or all; write the dashboard in any case."""
    parser = argparse.ArgumentParser(description="fill the generated parts of documents")
    parser.add_argument("documents", type=Path, nargs="*", default=DOCUMENTS)
    for path in parser.parse_args().documents:
        path.write_text(fill(path.read_text()))
    dashboard.FILE.write_text(panels())


if __name__ == "__main__":
    main()
