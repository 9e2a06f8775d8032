"""The process of one engine with recurrent layers: its scenarios, with faults, and its report."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import forced_preemption
import torch
from engine_child import played
from kvtxn.integrations.serving import eager_steps
from mixer_models import write
from model_files import write_tokenizer
from scenarios import NGRAM, SCENARIOS, Engine, Tokens, text
from state_jobs import JOBS, Job
from state_oracle import StateOracle
from step_faults import Faults, failing

#: Prompts of requests that all need one more block of 256 rows in the course of their answers: a
#: block more than the cache has, whichever is the first, since none can end before it needs it, and
#: all prompts are computed by then even if each draft is right.
LONG = [text(40 + i, 60 + 2 * i) for i in range(6)]
#: Tokens of each answer.
ANSWER = 210


def preempted(engine: Engine) -> Tokens:
    """More rows than there are blocks for."""
    return engine.run(LONG, ANSWER)


OWN: dict[str, Callable[[Engine], Tokens]] = SCENARIOS | {"preempted": preempted}


class StateProbe(Faults, StateOracle):
    """The worker extension of these tests: the oracle, and faults inside kvtxn."""

    def describe_states(self) -> dict[str, Any]:
        """Describe the blocks of a request: columns of a state, and bytes of a block."""
        specs = self.model_runner.get_kv_cache_spec()  # type: ignore[attr-defined]
        states = {name: spec for name, spec in specs.items() if hasattr(spec, "shapes")}
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        config = runner.kv_cache_config
        at_once = get_max_concurrency_for_kv_cache_config(runner.vllm_config, config)
        return {
            "runner": type(runner).__name__,
            "blocks_per_request": config.num_blocks / at_once,
            "state_blocks": sorted({1 + s.num_speculative_blocks for s in states.values()}),
            "block_bytes": [s.page_size_bytes for s in states.values()],
            "past": [s.shapes[0][0] for s in states.values()],
        }

    def undo_everything(self) -> dict[str, Any]:
        """Undo every hook of kvtxn's; say what is left of them."""
        from kvtxn.integrations.vllm_plugin import unregister
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        for name in ("_prepare_inputs", "_model_forward", "_sample"):
            delattr(self.model_runner, name)  # type: ignore[attr-defined]  # the oracle's
        unregister()
        layers = [layer for layer, _ in self.gated.values()]
        impls = [layer.impl for layer in self.attending.values()]
        found: list[Any] = [self.model_runner, *layers, *impls]  # type: ignore[attr-defined]
        return {
            "classes": sorted({type(each).__name__ for each in found}),
            "attributes": [name for each in found for name in vars(each)
                           if "kvtxn" in name or name in ("conv_ssm_forward", "forward_native")],
            "num_spec": [layer.num_spec for layer in layers],
            "core": hasattr(gdn_attention._cpu_gdn_attention_nonspec, "kvtxn_users"),
        }  # fmt: skip

    def fault_install(self, kind: str) -> None:
        """Make ``kind`` fail now and then, until ``fault_remove``."""
        manager = self.model_runner.kvtxn.manager  # type: ignore[attr-defined]
        executor, stager = manager.executor, manager.context.stager
        sometimes = failing(kind)

        def some(real: Callable[..., Any]) -> Callable[..., Any]:
            """Do half of the layers' work, and count nothing."""

            def call(txn: Any, accepted: Any) -> None:
                everything, executor.layers = executor.layers, executor.layers[:2]
                staged = dict(list(txn.staged.items())[:2])
                nothing = torch.zeros_like(txn.counters)
                real(attrs.evolve(txn, counters=nothing, staged=staged), accepted)
                executor.layers = everything

            return call

        def one_more(*args: Any, **kwargs: Any) -> Any:
            return real_accepted(*args, **kwargs) + 1

        real_accepted = manager.acceptance.from_ids
        take, commit, advance = stager.take_if_unchanged, executor.commit, executor.advance
        places: dict[str, tuple[Any, str, Callable[..., Any]]] = {
            "plan": (eager_steps.Plan, "build", sometimes(eager_steps.Plan.build)),
            "window": (manager, "window", sometimes(manager.window)),
            "stage_state": (
                stager, "take_if_unchanged", sometimes(take, lambda ref, *_: bool(ref.replay)),
            ),
            "stage_rows": (
                stager, "take_if_unchanged", sometimes(take, lambda ref, *_: not ref.replay),
            ),
            "lend": (eager_steps, "read", sometimes(eager_steps.read)),
            "give_back": (eager_steps, "write", sometimes(eager_steps.write)),
            "accept": (manager.acceptance, "from_ids", sometimes(real_accepted)),
            "advance": (executor, "advance", sometimes(advance)),
            "half_advance": (executor, "advance", sometimes(advance, first=some(advance))),
            "commit": (executor, "commit", sometimes(commit)),
            "half_commit": (executor, "commit", sometimes(commit, first=some(commit))),
            # Not a failure: kvtxn itself would be wrong, and the oracle has to see it.
            "one_more": (manager.acceptance, "from_ids", one_more),
        }  # fmt: skip
        self.fault_begin(*places[kind])


