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
from replayed_pools import allocator_of, config_of, runner_of, table_of
from torch import Tensor

RECORDED = Path(__file__).parent / "recorded"

#: Tensors of a forward, by name, and their dtype.
TENSORS = {
    **dict.fromkeys(("input_ids", "positions", "out_cache_loc", "req_pool_indices"), torch.int64),
    "seq_lens": torch.int64,
    "extend_seq_lens": torch.int32,
}
#: Likewise, of a hybrid.
STATES = {
    **dict.fromkeys(("mamba_clear_indices", "mamba_cow_src_indices"), torch.int64),
    **dict.fromkeys(("mamba_cow_dst_indices", "mamba_track_indices"), torch.int64),
    **{"mamba_track_mask": torch.bool, "mamba_track_seqlens": torch.int64},
}


def events(name: str) -> list[dict]:
    """The events of a recording."""
    with lzma.open(RECORDED / f"{name}.jsonl.xz", "rt") as lines:
        return [json.loads(line) for line in lines]


def _tensor(given: list | None, dtype: torch.dtype = torch.int64) -> Tensor | None:
    """A tensor of what was recorded; None if nothing was."""
    return None if given is None else torch.tensor(given, dtype=dtype)


def _drafts(forward: dict) -> SimpleNamespace | None:
    """What a forward has of drafts: how many, and the links of those that form a tree."""
    width = forward.get("draft_token_num")
    if width is None:
        return None
    links = {"children": "retrieve_next_token", "siblings": "retrieve_next_sibling"}
    trees = {name: _tensor(forward[kept]) for kept, name in links.items() if kept in forward}
    return SimpleNamespace(draft_token_num=width, topk=1, **trees)


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
        self.req_to_token_pool = table_of(engine)
        self.token_to_kv_pool_allocator = allocator_of(engine)
        self.model_config, self.runner = config_of(engine), runner_of(engine)
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
            elif event["event"] == "flushed":
                self.hooks.flush_cache(lambda scheduler, done=event["done"]: done, self)
            else:
                self._besides(event)

    def _besides(self, event: dict) -> None:
        """Replay what may be between the steps, in them, or behind a forward; nothing of others."""
        if event["event"] == "released":
            self._release(event)
        elif event["event"] == "copied":
            copied = (torch.tensor(event[which]) for which in ("source", "target"))
            self.req_to_token_pool.mamba_pool.copy_from(*copied)
        elif event["event"] == "moved":
            moved = (torch.tensor(event[which]) for which in ("target", "source"))
            self.token_to_kv_pool_allocator.get_kvcache().move_kv_cache(*moved)
        elif event["event"] == "committed":
            names = "last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track"
            slots = (event.get(which) for which in ("last", "tracked", "steps"))
            given = {n: _tensor(each) for n, each in zip(names, slots, strict=True)}
            self.runner.attn_backend.update_mamba_state_after_mtp_verify(**given, model=None)

    def _release(self, event: dict) -> None:
        req = self.requests.pop(event["rid"], None)
        if req is not None:
            req.finished = lambda: event["finished"]
            self.hooks.release_kv_cache(lambda *_, **__: None, req, None, checkpoint=True)

    def _run_batch(self, ahead: Iterator[dict]) -> None:
        """Replay one step: what was recorded until it had run."""
        within = list(iter(lambda: next(ahead, {"event": "ran"}), {"event": "ran"}))
        by_name = {event["event"]: event for event in within}
        at = within.index(by_name["forward"]) if "forward" in by_name else len(within)
        for event in within[:at]:
            self._besides(event)
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
        forward = by_name["forward"]
        keeps = [forward["keeps"]] if "keeps" in forward else None
        batch = SimpleNamespace(reqs=self._reqs(forward), mamba_track_mask_cpu=keeps)
        run = self.model_worker
        result = self.hooks.run_batch(
            lambda scheduler, batch: run.forward_batch_generation(by_name, within[at:], later),
            self,
            batch,
        )
        for event in ends:
            self._besides(event)
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

    def _place(self, forward: dict) -> None:
        """Write what a forward's tables and maps have now."""
        table, lines = self.req_to_token_pool, forward["req_pool_indices"]
        for line, (at, slots) in zip(lines, forward["table"], strict=True):
            table.req_to_token[line, at : at + len(slots)] = torch.tensor(slots, dtype=torch.int32)
        for at, slots in forward.get("map", ()):
            pool = self.token_to_kv_pool_allocator.get_kvcache()
            pool.full_to_swa_index_mapping[at : at + len(slots)] = torch.tensor(slots)
        if "state_slots" in forward:
            slots = torch.tensor(forward["state_slots"], dtype=torch.int32)
            table.req_index_to_mamba_index_mapping[lines] = slots

    def _generate(self, by_name: dict, behind: list[dict], later: bool) -> SimpleNamespace:
        """Replay a forward, what was behind it, and its outcome; the latter later, if it was."""
        forward, outcome = by_name["forward"], by_name["outcome"]
        self._place(forward)
        tensors = {
            name: _tensor(forward.get(name), dtype) for name, dtype in {**TENSORS, **STATES}.items()
        }
        batch = SimpleNamespace(
            **tensors,
            forward_mode=SimpleNamespace(name=forward["mode"]),
            batch_size=len(forward["rids"]),
            rids=forward["rids"],
            extend_prefix_lens_cpu=forward.get("extend_prefix_lens_cpu"),
            extend_seq_lens_cpu=forward.get("extend_seq_lens_cpu"),
            spec_info=_drafts(forward),
            is_prefill_only=forward["prefill_only"],
        )
        self.hooks.forward(lambda runner, batch: None, self.runner, batch)
        for event in behind:
            self._besides(event)
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
