"""Engines of every kind that starts on a CPU, under audit, and the process of one of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import contained_engines
import failing_engines
import lost_reuse
import media_engines
import planted_bytes
import planted_engines
import ranks_apart
import recurrent_models
import shared_engines
import sleeping_engines
import stale_engines
from engine_jobs import two_cores
from engine_options import connector, options
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.vllm_plugin import audit_report, snapshots
from kvtxn.integrations.vllm_plugin.audit import runner_steps
from model_files import VOCAB, write
from planting import Rig


class GpuWaySteps(runner_steps.DeviceSteps):
    """The steps of GPUs, of a CPU's runner."""

    def open(self, is_ready: Callable[[], None]) -> Watch | None:
        """Open the watch, and begin at once: a CPU's runner does not say when it has warmed up."""
        watch = super().open(is_ready)
        if watch is not None:
            watch.begin()
        return watch


def watch_as_on_a_gpu() -> None:
    """Watch engines of this process from now on as on a GPU, but for kernels and waiting."""
    runner_steps.CpuSteps = GpuWaySteps  # type: ignore[assignment, misc]


TWO_RANKS = {
    "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, two_cores())),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}
#: Options of engines with recurrent layers: they keep states at no block boundary, and have blocks
#: as large as a state.
RECURRENT = {
    "dtype": "bfloat16",
    "enable_prefix_caching": False,
    "max_model_len": 512,
    "num_gpu_blocks_override": 60,
}
#: ExampleConnector stores a prompt when its first chunk is scheduled, so prompts have one chunk.
WHOLE_PROMPTS = {"max_num_batched_tokens": 2400, "num_gpu_blocks_override": 90}

#: By name: the model, and whatever differs from ``options``; ``rows`` are compared at least.
ENGINES: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama", "rounds": 8, "rows": 50_000},
    "tensor-parallel": {
        "model": "llama",
        "rounds": 1,
        "options": {"tensor_parallel_size": 2, "worker_extension_cls": "watched_engines.Rank"},
        "environment": TWO_RANKS,
    },
    "pipeline-parallel": {
        "model": "llama",
        "rounds": 1,
        "options": {
            "pipeline_parallel_size": 2,
            "speculative_config": None,
            "worker_extension_cls": "watched_engines.Stage",
        },
        "environment": TWO_RANKS,
    },
    "latent": {
        "model": "deepseek",
        "options": {
            "attention_config": {"backend": "CPU_MLA"},
            "max_num_batched_tokens": 288,
            "num_gpu_blocks_override": 52,
        },
    },
    "bytes": {
        "model": "gemma3",
        "kvtxn": {"audit": "bytes"},
        "options": {"num_gpu_blocks_override": 34},
    },
    "fp8": {"model": "llama", "options": {"kv_cache_dtype": "fp8"}},
    "draft-model": {
        "model": "llama",
        "draft": "draft",
        "kvtxn": planted_bytes.EACH,
        "afterwards": planted_bytes.AFTERWARDS["draft-model"],
    },
    "two-block-sizes": {"model": "gemma4", "options": {"num_gpu_blocks_override": 40}},
    "shared-rows": {"model": "gemma3n", "options": {"num_gpu_blocks_override": 40}},
    "hybrid-windows": {
        "model": "gemma3",
        "kvtxn": {"policy": "undo"},
        "options": {"num_gpu_blocks_override": 34},
    },
    "gated-delta-net": {
        "model": "qwen3_next",
        "states": True,
        "kvtxn": planted_bytes.EACH,
        "afterwards": planted_bytes.AFTERWARDS["gated-delta-net"],
        "options": RECURRENT,
    },
    "short-convolution": {
        "model": "lfm2",
        "states": True,
        "kvtxn": planted_bytes.EACH,
        "afterwards": (),
        "options": {**RECURRENT, "speculative_config": None},
    },
    "mamba": {
        "model": "mamba2",
        "states": True,
        "rows": 0,
        "kvtxn": planted_bytes.EACH,
        "afterwards": planted_bytes.AFTERWARDS["mamba"],
        "options": {**RECURRENT, "speculative_config": None},
    },
    "example-connector": {
        "model": "llama",
        "connector": "example",
        "options": WHOLE_PROMPTS,
    },
    "offloading-connector": {"model": "llama", "connector": "offloading"},
    "several-connectors": {
        "model": "llama",
        "connector": "several",
        "options": WHOLE_PROMPTS,
    },
}


#: The engines in which nothing is wrong.
HEALTHY = list(ENGINES)

