"""Recurrent states on a GPU, beside stock: ``python tests/gpu/try_states.py --out FOLDER``.

Small models with random weights: Qwen3.5 by vLLM's Triton kernel, which Qwen3-Next has, and by its
fused one; Nemotron-H and Granite (Mamba-2); LFM2 (short convolutions); with captured graphs, and
without. All but the kind "experts", Qwen3-Next itself, are dense; kinds that end with "_v1" have
vLLM's V1 runner. Each kind runs as stock and with windows, both over the same requests, whose
drafts are accepted by lot.

After every step each engine digests the state of each request: equal digests are equal bits. An
engine with windows also says which blocks of states the forward changed, and which the commit.

Engines named ``fast`` run kvtxn's own kernels. They may part from stock at
near-ties, as vLLM's two kernels part from each other. Their states are compared with a recurrence
in float64 (``state_recurrence``), and commits are given wrong counts, which that has to see.

FOLDER gets ``reports.json``, and ``engines.log`` with all that the engines logged. At the end each
engine is compared with stock, as in ``SEEN.md``. When the time is over, or on SIGTERM, the engines
that still run are ended; the reports of the others are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / part) for part in ("", "serving", "vllm_plugin/grid")]

from engine_pool import EngineFailed, EnginePool  # noqa: E402
from first_configs import take_first_configs  # noqa: E402
from folders import python_path  # noqa: E402
from gpu_jobs import ENVIRONMENT  # noqa: E402
from gpu_ties import CANDIDATES  # noqa: E402
from state_models import DRAFTS, KINDS, SCENARIOS, engines, options_of, write  # noqa: E402

# -- in an engine's process ----------------------------------------------------------


def prompts(count: int, least: int, most: int) -> list[list[int]]:
    """Prompts that repeat themselves, so that n-grams find drafts."""
    from scenarios import text

    return [text(7 * i, least + (most - least) * i // max(count - 1, 1)) for i in range(count)]


#: Scenarios of all kinds; some kinds name more.
PLAYED: Final = ("one", "eight", "chunked", "many")

#: Of the scenario "left" every third request is aborted after so many steps of the engine.
_LEAVE_AFTER: Final = 7


def watch_of(job: dict[str, Any]) -> str:
    """The worker extension of an engine."""
    if job["options"].get("tensor_parallel_size", 1) > 1:
        return "rank_states.Watch" if job["several"] else "one_gpu_states.Watch"
    return "state_watch_v1.Watch" if job["v1"] else "state_watch.Watch"


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build an engine, put it through the scenarios, and report."""
    os.environ.update(job["options"].get("environment", {}))
    from kvtxn.integrations.vllm_plugin import snapshots
    from vllm import LLM

    take_first_configs()
    model = write(job["model"], folder)
    settings = {"kvtxn": job["kvtxn"]} if job["kvtxn"] else {}
    options = options_of(job) | {"worker_extension_cls": watch_of(job)}
    drafter = options["speculative_config"].get("model")
    if drafter is not None:
        options["speculative_config"]["model"] = write(drafter, folder)
    llm = LLM(model=model, additional_config=settings, **options)
    report: dict[str, Any] = llm.collective_rpc("describe")[0]
    print("DESCRIBED", json.dumps(report), flush=True)
    llm.collective_rpc("randomise", args=(0.08,))
    llm.collective_rpc("watch")
    for name in job["scenarios"]:
        turns = None
        if name == "returning":
            before = report["growing"]
            both = zip(before["prompts"], before["tokens"], strict=True)
            turns = [[*prompt, *answer, 7] for prompt, answer in both]
        with leaving(llm) if name == "left" else nullcontext():
            report[name] = play(llm, SCENARIOS[name], turns)
        print("PLAYED", name, flush=True)
    report["preempted"] = preemptions(llm)
    if job["kvtxn"]:
        llm.collective_rpc("fail_once")
        report["fault"] = play(llm, SCENARIOS["eight"])
        report["commits_repeated"] = llm.collective_rpc("repair")[0]
    if job["kvtxn"].get("recurrent") == "fast":
        llm.collective_rpc("miscount")
        report["miscounted"] = play(llm, SCENARIOS["eight"])
        report["given_wrong_counts"] = sum(llm.collective_rpc("count_again"))
    report["counters"] = snapshots(llm)[0] if job["kvtxn"] else {}
    return report


