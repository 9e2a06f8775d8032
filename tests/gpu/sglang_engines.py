"""Small engines of SGLang on one GPU, side by side: with the ledger, without it, with faults.

python tests/gpu/sglang_engines.py OUT [ENGINE ...]     default: all of ``sglang_models.ENGINES``

The first engine runs alone, to compile kernels. OUT gets ``engines.json``, which ``gpu_seen.py``
reads, and logs, results, and what the recorder wrote. kvtxn is the one that is installed for this
Python, and so is SGLang, if ``--site`` names no folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sglang_machine import environment, where
from sglang_models import ENGINES, KNOWN, MODELS, make

HERE: Final = Path(__file__).resolve().parent
#: Plug-ins around kvtxn's, in the order in which SGLang loads them.
PLUGINS: Final = "[sglang.srt.plugins]\n" + "".join(
    f"{name} = {module}:register\n"
    for name, module in (
        ("aa_mend", "sglang_mend"),
        ("yy_faults", "sglang_faults"),
        ("zz_recorder", "sglang_recorder"),
    )
)
#: In the place of a package that SGLang imports for other models.
STUB: Final = '''"""A stub: names can be imported, calls raise."""


class FlashMLASchedMeta:
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"flash_mla.{name} is a stub")

    return missing
'''
WRONG: Final = re.compile(r"\b\w*(Error|Exception)\b|error:|undefined symbol|No module")
OURS: Final = re.compile(r"kvtxn.*event=|Failed to.*plugin")
PARTS: Final = (
    *("load_s", "batch_s", "fuzz_s", "steady_s", "accept", "errors", "failed", "flushed"),
    *("dropped", "from_host", "given_up"),
)
#: Alarms that the KV canary can name in its life; by default the first 1024.
RING_ROWS: Final = 1 << 17
RING: Final = {"SGLANG_KV_CANARY_RING_CAPACITY": str(RING_ROWS)}
#: By kind of a run, what an engine gets: arguments and variables.
KINDS: Final[Mapping[str, tuple[dict[str, Any], dict[str, str]]]] = {
    "ledger": ({}, {}),
    "plain": ({}, {}),
    "recorded": ({}, {}),
    "canary": ({"kv_canary": "log"}, RING),
    "strict": (
        {"kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 16},
        {
            **RING,
            "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1",
            "SGLANG_KV_CANARY_ENABLE_MHA_V": "1",
        },
    ),
}
COUNTERS: Final = {
    "rows": "kvtxn_audit_rows_checked_total",
    "steps": "kvtxn_audit_steps_total",
    "active": "kvtxn_audit_active",
    "bytes": "kvtxn_audit_bytes_compared_total",
    "unjudged": "kvtxn_audit_unjudged_total",
    "unverified": "kvtxn_audit_rows_unverified_total",
}


def install(folder: Path) -> None:
    """Write what makes the plug-ins beside this script known, and the stub."""
    info = folder / "kvtxn_tools-0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtxn-tools\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(PLUGINS)
    if importlib.util.find_spec("flash_mla") is None:
        for name in ("__init__", "flash_mla_interface"):
            (folder / "flash_mla").mkdir(exist_ok=True)
            (folder / "flash_mla" / f"{name}.py").write_text(STUB)


def variables(name: str, kind: str, out: Path) -> dict[str, str]:
    """Return the variables of an engine's process."""
    found = environment()
    for unwanted in ("KVTXN_SGLANG", "RECORD_FILE", "FAULTS", "WEIGHTS", "UNDO", "ON_VIOLATION"):
        found.pop(unwanted, None)
    found |= {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
    found |= {**ENGINES, **KNOWN}[name][2]
    found["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    paths = [found.get("PYTHONPATH", ""), str(HERE), str(out / "plugins")]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    audit, contains = found.pop("AUDIT", "ledger"), found.pop("ON_VIOLATION", None)
    if contains and kind == "plain":  # its texts are compared with those of the faulty one
        del found["FAULTS"]
    found["FAULTS_FILE"] = str(faults_file(name, kind, out))
    found |= KINDS[kind][1]
    if kind in ("ledger", "recorded"):
        every = {"audit_every": 8} if audit == "bytes" else {}
        every |= {"on_violation": contains} if contains else {}
        found["KVTXN_SGLANG"] = json.dumps({"audit": audit, "log_tokens": True, **every})
    if kind == "recorded":
        found["RECORD_FILE"] = str(out / "logs" / f"{name}.recorded.jsonl")
    return found


def faults_file(name: str, kind: str, out: Path) -> Path:
    return out / "logs" / f"{name}.{kind}.faults.jsonl"


class Job:
    """An engine's process.

    Args:
        name: of the engine.
        kind: of ``KINDS``.
        given: the script's arguments.
        limit: seconds.
    """

    def __init__(self, name: str, kind: str, given: argparse.Namespace, limit: float) -> None:
        self.name, self.kind, self.out = name, kind, given.out
        self.begun, self.limit, self.took = time.time(), limit, 0.0
        self.log = self.out / "logs" / f"{name}.{kind}.log"
        faults_file(name, kind, given.out).unlink(missing_ok=True)
        extra = {**given.extra, **KINDS[kind][0]}
        options = {"fuzz": given.fuzz, "rounds": given.rounds, "extra": extra}
        command = [sys.executable, str(HERE / given.child)]
        command += [str(self.out), name, kind, json.dumps(options)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables(name, kind, self.out),
                start_new_session=True,
                cwd=self.out,
            )

    def stop(self) -> None:
        """End the engine with all of its processes."""
        self.took = self.took or round(time.time() - self.begun, 1)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def over(self) -> bool:
        """End an engine that is done or out of time; tell whether it is."""
        if self.process.poll() is None and time.time() <= self.begun + self.limit:
            return False
        self.stop()
        return True


# -- what was found -----------------------------------------------------------------------


def result_of(name: str, kind: str, out: Path) -> dict[str, Any]:
    path = out / "results" / f"{name}.{kind}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def summary(job: Job) -> dict[str, Any]:
    """Say what an engine counted and found."""
    result = result_of(job.name, job.kind, job.out)
    lines = job.log.read_text(errors="replace").splitlines()
    row: dict[str, Any] = {"engine": job.name, "kind": job.kind, "took": job.took}
    row |= {"exit": job.process.poll(), "ok": result.get("ok", False)}
    row |= {part: result.get(part) for part in PARTS}
    row["log"] = [line[-600:] for line in lines if OURS.search(line)][:6]
    row["contained"] = sum("kvtxn.audit_contained" in line for line in lines)
    report = result.get("report")
    if report:
        row |= {key: report["counters"].get(name) for key, name in COUNTERS.items()}
        row |= {"violations": report["number"], "first": report["violations"][:3]}
        planted = faults_file(job.name, job.kind, job.out)
        if planted.exists():
            faults = [json.loads(line) for line in planted.read_text().splitlines()]
            found = [judged(fault, report["violations"]) for fault in faults]
            # Of a fault without a violation nothing is known where violations were left out.
            whole = report["number"] <= len(report["violations"])
            row["faults"] = [each for each in found if each["exact"] or whole]
    if job.kind != "plain" and (plain := plain_tokens(job.name, job.out)):
        row["same"] = same(result.get("tokens") or [], plain)
    if not row["ok"]:
        wrong = [line[-300:] for line in lines if WRONG.search(line)]
        row["wrong"] = list(dict.fromkeys(wrong[:4] + wrong[-6:]))
        row["last"] = [line[-300:] for line in lines[-25:]]
    return row


def plain_tokens(name: str, out: Path) -> list[Any]:
    """Return the texts without kvtxn of the same engine, or else of another one of its model.

    Drafts, caches and chunks change no text at temperature 0.
    """
    model = {**ENGINES, **KNOWN}[name][0]
    others = [other for other, (its, _, _) in ENGINES.items() if its == model]
    found = (result_of(each, "plain", out).get("tokens") for each in (name, *others))
    return next(filter(None, found), [])


def same(one: Sequence[Any], other: Sequence[Any]) -> dict[str, int]:
    """Compare the texts of two engines, and count the tokens before they part.

    A request that one of them has given up, as it read wrong rows again, has no text.
    """
    batches = zip(one, other, strict=False)
    pairs = [pair for both in batches for pair in zip(*both, strict=True) if None not in pair]
    lengths = [min(map(len, pair)) for pair in pairs]
    parted = (
        next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), length)
        for (a, b), length in zip(pairs, lengths, strict=True)
    )
    return {
        "requests": len(pairs),
        "equal": sum(a == b for a, b in pairs),
        "tokens": sum(lengths),
        "first_equal": sum(parted),
    }


