"""Engines with recurrent layers, by name: what each is asked for."""

from __future__ import annotations

from typing import Any

import attrs
from engine_jobs import two_cores

#: Scenarios of the grid, with requests of this folder's own under "preempted".
SCENARIOS = ["one", "eight", "chunked", "preempted", "abort", "stop"]
#: Faults inside kvtxn, and the reason under which each is counted.
FAULTS = {
    "plan": "begin",
    "window": "begin",
    "stage_state": "stage",
    "stage_rows": "stage",
    "lend": "stage",
    "give_back": "attend",
    "accept": "commit",
    "advance": "commit",
    "half_advance": "commit",
    "commit": "commit",
    "half_commit": "commit",
}
EXACT = {"policy": "auto", "recurrent": "exact"}


@attrs.frozen(kw_only=True)
class Job:
    """An engine and its scenarios.

    Attributes:
        scenarios: their names, ``scenario@fault`` for one with a fault.
        kvtxn: settings of kvtxn; None for an engine without.
        speculates: the engine has drafts.
        watched: the oracle looks at every step.
        blocks: blocks of the cache; as a default, those that six requests of up to 256 rows fill:
            two states and a block of rows each, and the block that vLLM keeps.
        undone: in the end all hooks are undone.
        forced: compare its preemptions with those of an engine that does not speculate.
        model: one of ``mixer_models``.
        dtype: dtype of the model.
        ranks: ranks that share each layer's heads.
    """

    scenarios: list[str]
    kvtxn: dict[str, Any] | None = None
    speculates: bool = True
    watched: bool = True
    blocks: int = 19
    undone: bool = False
    forced: bool = False
    model: str = "qwen3next"
    dtype: str = "bfloat16"
    ranks: int = 1

    @property
    def environment(self) -> dict[str, str]:
        """Return variables of the engine's process: each rank has a core."""
        cores = "|".join(map(str, two_cores()))
        return {} if self.ranks == 1 else {"VLLM_CPU_OMP_THREADS_BIND": cores}


#: Models with other recurrent layers than gated delta nets, and their dtypes.
MIXERS = {
    "nemotron_h": "bfloat16",  # with float32 states
    "mamba2": "bfloat16",
    "falcon_h1": "float32",
    "lfm2": "bfloat16",
}
MIXED = ["eight", "chunked", "abort"]
#: Models that meet every fault.
FAULTY = ("qwen3next", "nemotron_h", "lfm2")

JOBS = {
    "windows": Job(
        scenarios=[*SCENARIOS, *(f"chunked@{fault}" for fault in FAULTS), "chunked@one_more"],
        kvtxn=EXACT | {"audit": "ledger"},
        undone=True,
    ),
    "greedy": Job(scenarios=SCENARIOS, speculates=False),
    "stock": Job(scenarios=["chunked"], watched=False, blocks=120),
    "chosen": Job(scenarios=[], kvtxn=EXACT | {"recurrent": "auto"}, watched=False, blocks=120),
    "raise": Job(scenarios=["chunked@half_advance"], kvtxn=EXACT | {"on_error": "raise"}),
    "forced": Job(scenarios=[], kvtxn=EXACT, forced=True),
    "two-ranks": Job(scenarios=["one", "chunked"], kvtxn=EXACT, model="qwen3next_two", ranks=2),
    "two-ranks-greedy": Job(
        scenarios=["one", "chunked"], speculates=False, model="qwen3next_two", ranks=2
    ),
    "mamba2-stock": Job(scenarios=["chunked"], watched=False, blocks=120, model="mamba2"),
    **{
        model: Job(
            scenarios=[*MIXED, *(f"chunked@{fault}" for fault in FAULTS if model in FAULTY)],
            kvtxn=EXACT | {"audit": "ledger"},
            blocks=120,
            undone=True,
            model=model,
            dtype=dtype,
        )
        for model, dtype in MIXERS.items()
    },
    **{
        f"{model}-greedy": Job(
            scenarios=MIXED, speculates=False, blocks=120, model=model, dtype=dtype
        )
        for model, dtype in MIXERS.items()
    },
}
