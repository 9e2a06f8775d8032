"""Two engines on one machine that hand requests over through NIXL, each in its own process.

The first one computes prompts and some of the output, with drafts; the second one reads the first
one's memory and goes on. Both are watched by the image of all durable bytes (``egress_oracle``).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from connector_scenarios import forget
from egress_oracle import EgressOracle
from engine_options import options
from kvtxn.integrations.vllm_plugin import snapshots
from model_files import write
from scenarios import Engine, text

#: Requests, and how many tokens of each the first engine generates. No draft of a last step reaches
#: into another block: vLLM pairs the blocks of both engines from their ends. The user of the last
#: request leaves while its rows come.
PROMPTS = [text(800 + i, 36 + 11 * i) for i in range(7)]
FIRST = [1, 18, 28, 29, 21, 40, 9]
THEN = 30
LEAVES = f"then-{len(PROMPTS) - 1}"
#: Seconds until requests that wait for another engine's rows count as stuck.
MOST = 240.0


class Handed(EgressOracle):
    """An extension of vLLM's worker: blocks that NIXL fills are durable once it says so."""

    def durable(self, blocks: list[int]) -> list[Any]:
        """Return the bytes that blocks may leave with, ``[num_blocks, ...]`` of each layer."""
        return [self.eg_image(each)[blocks].numpy() for each in self.eg_caches.values()]

    def expect(self, handed: dict[str, list[Any]]) -> None:
        """Say with which bytes the rows of requests have left the other engine."""
        self.expected = {
            name: [torch.from_numpy(each) for each in found] for name, found in handed.items()
        }

    def _eg_tap(self, connector: Any, place: str) -> None:
        worker = connector.connector_worker
        known = hasattr(worker, "get_transfer_results")  # since 0.32
        ends = "get_transfer_results" if known else "get_finished"
        start, results = worker.start_load_kv, getattr(worker, ends)
        regions = list(self.eg_caches.values())

        def started(metadata: Any) -> Any:
            for name, asked in metadata.reqs_to_recv.items():
                blocks = [block for group in asked.local_block_ids for block in group]
                if blocks:
                    whole = self.expected[name.rpartition("-")[0]]
                    stored = [each[: len(blocks)] for each in whole]
                    self._eg_comes(("nixl", name), blocks, stored)
            return start(metadata)

        def finished() -> Any:
            found = results()
            for name in (found.finished_recving if known else found[1]) or ():
                if ("nixl", name) in self.eg_loads:
                    self._eg_came(("nixl", name), regions)
            return found

        worker.start_load_kv = started
        setattr(worker, ends, finished)


def build(model: str, policy: str, port: int | None) -> Any:
    """Build one of the two engines, or, without a port, one that needs no other."""
    from vllm import LLM

    if port is None:
        return LLM(**options(model, {}, num_gpu_blocks_override=64, additional_config={}))
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
    }
    kvtxn = {} if policy == "stock" else {"policy": policy, "on_error": "raise"}
    return LLM(
        **options(
            model,
            kvtxn,
            kv_transfer_config=transfer,
            num_gpu_blocks_override=64,
            worker_extension_cls=f"{__name__}.Handed",
            additional_config={"kvtxn": kvtxn} if kvtxn else {},
        )
    )


def _free_ports(count: int) -> list[int]:
    """Find ports below those that the system gives to whoever asks for any."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            found.append(port)
    return found


def _params(outputs: int, given: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=outputs,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": given},
    )


def _ended(llm: Any, asked: list[tuple[str, list[int], Any]], leaves: str = "") -> dict[str, Any]:
    """Run requests to their ends; one is aborted after the first step."""
    inner, done = llm.llm_engine, dict[str, Any]()
    for name, prompt, params in asked:
        inner.add_request(name, {"prompt_token_ids": prompt}, params)
    begin, step = time.monotonic(), 0
    while time.monotonic() < begin + MOST:
        step += 1
        if step == 2 and leaves:
            inner.abort_request([leaves])
        if len(done) == len(asked) - bool(leaves):
            return done
        done |= {output.request_id: output for output in inner.step() if output.finished}
    raise RuntimeError(f"only {sorted(done)} have ended")


def _report(llm: Any) -> dict[str, Any]:
    return {"oracle": llm.collective_rpc("egress_take")[0], "counts": snapshots(llm)[0]}


def prefill(model: str, policy: str, port: int, pipe: Any, other: Any) -> None:
    """Be the first engine: compute, then keep running other requests while the second one reads."""
    other.close()  # or else the pipe does not end with the second engine
    llm = build(model, policy, port)
    llm.collective_rpc("egress_install")
    asked = [
        (f"first-{i}", prompt, _params(count, {"do_remote_decode": True}))
        for i, (prompt, count) in enumerate(zip(PROMPTS, FIRST, strict=True))
    ]
    handed = []
    done = _ended(llm, asked)
    for found in (done[name] for name, *_ in asked):
        [blocks] = found.kv_transfer_params["remote_block_ids"]
        rows = llm.collective_rpc("durable", args=(list(blocks),))[0]
        handed.append((list(found.outputs[0].token_ids), found.kv_transfer_params, rows))
    pipe.send(handed)
    number = 0
    while not pipe.poll():
        Engine(llm).run([text(850 + number % 8, 20), text(860 + number % 8, 33)], 24)
        number += 1
    pipe.recv()
    forget(Engine(llm))  # no block is held any more
    pipe.send(_report(llm) | {"rounds": number})
    pipe.recv()
    os._exit(0)


def run(folder: Path) -> dict[str, Any]:
    """Run both engines of the policy that the folder is named after; returns their reports.

    Its name is "plain" for one engine that does the work of both.
    """
    policy = folder.name.rpartition(".")[2]
    model = write("llama", folder)  # the same path for both, or they refuse each other
    if policy == "plain":
        engine = Engine(build(model, policy, None))
        return {"tokens": engine.ask(PROMPTS, [engine.params(count + THEN) for count in FIRST])}
    ports = _free_ports(2)
    here, there = multiprocessing.Pipe()
    first = multiprocessing.get_context("fork").Process(
        target=prefill, args=(model, policy, ports[0], there, here), daemon=True
    )
    first.start()
    there.close()
    llm = build(model, policy, ports[1])
    llm.collective_rpc("egress_install")
    if not here.poll(120):
        raise RuntimeError(f"the first engine says nothing; its exit code is {first.exitcode}")
    handed = here.recv()
    asked, expected = [], {}
    for i, (prompt, (tokens, given, rows)) in enumerate(zip(PROMPTS, handed, strict=True)):
        asked.append((f"then-{i}", prompt + tokens, _params(THEN, given)))
        expected[f"then-{i}"] = rows
    llm.collective_rpc("expect", args=(expected,))
    done = _ended(llm, asked, LEAVES)
    here.send("read")
    tokens = [[*handed[i][0], *done[f"then-{i}"].outputs[0].token_ids] for i in range(len(done))]
    report = {"tokens": tokens, "then": _report(llm), "first": here.recv()}
    report["cached"] = [done[f"then-{i}"].num_cached_tokens for i in range(len(done))]
    here.send("end")
    first.join()
    return report
