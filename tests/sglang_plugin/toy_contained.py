"""A toy of SGLang's scheduler whose model reads the cache, and which can retract what it runs.

A row has its token, and whether it was computed from right rows alone. A step that reads another
row samples another token than the model's. So a text is the model's only if its request has read
right rows from its first token to its last.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch
from toy_pools import LINES, SLOTS
from toy_sglang import VOCABULARY, ToySglang, Tree, Worker, next_token


class Batch(SimpleNamespace):
    """A batch whose requests can leave it."""

    batch_is_full = True

    def filter_batch(self, *, keep_indices):
        self.reqs = [self.reqs[number] for number in keep_indices]


class Running:
    """The requests that run, as a batch."""

    batch_is_full = True

    def __init__(self, toy):
        self.toy = toy

    @property
    def reqs(self):
        return self.toy.running

    def filter_batch(self, *, keep_indices):
        self.toy.running = [self.toy.running[number] for number in keep_indices]


class LockedTree(Tree):
    """A tree that lets go of rows that no request has locked."""

    def __init__(self, toy):
        super().__init__()
        self.toy, self.emptied, self.sessions = toy, 0, {}

    def supports_prefix_sharing(self):
        return True

    def supports_swa(self):
        return False

    supports_mamba = supports_swa

    def locked(self):
        """The slots that requests hold from the tree."""
        toy = self.toy
        held = [req for req in toy.live() if req.kv.req_pool_idx is not None]
        return {slot for req in held for slot in toy.row(req)[: req.protected].tolist()}

    def evictable_size(self):
        locked = self.locked()
        return sum(slot not in locked for slot in self.slots.values())

    full_evictable_size = evictable_size

    def protected_size(self):
        return len(self.slots) - self.evictable_size()

    def all_values_flatten(self):
        return torch.tensor([*self.slots.values()])

    def evict(self, params):
        assert params.num_tokens == self.evictable_size()
        self.emptied += 1
        locked = self.locked()
        gone = {key: slot for key, slot in self.slots.items() if slot not in locked}
        self.slots = {key: slot for key, slot in self.slots.items() if slot in locked}
        self.toy.token_to_kv_pool_allocator.free([*gone.values()])

    def session_records(self):
        return self.sessions


class ReadingWorker(Worker):
    def forward_batch_generation(self, batch, on_publish=None):
        self.toy.compute(batch)
        return super().forward_batch_generation(batch)


class ReadingToy(ToySglang):
    """The scheduler.

    Args:
        hooks: the plug-in's.
        more: as for ``ToySglang``, without trees, and of kind "plain".
    """

    def __init__(self, hooks=None, **more):
        super().__init__(hooks, **more)
        self.running_batch, self.last_batch, self.chunked_req = Running(self), None, None
        self.batch_result_processor = SimpleNamespace(enable_overlap=self.enable_overlap)
        self.tree_cache = LockedTree(self)
        self.model_worker = ReadingWorker(self, self.tp_worker.model_runner)
        self.content = {}
        self.ended, self.released, self.taken = [], [], []
        self.plan = self._hooked("Scheduler.get_next_batch_to_run", ReadingToy.plan_step, self)
        self.take_in = self._hooked("Scheduler.process_batch_result", ReadingToy.take_result, self)

    @property
    def waiting_queue(self):
        return self.waiting

    def live(self):
        """Requests that have a line of the table."""
        flying = [req for batch, _ in self.results for req in batch.requests]
        return {id(req): req for req in (*self.running, *flying, *self.held)}.values()

    held = ()

    def offer(self, prompt, limit, **more):
        req = super().offer(prompt, limit, **more)
        req.is_retracted, req.to_finish, req.inflight_middle_chunks = False, None, 0
        req.grammar, req.return_logprob, req.kvtxn_contained = None, False, 0
        req.skip_radix_cache_insert = False
        req.time_stats = SimpleNamespace(set_wait_queue_entry_time=lambda: req.waits.append(1))
        req.waits, req.send_output_token_logprobs_offset = [], 0
        req._compute_max_prefix_len = lambda length: length - 1
        return req

    def match(self, req):
        return super().match(req)[: req._compute_max_prefix_len(len(req.tokens))]

    def checkpoint(self, req, up_to):
        if not req.skip_radix_cache_insert:
            super().checkpoint(req, up_to)

    def plan_step(self, running_batch=None, last_batch=None):
        for req in self.running:  # a chunk's rows are in the tree before its result is taken in
            if req.kv.kv_committed_len < req.fill:
                self.checkpoint(req, req.kv.kv_committed_len)
        batch = ToySglang.plan(self)
        for req in batch.reqs if batch is not None else ():
            req.is_retracted = False
        return SimpleNamespace(batch_to_run=batch)

    def step(self):
        """As ``ToySglang.step``, with a plan as SGLang has it."""
        plan = self.plan
        self.plan = lambda: plan().batch_to_run
        try:
            super().step()
        finally:
            self.plan = plan
        for _, result in self.results:  # as SGLang does once it has sampled
            result.delay_sample_func = None

    def batch(self, *args, **more):
        found = Batch(**vars(super().batch(*args, **more)))
        found.requests = found.reqs
        return found

    def compute(self, batch):
        """Read the rows of each request, and sample of them; SGLang's forward."""
        forward = batch.forward_batch
        ids, slots = forward.input_ids.tolist(), forward.out_cache_loc.tolist()
        lines = forward.req_pool_indices.tolist()
        row = 0
        for number, (first, end) in enumerate(zip(batch.before, batch.ends, strict=True)):
            req = batch.requests[number]
            tokens = [*self.device[req.rid][:first], *ids[row : row + end - first]]
            table = self.req_to_token_pool.req_to_token[lines[number]].tolist()
            for position in range(first, end):
                read = [self.content.get(slot) for slot in table[:position]]
                right = [(token, True) for token in tokens[:position]]
                # A row is computed of those before it, and lies where it is written to.
                self.content[slots[row]] = (ids[row], read == right)
                if self.content.get(table[position]) != (tokens[position], True):
                    self.spoil(batch, number, position - first)
                row += 1

    def spoil(self, batch, number, row):
        """Let a row sample another token than the model's, as it has read a wrong row."""
        if batch.accepted is None:
            if row == batch.ends[number] - batch.before[number] - 1:
                batch.sampled[number] = batch.sampled[number] % (VOCABULARY - 1) + 1
            return
        if row < batch.accepted[number]:
            batch.accepted[number] = row + 1
            at = number * (self.drafts + 1) + row
            batch.sampled[at] = batch.sampled[at] % (VOCABULARY - 1) + 1

    def take_result(self, batch, result):
        """As SGLang: requests that are retracted are passed over."""
        flying = self.running
        hidden = [req for req in batch.requests if req.is_retracted]
        assert not hidden or self.batch_result_processor.enable_overlap
        self.taken.append(batch)
        view = SimpleNamespace(**vars(batch))
        view.reqs = batch.requests
        kept = [req for req in flying if not any(req is other for other in hidden)]
        gone = [req for req in flying if any(req is other for other in hidden)]
        self.held, self.running = gone, kept
        ToySglang.take_in(self, view, result)
        self.held, self.running = (), [req for req in flying if req in self.running or req in gone]

    def send_abort_output(self, output, req):
        self.ended.append((req, output.finished_reason))
        self.done.append(req)

    def _release_aborted_request(self, req):
        self.released.append(req)

    def check(self, *, slots=True):
        """No row of the tree is wrong; with ``slots`` each slot is free, or in the tree, once."""
        assert [*self.waiting, *self.running, *self.results] == []
        free = [*self.token_to_kv_pool_allocator.free_slots]
        every = sorted([*free, *self.tree_cache.slots.values()])
        assert not slots or every == [*range(1, SLOTS + 1)]
        assert len(self.req_to_token_pool.free_slots) == LINES - 1
        for key, slot in self.tree_cache.slots.items():
            assert self.content[slot] == (key[-1], True)

    def clean_texts(self):
        """Tell whether each text is the model's."""
        return all(
            req.tokens[end] == next_token(req.tokens[:end])
            for req in self.done
            for end in range(len(req.origin_input_ids), len(req.tokens))
        )