def merged(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the ranks saw as one: digests side by side, numbers of states added up.

    Args:
        seen: by rank, what ``Watch.take`` returned.
    """
    first = seen[0]
    if len(seen) == 1:
        return first
    digests = {
        key: [part for each in seen for part in each["digests"].get(key, ())]
        for key in first["digests"]
    }
    counts = dict(first["counts"])
    for name in counts:
        if "stray" in name or name.endswith("_changed"):
            counts[name] = sum(each["counts"].get(name, 0) for each in seen)
    recurred = {
        name: (max if name == "worst" else sum)(each["recurred"][name] for each in seen)
        for name in first["recurred"]
    }
    return {**first, "digests": digests, "counts": counts, "recurred": recurred}


@contextmanager
def leaving(llm: Any) -> Iterator[None]:
    """Abort every third request in the middle; the others go on."""
    engine, steps = llm.llm_engine, count(1)
    step = engine.step

    def stepping() -> Any:
        if next(steps) == _LEAVE_AFTER:
            engine.abort_request(sorted(engine.output_processor.external_req_ids, key=int)[::3])
        return step()

    engine.step = stepping
    try:
        yield
    finally:
        del engine.step


def preemptions(llm: Any) -> int:
    """The number of times that requests were preempted until now."""
    found = (each for each in llm.get_metrics() if each.name == "vllm:num_preemptions")
    return int(sum(each.value for each in found))


def play(
    llm: Any, shape: tuple[int, int, int, int], asked: list[list[int]] | None = None
) -> dict[str, Any]:
    """Run one scenario; returns prompts, tokens, and what the worker saw."""
    from vllm import SamplingParams

    number, least, most, outputs = shape
    llm.collective_rpc("begin", args=(0,))
    asked = asked or prompts(number, least, most)
    plain: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**plain, max_tokens=outputs, logprobs=CANDIDATES)
    first = llm.request_counter.counter
    results = llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
    tokens: list[list[int]] = [[] for _ in asked]
    logits: list[Any] = [[] for _ in asked]
    for result in results:
        place, [output] = int(result.request_id) - first, result.outputs
        if output.finish_reason == "abort":
            continue  # its last tokens may be anybody's guess
        tokens[place] = list(output.token_ids)
        logits[place] = [
            [[token, found.logprob] for token, found in step.items()] for step in output.logprobs
        ]
    seen = merged(llm.collective_rpc("take"))
    hits = sum(result.num_cached_tokens or 0 for result in results)
    return {"prompts": asked, "tokens": tokens, "logits": logits, "hits": hits, **seen}


# -- beside the engines ----------------------------------------------------------------


class TimeIsOverError(Exception):
    """The engines that still run are to be ended."""


def _stop(*_: object) -> None:
    raise TimeIsOverError


class Findings:
    """Reports of engines, written into a folder as they come.

    Args:
        out: the folder.
        names: of all engines, in their order.
    """

    def __init__(self, out: Path, names: Iterable[str]) -> None:
        self.reports: dict[str, dict[str, Any]] = {}
        self._out, self._names = out, list(names)
        self._log = (out / "engines.log").open("w")

    def take(self, pool: EnginePool, name: str) -> None:
        """Take an engine's report."""
        try:
            self.reports[name] = pool.report(name)
        except EngineFailed as failed:
            self.reports[name] = {"error": str(failed)}
        text = pool.log(name)
        self._log.write(f"\n{'=' * 30} {name}\n{text[:60_000]}")
        self._log.write(f"\n[...]\n{text[-120_000:]}" if len(text) > 60_000 else "")
        self._log.flush()
        print(name, self.reports[name].get("error", "done"), flush=True)
        self.write()

    def write(self) -> None:
        """Write all reports, by a file that takes the last one's place once it is whole."""
        part = self._out / "reports.part"
        part.write_text(json.dumps(self.ordered()))
        part.rename(self._out / "reports.json")

    def ordered(self) -> dict[str, dict[str, Any]]:
        """The reports in the order of the names."""
        return {name: self.reports[name] for name in self._names if name in self.reports}

    def take_finished(self, pool: EnginePool) -> None:
        """Take the reports of all engines that have one and were not taken."""
        for name in self._names:
            if name not in self.reports and pool.finished(name):
                self.take(pool, name)


def run(pool: EnginePool, findings: Findings, seconds: int) -> None:
    """Take reports as they come, until all have, or the time is over."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(seconds)
    try:
        for name in pool.as_they_end():
            findings.take(pool, name)
    except TimeIsOverError:
        print("the time is over", flush=True)
    signal.alarm(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    findings.take_finished(pool)
    findings.write()
    pool.stop()


def main() -> int:
    """Run the engines; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for what was found")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of engines")
    parser.add_argument("--jobs", type=int, default=8, help="engines at once")
    parser.add_argument("--seconds", type=float, default=280.0, help="what one engine may take")
    parser.add_argument("--total", type=int, default=3600, help="seconds for all engines")
    parser.add_argument("--several", action="store_true", help="a GPU for each rank of an engine")
    parser.add_argument("--list", action="store_true", help="print the engines' names")
    given = parser.parse_args()
    jobs = {
        name: job | {"scenarios": [*PLAYED, *job["more"]]}
        for name, job in engines(several=given.several).items()
        if not given.only or any(part in name for part in given.only)
    }
    if given.list:
        print(*jobs, f"kinds {len(KINDS)}, drafts {DRAFTS}", sep="\n")
        return 0
    if given.out is None:
        parser.error("--out is required, but for --list")
    import tempfile

    given.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp()) / "engines"
    pool = EnginePool(
        "try_states:carry_out",
        jobs,
        folder,
        count=given.jobs,
        seconds=given.seconds,
        environment=ENVIRONMENT | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path(HERE)},
        preload=["vllm", "vllm.v1.engine.llm_engine"],
    )
    findings = Findings(given.out, jobs)
    run(pool, findings, given.total)
    import gpu_seen

    for reduce in (gpu_seen.states, gpu_seen.fast):
        for name, found in reduce(findings.ordered()).items():
            print(name, json.dumps(found))
    failed = {name for name, report in findings.reports.items() if "error" in report}
    refused = {name for name in failed if stock_fails_alike(name, findings.reports)}
    missing, well = len(jobs) - len(findings.reports), len(findings.reports) - len(failed)
    print("stock cannot run either:", *sorted(refused) or ["none"])
    print(f"{len(failed - refused)} engines failed, {well} did not, {missing} have no report")
    return 1 if failed - refused or missing else 0


def stock_fails_alike(name: str, reports: dict[str, dict[str, Any]]) -> bool:
    """Tell whether the engine without windows has the same error: the release refuses it."""
    error = reports[name]["error"].partition(": ")[2]
    stock = reports.get(f"{name.rpartition('.')[0]}.stock", {}).get("error", "")
    stock = stock.partition(": ")[2]
    return error == stock and not error.startswith("no report")


if __name__ == "__main__":
    sys.exit(main())