ENGINES |= {
    "mamba-with-drafts": {"model": "mamba2", "states": True, "rounds": 1, "options": RECURRENT},
    "planted-rows": {"model": "llama", "faults": planted_engines.ROWS},
    "planted-forwards": {"model": "llama", "faults": planted_engines.FORWARDS},
    "planted-blocks": {"model": "llama", "faults": planted_engines.BLOCKS},
    "planted-states": {
        "model": "qwen3_next",
        "states": True,
        "faults": planted_engines.STATES,
        "options": RECURRENT,
    },
    "planted-single-states": {
        "model": "qwen3_next",
        "states": True,
        "kvtxn": {"policy": "auto", "recurrent": "exact"},
        "faults": planted_engines.SINGLE_STATES,
        "options": RECURRENT,
    },
    "planted-transfers": {
        "model": "llama",
        "connector": "offloading",
        "faults": planted_engines.TRANSFERS,
    },
    # The same faults, found in the way of GPUs.
    "device-rows": {"model": "llama", "as_on_a_gpu": True, "faults": planted_engines.ROWS},
    "device-states": {
        "model": "qwen3_next",
        "as_on_a_gpu": True,
        "states": True,
        "faults": planted_engines.STATES,
        "options": RECURRENT,
    },
    "device-transfers": {
        "model": "llama",
        "as_on_a_gpu": True,
        "connector": "offloading",
        "faults": planted_engines.TRANSFERS,
    },
    "planted-bytes": {
        "model": "llama",
        "kvtxn": {**planted_bytes.EACH, "on_violation": "contain"},
        "faults": planted_engines.BYTES,
    },
    "contained": {
        "model": "llama",
        "kvtxn": {"on_violation": "contain"},
        "faults": planted_engines.HEALED,
        "work": planted_engines.contain,
    },
    **{
        f"contained-{name}": {
            "model": "llama",
            "connector": name,
            "kvtxn": {"on_violation": "contain"},
            "faults": planted_engines.CONNECTED,
            "work": planted_engines.contain_while_clients_leave,
            "options": WHOLE_PROMPTS,
        }
        for name in ("offloading", "example", "several")
    },
    "fails": {
        "model": "llama",
        "kvtxn": {"audit": "bytes"},
        "faults": (),
        "work": failing_engines.report,
    },
    **{
        name: {
            "model": "llama",
            "faults": (),
            "work": stale_engines.find,
            **more,
            "kvtxn": {"weights_every": 1, **more.get("kvtxn", {})},
        }
        for name, more in {
            "stale": {},
            "stale-alarm": {
                "kvtxn": {"stale": "alarm"},
                "ways": (stale_engines.reload, stale_engines.and_reset),
            },
            "stale-contain": {
                "kvtxn": {"stale": "contain"},
                "ways": (stale_engines.reload, stale_engines.while_a_request_runs),
            },
            "stale-connector": {
                "connector": "example",
                "options": WHOLE_PROMPTS,
                "ways": (stale_engines.and_reset_all,),
            },
            "stale-states": {
                "model": "qwen3_next",
                "states": True,
                "options": RECURRENT,
                "ways": (stale_engines.in_the_middle,),
            },
        }.items()
    },
    "shared-store": {
        "model": "llama",
        "connector": "example",
        "shares": True,
        "kvtxn": {"weights_every": 1},
        "faults": (),
        "work": shared_engines.find,
        "options": WHOLE_PROMPTS,
    },
    "lost-reuse": {"model": "llama", "faults": (), "work": lost_reuse.find},
    "lost-states": {
        "model": "qwen3_next",
        "states": True,
        "faults": (),
        "work": lost_reuse.find,
        "options": {
            **{"dtype": "bfloat16", "mamba_cache_mode": "align", "speculative_config": None},
            **{"max_model_len": 1000, "max_num_batched_tokens": 1024},
            "num_gpu_blocks_override": 60,
        },
    },
    "shared-pictures": {
        "model": "blip2",
        "connector": "example",
        "shares": True,
        "faults": (),
        "first": media_engines.ask_about_red,
        "work": media_engines.find_in_store,
        "options": {**WHOLE_PROMPTS, "skip_tokenizer_init": False},
    },
    # The core in a process of its own, to which the front end sends what it knows of a picture.
    "pictures": {
        "model": "blip2",
        "faults": (),
        "work": media_engines.find,
        "options": {
            "skip_tokenizer_init": False,
            "num_gpu_blocks_override": 60,
            "worker_extension_cls": "media_engines.Painter",
        },
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    },
    "sleeps": {
        "model": "llama",
        "as_on_a_gpu": True,
        "faults": (),
        "work": sleeping_engines.pretend,
    },
    # Two groups with blocks of different sizes, and the core in a process of its own.
    "contained-process": {
        "model": "gemma4",
        "kvtxn": {"on_violation": "contain"},
        "faults": contained_engines.FAULTS,
        "work": contained_engines.contain,
        "options": {
            "num_gpu_blocks_override": 60,
            "worker_extension_cls": "contained_engines.Planting",
        },
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    },
    "contained-ranks": {
        "model": "llama",
        "kvtxn": {"on_violation": "contain"},
        "faults": contained_engines.FAULTS,
        "work": contained_engines.contain,
        "ranks": 2,
        "options": {
            "tensor_parallel_size": 2,
            "num_gpu_blocks_override": 40,
            "worker_extension_cls": "contained_engines.Planting",
        },
        "environment": TWO_RANKS,
    },
    **{
        f"ranks-{name}": {
            "model": "llama",
            "kvtxn": kvtxn,
            "faults": (),
            "work": work,
            "options": {
                "tensor_parallel_size": 2,
                "num_gpu_blocks_override": 40,
                "worker_extension_cls": "ranks_apart.Planting",
            },
            "environment": TWO_RANKS,
        }
        for name, kvtxn, work in (
            ("raise", {**planted_bytes.EACH, "on_violation": "raise"}, ranks_apart.raises),
            ("fail", {"policy": "undo", "on_error": "raise"}, ranks_apart.fails),
        )
    },
}


