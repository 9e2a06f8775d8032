"""The record of vLLM's own tests, and PEERS.md, which is drawn from it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import peers_models as models

HERE = Path(__file__).parent
RECORD, TABLE = HERE / "peers.json", HERE / "PEERS.md"

#: Why a test does not pass in stock either: the first pattern that is found in its error.
CAUSES = {
    "the hub": r"offline|[Hh]ugging|hf\.co|local directory|couldn't connect|LocalEntry|Repo id"
    r"|Invalid repository|Max retries|Cannot find an appropriate cached",
    "Triton": r"[Tt]riton|kernel parameters|'NoneType' object is not callable",
    "a GPU": r"CUDA|cuda|GPU|gpu|NVIDIA|[Uu]nsupported platform|flash_attn|ROCm|XPU",
}
OTHER = "something else"

#: What was found out about a file's failures, by platform. A test holds each of these to be true.
FOUND = {
    ("CPU", "tests/v1/sample/test_rejection_sampler.py"): (
        "random sampling with drafts is at fault in vLLM's CPU build without Triton: its stand-in "
        "for `expand_kernel` writes each request's temperature into a copy that is dropped, and "
        "logits are divided by whatever was in memory; which tests fail so differs from run to run"
    )
}

HEAD = """# vLLM's own tests with kvtxn active

Drawn from what `python tests/vllm_plugin/peers/run_peers.py SOURCE` saw, offline. Each file of
vLLM's source distribution ran in stock and with
`additional_config={{"kvtxn": {{"policy": "undo", "on_error": "raise"}}}}` in every engine that a
test builds; files with engines ran under `deferred`, too. The number of windows that such engines
had is in the table. Most of these tests build no engine, and see kvtxn's hooks alone. On a CPU
files with engines also ran under `pytest --kvtxn-audit=ledger`, which audits every engine and fails
a test in which a row that is read is not the right one; the table has the number of rows that were
read so, where the engine could be asked at its end.

For a test that was skipped or failed the columns on the right say what it asks for, and the list
below the table what it said. The demo's model stands in for {targets}; drafters of its shape with
random weights stand in for {drafters}, and where torchvision is installed a configuration alone for
{images}. On a GPU engines get 1 GiB for their caches, since several run at a time. Other tests of
`v1/e2e/spec_decode` are left out: each asks for models of the hub or several GPUs.
"""


def cause(reason: str) -> str:
    """Name the thing that a test asks for and does not get in stock."""
    return next((name for name, pattern in CAUSES.items() if re.search(pattern, reason)), OTHER)


def said(reason: str) -> str:
    """A reason without what differs from one run to the next, in at most 160 characters."""
    reason = " ".join(reason.split()).removeprefix("Skipped: ")
    reason = re.sub(r"^\S+: 1 validation error for \w+ Value error, ", "", reason)
    if reason.startswith("assert "):
        reason = re.sub(r"[\[(].*| \+ +where .*", "...", reason)
        reason = re.sub(r"\d+(\.\d+)?", "N", reason)
    reason = re.sub(r"0x[0-9a-f]+|/tmp/\S+|[`|<>]", "", reason)
    return reason if len(reason) <= 160 else reason[:157] + "..."


def by_file(runs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Count outcomes and windows of each file.

    Args:
        runs: by policy what became of each test, ``{test: (outcome, reason)}``, and by file the
            numbers of windows and of rows that were read under audit.
    """
    found: dict[str, dict[str, Any]] = {}
    nothing: tuple[str, str] = ("not run", "")
    files = {policy: {_file(test) for test in run["tests"]} for policy, run in runs.items()}
    for test in sorted({test for run in runs.values() for test in run["tests"]}):
        file = _file(test)
        ends = {policy: run["tests"].get(test, nothing) for policy, run in runs.items()}
        line = found.setdefault(
            file, {"passed": 0, "causes": Counter(), "reasons": Counter(), "differs": {}}
        )
        audited = file in files.get("audit", ())
        ours = "audit" if audited and file not in files.get("undo", ()) else "undo"
        outcome, reason = ends.get(ours, nothing)
        if outcome == "passed":
            line["passed"] += 1
        else:
            line["causes"][cause(reason)] += 1
            line["reasons"][f"{outcome}: {said(reason)}"] += 1
        compared = ["stock", *(["audit"] if audited else [])]
        if any(run["windows"].get(file) for policy, run in runs.items() if policy != "stock"):
            compared.append("deferred")
        if {ends.get(policy, nothing)[0] for policy in compared} != {outcome}:
            line["differs"][test] = ", ".join(
                f"{policy}: {outcome}" + f" ({said(reason)})" * bool(reason)
                for policy, (outcome, reason) in ends.items()
                if policy in (ours, "stock") or outcome != "not run"
            )
    for file, line in found.items():
        line["windows"] = {
            policy: run["windows"][file]
            for policy, run in sorted(runs.items(), reverse=True)
            if policy != "stock" and run["windows"].get(file)
        }
        line["rows"] = sum(run.get("rows", {}).get(file, 0) for run in runs.values())
    return found


