"""The process of one engine on a GPU: scenarios with the audit and without it, then faults."""

from __future__ import annotations

import itertools
import json
import os
import time
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import attrs
import connector_scenarios
import failing_engines
import gpu_child
import gpu_oracle
import gpu_planted
import long_life
import planted_ends
import planted_engines
import scenarios
import sleeping_engines
import torch
from connected_jobs import transfer
from planting import Rig
from scenarios import Engine

#: Methods of a watch that run in each step.
IN_STEPS = ("change", "step", "sampled")


class AuditWorker(gpu_oracle.Watch):
    """The worker extension of these engines: methods that vLLM calls in each worker."""

    def audit_switch(self, on: bool) -> bool:
        """Watch from now on, with empty books, or no longer; tells whether there is a watch."""
        watch = getattr(self.model_runner, "kvtxn_audit", None)  # type: ignore[attr-defined]
        if watch is None:
            return False
        if not on:
            watch.begun = False
            return True
        watch.begin()
        self.audit_brought = 0
        self._count_imports(watch.ledger)
        return True

    def _count_imports(self, ledger: Any) -> None:
        """Count the rows that a connector brings, once for each ledger."""
        if "import_rows" in vars(ledger):
            return
        real = ledger.import_rows

        def import_rows(
            request: str, group: str, table: Any, first: int, end: int, *by: Any
        ) -> Any:
            self.audit_brought += end - first
            return real(request, group, table, first, end, *by)

        ledger.import_rows = import_rows

    def audit_compare_all(self) -> bool:
        """Compare each row at each read, where bytes are compared."""
        watch = getattr(self.model_runner, "kvtxn_audit", None)  # type: ignore[attr-defined]
        if watch is None or watch.scrub is None:
            return False
        gpu_planted.compare_all(_Held(watch))
        return True

    def audit_misunderstand(self) -> None:
        """Let the second rank take the fourth token of the next request for another."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        real = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            for new in scheduler_output.scheduled_new_reqs[:1]:
                both = (new.prompt_token_ids, new.prefill_token_ids)  # or one list, named twice
                for tokens in {id(each): each for each in both if each}.values():
                    tokens[3] ^= 1
                runner.execute_model = real
            return real(scheduler_output, *args, **kwargs)

        if self.rank == 1:  # type: ignore[attr-defined]
            runner.execute_model = execute_model

    def audit_facts(self) -> dict[str, Any]:
        """Sizes and counts of a rank."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        watch = getattr(runner, "kvtxn_audit", None)
        groups = runner.kv_cache_config.kv_cache_groups
        found: dict[str, Any] = {
            "runner": getattr(type(runner), "kvtxn_own_class", type(runner)).__module__,
            "graphs": runner.compilation_config.cudagraph_mode.name,
            "ahead": bool(runner.scheduler_config.async_scheduling),
            "groups": [type(group.kv_cache_spec).__name__ for group in groups],
            "blocks": int(runner.kv_cache_config.num_blocks),
            "windows": getattr(runner, "kvtxn", None) is not None,
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "memory": torch.cuda.mem_get_info()[1],
        }
        if watch is not None:
            found["brought"] = getattr(self, "audit_brought", 0)
            found["watched"] = {name: str(group) for name, group in watch.groups.items()}
            published = getattr(watch, "_published", None)
            found["published"] = [group.name for group in published.groups] if published else []
            found["bytes"] = watch.ledger.books.num_bytes
            found["compared"] = 0 if watch.scrub is None else watch.scrub.compared
            found["layers"] = 0 if watch.scrub is None else len(watch.ledger.findings.layers)
        return found

    def audit_time(self, on: bool) -> dict[str, Any]:
        """Note the host's time and the waits of each call in a step; returns those noted so far."""
        watch = getattr(self.model_runner, "kvtxn_audit", None)  # type: ignore[attr-defined]
        if watch is None:
            return {}
        if on:
            self.audit_times, self.audit_calls = Counter[str](), Counter[str]()
            self.audit_waits: Counter[str] = Counter()
            for name in IN_STEPS:
                setattr(watch, name, self._timed(name, getattr(watch, name)))
            return {}
        for name in IN_STEPS:
            delattr(watch, name)
        each = {
            name: round(1e6 * self.audit_times[name] / max(self.audit_calls[name], 1), 1)
            for name in IN_STEPS
        }
        calls, waits = dict(self.audit_calls), dict(self.audit_waits)
        return {"microseconds": each, "calls": calls, "waits": waits}

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                begin = time.perf_counter()
                try:
                    return call(*args, **kwargs)
                finally:
                    self.audit_times[name] += time.perf_counter() - begin
                    self.audit_calls[name] += 1
                    torch.cuda.set_sync_debug_mode("default")
                    for each in caught:
                        if "called a synchronizing" in str(each.message):
                            self.audit_waits[f"{name}: {each.filename}:{each.lineno}"] += 1

        return timed


