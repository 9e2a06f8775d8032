"""Reads the KV cache itself, inside vLLM's workers, and judges every verify step.

Injected with ``worker_extension_cls``. It shares nothing with kvtxn: drafts
come from vLLM's own metadata, acceptance from the sampled ids, and rows are
found by the layout that vLLM's x86 kernels write. It works the same in a stock
engine, where it finds every rejected row written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: How this process's engine packs rows on a CPU, set by ``oracle_install``.
packings: set[str] = set()


def words(cache: Tensor) -> Tensor:
    """The same memory as integers: bytes count, not numbers."""
    return cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()])


def planes(cache: Tensor) -> tuple[Tensor, ...]:
    """The parts of a cache's rows as integers, ``[blocks, block_size, ...]``; see ``place``.

    A latent cache has plain rows; else K and V lie in one tensor,
    ``[blocks, heads, size, 2 * head_size]``. With AMX it is ``[blocks, tiles, rows, ...]``.
    """
    cache = words(cache)
    if cache.ndim == 3:
        return (cache,)
    if cache.is_cuda:
        return gpu_planes(cache)
    return amx_planes(cache) if "amx" in packings else x86_planes(cache)


def place(plane: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """The index of rows in a plane: block and row, with AMX block, tile and row."""
    if plane.ndim < 6:
        return slots // plane.shape[1], slots % plane.shape[1]
    rows = plane.shape[2]
    size = plane.shape[1] * rows
    return slots // size, slots % size // rows, slots % rows


def gpu_planes(cache: Tensor) -> tuple[Tensor, ...]:
    """K and V of a row lie together."""
    return cache.transpose(1, 2).chunk(2, -1)


def x86_planes(cache: Tensor) -> tuple[Tensor, ...]:
    """K and V as vLLM's x86 kernels pack them, a block's keys before its values."""
    blocks, heads, size, both = cache.shape
    halves = cache.view(blocks, heads, 2, size * both // 2)
    key = halves[:, :, 0].view(blocks, heads, both // 2, size).permute(0, 3, 1, 2)
    value = halves[:, :, 1].view(blocks, heads, size, both // 2).permute(0, 2, 1, 3)
    return key, value


def amx_planes(cache: Tensor) -> tuple[Tensor, ...]:
    """The same with AMX: keys in tiles of 16 rows, values of 16 numbers, by pairs."""
    blocks, heads, size, both = cache.shape
    halves = cache.view(blocks, heads, 2, size * both // 2)
    key = halves[:, :, 0].view(blocks, heads, size // 16, both // 4, 16, 2)
    value = halves[:, :, 1].view(blocks, heads, both // 32, size // 2, 16, 2)
    return key.permute(0, 2, 4, 1, 3, 5), value.permute(0, 3, 5, 1, 2, 4)


def mark(caches: dict[str, Tensor], slots: dict[str, Tensor], rows: list[int]) -> None:
    """Put tiny numbers into these rows, which are about to be written; others in every row.

    Nobody may read what a slot holds until then. Without this a row would look unwritten that comes
    to the bytes of an earlier one in its place, as when the same is asked twice.
    """
    for number, (name, cache) in enumerate(caches.items()):
        slot = slots[name][rows]
        slot = slot[slot >= 0]
        for plane in planes(cache):
            where = place(plane, slot)
            shape = plane.shape[len(where) :]
            places = torch.arange(shape.numel(), device=slot.device).view(shape) + 7 * number
            numbers = slot.view(-1, *[1] * len(shape)) + places
            plane[where] = (1 + numbers % 100).to(plane.dtype)


def drafted(drafts: list[int], ends: list[int]) -> list[int]:
    """The draft rows of a batch; each request's lie at its end."""
    pairs = zip(drafts, ends, strict=True)
    return [row for count, end in pairs for row in range(end - count, end)]