def sglang_modules(toy):
    """SGLang's modules, as far as they are called, over a toy's functions."""

    def retract_all(
        *, reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache,
        hisparse_coordinator, offload_kv,
    ):  # fmt: skip
        for req in reqs:
            toy().release(req, insert=False)
            req.is_retracted = True
            toy().events["retracted"] += 1

    def prepare_abort(req, message, status):
        req.aborted = True
        reason = {"type": "abort", "message": message, "status_code": status}
        req.finished_reason = SimpleNamespace(to_json=lambda: reason)

    def release_kv_cache(req, tree_cache, *, checkpoint):
        toy().release(req, insert=checkpoint)

    def abort(req, finished_reason):
        return SimpleNamespace(rid=req.rid, finished_reason=finished_reason)

    managers, cache = "sglang.srt.managers", "sglang.srt.mem_cache"
    common = {"release_kv_cache": release_kv_cache}
    functions = {
        "sglang": {}, "sglang.srt": {}, managers: {}, cache: {"common": SimpleNamespace(**common)},
        "sglang.srt.disaggregation": {},
        f"{managers}.schedule_batch": {"retract_all": retract_all},
        f"{managers}.scheduler": {"_make_abort_req": abort},
        "sglang.srt.disaggregation.utils": {"prepare_abort": prepare_abort},
        f"{cache}.common": common,
        f"{cache}.base_prefix_cache": {"EvictParams": SimpleNamespace},
    }  # fmt: skip
    found = {}
    for name, inside in functions.items():
        found[name] = module = ModuleType(name)
        vars(module).update(inside)
    return found
