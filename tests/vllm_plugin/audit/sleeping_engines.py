"""Engines that sleep and wake up: of a CPU, whose worker only seems to, and of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtxn.integrations.vllm_plugin import audit_report, snapshots, worker_answers
from kvtxn.integrations.vllm_plugin.audit import watch_opening
from planting import Rig, around, texts


def live(llm: Any) -> dict[str, Any]:
    """Let an engine sleep in every way, and report its texts and what the audit found of each."""
    rig, prompts = Rig(llm), texts(1, 4, 70)
    stock = rig.run(prompts, 30)
    report: dict[str, Any] = {"before": rig.found()[:5], "ways": {}}
    ways = {"level 1": _whole, "level 2": _weights_anew, "keep": None}
    if hasattr(llm, "release_kv_cache_memory"):  # since vLLM 0.31
        ways["cache alone"] = _cache_alone
    for name, way in ways.items():
        rig.clear()
        rig.run(prompts, 30)
        told: dict[str, Any] = {}
        if way is None:
            found = _in_the_middle(llm, rig, prompts, told)
        else:
            way(llm, told)
            found = rig.run(prompts, 30)
        report["ways"][name] = {
            **told,
            "same": found == stock,
            "violations": rig.found()[:5],
        }
    report["ages"] = audit_report(llm, ages=True)[0]  # of weights that came back, or were read anew
    report["forgotten"] = _without_reset(llm, rig, prompts)
    report["steps"] = snapshots(llm)[0]["kvtxn_audit_steps_total"]
    return report


def _asked(llm: Any) -> list[Any]:
    """Return the answers of all workers."""
    return [snapshots(llm), audit_report(llm)]


def _whole(llm: Any, told: dict[str, Any], **mode: Any) -> None:
    """Sleep and wake up; the weights come back from the host."""
    before = _asked(llm)
    llm.sleep(1, **mode)
    told["answers"] = _asked(llm) == before
    llm.wake_up()
    told["awake"] = _asked(llm) == before


def _weights_anew(llm: Any, told: dict[str, Any]) -> None:
    """Sleep, and read the weights anew, before there is a cache again."""
    before = _asked(llm)
    llm.sleep(2)
    told["answers"] = _asked(llm) == before
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    told["awake"] = _asked(llm) == before
    llm.wake_up(tags=["kv_cache"])


def _cache_alone(llm: Any, told: dict[str, Any]) -> None:
    """Give the memory of the cache away for a while."""
    llm.llm_engine.step()  # the workers hear which requests have ended
    while llm.llm_engine.engine_core.engine_core.batch_queue:  # steps that ran ahead
        llm.llm_engine.step()
    before = _asked(llm)
    llm.sleep(0)
    llm.release_kv_cache_memory()
    told["answers"] = _asked(llm) == before
    llm.wake_up(tags=["kv_cache"])
    llm.wake_up(tags=["scheduling"])
    told["awake"] = _asked(llm) == before


def _in_the_middle(llm: Any, rig: Rig, prompts: list[list[int]], told: dict[str, Any]) -> Any:
    """Sleep while requests run, which are kept and computed again."""
    steps = 0

    def before() -> None:
        nonlocal steps
        steps += 1
        if steps == 8:
            told["running"] = len(rig.scheduler.running)
            _whole(llm, told, mode="keep")

    with around(rig.engine, "step", before):
        return rig.run(prompts, 30)


def _without_reset(llm: Any, rig: Rig, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Let the workers sleep behind the scheduler's back: it goes on with a cache that is gone."""
    rig.clear()
    rig.run(prompts, 30)
    llm.collective_rpc("sleep", args=(1,))
    llm.collective_rpc("wake_up")
    rig.run(prompts, 30)
    return rig.found()[:5]


def pretend(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Do the same on a CPU: its worker loses its cache, and cannot be asked while it sleeps."""
    rig = Rig(llm)
    wrapper = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    worker, ledger = wrapper.worker, rig.watch.ledger
    known = ledger.counters

    def lose(*tags: Any) -> None:
        for cache in rig.runner.kv_caches:
            cache.zero_()

    def sleep(level: int = 1) -> None:
        lose()
        ledger.counters = ledger.violations = None

    def wake_up(tags: Any = None) -> None:
        vars(ledger).pop("counters", None)
        vars(ledger).pop("violations", None)

    worker.sleep, worker.wake_up, worker.discard = sleep, wake_up, lose
    worker.reload_weights = lambda: None
    undo = (worker_answers.let_sleep(wrapper), watch_opening.follow_updates(wrapper))
    report = live(llm)
    for each in reversed(undo):
        each()
    report["undone"] = worker.sleep is sleep and ledger.counters == known
    return report
