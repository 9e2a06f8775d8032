"""Replays what an SGLang engine did on a GPU through the plug-in's hooks, on a CPU.

A plug-in wrote down each forward, outcome and end as SGLang 0.5.23 had them on an H200; ``trim.py``
made the recording small.
"""

from __future__ import annotations

import json
import lzma
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

RECORDED = Path(__file__).parent / "recorded"

#: Tensors of a forward, by name, and their dtype.
TENSORS = {
    **dict.fromkeys(("input_ids", "positions", "out_cache_loc", "req_pool_indices"), torch.int64),
    "seq_lens": torch.int64,
    "extend_seq_lens": torch.int32,
}


def events(name: str) -> list[dict]:
    """The events of a recording."""
    with lzma.open(RECORDED / f"{name}.jsonl.xz", "rt") as lines:
        return [json.loads(line) for line in lines]


def named(name: str) -> object:
    """An object of a class of this name."""
    return type(name, (), {})()


class Replay:
    """A recorded engine, as far as the plug-in looks into it.

    Args:
        hooks: the plug-in's.
        recorded: the events.
        fault: changes an event before it is replayed.
    """

    is_generation = True
    enable_overlap = False
    forward_stream = None

    def __init__(
        self, hooks, recorded: list[dict], fault: Callable[[dict], None] | None = None
    ) -> None:
        self.hooks, self.fault = hooks, fault
        engine, *self.recorded = recorded
        assert engine["event"] == "engine"
        args = {name: value for name, value in engine["args"].items() if value is not None}
        self.server_args = SimpleNamespace(**args)
        self.spec_algorithm = SimpleNamespace(name=engine["algorithm"])
        self.req_to_token_pool = named(engine["table_class"])
        table = torch.zeros(*engine["table"], dtype=torch.int32)
        self.req_to_token_pool.req_to_token = table
        allocator = self.token_to_kv_pool_allocator = named(engine["slots"])
        allocator.size, allocator.page_size = engine["size"], engine["page"]
        allocator.get_kvcache = lambda: named(engine["rows"])
        self.runner = SimpleNamespace(
            is_draft_worker=False, device="cpu", model=torch.nn.Linear(2, 2)
        )
        self.tp_worker = SimpleNamespace(model_runner=self.runner)
        self.model_worker = SimpleNamespace(forward_batch_generation=self._generate)
        self.requests: dict[str, SimpleNamespace] = {}
        self.steps = 0

    def run(self) -> None:
        """Replay every event."""
        ahead = iter(self.recorded)
        for event in ahead:
            if event["event"] == "run_batch":
                self._run_batch(ahead)
            elif event["event"] == "released":
                self._release(event)
            elif event["event"] == "flushed":
                self.hooks.flush_cache(lambda scheduler, done=event["done"]: done, self)

    def _release(self, event: dict) -> None:
        req = self.requests.pop(event["rid"], None)
        if req is not None:
            req.finished = lambda: event["finished"]
            self.hooks.release_kv_cache(lambda *_, **__: None, req, None, checkpoint=True)

    def _run_batch(self, ahead: Iterator[dict]) -> None:
        """Replay one step: what was recorded until it had run."""
        within = list(iter(lambda: next(ahead, {"event": "ran"}), {"event": "ran"}))
        by_name = {event["event"]: event for event in within}
        for event in within:
            if event["event"] == "released":
                self._release(event)
        if "forward" not in by_name:
            return
        later, ends = "outcome" not in by_name, []
        if later:  # sampled after the last step was taken in, as with a grammar
            for event in ahead:
                if event["event"] == "outcome":
                    by_name["outcome"] = event
                    break
                ends.append(event)
            else:
                return
        self.steps += 1
        if self.fault is not None:
            self.fault(by_name)
        batch = SimpleNamespace(reqs=self._reqs(by_name["forward"]))
        run = self.model_worker
        result = self.hooks.run_batch(
            lambda scheduler, batch: run.forward_batch_generation(by_name, later), self, batch
        )
        for event in ends:
            if event["event"] == "released":
                self._release(event)
        if later:
            result.delay_sample_func()

    def _reqs(self, forward: dict) -> list[SimpleNamespace]:
        for req in forward["reqs"]:
            if isinstance(req["prompt"], list):  # it comes, or comes again
                self.requests[req["rid"]] = SimpleNamespace(
                    rid=req["rid"], origin_input_ids=array("q", req["prompt"]), lora_id=None,
                    input_embeds=None, positional_embed_overrides=None, finished=lambda: False,
                    kv=SimpleNamespace(kv_committed_len=0),
                )  # fmt: skip
                output = req["output"]
            else:
                output = [0] * req["output"]
            self.requests[req["rid"]].output_ids = array("q", output)
        return [self.requests[rid] for rid in forward["rids"]]

    def _generate(self, by_name: dict, later: bool) -> SimpleNamespace:
        """Replay a forward and its outcome; the latter later, if it was."""
        forward, outcome = by_name["forward"], by_name["outcome"]
        table = self.req_to_token_pool.req_to_token
        for line, (at, slots) in zip(forward["req_pool_indices"], forward["table"], strict=True):
            table[line, at : at + len(slots)] = torch.tensor(slots, dtype=torch.int32)
        tensors: dict[str, Tensor | None] = {
            name: torch.tensor(forward[name], dtype=dtype) if name in forward else None
            for name, dtype in TENSORS.items()
        }
        width = forward.get("draft_token_num")
        batch = SimpleNamespace(
            **tensors,
            forward_mode=SimpleNamespace(name=forward["mode"]),
            batch_size=len(forward["rids"]),
            rids=forward["rids"],
            extend_prefix_lens_cpu=forward.get("extend_prefix_lens_cpu"),
            extend_seq_lens_cpu=forward.get("extend_seq_lens_cpu"),
            spec_info=None if width is None else SimpleNamespace(draft_token_num=width, topk=1),
            is_prefill_only=forward["prefill_only"],
        )
        self.hooks.forward(lambda runner, batch: None, self.runner, batch)
        counts = outcome.get("accept_lens")
        result = SimpleNamespace(
            next_token_ids=None if later else torch.tensor(outcome["ids"]),
            accept_lens=None if counts is None else torch.tensor(counts, dtype=torch.int32),
            delay_sample_func=None,
        )

        def sample() -> SimpleNamespace:
            result.next_token_ids = torch.tensor(outcome["ids"])
            return result

        result.delay_sample_func = sample if later else None
        return result