def _file(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def section(platform: str, record: dict[str, Any]) -> list[str]:
    """The page's lines on one machine."""
    files: dict[str, dict[str, Any]] = record["files"]
    differing = {test: how for line in files.values() for test, how in line["differs"].items()}
    passed = sum(line["passed"] for line in files.values())
    verdict = "What does not pass does not pass in stock either."
    if differing:
        verdict = f"{len(differing)} end otherwise elsewhere; they are listed below the table."
    names = [*CAUSES, OTHER]
    lines = ["", f"## {platform}", "", f"{record['engine']}. Passed: {passed}. {verdict}", ""]
    lines += [
        f"| file | passed | windows | rows read | {' | '.join(names)} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for file, line in files.items():
        windows = ", ".join(f"{count} `{policy}`" for policy, count in line["windows"].items())
        rows = f"{line['rows']:,}" if line.get("rows") else ""
        counts = " | ".join(str(line["causes"].get(name, "")) for name in names)
        name = file.removeprefix("tests/")
        lines.append(f"| {name} | {line['passed']} | {windows} | {rows} | {counts} |")
    why = [
        f"- {file.removeprefix('tests/')}: {count} `{reason}`"
        for file, line in files.items()
        for reason, count in sorted(line["reasons"].items())
    ]
    explained = [
        f"- {file.removeprefix('tests/')}: {what}."
        for (where, file), what in FOUND.items()
        if where == platform and files.get(file, {}).get("reasons")
    ]
    listed = [f"- `{test}`: {how}" for test, how in differing.items()]
    listed += explained
    return lines + [""] * bool(listed) + listed + [""] * bool(why) + why


def draw(record: dict[str, Any]) -> str:
    """The page."""
    head = HEAD.format(
        targets=", ".join(f"`{name}`" for name in models.TARGETS),
        drafters=", ".join(f"`{name}`" for name in (*models.EAGLE, *models.EAGLE3)),
        images=", ".join(f"`{name}`" for name in models.IMAGES),
    )
    lines = [line for platform in sorted(record) for line in section(platform, record[platform])]
    return head + "\n".join([*lines, ""])


def merge(found: dict[str, Any]) -> None:
    """Record what was seen on a machine, and draw the page anew."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known = record.get(found["platform"], {"files": {}})["files"]
    new = {
        file: line
        for file, line in by_file(found["runs"]).items()
        if file not in known or _was_run(line)
    }
    files = dict(sorted((known | new).items()))
    record[found["platform"]] = {"engine": found["engine"], "files": files}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    TABLE.write_text(draw(record))


def _was_run(line: dict[str, Any]) -> bool:
    """Tell whether a test of this file came to an end."""
    return line["passed"] or not all(reason.startswith("not run") for reason in line["reasons"])