@attrs.frozen
class _Held:
    """What ``compare_all`` wants of a rig."""

    watch: Any


def build(job: dict[str, Any], folder: Path) -> Any:
    """Build the engine of a job."""
    more = {}
    if job.get("connectors"):
        more["kv_transfer_config"] = transfer(job["connectors"], folder / "store")
    worker = job.get("worker", "gpu_audit_child.AuditWorker")
    return gpu_child.engine(job, folder, {"kvtxn": job["asked"]}, worker, **more)


_RUNS: Final = itertools.count()


def empty(llm: Any) -> None:
    """Empty the prefix cache; blocks that a connector stores still are in it until it has done so.

    Raises:
        RuntimeError: it cannot be emptied, so a scenario would find rows that nobody watched.
    """
    for _ in range(200):
        if llm.reset_prefix_cache():
            return
        llm.llm_engine.step()
        time.sleep(0.05)
    raise RuntimeError("the prefix cache cannot be emptied")


def say(llm: Any, name: str) -> Any:
    """Run one scenario; returns its tokens."""
    empty(llm)
    llm.collective_rpc("oracle_seed", args=(0,))
    own = {"aborted": aborted, "ends": planted_ends.ends, "states_come_back": states_come_back}
    known = connector_scenarios.SCENARIOS | scenarios.SCENARIOS | own
    return known[name](Engine(llm))


def aborted(engine: Engine) -> Any:
    """Requests that are aborted in the middle; others take their blocks at once."""
    inner, params = engine.llm.llm_engine, engine.params(40)
    for step in range(60):
        if step % 6 == 0:
            for index in range(3):
                prompt = scenarios.text(500 + step + index, 30 + step)
                inner.add_request(f"a-{step}-{index}", {"prompt_token_ids": prompt}, params)
        if step % 6 == 5:
            inner.abort_request([f"a-{step - 5}-{index}" for index in range(2)])
        inner.step()
    while inner.has_unfinished_requests():
        inner.step()
    return []


def states_come_back(engine: Engine) -> Any:
    """Prompts of some blocks, and longer ones, each with an empty prefix cache.

    A salt of each run's own keeps off what the connector has of runs that nobody watched.
    """
    engine.salt = f"run {next(_RUNS)}"
    size = int(engine.llm.llm_engine.vllm_config.cache_config.block_size)
    prompts = [scenarios.text(900 + i, 2 * size + 5 * i + 3) for i in range(3)]
    first = engine.run(prompts, 12)
    connector_scenarios.forget(engine)
    longer = [prompt + scenarios.text(950 + i, 7 * i + 5) for i, prompt in enumerate(prompts)]
    second = engine.run(longer, 12)
    connector_scenarios.forget(engine)
    return [*first, *second, *engine.run(prompts, 12)]


def healthy(llm: Any, job: dict[str, Any], found: dict[str, Any], keep: Any) -> None:
    """Run scenarios without the audit and with it: tokens are compared, violations are kept.

    ``found`` gets what came of each; ``keep`` is called after each.
    """
    from kvtxn.integrations.vllm_plugin import audit_report, snapshots

    llm.collective_rpc("audit_switch", args=(False,))
    say(llm, job["scenarios"][0])  # whatever vLLM compiles late
    for name in job["scenarios"]:
        try:
            llm.collective_rpc("audit_switch", args=(False,))
            known = audit_report(llm)
            without = say(llm, name)
            empty(llm)
            idle = audit_report(llm)
            on = llm.collective_rpc("audit_switch", args=(True,))
            tokens = say(llm, name)
            counts = snapshots(llm)
            same = sum(a == b for a, b in zip(tokens, without, strict=False))
            found[name] = {
                "watched": on,
                "same": f"{same} of {len(tokens)}",
                "exact": tokens == without,
                "counters": [_audit(each) for each in counts],
                "idle": _new(idle, known),
                "violations": _new(audit_report(llm), idle),
                "facts": llm.collective_rpc("audit_facts")[-1],
            }
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": repr(error)}
            if "EngineDead" in repr(error):
                break
        keep()


def _new(report: list[list[Any]], known: list[list[Any]]) -> list[list[Any]]:
    """Each rank's first five violations beyond those that were known."""
    return [new[len(old) : len(old) + 5] for new, old in zip(report, known, strict=True)]


def _audit(counts: dict[str, float]) -> dict[str, float]:
    """The counters of the audit and of the windows that say anything."""
    wanted = ("kvtxn_audit", "kvtxn_windows_total", "kvtxn_active", "kvtxn_fallbacks")
    return {k: v for k, v in counts.items() if k.startswith(wanted) and v}