def judged(fault: Mapping[str, Any], violations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Say which violations fit a fault: of its request and position, or of its slots."""
    name, asked, slot = fault["fault"], fault.get("request"), fault.get("slot")
    slots = slot if isinstance(slot, list) else [slot]
    anywhere = name in ("flush_without_tree", "length_one_less", "host_write")

    def fits(violation: Mapping[str, Any]) -> bool:
        if violation["step"] < fault["step"]:
            return False
        if fault.get("group") not in (None, violation.get("group")):
            return False
        if asked is not None:
            return violation["request"] in (asked, fault.get("other"))
        return anywhere or violation["slot"] in slots

    found = [each for each in violations if fits(each)]
    position = fault.get("position")
    exact = [v for v in found if position in (None, v["position"]) or v["slot"] in slots]
    hidden = ("group", "layer", "found")
    short = [
        {key: value for key, value in each.items() if value is not None and key not in hidden}
        for each in (exact or found)[:2]
    ]
    planted = {key: value for key, value in fault.items() if key != "fault"}
    facts = {"exact": len(exact), "fits": len(found), "found": short}
    return {"fault": name, "planted": planted, **facts}


# -- the run ------------------------------------------------------------------------------


def queue_of(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Name the engines and kinds of a run, without the first."""
    found = [(name, "ledger") for name in given.engines if name != given.first]
    for kind, names in (("plain", given.plain), ("recorded", given.recorded)):
        found += [(name, kind) for name in given.engines if name in names]
    return found


def play(
    given: argparse.Namespace,
    first: tuple[str, str] | None,
    queue: Iterable[tuple[str, str]],
    ended: Callable[[Job], None],
) -> None:
    """Run the first engine, then all others, so many at a time, and end what takes too long.

    Args:
        given: the script's arguments.
        first: an engine and its kind.
        queue: engines and kinds.
        ended: is called for each engine that has ended.
    """
    running: list[Job] = []
    deadline, queue = time.time() + given.total, list(queue)

    def wait() -> None:
        for job in [each for each in running if each.over()]:
            running.remove(job)
            ended(job)
        time.sleep(0.25)

    try:
        if first:
            running.append(Job(*first, given, given.first_limit))
        while running:
            wait()
        while (queue or running) and time.time() < deadline:
            while queue and len(running) < given.parallel:
                running.append(Job(*queue.pop(0), given, min(given.limit, deadline - time.time())))
                time.sleep(0.5)
            wait()
    finally:
        for job in running:
            job.stop()
            ended(job)
    for name, kind in queue:
        print(f"not started: {name}, {kind}")


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add_options(parser)
    add("engines", nargs="*", metavar="ENGINE", help=", ".join(ENGINES))
    add("--first", default="radix", help="the engine that runs alone, or ''")
    add(
        "--plain", nargs="*", default=["radix"], help="also without kvtxn, one of a model is enough"
    )
    add("--recorded", nargs="*", default=["chunked", "eagle"], help="also with the recorder")
    given = parser.parse_args(words)
    given.engines = given.engines or list(ENGINES)
    if unknown := {*given.engines, *given.plain, *given.recorded} - {*ENGINES}:
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    return given


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what each run of several engines can be told."""
    add = parser.add_argument
    add("out", type=lambda path: Path(path).resolve(), help="folder")
    add("--site", help="folder in which SGLang is installed")
    add("--first-limit", type=float, default=160, help="seconds of the engine that runs alone")
    add("--limit", type=float, default=220, help="seconds of each other engine")
    add("--total", type=float, default=540, help="seconds of all")
    add("--parallel", type=int, default=9, help="engines at a time")
    add("--fuzz", type=int, default=40, help="requests of a round of the fuzzed load")
    add("--rounds", type=int, default=2, help="of the fuzzed load")
    add("--extra", type=json.loads, default={}, help="JSON: more arguments of each engine")
    parser.set_defaults(child="sglang_child.py")


def only(
    parser: argparse.ArgumentParser, engines: Iterable[str], words: Sequence[str] | None
) -> argparse.Namespace:
    """Read a command line that may choose among engines by ``--engines``."""
    parser.add_argument("--engines", nargs="*", default=[], metavar="ENGINE", help="only these")
    given = parser.parse_args(words)
    if unknown := {*given.engines} - {*engines}:
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    return given


def prepare(given: argparse.Namespace) -> None:
    """Make folders, plug-ins and models. From now on SIGTERM ends the run with what it has."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if given.site:
        sys.path.insert(1, given.site)
        os.environ["PYTHONPATH"] = os.pathsep.join([given.site, os.environ.get("PYTHONPATH", "")])
    for part in ("logs", "results"):
        (given.out / part).mkdir(parents=True, exist_ok=True)
    install(given.out / "plugins")
    for model in MODELS:
        make(model, given.out / "models")


def main() -> None:
    """Run the engines; write ``engines.json`` as each ends, and print a line for each."""
    given = parsed()
    prepare(given)
    jobs: list[Job] = []
    about = {**where(given.out), "extra": given.extra}

    def ended(job: Job) -> None:
        jobs.append(job)
        found = {**about, "engines": [summary(each) for each in jobs]}
        (given.out / "engines.json").write_text(json.dumps(found, indent=1) + "\n")

    first = (given.first, "ledger") if given.first in given.engines else None
    play(given, first, queue_of(given), ended)
    for row in map(summary, jobs):
        print(json.dumps({key: row[key] for key in row if row[key] not in (None, [], {})})[:1800])


if __name__ == "__main__":
    main()
