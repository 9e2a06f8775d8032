"""Engines whose core or ranks have processes of their own: faults are planted in their workers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import planted_rows
from kvtxn.integrations.vllm_plugin import audit_report
from planting import Struck, texts

#: Faults that a worker can be given without its scheduler.
FAULTS = (
    planted_rows.lost_write,
    planted_rows.write_into_anothers_block,
    planted_rows.table_shifted,
    planted_rows.wrong_prompt_token,
)


class WorkerRig:
    """A worker's runner, for faults that need nothing else of a ``Rig``.

    Args:
        runner: the worker's model runner.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.struck: Struck | None = None

    def strike(self, request: str, position: int, slot: int | None, later: int = 0) -> None:
        """Note where the fault has struck."""
        self.struck = Struck(request, position, slot, later)


class Planting:
    """An extension of vLLM's worker."""

    def plant(self, name: str, rank: int) -> None:
        """Plant a fault in one rank."""
        self.kvtxn_rig = WorkerRig(self.model_runner)  # type: ignore[attr-defined]
        self.kvtxn_planted = ExitStack()
        if self.rank == rank:  # type: ignore[attr-defined]
            self.kvtxn_planted.enter_context(getattr(planted_rows, name)(self.kvtxn_rig))

    def lift(self) -> bool:
        """Take the fault out; tells whether it has struck."""
        self.kvtxn_planted.close()
        return self.kvtxn_rig.struck is not None


def work(llm: Any) -> list[list[int]]:
    """Prompts that repeat themselves, again in a full cache, and others."""
    from vllm import SamplingParams, TokensPrompt

    found = []
    for prompts, outputs in ((texts(1, 4, 70), 40), (texts(1, 4, 70), 20), (texts(2, 4, 60), 12)):
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        for output in llm.generate(given, params, use_tqdm=False):
            found.append(list(output.outputs[0].token_ids))
    return found


def contain(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compare the texts of an engine with faults with those of the same engine without."""
    report: dict[str, Any] = {"stock": work(llm), "healed": {}}
    ranks, known = engine.get("ranks", 1), 0
    for number, fault in enumerate(FAULTS):
        llm.reset_prefix_cache()
        llm.collective_rpc("plant", args=(fault.__name__, ranks - 1 - number % ranks))
        found = work(llm)
        struck = any(llm.collective_rpc("lift"))
        violations = sum(map(len, audit_report(llm)))
        report["healed"][fault.__name__] = {
            "texts": found,
            "struck": struck,
            "violations": violations - known,
        }
        known = violations
    return report
