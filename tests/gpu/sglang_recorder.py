"""A plug-in of SGLang that writes down what the seam of kvtxn sees, for replays without a GPU.

``RECORD_FILE=PATH.jsonl`` switches it on; after ``RECORD_STEPS`` forwards (400) it ends. Its entry
point, ``sglang_recorder:register`` in the group ``sglang.srt.plugins``, is the user's to install.
Each line is an event: the engine, then forwards, outcomes and ends in their order.
``tests/sglang_plugin/recorded/trim.py`` makes it small, ``replay.py`` plays it. Each step waits for
the device.
"""

from __future__ import annotations

import json
import os
from functools import partial

TENSORS = (
    *("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"),
    *("extend_seq_lens", "extend_prefix_lens"),
)
ARGUMENTS = ("speculative_eagle_topk", "speculative_num_draft_tokens", "disable_radix_cache")


def numbers(tensor):
    """A tensor's or a list's numbers; None for none."""
    if tensor is None:
        return None
    return tensor.tolist() if hasattr(tensor, "tolist") else list(tensor)


class Recorder:
    """What one scheduler does, written to a file.

    Args:
        path: of the file.
        steps: forwards until the end.
    """

    def __init__(self, path, steps) -> None:
        self.file = open(path, "a", buffering=1)  # noqa: SIM115  # as long as the process
        self.steps = steps
        self.known: dict[str, int] = {}
        self.runner = self.batch = self.table = None

    def write(self, event, **facts) -> None:
        if self.steps >= 0:
            self.file.write(json.dumps({"event": event, **facts}) + "\n")

    def begin(self, scheduler) -> None:
        """Describe the engine, and hear what its worker returns."""
        self.runner, worker = scheduler.tp_worker.model_runner, scheduler.model_worker
        allocator, args = scheduler.token_to_kv_pool_allocator, scheduler.server_args
        self.table = scheduler.req_to_token_pool.req_to_token
        self.write(
            "engine",
            table=list(self.table.shape),
            table_class=type(scheduler.req_to_token_pool).__name__,
            rows=type(allocator.get_kvcache()).__name__,
            slots=type(allocator).__name__,
            size=int(allocator.size),
            page=int(allocator.page_size),
            overlap=bool(scheduler.enable_overlap),
            algorithm=scheduler.spec_algorithm.name,
            args={name: getattr(args, name, None) for name in ARGUMENTS},
        )
        worker.forward_batch_generation = partial(self.generated, worker.forward_batch_generation)

    def generated(self, generate, *args, **kwargs):
        result = generate(*args, **kwargs)
        later = result.delay_sample_func
        if later is None:
            self.outcome(result)
        else:

            def sample():
                done = later()
                self.outcome(result)
                return done

            result.delay_sample_func = sample
        return result

    def outcome(self, result) -> None:
        counts = numbers(result.accept_lens)
        self.write("outcome", ids=numbers(result.next_token_ids), accept_lens=counts)

    # -- hooks -------------------------------------------------------------------------------

    def run_batch(self, original, scheduler, batch, *args, **kwargs):
        if self.runner is None:
            self.begin(scheduler)
        self.batch = batch
        self.write("run_batch")
        try:
            return original(scheduler, batch, *args, **kwargs)
        finally:
            self.batch = None
            self.write("ran")

    def forward(self, original, runner, batch, *args, **kwargs):
        if self.batch is not None and runner is self.runner and batch.rids:
            self.steps -= 1
            self.write_forward(batch)
        return original(runner, batch, *args, **kwargs)

    def write_forward(self, batch) -> None:
        reqs = []
        for req in self.batch.reqs:
            new = self.known.get(req.rid) != id(req)
            self.known[req.rid] = id(req)
            both = [
                list(each) if new else len(each) for each in (req.origin_input_ids, req.output_ids)
            ]
            reqs.append({"rid": req.rid, "prompt": both[0], "output": both[1]})
        width = getattr(batch.spec_info, "draft_token_num", None)
        ends = zip(numbers(batch.req_pool_indices), numbers(batch.seq_lens), strict=True)
        self.write(
            "forward",
            mode=batch.forward_mode.name,
            rids=list(batch.rids),
            reqs=reqs,
            **{name: numbers(getattr(batch, name, None)) for name in TENSORS},
            extend_prefix_lens_cpu=numbers(batch.extend_prefix_lens_cpu),
            extend_seq_lens_cpu=numbers(batch.extend_seq_lens_cpu),
            draft_token_num=width,
            prefill_only=bool(batch.is_prefill_only),
            slots=[self.table[line, : end + (width or 0)].tolist() for line, end in ends],
        )

    def released(self, original, req, *args, **kwargs):
        self.known.pop(req.rid, None)
        self.write("released", rid=req.rid, finished=bool(req.finished()))
        return original(req, *args, **kwargs)

    def flushed(self, original, scheduler, *args, **kwargs):
        done = original(scheduler, *args, **kwargs)
        self.write("flushed", done=bool(done))
        return done


def register() -> None:
    """Record the scheduler of this process, if the user asks for it."""
    path = os.environ.get("RECORD_FILE")
    if not path:
        return
    hooks = __import__("sglang.srt.plugins.hook_registry", fromlist=["HookRegistry"])
    recorder = Recorder(path, int(os.environ.get("RECORD_STEPS", "400")))
    for target, hook in {
        "sglang.srt.model_executor.model_runner.ModelRunner.forward": recorder.forward,
        "sglang.srt.managers.scheduler.Scheduler.run_batch": recorder.run_batch,
        "sglang.srt.managers.scheduler.Scheduler.flush_cache": recorder.flushed,
        "sglang.srt.mem_cache.common.release_kv_cache": recorder.released,
    }.items():
        hooks.HookRegistry.register(target, hook, hooks.HookType.AROUND)