def timing(llm: Any, name: str) -> dict[str, Any]:
    """Run a scenario with a clock around each call, and with every wait noted."""
    empty(llm)
    llm.collective_rpc("audit_switch", args=(True,))
    llm.collective_rpc("audit_time", args=(True,))
    say(llm, name)
    found: dict[str, Any] = llm.collective_rpc("audit_time", args=(False,))[-1]
    return found


def planted(llm: Any, job: dict[str, Any], report: dict[str, Any], keep: Any) -> None:
    """Plant faults one after the other until each has struck; report what was found of each.

    ``report`` gets ``healthy``, ``found`` by fault, and ``again``; ``keep`` is called after each.
    """
    empty(llm)
    llm.collective_rpc("audit_switch", args=(True,))
    if "audit_every" not in job["asked"]:
        llm.collective_rpc("audit_compare_all")
    # The hybrids here accept no draft in shorter answers, and some faults need an accepted one.
    long = partial(planted_engines.work, lengths=(40, 30, 70, 20))
    rig, work = Rig(llm), planted_ends.work if job.get("ends") else long
    before = work(rig)
    report |= {"healthy": rig.found()[:5], "found": {}, "again": "it did not come to that"}
    faults = gpu_planted.by_name(v2=hasattr(rig.runner, "prepare_attn"))
    for name in job["faults"]:
        keep()
        try:
            rig.clear()
            with faults[name](rig):
                work(rig)
            struck = None if rig.struck is None else attrs.asdict(rig.struck)
            report["found"][name] = {"struck": struck, "violations": rig.found()[:8]}
        except Exception as error:
            traceback.print_exc()
            report["found"][name] = {"error": repr(error)}
            if "CUDA error" in repr(error):
                break
    try:
        for name in job.get("harmless", ()):
            rig.clear()
            with faults[name](rig):
                work(rig)
            report.setdefault("harmless", {})[name] = [rig.struck is not None, rig.found()[:5]]
        rig.clear()
        report["again"] = [work(rig) == before, rig.found()[:5]]
    except Exception as error:
        traceback.print_exc()
        report["again"] = repr(error)


def ranks_differ(llm: Any, name: str) -> list[list[Any]]:
    """Let one rank take a token for another; returns the kinds and steps that each rank reports."""
    from kvtxn.integrations.vllm_plugin import audit_report

    empty(llm)
    llm.collective_rpc("audit_switch", args=(True,))
    llm.collective_rpc("audit_misunderstand")
    say(llm, name)
    return [[[each["kind"], each["step"]] for each in rank] for rank in audit_report(llm)]


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build an engine and run it; returns its report.

    ``partial.json`` in the folder has what is known so far, in case the engine is ended.
    """
    assert not torch.cuda.is_initialized(), "a process that is forked could not use the GPU"
    os.environ.update(job.get("environment", {}))
    begin = time.monotonic()
    llm = build(job, folder)
    started = time.monotonic()
    report: dict[str, Any] = {"facts": llm.collective_rpc("audit_facts")}
    if job.get("random"):
        llm.collective_rpc("randomise", args=(0.08,))
    if job["asked"]["audit"] == "bytes" and "audit_every" not in job["asked"]:
        report["compare_all"] = llm.collective_rpc("audit_compare_all")

    def keep() -> None:
        report["seconds"] = [round(started - begin), round(time.monotonic() - started)]
        (folder / "partial.json").write_text(json.dumps(report))

    keep()
    healthy(llm, job, report.setdefault("healthy", {}), keep)
    if job.get("ranks_differ"):
        report["ranks"] = ranks_differ(llm, job["scenarios"][0])
    if job.get("long"):
        empty(llm)
        llm.collective_rpc("audit_switch", args=(True,))
        report["long"] = long_life.live(llm, **job["long"])
    if job.get("time"):
        report["time"] = timing(llm, job["time"])
    if job.get("contains"):
        empty(llm)
        llm.collective_rpc("audit_switch", args=(True,))
        known = {fault.__name__ for fault in gpu_planted.V2}
        faults = [fault for fault in planted_engines.HEALED if fault.__name__ in known]
        report["contained"] = planted_engines.contain(llm, job, folder, faults)
    if job.get("sleeps"):
        empty(llm)
        llm.collective_rpc("audit_switch", args=(True,))
        # vLLM would take what other engines on this GPU allocate meanwhile for its own.
        with mock.patch("torch.accelerator.get_memory_info", return_value=(0, 0)):
            report["slept"] = sleeping_engines.live(llm)
        keep()
    if job.get("fails"):
        empty(llm)
        llm.collective_rpc("audit_switch", args=(True,))
        report["failed"] = failing_engines.live(llm)
        keep()
    if job.get("faults"):
        planted(llm, job, report.setdefault("planted", {}), keep)
    keep()
    return report
