"""One process: engines of a release that is not listed, which decide by their self-test."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from engine_options import connector
from engine_starts import apart, arguments, build, prepared, tokens
from model_files import write
from scenarios import NGRAM

from kvtxn.window import Window

#: The rows that one request verifies.
ONE_REQUEST = NGRAM["num_speculative_tokens"] + 1

#: A step has no room for the rows of two requests with drafts and of one without.
SHORT = {
    "max_num_batched_tokens": 32,
    "speculative_config": NGRAM | {"num_speculative_tokens": 15},
}

#: By name: the user's settings, and the fault that is planted.
ENGINES: dict[str, tuple[dict[str, Any], str | None]] = {
    "deferred": ({"policy": "deferred", "unchecked": True}, None),
    "undo": ({"policy": "undo", "unchecked": True}, None),
    "groups": ({"policy": "auto", "unchecked": True}, None),
    "few rows": ({"policy": "undo", "unchecked": True, "max_rows": ONE_REQUEST}, None),
    "short steps": ({"policy": "undo", "unchecked": True}, None),
    "not asked for": ({"policy": "deferred"}, None),
    "wrong row": ({"policy": "deferred", "unchecked": True}, "wrong_row"),
    "nothing rejected": ({"policy": "undo", "unchecked": True}, "nothing_rejected"),
    "elsewhere": ({"policy": "deferred", "unchecked": True}, "elsewhere"),
    "refused": ({"policy": "deferred", "unchecked": True}, "refused"),
    "gone": ({"policy": "deferred", "unchecked": True}, "gone"),
    "required": ({"policy": "deferred", "unchecked": True, "required": True}, "wrong_row"),
    "required, gone": ({"policy": "deferred", "unchecked": True, "required": True}, "gone"),
    "connector": ({"policy": "undo", "unchecked": True}, None),
    "required, connector": ({"policy": "undo", "unchecked": True, "required": True}, None),
}


def more(model: str, name: str) -> dict[str, Any]:
    """Arguments of an engine beside its settings."""
    if "connector" not in name:
        return SHORT if name == "short steps" else {}
    return {"kv_transfer_config": connector(Path(model).parent, "example")}


def take_off() -> None:
    """Take the running release off the list; all forks take over what is read of its sources."""
    from kvtxn.integrations.vllm_plugin.policy import doctor, release_records, supported
    from kvtxn.integrations.vllm_plugin.seam import workers

    version, load = workers.version(), release_records.load
    for known in ("RELEASES", "GPU_RELEASES"):
        others = tuple(each for each in getattr(supported, known) if each != version)
        setattr(supported, known, others)
    release_records.load = lambda: tuple(each for each in load() if each.version != version)
    sources = doctor.Sources(workers.source_folder())
    sources.find = cache(sources.find)
    doctor.Sources = lambda root: sources
    doctor.compare(version, "cpu")


def wrong_row(steps: Any) -> None:
    """Stage each draft's row in the place of another one."""
    stage = Window.stage
    Window.stage = lambda self, ref, *parts: stage(self, ref, *(part.roll(1, 0) for part in parts))


def refused(steps: Any) -> None:
    """Let no row be staged."""

    def stage(self: Any, ref: Any, *parts: Any) -> None:
        raise RuntimeError("planted")

    Window.stage = stage


def nothing_rejected(steps: Any) -> None:
    """Commit every draft, whatever was sampled."""

    def commit_all(self: Any, sampled: Any) -> None:
        if self.window is not None:
            self.window.commit(list(self._plan.draft_len))
        self.abandon()

    steps.commit = commit_all


def elsewhere(steps: Any) -> None:
    """Change a row that is in nobody's block."""
    commit = steps.commit

    def and_elsewhere(self: Any, sampled: Any) -> None:
        plane = next(iter(self.manager.layers.values())).planes[0]
        plane.cells[plane.index(torch.tensor([plane.num_slots - 1]))] += 1
        commit(self, sampled)

    steps.commit = and_elsewhere


FAULTS = {each.__name__: each for each in (wrong_row, refused, nothing_rejected, elsewhere)}


def gone() -> None:
    """Let a hook point be gone."""
    from kvtxn.integrations.vllm_plugin.policy import release_records

    read, name = (
        release_records.read_hooks,
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample",
    )
    release_records.read_hooks = lambda sources, names: read(
        sources, [n for n in names if n != name]
    )


def start(model: str, name: str) -> dict[str, Any]:
    """Start an engine, and let it serve."""
    from kvtxn.integrations.serving.eager_steps import EagerSteps
    from kvtxn.integrations.vllm_plugin import snapshots
    from kvtxn.integrations.vllm_plugin.policy import doctor
    from kvtxn.integrations.vllm_plugin.seam import workers

    version = workers.version()
    kvtxn, fault = ENGINES[name]
    print(f"--- {name}", flush=True)
    if fault == "gone":
        gone()
    elif fault is not None:
        FAULTS[fault](EagerSteps)
    foreseen = doctor.report(arguments(model, kvtxn, **more(model, name)))["asked"]
    try:
        llm = build(model, kvtxn, **more(model, name))
    except Exception as error:
        found = {"type": type(error).__name__, "says": str(error), "version": version}
        return found | {"foreseen": foreseen}
    (before,) = snapshots(llm)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    caches = [layer.kv_cache for layer in runner.compilation_config.static_forward_context.values()]
    return {
        "type": None,
        "version": version,
        "foreseen": foreseen,
        "left": list(runner.requests),
        "written": int(sum((cache != 0).sum() for cache in caches)),
        "class": type(runner).__name__,
        "before": before,
        "tokens": tokens(llm),
        "after": snapshots(llm)[0],
    }


def stock(model: str) -> list[int]:
    """Tokens of an engine without any hooks."""
    from kvtxn.integrations.vllm_plugin import plugin

    plugin.unregister()
    return tokens(build(model, {"policy": "undo"}, speculates=True))


def run(folder: Path) -> dict[str, Any]:
    """Report every engine."""
    model = prepared(folder)
    take_off()
    groups = write("gemma3", folder / "gemma3")  # layers of two groups share their tensors
    models = dict.fromkeys(ENGINES, model) | {"groups": groups}
    report: dict[str, Any] = {name: apart(start, models[name], name) for name in ENGINES}
    return report | {"stock": apart(stock, model), "stock, groups": apart(stock, groups)}
