"""Count the functions of kvtxn in a step with drafts: ``python tests/gpu/step_functions.py OUT``.

An engine on one GPU without captured graphs, whose drafts wait (``deferred``). Python's profiler
notes each function of kvtxn that is called between two steps. OUT, a file, gets the step with
drafts that calls fewest, as JSON: how many functions, in how many files, and their names in the
order of calls.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

PROMPT: Final = [5, 6, 7, 8, 9] * 12
STEPS: Final = 40


class Called:
    """Notes functions of kvtxn as Python's profiler tells of them.

    Attributes:
        names: ``(file, function)`` in the order of their first calls.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self._folders = tuple(folder + os.sep for folder in folders)
        self.names: dict[tuple[str, str], None] = {}

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._folders):
            self.names.setdefault((code.co_filename, code.co_qualname))


def committed(llm: Any) -> float:
    """Return the number of windows committed so far."""
    from kvtxn.integrations.vllm_plugin import snapshots

    return float(snapshots(llm)[0]["kvtxn_windows_total_committed"])


def main() -> int:
    """Run the engine; returns 1 if no step committed a window."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import kvtxn.backends
    from kvtxn.benchmarks.common.machine import describe
    from kvtxn.integrations.demo.engine import MODEL
    from vllm import LLM, SamplingParams

    from kvtxn import integrations

    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    llm = LLM(
        str(MODEL),
        additional_config={"kvtxn": {"policy": "deferred"}},
        speculative_config=drafts | {"prompt_lookup_min": 1},
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        max_model_len=512,
    )
    engine = llm.llm_engine
    given = SamplingParams(temperature=0.0, max_tokens=2 * STEPS, ignore_eos=True)
    engine.add_request("0", {"prompt_token_ids": PROMPT}, given)
    folders = {*kvtxn.__path__, *kvtxn.backends.__path__, *integrations.__path__}
    found: list[Called] = []
    for _ in range(STEPS):
        before, called = committed(llm), Called(folders)
        sys.setprofile(called)
        engine.step()
        sys.setprofile(None)
        if committed(llm) > before:
            found.append(called)
    if not found:
        print("no step committed a window", file=sys.stderr)
        return 1
    names = list(min(found, key=lambda called: len(called.names)).names)
    report = {"functions": len(names), "files": len({file for file, _ in names}), "names": names}
    Path(sys.argv[1]).write_text(json.dumps({"machine": describe(), **report}, indent=1) + "\n")
    print(f"{report['functions']} functions in {report['files']} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