def groups_of(runner: Any) -> dict[str, int]:
    """The KV-cache group of each of the target's layers."""
    mine = {id(module) for module in runner.get_model().modules()}
    found = runner.compilation_config.static_forward_context
    groups = {
        name: number
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
        for name in group.layer_names
        if id(found[name]) in mine
    }
    assert groups
    return groups


def caches_of(runner: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """The caches of these layers, as far as vLLM hands their blocks out."""
    found = runner.compilation_config.static_forward_context
    there = runner.kv_cache_config.num_blocks
    known = runner.vllm_config.cache_config.num_gpu_blocks or there
    caches = {name: found[name].kv_cache for name in names}
    return {name: cache[: len(cache) // there * known] for name, cache in caches.items()}


def once_slots_are_known(tables: Any, method: str) -> list[Callable[[], None]]:
    """Return a list; its functions are called when the tables' ``method`` has computed slots.

    That is before the runner's subclass, if it has one, or the forward looks at the caches.
    """
    waiting: list[Callable[[], None]] = []
    compute = getattr(tables, method)

    def computed(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        while waiting:
            waiting.pop()()
        return result

    setattr(tables, method, computed)
    return waiting


class Step:
    """One forward with drafts: the caches before it, and which row is what."""

    def __init__(self, caches: dict[str, Tensor], slots: dict[str, Tensor], drafts: list[int],
                 ends: list[int]) -> None:  # fmt: skip
        self.before = {cache.data_ptr(): cache.clone() for cache in caches.values()}
        self.caches, self.slots = caches, {name: s.clone() for name, s in slots.items()}
        self.drafts, self.ends = drafts, ends

    def rows(self, accepted: list[int]) -> tuple[list[int], list[int]]:
        """Draft rows that are kept, and draft rows that are not."""
        kept, rejected = [], []
        for drafts, end, count in zip(self.drafts, self.ends, accepted, strict=True):
            kept += range(end - drafts, end - drafts + count)
            rejected += range(end - drafts + count, end)
        return kept, rejected

    def drafted(self) -> list[int]:
        """All of them."""
        return drafted(self.drafts, self.ends)

    def changed(
        self, rows: list[int], copies: dict[str, Tensor] | None = None, everywhere: bool = False
    ) -> int:
        """Count rows that differ from before in any layer, in the caches or in copies of them.

        ``everywhere``: in each layer, its keys and its values.
        """
        if not rows:
            return 0
        found = []
        for name, own in self.caches.items():
            slot = self.slots[name][rows]
            cache = own if copies is None else copies[name]
            before = self.before[own.data_ptr()].view(own.shape)
            for now, then in zip(planes(cache), planes(before), strict=True):
                where = place(now, slot)
                found.append((now[where] != then[where]).flatten(1).any(1))
        differ = torch.stack(found)
        return int((differ.all(0) if everywhere else differ.any(0)).sum())

    def strays(self, allowed: list[int]) -> int:
        """Layers that changed anywhere but in the rows that may be written."""
        expected = {pointer: cache.clone() for pointer, cache in self.before.items()}
        for name, cache in self.caches.items():
            slot = self.slots[name][allowed]
            wanted = expected[cache.data_ptr()].view(cache.shape)  # groups may share memory
            for now, then in zip(planes(cache), planes(wanted), strict=True):
                where = place(now, slot)
                then[where] = now[where]
        return sum(
            not torch.equal(words(cache), words(expected[cache.data_ptr()].view(cache.shape)))
            for cache in self.caches.values()
        )


class CacheOracle:
    """Methods for ``collective_rpc``; ``self`` is vLLM's worker."""

    def oracle_install(self) -> None:
        """Watch every step from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        found = runner.compilation_config.static_forward_context
        groups = groups_of(runner)
        names = list(groups)
        packings.clear()
        packings.update(
            getattr(found[name], "isa", getattr(found[name].impl, "isa", "latent"))
            for name in names
        )
        assert packings == {"amx"} or packings <= {"vec", "vec16", "latent"}, "another packing"
        self.oracle_counts = Counter[str]()
        self.oracle_names, self.oracle_layers = names, found
        counts, plan, step = self.oracle_counts, [], []
        tables = runner.input_batch.block_table
        waiting = once_slots_are_known(tables, "compute_slot_mapping")
        prepare, forward, sample = runner._prepare_inputs, runner._model_forward, runner._sample

        def prepared(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            asked = scheduler_output.scheduled_spec_decode_tokens
            drafts = [len(asked.get(request, ())) for request in runner.input_batch.req_ids]
            rows = drafted(drafts, num_scheduled_tokens.cumsum().tolist())
            caches = caches_of(runner, names)
            slots = {name: tables[number].slot_mapping.gpu for name, number in groups.items()}
            waiting.append(partial(mark, caches, slots, rows))
            result = prepare(scheduler_output, num_scheduled_tokens)
            plan[:] = [[] if result[1] is None else list(result[1].num_draft_tokens)]
            ends = runner.query_start_loc.np[1 : len(plan[0]) + 1].tolist()
            lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            plan.append(ends)
            mixed = any(n > d + 1 for n, d in zip(lengths, plan[0], strict=True))
            counts["steps"] += 1
            counts["mixed"] += mixed and any(plan[0])
            return result

        def forwarded(*args: Any, **kwargs: Any) -> Any:
            from vllm.forward_context import get_forward_context

            step.clear()
            if plan and any(plan[0]):
                slots = get_forward_context().slot_mapping
                caches = caches_of(runner, names)
                step.append(Step(caches, {name: slots[name] for name in names}, *plan))
            self.before_forward(step[0] if step else None)
            result = forward(*args, **kwargs)
            if step:
                self.after_forward(step[0])
                counts["early"] += step[0].changed(step[0].drafted())
            return result

        def sampled(logits: Any, metadata: Any) -> Any:
            output = sample(logits, metadata)
            if step:
                ids = output.sampled_token_ids
                self.judge(step[0], ((ids != -1).sum(1) - 1).clamp(min=0).tolist())
                step.clear()
            return output

        runner._prepare_inputs, runner._model_forward = prepared, forwarded
        runner._sample = sampled

    def judge(self, step: Step, accepted: list[int]) -> None:
        """Compare the caches with those before the step, once this many drafts are accepted."""
        kept, rejected = step.rows(accepted)
        others = set(range(step.ends[-1])) - set(kept) - set(rejected)
        self.after_sampling(step, rejected)
        counts = self.oracle_counts
        counts["windows"] += 1
        counts["kept"] += len(kept)
        counts["rejected"] += len(rejected)
        counts["rejected_written"] += step.changed(rejected)
        counts["lost"] += len(kept) - step.changed(kept, everywhere=True)
        counts["strays"] += step.strays([*others, *kept])

    def before_forward(self, step: Step | None) -> None:
        """For those who watch more; None: no drafts."""

    def after_forward(self, step: Step) -> None:
        """Likewise."""

    def after_sampling(self, step: Step, rejected: list[int]) -> None:
        """Likewise; ``rejected`` are rows of the batch."""

    def oracle_take(self) -> dict[str, int]:
        """The counts since the last call."""
        taken = dict(self.oracle_counts)
        self.oracle_counts.clear()
        return taken

    def oracle_seed(self, seed: int) -> None:
        """Seed the sampler, and make it deterministic.

        vLLM 0.32's CPU replacement of ``expand_kernel`` writes floats into a copy and loses
        them: with speculation, the temperature is whatever the memory held before, and stock
        does not even agree with itself. In every engine of these tests it is repeated by torch.
        """
        from vllm.v1.sample import rejection_sampler

        def expand(
            x: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
        ) -> Tensor:
            counts = torch.diff(ends, prepend=ends.new_zeros(1))
            replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
            return replaced.repeat_interleave(counts)

        rejection_sampler.expand_batch_to_tokens = expand
        torch.manual_seed(seed)
