"""A toy of SGLang's scheduler with a hybrid: recurrent states beside the rows.

A state is a number that each token changes. Requests have a slot each, which is cleared, or gets
the state of a hit; the tree has slots of its own. ``no_buffer`` copies a prompt's state for the
tree, and gives it that of a request that ends. ``extra_buffer`` has two further slots per request,
which get the states behind certain numbers of tokens, and gives them to the tree.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from toy_pools import LINES, TokenToKVPoolAllocator
from toy_sglang import ToySglang

STATES = 60
#: Tokens from one state of a prompt to the next, and from one of the steps that follow.
CHUNK, INTERVAL = 4, 16


def after(state: int, tokens) -> int:
    """The state after some more tokens."""
    for token in tokens:
        state = (state * 31 + token) % 1_000_003
    return state


class GDNAttnBackend:
    """Reads the state of a request that begins, too."""


class Mamba2AttnBackend:
    """Does not."""


class HybridLinearAttnBackend:
    """Steps through the states of a forward.

    Args:
        toy: the scheduler.
        linear: the attention of the layers with states.
    """

    def __init__(self, toy, linear) -> None:
        self.toy, self.linear_attn_backend = toy, linear
        self.drafts: list[list[int]] = []
        self.slots: list[int] = []
        #: How many states were read that were not those of the request's tokens.
        self.wrong = 0

    def forward(self, batch) -> None:
        pool = self.toy.req_to_token_pool
        states = pool.mamba_pool.temporal
        if batch.forward_mode.name == "EXTEND":
            if batch.mamba_clear_indices is not None:
                states[batch.mamba_clear_indices] = 0
            if batch.mamba_cow_src_indices is not None:
                pool.mamba_pool.copy_from(batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices)
        self.slots = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        self.drafts, row = [], 0
        for number, slot in enumerate(self.slots):
            rows = self.rows_of(batch, number)
            tokens = batch.input_ids[row : row + rows].tolist()
            first = int(batch.positions[row])
            state = int(states[slot]) if first or self.reads_cleared else 0
            self.wrong += state != after(0, self.toy.device[batch.rids[number]][:first])
            row += rows
            if batch.forward_mode.name == "TARGET_VERIFY":
                self.drafts.append(self.branches(batch, number, state, tokens))
                continue
            self.keep(batch, number, first, state, tokens)
            states[slot] = after(state, tokens)

    @property
    def reads_cleared(self) -> bool:
        return isinstance(self.linear_attn_backend, GDNAttnBackend)

    def rows_of(self, batch, number) -> int:
        if batch.forward_mode.name == "EXTEND":
            return int(batch.extend_seq_lens[number])
        return self.toy.drafts + 1 if batch.forward_mode.name == "TARGET_VERIFY" else 1

    def keep(self, batch, number, first, state, tokens) -> None:
        """Write the state for the tree to its slot."""
        if batch.mamba_track_mask is None or not batch.mamba_track_mask[number]:
            return
        rows = len(tokens)
        if batch.mamba_track_seqlens is not None:
            rows = (int(batch.mamba_track_seqlens[number]) - first) // CHUNK * CHUNK
        slot = batch.mamba_track_indices[number]
        self.toy.req_to_token_pool.mamba_pool.temporal[slot] = after(state, tokens[:rows])

    def branches(self, batch, number, state, tokens) -> list[int]:
        """The state after each row of a chain, or of a tree."""
        spec = batch.spec_info
        if not self.toy.trees:
            return [after(state, tokens[: end + 1]) for end in range(len(tokens))]
        children, siblings = (
            each[number].tolist() for each in (spec.retrieve_next_token, spec.retrieve_next_sibling)
        )
        found = [after(state, tokens[:1]), *[0] * (len(tokens) - 1)]
        for node in range(len(tokens)):
            child = children[node]
            while child >= 0:
                found[child] = after(found[node], [tokens[child]])
                child = siblings[child]
        return found

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices,
        mamba_track_indices,
        mamba_steps_to_track,
        model=None,
        req_pool_indices=None,
    ) -> None:
        states = self.toy.req_to_token_pool.mamba_pool.temporal
        for number, (drafts, slot) in enumerate(zip(self.drafts, self.slots, strict=True)):
            states[slot] = drafts[last_correct_step_indices[number]]
            if mamba_track_indices is not None and mamba_steps_to_track[number] >= 0:
                kept = drafts[mamba_steps_to_track[number]]
                states[mamba_track_indices[number]] = kept


class MambaPool:
    def __init__(self) -> None:
        self.temporal = torch.full((STATES + 1,), -7)

    def copy_from(self, src_indices, dst_indices) -> None:
        self.temporal[dst_indices] = self.temporal[src_indices]


class ToyHybrid(ToySglang):
    """The scheduler of a hybrid.

    Args:
        strategy: "no_buffer", without overlap; or "extra_buffer".
        linear: the class of the attention of the layers with states.
    """

    def __init__(
        self, hooks=None, *, strategy="extra_buffer", linear=GDNAttnBackend, **more
    ) -> None:
        more.setdefault("chunk", 20)
        super().__init__(hooks, kind="hybrid", **more)
        self.extra = strategy == "extra_buffer"
        assert self.extra or not self.enable_overlap
        self.server_args.mamba_radix_cache_strategy = strategy
        self.model_config.hf_text_config = SimpleNamespace(mamba_chunk_size=CHUNK)
        pool = self.req_to_token_pool
        pool.mamba_pool, pool.mamba_ckpt_pool = MambaPool(), None
        pool.mamba_allocator = TokenToKVPoolAllocator(pool.mamba_pool, STATES)
        pool.req_index_to_mamba_index_mapping = torch.zeros(LINES, dtype=torch.int32)
        self.backend = HybridLinearAttnBackend(self, linear())
        runner = self.tp_worker.model_runner
        runner.attn_backend = runner.states = self.backend
        #: The tree's states, by prefix; and what a request has of them.
        self.kept: dict[tuple, int] = {}
        self.held: dict[str, SimpleNamespace] = {}
        self.events |= {"states hit": 0, "states kept": 0}

    # -- slots -------------------------------------------------------------------------------

    def slot(self) -> int:
        """Hand out a slot; the tree gives one back if there is none."""
        allocator = self.req_to_token_pool.mamba_allocator
        while len(allocator.free_slots) < 1:
            allocator.free([self.kept.pop(self.random.choice([*self.kept]))])
        return allocator.alloc(1)[0]

    def match(self, req):
        """Return a hit's rows, as far as the tree has a state, and give the request slots."""
        hit = super().match(req)
        while hit and (req.lora_id, *req.tokens[: len(hit)]) not in self.kept:
            hit.pop()
        source = self.kept.get((req.lora_id, *req.tokens[: len(hit)])) if hit else None
        own = SimpleNamespace(slot=None, source=source, begins=True, next=0, last=0, length=None)
        if source is not None:  # the tree must not give it back while it is copied
            kept = self.kept.pop((req.lora_id, *req.tokens[: len(hit)]))
            own.slot = self.slot()
            self.kept[(req.lora_id, *req.tokens[: len(hit)])] = kept
        else:
            own.slot = self.slot()
        own.further = [self.slot(), self.slot()] if self.extra else []
        self.held[req.rid] = own
        line = req.kv.req_pool_idx
        self.req_to_token_pool.req_index_to_mamba_index_mapping[line] = own.slot
        self.events["states hit"] += source is not None
        return hit

    # -- a step ------------------------------------------------------------------------------

    def batch(self, mode, reqs, before, ends, *more):
        batch = super().batch(mode, reqs, before, ends, *more)
        forward, held = batch.forward_batch, [self.held[req.rid] for req in reqs]
        forward.mamba_clear_indices = forward.mamba_cow_src_indices = None
        forward.mamba_cow_dst_indices = forward.mamba_track_mask = None
        forward.mamba_track_indices = forward.mamba_track_seqlens = None
        batch.mamba_track_mask_cpu, batch.held = None, held
        batch.used = [own.next for own in held]
        if mode == "EXTEND":
            self.begin(forward, held)
        if not self.extra:
            return batch
        forward.mamba_track_indices = torch.tensor([own.further[own.next] for own in held])
        if mode == "DECODE":
            mask = batch.mamba_track_mask_cpu = [end % INTERVAL == 0 for end in ends]
            forward.mamba_track_mask = torch.tensor(mask)
        elif mode == "EXTEND":
            spans = [end - first for first, end in zip(before, ends, strict=True)]
            forward.mamba_track_mask = torch.tensor([span >= CHUNK for span in spans])
            lengths = [end if span >= CHUNK else -1 for end, span in zip(ends, spans, strict=True)]
            forward.mamba_track_seqlens = torch.tensor(lengths)
            for own, first, span in zip(held, before, spans, strict=True):
                if span >= CHUNK:
                    own.last, own.next = own.next, 1 - own.next
                    own.length = first + span // CHUNK * CHUNK
        return batch

    def begin(self, forward, held) -> None:
        """Clear the states of requests that begin, or copy those of their hits."""
        clear = [own.slot for own in held if own.begins and own.source is None]
        copies = [(own.source, own.slot) for own in held if own.begins and own.source is not None]
        if clear:
            forward.mamba_clear_indices = torch.tensor(clear)
        if copies:
            source, target = torch.tensor(copies).unbind(1)
            forward.mamba_cow_src_indices, forward.mamba_cow_dst_indices = source, target
        for own in held:
            own.begins = False

    def commit(self, batch) -> None:
        """Commit the state after the last accepted row, and one for the tree if one is due."""
        steps = torch.tensor([path[-1] for path in batch.paths])
        kept = []
        for first, path, own in zip(batch.before, batch.paths, batch.held, strict=True):
            due = (first + len(path)) // INTERVAL * INTERVAL
            kept.append(path[due - first - 1] if due > first else -1)
            own.due = due if due > first else None
        slots = batch.forward_batch.mamba_track_indices
        self.backend.update_mamba_state_after_mtp_verify(
            steps, slots, None if slots is None else torch.tensor(kept), model=None
        )
        batch.due = [own.due for own in batch.held]

    def take_in(self, batch, result) -> None:
        """Take in which states of the step the tree can have."""
        due = [None] * len(batch.reqs)
        if self.extra and batch.accepted is not None:
            due = batch.due
        elif batch.mamba_track_mask_cpu is not None:
            marks = zip(batch.ends, batch.mamba_track_mask_cpu, strict=True)
            due = [end if mark else None for end, mark in marks]
        for own, length, used in zip(batch.held, due, batch.used, strict=True):
            if length is not None:
                own.last, own.next, own.length = used, 1 - used, length
        super().take_in(batch, result)

    def checkpoint(self, req, up_to) -> None:
        """Give the tree a state, and the rows up to it."""
        own, ends = self.held[req.rid], req not in self.running
        if self.extra:
            up_to = 0 if own.length is None or own.length > up_to else own.length
        elif ends and up_to != req.kv.kv_committed_len:
            return  # the state has run past the tokens that were asked for
        if up_to <= 0:
            return
        super().checkpoint(req, up_to)
        key = (req.lora_id, *req.tokens[:up_to])
        own.length = None
        if key in self.kept:
            return
        if self.extra:
            state, own.further[own.last] = own.further[own.last], None if ends else self.slot()
        elif ends:
            state, own.slot = own.slot, None
        else:
            state = self.slot()
            source, target = torch.tensor([own.slot]), torch.tensor([state])
            self.req_to_token_pool.mamba_pool.copy_from(source, target)
        self.kept[key] = state
        self.events["states kept"] += 1

    def release(self, req, insert=True) -> None:
        super().release(req, insert=insert and req.finished())

    def _release(self, req, tree_cache, *, checkpoint) -> None:
        super()._release(req, tree_cache, checkpoint=checkpoint)
        own = self.held[req.rid]
        slots = [slot for slot in (own.slot, *own.further) if slot is not None]
        self.req_to_token_pool.mamba_allocator.free(slots)

    def flush_cache(self, empty_cache=True) -> bool:
        done = super().flush_cache(empty_cache)
        if done:
            self.kept.clear()
            self.req_to_token_pool.mamba_allocator.clear()
        return done
