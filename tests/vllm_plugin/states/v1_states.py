"""The process of an engine whose V1 runner holds states in the way of GPUs, on a CPU.

But for the operators, which ``state_operators`` writes out, and the windows of attention, which
have tests of their own, all is as on a GPU: vLLM's V1 runner, its builders of metadata, and the
part that names blocks before a forward and commits states after the sampler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import state_operators
import torch
from engine_child import played
from kvtxn.integrations.serving.graph_steps import PackedGraphSteps
from kvtxn.integrations.vllm_plugin import runner_parts
from kvtxn.integrations.vllm_plugin.gpu import states, windows
from kvtxn.integrations.vllm_plugin.policy.decision import Decision
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.settings import PluginSettings
from kvtxn.integrations.vllm_plugin.runners import window_steps
from kvtxn.integrations.vllm_plugin.seam import held_states
from kvtxn.integrations.vllm_plugin.seam.verified_rows import Mamba2Rows
from mixer_models import write
from scenarios import NGRAM
from state_engines import OWN

from kvtxn import LayerRef, TransactionManager, TxnConfig

#: What each engine goes through; Nemotron-H with windows runs out of blocks in "preempted".
SCENARIOS = ("eight", "chunked", "abort", "preempted")


class NoRows(PackedGraphSteps):
    """Steps whose windows hold states alone."""

    def begin_among(self, *_: object) -> None:
        """Nothing: no row is held."""


def hold_alone(caches: Any, *_: object) -> Any:
    """Make steps without windows of attention."""
    ref = LayerRef("rows", *torch.zeros(2, 4, 4, 1, 8), group="group.0")
    manager = TransactionManager([ref], TxnConfig(policy="undo", backend="torch", max_rows=8))
    held, more = caches._states.hold(manager)
    steps = NoRows(manager, 5, 1 << 20, states=held)
    caches._states.join(steps)
    return steps, more


class Probe:
    """The worker extension of these tests."""

    def strengthen(self) -> list[int]:
        """Let states be felt and fade slowly; returns the blocks of a request in each group."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, weight in runner.get_model().named_parameters():
                if "conv" in name:
                    weight.mul_(8.0)
                elif name.endswith("dt_bias"):
                    weight.fill_(0.5)
                elif name.endswith(".A"):
                    weight.fill_(-0.05)
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        return [1 + spec.num_speculative_blocks for spec in specs if hasattr(spec, "shapes")]

    def fail(self) -> None:
        """Let the commit of one layer fail once."""
        rows = self.model_runner.kvtxn_states._verified[0]  # type: ignore[attr-defined]
        commit = rows.commit

        def failing(step: Any) -> None:
            rows.commit = commit
            raise RuntimeError("a fault that a test injects")

        rows.commit = failing

    def miscount(self) -> None:
        """Take one row more in than is kept, from now on."""
        all_states = self.model_runner.kvtxn_states  # type: ignore[attr-defined]
        commit = all_states.commit
        all_states.commit = lambda sampled: commit(sampled + 1)


def hold_states() -> None:
    """Give the parts of GPUs to the runner of each worker that is made from now on."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    def keep(rows: Any, given: Any) -> None:
        for part, room in zip(given, rows._parts, strict=True):
            room[: part.shape[0]] = part.reshape(part.shape[0], *room.shape[1:])

    def init_device(worker: Any) -> None:
        make(worker)
        wanted = PluginSettings(TxnConfig(policy="undo", max_rows=256), recurrent="exact")
        facts = EngineFacts(device="cuda", runner="v1", recurrent="any")
        runner_parts.attach(worker.model_runner, wanted, 0, facts, windows=True)

    windows.WindowCaches.make_steps = hold_alone  # type: ignore[method-assign]
    for module in (states, window_steps):
        module.decide = lambda *_: Decision("undo", "a test")  # type: ignore[assignment]
    held_states.launches_differ = lambda *_, **__: None  # type: ignore[assignment]
    Mamba2Rows.keep = keep  # type: ignore[method-assign] - the kernel's work
    make, CPUWorker.init_device = CPUWorker.init_device, init_device  # type: ignore[assignment]


def run(folder: Path) -> dict[str, Any]:
    """Run the engine that the folder is named after: ``v1-MODEL-stock`` or ``v1-MODEL-exact``."""
    from vllm import LLM

    _, model, who = folder.name.partition(".")[0].split("-")
    state_operators.install()
    if who == "exact":
        hold_states()
    llm = LLM(
        model=write(model, folder),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        max_model_len=288,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=400 if who == "stock" else 60 if model == "lfm2" else 26,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=NGRAM,
        worker_extension_cls="v1_states.Probe",
    )
    found: dict[str, Any] = {"state_blocks": llm.collective_rpc("strengthen")[0]}
    for name in SCENARIOS:
        found[name] = played(llm, name, OWN, lambda: None, 2)
    if who == "exact" and model == "nemotron_h":
        llm.collective_rpc("fail")
        found["fault"] = played(llm, "chunked", OWN, lambda: None, 2)
        llm.collective_rpc("miscount")
        found["wrong"] = played(llm, "chunked", OWN, lambda: None, 2)
    return found