class Stage:
    """An extension of vLLM's worker."""

    def make_room(self) -> None:
        """Make the tensors that a later stage receives; an engine that warms up has them."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )


class Rank:
    """An extension of vLLM's worker."""

    def misunderstand(self) -> None:
        """Let the second rank take the next request's fourth token for another."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        real = runner._update_states

        def update(scheduler_output: Any) -> Any:
            for new in scheduler_output.scheduled_new_reqs[:1]:
                new.prompt_token_ids[3] ^= 1
                runner._update_states = real
            return real(scheduler_output)

        if self.rank == 1:  # type: ignore[attr-defined]
            runner._update_states = update


def take_ragged_steps() -> None:
    """Let the kernel of gated delta nets for CPUs pass over steps that it cannot compute.

    That of 0.32.0 fails where a request has fewer drafts than were accepted before. The audit reads
    the tables and counts that the kernel is given; what it computes is all the same here.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    real = gdn_attention._spec_forward

    def forward(layer: Any, metadata: Any, rows: Any, *more: Any) -> Any:
        try:
            return real(layer, metadata, rows, *more)
        except RuntimeError:
            heads, size = layer.kv_cache[1].shape[1:3]
            return rows.new_zeros((len(rows), heads, size))

    gdn_attention._spec_forward = forward


def build(engine: dict[str, Any], folder: Path) -> Any:
    """Make an engine whose pool is small enough to preempt."""
    from vllm import LLM

    makes = recurrent_models.write if engine.get("states") else write
    more = dict(engine.get("options", {}))
    if "draft" in engine:
        path = write(engine["draft"], folder)
        drafts = {"method": "draft_model", "model": path, "num_speculative_tokens": 3}
        more["speculative_config"] = drafts
    if "connector" in engine:
        more["kv_transfer_config"] = connector(folder, engine["connector"])
    shares = shared_engines.store(folder) if engine.get("shares") else {}
    kvtxn = {"audit": "ledger", **engine.get("kvtxn", {}), **shares}
    return LLM(**options(makes(engine["model"], folder), kvtxn, **more))


def work(llm: Any, chance: random.Random, texts: list[list[int]]) -> None:
    """Shared prefixes, repetitions, more requests than fit; in the end an empty cache."""
    from vllm import SamplingParams, TokensPrompt

    prompts, parameters = [], []
    for number in range(16):
        phrase = [chance.randrange(VOCAB) for _ in range(chance.randint(3, 12))]
        start = chance.choice(texts)[: chance.randint(0, 96)]
        tokens = [*start, *phrase * chance.randint(1, 4)]
        if number < len(texts):  # the same in every round
            tokens = texts[number] * 2
        prompts.append(TokensPrompt(prompt_token_ids=tokens))
        length = chance.randint(1, 90)
        parameters.append(SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
    llm.generate(prompts, parameters, use_tqdm=False)
    llm.reset_prefix_cache()


def run(folder: Path) -> dict[str, Any]:
    """Run the engine that the folder is named after; returns its report."""
    return carry_out(ENGINES[folder.name.removeprefix("audit-").partition(".")[0]], folder)


def carry_out(engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build an engine, let it work, and report."""
    os.environ.update(engine.get("environment", {}))
    if engine["model"] == "qwen3_next":
        take_ragged_steps()
    if engine.get("as_on_a_gpu"):
        watch_as_on_a_gpu()
    if engine.get("shares"):
        shared_engines.fill(partial(build, engine, folder), engine.get("first", shared_engines.ask))
    llm, chance = build(engine, folder), random.Random(0)
    if "faults" in engine:
        found: dict[str, Any] = engine.get("work", planted_engines.find)(llm, engine, folder)
        return found
    if "pipeline_parallel_size" in engine.get("options", {}):
        llm.collective_rpc("make_room")
    texts = [[chance.randrange(VOCAB) for _ in range(96)] for _ in range(3)]
    for _ in range(engine.get("rounds", 2)):
        work(llm, chance, texts)
    known = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    report = {
        "counts": snapshots(llm),
        "report": audit_report(llm),
        "preempted": known.get("vllm:num_preemptions", 0),
        "accepted": known.get("vllm:spec_decode_num_accepted_tokens", 0),
        "external": known.get("vllm:external_prefix_cache_hits", 0),
    }
    if engine.get("options", {}).get("worker_extension_cls") == "watched_engines.Rank":
        llm.collective_rpc("misunderstand")
        work(llm, chance, texts)
        report["differ"] = audit_report(llm)
    if "afterwards" in engine:
        report["compared"] = Rig(llm).watch.scrub.compared
        report["found"] = planted_engines.find_afterwards(llm, engine["afterwards"])
    return report