def weights(model: str) -> dict[str, list[list[float]]]:
    """The convolution's weight of each recurrent layer, as the checkpoint has it."""
    from safetensors.torch import load_file

    found = load_file(Path(model) / "model.safetensors")
    end = ".linear_attn.conv1d.weight"
    return {
        name.removesuffix(".conv1d.weight"): tensor[:, 0].float().tolist()
        for name, tensor in found.items()
        if name.endswith(end)
    }


def build(job: Job, folder: Path) -> tuple[Any, str]:
    """The engine of a job, and the folder of its model."""
    from vllm import LLM

    os.environ.update(job.environment)
    model = write(job.model, folder)
    write_tokenizer(model)
    llm = LLM(
        model=model,
        dtype=job.dtype,
        seed=0,
        enforce_eager=True,
        num_gpu_blocks_override=job.blocks,
        max_model_len=288,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        disable_log_stats=False,
        enable_prefix_caching=False,
        mamba_ssm_cache_dtype="float32",  # vLLM chooses by what the CPU can do
        tensor_parallel_size=job.ranks,
        speculative_config=NGRAM if job.speculates else None,
        additional_config={} if job.kvtxn is None else {"kvtxn": job.kvtxn},
        worker_extension_cls="state_engines.StateProbe",
    )
    return llm, model


def forced(job: Job, folder: Path) -> dict[str, Any]:
    """Compare preemptions of two engines of one process."""
    from vllm.platforms import current_platform

    plain, _ = build(attrs.evolve(job, speculates=False, kvtxn=None, blocks=120), folder)
    # vLLM replaces Triton's kernels in a process once; the second time it trips over numba.
    with mock.patch.object(type(current_platform), "register_triton_kernel_overrides"):
        windows, _ = build(job, folder)
    return forced_preemption.compare(windows, plain, LONG, ANSWER)


def run(folder: Path) -> dict[str, Any]:
    """Run the engine that the folder is named after; an error in a scenario ends it."""
    job = JOBS[folder.name.removeprefix("states-").partition(".")[0]]
    if job.forced:
        return forced(job, folder)
    llm, model = build(job, folder)
    results: dict[str, Any] = llm.collective_rpc("describe_states")[0]
    if job.watched:
        llm.collective_rpc("states_listen")
        llm.collective_rpc("states_install", args=(weights(model),))

    def seen() -> list[Any]:
        return llm.collective_rpc("states_take") if job.watched else []

    for name in job.scenarios:
        results[name] = played(llm, name, OWN, seen, 2 if job.ranks > 1 else None)
        if "error" in results[name]:
            return results
    if job.undone:
        results["undone"] = llm.collective_rpc("undo_everything")[0]
        try:
            OWN["one"](Engine(llm))
        except Exception as error:
            results["undone"]["error"] = repr(error)
    return results
