"""A plug-in of SGLang that writes down what the seam of kvtxn sees, for replays without a GPU.

``RECORD_FILE=PATH.jsonl`` switches it on; after ``RECORD_STEPS`` forwards (400) it ends. Its entry
point, ``sglang_recorder:register`` in the group ``sglang.srt.plugins``, is the user's to install.
Each line is an event: the engine, then forwards, outcomes and ends in their order.
``tests/sglang_plugin/recorded/trim.py`` makes it small, ``replay.py`` plays it. Each step waits for
the device. What the seam reads of trees, windows and states is kept where an engine has them; the
engine is one of which every group is watched.
"""

from __future__ import annotations

import json
import os
from functools import partial

TENSORS = (
    *("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"),
    *("extend_seq_lens", "extend_prefix_lens"),
)
#: Of a hybrid's forward: states that are cleared, copied, and kept for the tree.
STATES = (
    *("mamba_clear_indices", "mamba_cow_src_indices", "mamba_cow_dst_indices"),
    *("mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens"),
)
ARGUMENTS = ("speculative_eagle_topk", "speculative_num_draft_tokens", "disable_radix_cache")


def numbers(tensor):
    """A tensor's or a list's numbers; None for none."""
    if tensor is None:
        return None
    return tensor.tolist() if hasattr(tensor, "tolist") else list(tensor)


def arguments(scheduler):
    """Arguments of the server as SGLang has resolved them; None for one that is not there."""
    args = scheduler.server_args
    resolved = getattr(args, "resolved_dict", None)
    found = vars(args) if resolved is None else resolved()
    return {name: found.get(name) for name in ARGUMENTS}


def runs(before, now):
    """Where numbers of a tensor have changed: the first place and the new numbers of each run."""
    found = []
    places = (before != now).nonzero().flatten()
    for at, number in zip(places.tolist(), now[places].tolist(), strict=True):
        if not found or found[-1][0] + len(found[-1][1]) != at:
            found.append([at, []])
        found[-1][1].append(number)
    return found


def windows(scheduler):
    """Facts of pools for layers with and without a window; None if there is one pool alone."""
    allocator = scheduler.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    if type(pool).__name__ != "SWAKVPool":
        return None
    inside = {name: getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")}
    return {
        "window": scheduler.tp_worker.model_runner.sliding_window_size,
        "size_full": int(allocator.size_full),
        "size_swa": int(allocator.size_swa),
        "inside": {name: type(each).__name__ for name, each in inside.items() if each is not None},
        "layers": [[number, bool(slides)] for number, (_, slides) in pool.layers_mapping.items()],
    }


def states(scheduler):
    """Facts of a hybrid's states, and of the pool with its rows; None without states."""
    table, runner = scheduler.req_to_token_pool, scheduler.tp_worker.model_runner
    if type(table).__name__ != "HybridReqToTokenPool":
        return None
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return {
        "slots": int(table.mamba_allocator.size),
        "linear": type(runner.attn_backend.linear_attn_backend).__name__,
        "chunk": int(getattr(scheduler.model_config.hf_text_config, "mamba_chunk_size", 64)),
        "inside": type(pool.full_kv_pool).__name__,
        "layers": [*pool.full_attention_layer_id_mapping],
    }


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
        #: The pool's map of slots, and what it was; where states are, if there are any.
        self.map = self.mapped = self.states = None
        self.trees = self.in_forward = False

    def write(self, event, **facts) -> None:
        if self.steps >= 0:
            self.file.write(json.dumps({"event": event, **facts}) + "\n")

    def begin(self, scheduler) -> None:
        """Describe the engine, and hear what its worker returns."""
        self.runner, worker = scheduler.tp_worker.model_runner, scheduler.model_worker
        allocator = scheduler.token_to_kv_pool_allocator
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
            args=arguments(scheduler),
            windows=windows(scheduler),
            states=states(scheduler),
        )
        self.follow(scheduler)
        worker.forward_batch_generation = partial(self.generated, worker.forward_batch_generation)

    def follow(self, scheduler) -> None:
        """Hear of moved rows, and of states that no forward writes; know what a forward has."""
        allocator, algorithm = scheduler.token_to_kv_pool_allocator, scheduler.spec_algorithm.name
        pool, table = allocator.get_kvcache(), scheduler.req_to_token_pool
        topk = arguments(scheduler)["speculative_eagle_topk"] or 1
        self.trees = algorithm == "NGRAM" or (algorithm != "NONE" and topk > 1)
        if self.trees:
            pool.move_kv_cache = partial(self.moved, pool.move_kv_cache)
        if type(allocator).__name__ == "SWATokenToKVPoolAllocator":
            self.map = pool.full_to_swa_index_mapping
            self.mapped = self.map.cpu() * 0
        if type(table).__name__ == "HybridReqToTokenPool":
            self.states = table.req_index_to_mamba_index_mapping
            backend, kept = self.runner.attn_backend, table.mamba_pool
            commit = partial(self.committed, backend.update_mamba_state_after_mtp_verify)
            backend.update_mamba_state_after_mtp_verify = commit
            kept.copy_from = partial(self.copied, kept.copy_from)

    def moved(self, move, tgt_loc, src_loc) -> None:
        move(tgt_loc, src_loc)
        self.write("moved", target=numbers(tgt_loc), source=numbers(src_loc))

    def committed(
        self, commit, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, **more
    ) -> None:
        both = mamba_track_indices, mamba_steps_to_track
        commit(last_correct_step_indices, *both, **more)
        slots, steps = map(numbers, both)
        last = numbers(last_correct_step_indices)
        self.write("committed", last=last, tracked=slots, steps=steps)

    def copied(self, copy, src_indices, dst_indices) -> None:
        copy(src_indices, dst_indices)
        if not self.in_forward:  # the batch tells of the others
            self.write("copied", source=numbers(src_indices), target=numbers(dst_indices))

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
        if self.batch is None or runner is not self.runner or not batch.rids:
            return original(runner, batch, *args, **kwargs)
        self.steps -= 1
        if self.steps >= 0:  # an engine that serves on is not slowed
            self.write_forward(batch)
        self.in_forward = True
        try:
            return original(runner, batch, *args, **kwargs)
        finally:
            self.in_forward = False

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
            **self.tree_of(batch),
            **self.map_of(),
            **self.states_of(batch),
        )

    def tree_of(self, batch):
        """The links of drafts that form a tree."""
        if not self.trees or batch.forward_mode.name != "TARGET_VERIFY":
            return {}
        spec = batch.spec_info
        both = spec.retrieve_next_token, spec.retrieve_next_sibling
        return dict(zip(("children", "siblings"), map(numbers, both), strict=True))

    def map_of(self):
        """What has changed in the map of windows since the last forward."""
        if self.map is None:
            return {}
        before, self.mapped = self.mapped, self.map.cpu().clone()
        return {"map": runs(before, self.mapped) or None}

    def states_of(self, batch):
        """The slot of each request's state, and what the batch tells of others."""
        if self.states is None:
            return {}
        keeps = getattr(self.batch, "mamba_track_mask_cpu", None)
        return {
            "state_slots": numbers(self.states[batch.req_pool_indices]),
            "keeps": None if keeps is None else bool(any(keeps)),
            **{name: numbers(getattr(batch, name, None)) for name in STATES},
        }

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
