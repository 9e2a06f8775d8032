"""Windows on every pipeline stage: tokens beside stock's, and the caches of each stage.

    python tests/gpu/try_stages.py --out FOLDER [--several] [--jobs 6] [--only NAME ...]

All stages of an engine share one GPU (``one_gpu``); with ``--several`` each has its own, as in use.
Each engine's report is a file as soon as the engine ends; at the end they are judged as in
``SEEN.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / part) for part in ("", "serving", "vllm_plugin/grid")]

import one_gpu_jobs  # noqa: E402
import seen_stages  # noqa: E402
from engine_pool import EngineFailed, EnginePool  # noqa: E402
from folders import python_path  # noqa: E402
from gpu_jobs import ENVIRONMENT  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's arguments."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--several", action="store_true", help="a GPU for each stage")
    made.add_argument("--jobs", type=int, default=6, help="engines at once")
    made.add_argument("--seconds", type=float, default=280.0, help="what one engine may take")
    made.add_argument("--only", nargs="*", default=list(one_gpu_jobs.ENGINES))
    return made


def main() -> int:
    """Run the engines; returns 1 if one of them failed or differs from stock."""
    given = parser().parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    pool = EnginePool(
        "one_gpu_child:carry_out",
        {name: one_gpu_jobs.placed(name, several=given.several) for name in given.only},
        given.out / "engines",
        count=given.jobs,
        seconds=given.seconds,
        environment=ENVIRONMENT | {"PYTHONPATH": python_path(HERE)},
        preload=["vllm", "vllm.v1.engine.llm_engine"],
    )
    bad = False
    for name in pool.as_they_end():
        log = pool.log(name)
        try:
            report = pool.report(name)
        except EngineFailed as failed:
            report = {"error": str(failed), "log": log[-8000:]}
        (given.out / f"{name}.json").write_text(json.dumps(report))
        (given.out / f"{name}.log").write_text(log[-200_000:])
        played = [each for each in report.values() if isinstance(each, dict)]
        errors = [each["error"] for each in (report, *played) if "error" in each]
        print(name, *errors or [f"done in {report['seconds']} s"], flush=True)
        bad |= bool(errors)
    pool.stop()
    if not bad:
        for name, found in seen_stages.stages(given.out).items():
            problems = seen_stages.wrong(found)
            print(name, problems or "well", json.dumps(found), flush=True)
            bad |= bool(problems)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
