"""A toy of SGLang's scheduler: the same objects and the same order of calls, without a model.

Its pools, requests, batches and results have the names and shapes that were seen in SGLang 0.5.23
on a GPU. What a forward computes is known beforehand: the token behind any prefix, and so the words
that a right cache has. A step of the toy does what SGLang's does with the table and the tree:
prompts in chunks, hits in a radix tree, retraction, one more forward of a request that is done,
drafts that are over-allocated, flushes.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from itertools import pairwise
from types import SimpleNamespace

import attrs
import torch
from toy_pools import (
    LINES,
    WINDOW,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)

VOCABULARY = 50


@attrs.define(eq=False, slots=False)
class Req:
    rid: str
    origin_input_ids: array
    limit: int
    output_ids: array = attrs.field(factory=lambda: array("q"))
    lora_id: str | None = None
    input_embeds: object = None
    positional_embed_overrides: object = None
    beam_group: object = None
    kv: SimpleNamespace = attrs.field(
        factory=lambda: SimpleNamespace(req_pool_idx=None, kv_committed_len=0, kv_allocated_len=0)
    )
    #: Rows that the tree has; the request does not give them back.
    protected: int = 0
    #: Rows that have left the window, and have given their slots of it back.
    evicted: int = 0
    aborted: bool = False
    #: Tokens that it has when its rows are first computed, or again.
    fill: int = 0

    def finished(self) -> bool:
        return self.aborted or len(self.output_ids) >= self.limit

    @property
    def tokens(self):
        return [*self.origin_input_ids, *self.output_ids]


class Tree:
    """A radix tree of single tokens: the slot of each prefix that it knows.

    Args:
        mapping: of the slots of windows; a hit needs the last rows before it to have one.
    """

    def __init__(self, mapping=None) -> None:
        self.mapping = mapping
        self.reset()

    def reset(self) -> None:
        self.slots: dict[tuple, int] = {}

    def match(self, key, tokens):
        found = []
        for end in range(1, len(tokens) + 1):
            slot = self.slots.get((key, *tokens[:end]))
            if slot is None:
                break
            found.append(slot)
        if self.mapping is None:
            return found
        there = (self.mapping[found] > 0).tolist()
        while found and not all(there[-WINDOW:]):
            found.pop()
            there.pop()
        return found

    def insert(self, key, tokens, slots):
        """Insert rows; return the tree's slots, and those of rows that it had already.

        A row that has lost its slot of the window gets that of the one that comes.
        """
        doubled, known = [], []
        for end, slot in enumerate(slots, 1):
            kept = self.slots.setdefault((key, *tokens[:end]), slot)
            known.append(kept)
            if kept != slot:
                doubled.append(slot)
                if self.mapping is not None and not self.mapping[kept]:
                    self.mapping[kept], self.mapping[slot] = int(self.mapping[slot]), 0
        return known, doubled


def next_token(tokens):
    """The token that the model samples behind a prefix."""
    return random.Random(str(list(tokens))).randrange(1, VOCABULARY)


def grown_tree(text, drafts, chance):
    """A tree of drafts behind a text, which is its root; no two siblings have one token.

    Args:
        text: the tokens up to the root's.
        drafts: nodes behind the root.
        chance: draws it.

    Returns:
        By node: its token, its depth, its text, its first child and its next sibling (-1 without);
        and the nodes that the model accepts, the root first.
    """
    texts, depths = [list(text)], [0]
    children = [[] for _ in range(drafts + 1)]
    for node in range(1, drafts + 1):
        parent = chance.randrange(node)
        right = next_token(texts[parent])
        taken = {texts[child][-1] for child in children[parent]}
        token = right if chance.random() < 0.6 else chance.randrange(1, VOCABULARY)
        while token in taken:
            token = token % (VOCABULARY - 1) + 1
        children[parent].append(node)
        texts.append([*texts[parent], token])
        depths.append(depths[parent] + 1)
    after = [-1] * (drafts + 1)
    for family in children:
        for one, other in pairwise(family):
            after[one] = other
    path = [0]
    while True:
        right = next_token(texts[path[-1]])
        kept = [child for child in children[path[-1]] if texts[child][-1] == right]
        if not kept:
            break
        path += kept
    return SimpleNamespace(
        tokens=[text[-1] for text in texts], depths=depths, texts=texts, path=path, siblings=after,
        children=[family[0] if family else -1 for family in children],
    )  # fmt: skip


def counters_of_clean_steps(hooks):
    """The counters of an audit that saw every group and request, and found nothing."""
    report = hooks.report()
    assert report["violations"] == []
    counted = report["counters"]
    assert counted["kvtxn_audit_active"] == 1
    assert counted["kvtxn_audit_unjudged_total"] == 0
    assert counted["kvtxn_audit_unwatched_groups"] == 0
    return counted


def decodes(batch, rows=10):
    """Tell whether a batch decodes at least three requests, each of which has more rows."""
    mode = batch.forward_batch.forward_mode.name
    return mode != "EXTEND" and len(batch.reqs) > 2 and min(batch.before) > rows


class ModelRunner:
    """The target's runner, or a drafter's."""

    is_draft_worker, device, sliding_window_size = False, "cpu", WINDOW

    #: Of a hybrid, the layers with recurrent states.
    states = None

    def __init__(self, pool) -> None:
        self.model, self.pool = torch.nn.Linear(2, 2), pool

    def forward(self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None):
        if forward_batch.fails:
            raise ArithmeticError("the forward failed")
        self.pool.write(forward_batch)
        if self.states is not None:
            self.states.forward(forward_batch)
        return SimpleNamespace(logits_output=None)


@attrs.define(eq=False, slots=False)
class Worker:
    """A model worker: runs the forward, and the drafts of a chain where there are any."""

    toy: ToySglang
    model_runner: ModelRunner

    def forward_batch_generation(self, batch, on_publish=None):
        toy, forward = self.toy, batch.forward_batch
        self.model_runner.forward(forward)
        result = SimpleNamespace(
            next_token_ids=None, accept_lens=None, delay_sample_func=None, new_seq_lens=None
        )
        if batch.later:

            def sample():
                result.next_token_ids = torch.tensor(batch.sampled)
                return result

            result.delay_sample_func = sample
        else:
            result.next_token_ids = torch.tensor(batch.sampled, dtype=torch.int32)
        if batch.accepted is not None:
            result.accept_lens = torch.tensor(batch.accepted, dtype=torch.int32)
        if batch.moves is not None:
            toy.token_to_kv_pool_allocator.get_kvcache().move_kv_cache(*batch.moves)
        if batch.accepted is not None:
            toy.commit(batch)
        toy.ran(batch)
        return result


class ToySglang:
    """The scheduler.

    Args:
        hooks: the plug-in's hooks by dotted name; none for a plain engine.
        drafts: rows of drafts of each verify step.
        overlap: results are taken in one step later.
        trees: the drafts form trees, as those of NGRAM do.
        chunk: the most tokens of a prompt in a step.
        kind: of the model: "plain"; "windows" in some layers, or "pure", in all of them; "hybrid"
            with recurrent layers.
        seed: of lengths, prefixes, ends.
    """

    is_generation = True
    #: How often a request is retracted, and aborted.
    retracts, aborts = 0.05, 0.01

    def __init__(
        self, hooks=None, *, drafts=0, trees=False, overlap=True, chunk=12, kind="plain", seed=0
    ) -> None:
        self.trees, self.kind = trees, kind
        self.hooks = hooks or {}
        self.drafts, self.chunk, self.random = drafts, chunk, random.Random(seed)
        self.enable_overlap = overlap
        self.forward_stream = None
        self.spec_algorithm = SimpleNamespace(
            name="NGRAM" if trees else "EAGLE" if drafts else "NONE"
        )
        self.server_args = SimpleNamespace(
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=drafts + 1 if drafts else None,
            disable_radix_cache=False,
        )
        self.model_config = SimpleNamespace(is_encoder_decoder=False, attention_chunk_size=None)
        table = HybridReqToTokenPool if kind == "hybrid" else ReqToTokenPool
        self.req_to_token_pool = table()
        slots = {"windows": SWATokenToKVPoolAllocator, "pure": PureSWATokenToKVPoolAllocator}
        self.token_to_kv_pool_allocator = (
            TokenToKVPoolAllocator(HybridLinearKVPool())
            if kind == "hybrid"
            else slots.get(kind, TokenToKVPoolAllocator)()
        )
        self.tree_cache = Tree(getattr(self.token_to_kv_pool_allocator, "mapping", None))
        runner = ModelRunner(self.token_to_kv_pool_allocator.pool)
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.model_worker = Worker(self, runner)
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.results: deque = deque()
        #: A request whose length is published as one less than it is.
        self.too_short: Req | None = None
        #: Plants a fault into a batch before it runs, if there is one.
        self.fault = None
        #: Tokens of each request as the device knows them: the host is a step behind.
        self.device: dict[str, list[int]] = {}
        self.done: list[Req] = []
        self.offered = 0
        self.events = dict.fromkeys(
            ("hits", "chunks", "retracted", "flushed", "more", "later", "steps"), 0
        )
        self.events |= {"evicted": 0, "tombs": 0}
        runner.forward = self._hooked("ModelRunner.forward", ModelRunner.forward, runner)

    def _hooked(self, name, function, *bound):
        for target, hook in self.hooks.items():
            if target.endswith(name):
                return lambda *args, **kwargs: hook(function, *bound, *args, **kwargs)
        return lambda *args, **kwargs: function(*bound, *args, **kwargs)

    def plants(self, plant, fits) -> list:
        """Plant a fault once, into the first batch that fits; return what ``plant`` returns.

        Args:
            plant: changes the toy or the batch; returns None if it cannot.
            fits: tells whether to try.
        """
        planted = []

        def fault(toy, batch):
            if not planted and fits(batch):
                found = plant(toy, batch)
                planted.extend([] if found is None else [found])

        self.fault = fault
        return planted

    # -- requests ----------------------------------------------------------------------------

    def offer(self, prompt, limit, **more) -> Req:
        self.offered += 1
        req = Req(f"r{self.offered}", array("q", prompt), limit, **more)
        self.waiting.append(req)
        return req

    def row(self, req):
        return self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]

    def grow(self, req, length) -> None:
        """Give a request slots up to a length."""
        have = req.kv.kv_allocated_len
        if length > have:
            self.make_room(length - have)
            slots = self.token_to_kv_pool_allocator.alloc(length - have)
            self.row(req)[have:length] = torch.tensor(slots, dtype=torch.int32)
            req.kv.kv_allocated_len = length

    def make_room(self, number) -> None:
        """Let rows of the tree that nobody runs on give back their slots of the window."""
        if self.kind != "windows":
            return
        allocator = self.token_to_kv_pool_allocator
        used = {slot for req in self.running for slot in self.row(req).tolist()}
        held = [s for s in self.tree_cache.slots.values() if s not in used and allocator.mapping[s]]
        self.random.shuffle(held)
        while len(allocator.near.free_slots) < number:
            allocator.free_swa([held.pop()])
            self.events["tombs"] += 1

    def leave_windows(self) -> None:
        """Give back slots of rows that have left the window; SGLang's ``maybe_evict_swa``.

        Behind a prompt that step may run still, so it begins with the second step that decodes.
        """
        if self.kind not in ("windows", "pure"):
            return
        for req in self.running:
            have, end = max(req.evicted, req.protected), len(req.tokens) - 1 - WINDOW
            if len(req.output_ids) > 1 and end > have:
                slots = self.row(req)[have:end].tolist()
                self.token_to_kv_pool_allocator.free_swa(slots)
                req.evicted = end
                self.events["evicted"] += 1

    def release(self, req, insert=True) -> None:
        """Give back a request's rows; SGLang's ``release_kv_cache``."""
        self._hooked("common.release_kv_cache", self._release)(
            req, self.tree_cache, checkpoint=insert
        )

    def _release(self, req, tree_cache, *, checkpoint) -> None:
        if checkpoint:
            self.checkpoint(req, min(req.kv.kv_committed_len, len(req.tokens) - 1))
        first = max(req.protected, req.evicted) if self.kind == "pure" else req.protected
        slots = self.row(req)[first : req.kv.kv_allocated_len].tolist()
        self.token_to_kv_pool_allocator.free(slots)
        self.req_to_token_pool.free_slots.append(req.kv.req_pool_idx)
        req.kv = SimpleNamespace(req_pool_idx=None, kv_committed_len=0, kv_allocated_len=0)
        req.protected = req.evicted = 0

    def checkpoint(self, req, up_to) -> None:
        """Insert a request's rows into the tree, which rewrites its line of the table."""
        if up_to <= req.protected or self.kind == "pure":
            return
        row = self.row(req)
        kept, doubled = self.tree_cache.insert(
            req.lora_id, req.tokens[:up_to], row[:up_to].tolist()
        )
        row[:up_to] = torch.tensor(kept, dtype=torch.int32)
        self.token_to_kv_pool_allocator.free(doubled)
        req.protected = up_to

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan a step, run it, and take in the result of the last one, or of this one."""
        batch = self.plan()
        if batch is not None:
            self.events["steps"] += 1
            if self.fault is not None:
                self.fault(self, batch)
            result = self._hooked("Scheduler.run_batch", ToySglang.run_batch, self)(batch)
            self.results.append((batch, result))
        while self.results and (batch is None or not self.enable_overlap or len(self.results) > 1):
            self.take_in(*self.results.popleft())
        if batch is not None and getattr(result, "delay_sample_func", None) is not None:
            assert result.delay_sample_func() is result
            self.events["later"] += 1

    def plan(self):
        retracts = self.random.random() < self.retracts and len(self.running) > 1
        if retracts:  # it comes again when the result of the last step was taken in
            self.retract(self.running[-1])
        chunked = [req for req in self.running if req.kv.kv_committed_len < req.fill]
        room = 0 if retracts else min(len(self.req_to_token_pool.free_slots), 2)
        if chunked or (self.waiting and room):
            return self.extend(chunked, room)
        return self.decode() if self.running else None

    def extend(self, chunked, room):
        reqs = [*chunked]
        while self.waiting and room > 0:
            req, room = self.waiting.pop(0), room - 1
            req.kv.req_pool_idx = self.req_to_token_pool.free_slots.pop()
            req.fill = len(req.tokens)
            hit = self.match(req)
            self.events["hits"] += bool(hit)
            self.row(req)[: len(hit)] = torch.tensor(hit, dtype=torch.int32)
            req.protected = req.kv.kv_committed_len = req.kv.kv_allocated_len = len(hit)
            self.running.append(req)
            reqs.append(req)
        before = [req.kv.kv_committed_len for req in reqs]
        ends = [min(req.fill, have + self.chunk) for req, have in zip(reqs, before, strict=True)]
        for req, end in zip(reqs, ends, strict=True):
            self.grow(req, end)
            self.device[req.rid] = req.tokens
        sampled = [next_token(req.tokens[:end]) for req, end in zip(reqs, ends, strict=True)]
        return self.batch("EXTEND", reqs, before, ends, sampled)

    def match(self, req):
        """Return the slots of the rows of a hit."""
        return self.tree_cache.match(req.lora_id, req.tokens[:-1])

    def commit(self, batch) -> None:
        """Write what has to wait until it is decided which drafts stay."""

    def decode(self):
        self.leave_windows()
        reqs, drafts = list(self.running), self.drafts
        before = [len(self.device[req.rid]) - 1 for req in reqs]
        ends = [have + drafts + 1 for have in before]
        for req, end in zip(reqs, ends, strict=True):
            self.grow(req, end)
        if not drafts:
            sampled = [next_token(self.device[req.rid]) for req in reqs]
            return self.batch("DECODE", reqs, before, ends, sampled)
        if self.trees:
            return self.verify_trees(reqs, before, ends)
        proposed, sampled, accepted = [], [], []
        for req in reqs:
            tokens, wrong = list(self.device[req.rid]), self.random.randrange(drafts + 1)
            for number in range(drafts + 1):
                right = next_token(tokens)
                sampled.append(right)
                tokens.append(right if number != wrong else right % (VOCABULARY - 1) + 1)
            proposed.append(tokens[-drafts - 1 : -1])
            accepted.append(wrong + 1)
        return self.batch("TARGET_VERIFY", reqs, before, ends, sampled, accepted, proposed)

    def verify_trees(self, reqs, before, ends):
        """Draft a tree for each request; the accepted rows are moved to the front."""
        width, proposed, sampled, accepted, depths = self.drafts + 1, [], [], [], []
        links = torch.full((2, len(reqs), width), -1)
        targets, sources = torch.zeros(2, len(reqs) * width, dtype=torch.int64)
        paths = []
        for number, (req, first) in enumerate(zip(reqs, before, strict=True)):
            tree = grown_tree(self.device[req.rid], self.drafts, self.random)
            proposed.append(tree.tokens[1:])
            depths += [first + depth for depth in tree.depths]
            links[:, number] = torch.tensor([tree.children, tree.siblings])
            kept = [next_token(tree.texts[node]) for node in tree.path]
            sampled += kept + [0] * (width - len(kept))
            accepted.append(len(kept))
            paths.append(tree.path)
            slots = self.row(req)[first : first + width]
            at = number * width
            targets[at : at + len(kept)] = slots[: len(kept)]
            sources[at : at + len(kept)] = slots[tree.path]
        batch = self.batch("TARGET_VERIFY", reqs, before, ends, sampled, accepted, proposed)
        spec = batch.forward_batch.spec_info
        spec.retrieve_next_token, spec.retrieve_next_sibling = links
        batch.forward_batch.positions = torch.tensor(depths)
        batch.moves, batch.paths = (targets, sources), paths
        return batch

    def batch(self, mode, reqs, before, ends, sampled, accepted=None, proposed=None):
        """Make the batch, and the forward's, as SGLang's init_new does."""
        ids, slots, positions = [], [], []
        for number, (req, first, end) in enumerate(zip(reqs, before, ends, strict=True)):
            tokens = self.device[req.rid] + (proposed[number] if proposed else [])
            ids += tokens[first:end]
            positions += range(first, end)
            slots += self.row(req)[first:end].tolist()
        extends = mode == "EXTEND"
        lengths = before if mode == "TARGET_VERIFY" else ends
        spans = [end - first for first, end in zip(before, ends, strict=True)]
        forward = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode),
            batch_size=len(reqs),
            rids=[req.rid for req in reqs],
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            out_cache_loc=torch.tensor(slots),
            req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in reqs]),
            seq_lens=torch.tensor(lengths),
            extend_seq_lens=torch.tensor(spans, dtype=torch.int32) if extends else None,
            extend_prefix_lens_cpu=before if extends else None,
            extend_seq_lens_cpu=spans if extends else None,
            spec_info=SimpleNamespace(draft_token_num=self.drafts + 1, topk=1)
            if proposed
            else None,
            is_prefill_only=False,
            fails=False,
        )
        later = mode == "DECODE" and self.random.random() < 0.2
        return SimpleNamespace(
            reqs=reqs, forward_batch=forward, before=before, ends=ends, sampled=sampled,
            accepted=accepted, later=later, moves=None,
            paths=accepted and [list(range(kept)) for kept in accepted],
        )  # fmt: skip

    def run_batch(self, batch, pp_proxy_tensors=None):
        return self.model_worker.forward_batch_generation(batch)

    def ran(self, batch) -> None:
        """What the device knows after the step, and the scheduler of lengths."""
        for number, (req, end) in enumerate(zip(batch.reqs, batch.ends, strict=True)):
            tokens = self.device[req.rid]
            if batch.accepted is not None:
                kept = batch.accepted[number]
                first = number * (self.drafts + 1)
                tokens += batch.sampled[first : first + kept]
                if req is self.too_short:
                    self.too_short = tokens.pop(-2) and None
                req.kv.kv_committed_len = batch.before[number] + kept
                continue
            req.kv.kv_committed_len = end
            if end == len(tokens):
                tokens.append(batch.sampled[number])
            else:
                self.events["chunks"] += 1

    def take_in(self, batch, result) -> None:
        """Take in a result; SGLang's ``process_batch_result``."""
        for number, req in enumerate(batch.reqs):
            if req.kv.req_pool_idx is None or req not in self.running:
                self.events["more"] += req.finished()
                continue  # done before, or retracted
            if batch.accepted is not None:
                first = number * (self.drafts + 1)
                req.output_ids.extend(batch.sampled[first : first + batch.accepted[number]])
            elif batch.forward_batch.forward_mode.name == "DECODE":
                req.output_ids.append(batch.sampled[number])
            else:
                self.checkpoint(req, batch.ends[number])
                if batch.ends[number] == req.fill:
                    req.output_ids.append(batch.sampled[number])
            if req.finished() or self.random.random() < self.aborts:
                req.aborted = not req.finished()
                del req.output_ids[req.limit :]
                self.running.remove(req)
                self.done.append(req)
                self.release(req, insert=not req.aborted)

    def retract(self, req) -> None:
        self.events["retracted"] += 1
        self.running.remove(req)
        self.release(req)
        self.waiting.append(req)

    def flush_cache(self, empty_cache=True) -> bool:
        if self.running or self.waiting or self.results:
            return False
        self.tree_cache.reset()
        self.token_to_kv_pool_allocator.clear()
        self.req_to_token_pool.free_slots = list(range(1, LINES))
        self.events["flushed"] += 1
        return True

    def flush(self) -> bool:
        return self._hooked("Scheduler.flush_cache", ToySglang.flush_cache, self)()

    def serve(self, requests, steps=10_000) -> None:
        """Serve requests with shared prefixes to their ends."""
        shared = [self.random.randrange(1, VOCABULARY) for _ in range(20)]
        for _ in range(requests):
            prompt = shared[: self.random.randrange(4, 20)]
            prompt += [
                self.random.randrange(1, VOCABULARY) for _ in range(self.random.randrange(1, 16))
            ]
            self.offer(prompt, self.random.randrange(1, 20))
        for _ in range(steps):
            if not (self.waiting or self.running or self.results):
                break
            self.step()
