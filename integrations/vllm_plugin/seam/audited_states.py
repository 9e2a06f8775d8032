"""Reading recurrent states for the ledger: the blocks that a step's kernels read and write.

A request's states lie in a few blocks, the columns of its table. A speculating step continues the
state in the column of the last accepted draft, and leaves the state after row j in column j. Any
other step continues column 0, and leaves the state after its last row there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ....audit import StateGroup, Window
from ....layers import LayerRef
from ...serving.step import Rows, States
from . import aligned_states, audited_requests
from .runner_protocols import GatedDeltaMetadata, Runner, RunnerV1, SelectiveMetadata
from .state_layers import kind_of, state_slots

#: vLLM's block that belongs to nobody; a state with this block is not kept.
_NULL_BLOCK: Final = 0
#: In place of a number of drafts about which groups disagree: more than a step has.
_DISAGREED: Final = 1 << 30


#: Kinds of recurrent layers whose metadata say which columns a step reads, as vLLM names them.
_READ: Final = ("MAMBA1", "MAMBA2", "GDN_ATTN", "SHORT_CONV")


def state_groups(runner: Runner) -> dict[str, StateGroup]:
    """Return, by name, the KV-cache groups of recurrent layers that the ledger can watch.

    With a prefix cache that keeps states, all of them or none: the runner has to say which states
    it copies, which it does on a GPU in vLLM's mode "align". Left out are kinds of layers that
    kvtxn cannot read, and, if vLLM speculates by a state block per draft, groups without such
    blocks.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    config = runner.kv_cache_config
    mode = getattr(runner.cache_config, "mamba_cache_mode", "none")
    watched = mode == "none" or (mode == "align" and copies_are_told(runner))
    if not watched:
        return {}
    held = holds_states(runner) or has_single_states(runner)
    columns = runner.speculative_config is not None and not held
    return {
        f"group.{number}": StateGroup(f"group.{number}", int(config.num_blocks), pool="blocks")
        for number, group in enumerate(config.kv_cache_groups)
        if isinstance(group.kv_cache_spec, MambaSpec)
        and group.kv_cache_spec.mamba_type.name in _READ
        and (group.kv_cache_spec.num_speculative_blocks or not columns)
    }


def holds_states(runner: Runner) -> bool:
    """Tell whether kvtxn's windows hold a runner's states, one block per request, on a GPU."""
    held = getattr(runner, "kvtxn_states", None) is not None
    return held and torch.device(runner.device).type == "cuda"


def has_single_states(runner: Runner) -> bool:
    """Tell whether kvtxn's windows hold a runner's states, one block per request, on a CPU."""
    return bool(getattr(runner, "kvtxn_one_state", False))


def copies_are_told(runner: Runner) -> bool:
    """Tell whether kvtxn can see which states a runner copies for its prefix cache.

    That takes a GPU, and vLLM's code of copies as it is known.
    """
    if torch.device(runner.device).type != "cuda":
        return False
    if aligned_states.lacks_context(runner):  # the host knows the columns
        return hasattr(runner, "mamba_state_idx")
    return aligned_states.copies_differ() is None


def block_sizes(runner: Runner, groups: Iterable[str]) -> dict[str, int]:
    """Return the tokens of a block by group; empty unless the prefix cache keeps states.

    With "align" it keeps them at the ends of these blocks.
    """
    if not groups or not aligned_states.is_aligned(runner):
        return {}
    every = runner.kv_cache_config.kv_cache_groups
    numbers = {name: int(name.partition(".")[2]) for name in groups}
    return {name: int(every[n].kv_cache_spec.block_size) for name, n in numbers.items()}


def state_refs(runner: Runner, groups: Iterable[str]) -> list[LayerRef]:
    """Describe the recurrent layers of some groups, with all of their caches, for the library."""
    layers = runner.compilation_config.static_forward_context
    refs = []
    for group in groups:
        for name in runner.kv_cache_config.kv_cache_groups[
            int(group.partition(".")[2])
        ].layer_names:
            refs.append(LayerRef.recurrent(name, *layers[name].kv_cache, group=group))
    return refs


def past_windows(runner: Runner, refs: Iterable[LayerRef]) -> dict[str, Window]:
    """Return, by layer, the part of a convolution's past that a step with drafts reads.

    That is the first state without as many last places as a step has drafts. Kinds of layers that
    ``state_layers`` does not know are left out.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    drafts, dim = audited_requests.most_drafts(runner), 2 if is_conv_state_dim_first() else 1
    modules = runner.compilation_config.static_forward_context
    found = {}
    for ref in refs:
        if kind_of(modules[ref.name]) is not None:  # the past is the first state of these
            found[ref.name] = Window(0, int(ref.states[0].shape[dim]) - drafts, dim)
    return found


def states(runner: RunnerV1, groups: Iterable[str], starts: Tensor, first: Tensor) -> States:
    """Read which blocks of states the forward that is about to run reads and writes.

    Groups whose metadata kvtxn cannot read are left out.

    Args:
        runner: a V1 runner on a CPU, in its forward context.
        groups: names of the groups to read.
        starts: int ``[num_requests + 1]``, each request's first row, and the end.
        first: int64 ``[num_requests]``, the position of each request's first row.
    """
    return _read(runner, groups, forward_metadata(), starts, first, int(starts[-1]))


def single_states(runner: RunnerV1, groups: Sequence[str], rows: Rows) -> States:
    """Read which blocks of states a forward on a CPU uses whose windows hold one per request.

    A request without drafts continues its state there and leaves the state after its last row; with
    drafts, the state is written once it is known which of them stay, and counts among ``leaves``. A
    request that begins has no source.
    """
    count = len(rows.names)
    assert rows.first is not None  # on a CPU the host knows it
    starts, first = rows.starts[: count + 1].long(), rows.first[:count]
    speculates = None if rows.drafts is None else rows.drafts[:count] > 0
    found = States({}, {}, None)
    for name, block in state_slots(runner, groups).items():
        found.sources[name] = torch.where(first > 0, block, -1)
        slots = torch.full((int(starts[-1]),), -1)
        slots[starts[1:] - 1] = block if speculates is None else torch.where(speculates, -1, block)
        if speculates is not None:
            found.leaves[name] = torch.where(speculates, block, -1)
        found.slots[name] = slots
    return found


def forward_metadata() -> object:
    """Return the attention metadata of the forward that is about to run, by layer.

    None, or a list, in forwards without it, or in microbatches, as vLLM has it.
    """
    from vllm.forward_context import get_forward_context

    found: object = get_forward_context().attn_metadata
    return found


class DeviceStateReader:
    """Reads the states of a GPU's steps into buffers of its own, without waiting for the device."""

    def __init__(self, runner: Runner, groups: Iterable[str], device: torch.device) -> None:
        self._runner: Final = runner
        self._groups: Final = tuple(groups)
        requests, rows = int(runner.max_num_reqs), int(runner.max_num_tokens)
        with torch.inference_mode(False):  # steps write into them in inference mode or not

            def zeros(length: int) -> Tensor:
                return torch.zeros(length, dtype=torch.int64, device=device)

            self._slots: Final = {name: zeros(rows) for name in self._groups}
            self._sources: Final = {name: zeros(requests) for name in self._groups}
            self._leaves: Final = {name: zeros(requests) for name in self._groups}
            self._ends: Final = {name: zeros(requests) for name in self._groups}
            self._end_at: Final = zeros(requests)
            self._told: Final = zeros(requests)
        self._sizes: Final = block_sizes(runner, self._groups) if holds_states(runner) else {}
        self._known: dict[tuple[object, ...], States] = {}

    def read(self, metadata: object, rows: Rows, total: int) -> States:
        """Return the states of a forward, on the device; does not wait.

        Its tensors are those of the step before: they are filled anew. Groups whose metadata kvtxn
        cannot read are left out.

        Args:
            metadata: the forward's, by layer.
            rows: its rows, with positions.
            total: its number of rows, padding included.
        """
        count = len(rows.names)
        starts = rows.starts[: count + 1]
        assert rows.positions is not None  # the device alone knows positions
        first = rows.positions.index_select(0, starts[:-1].long()).long()
        found = _read(self._runner, self._groups, metadata, starts, first, total)
        for name, slots in found.slots.items():
            self._slots[name][:total].copy_(slots)
            self._sources[name][:count].copy_(found.sources[name])
            if name in found.leaves:
                self._leaves[name][:count].copy_(found.leaves[name])
        if found.told is not None:
            self._told[:count].copy_(found.told)
        ends = self._put_ends(found.leaves, first)
        key = (count, found.told is None, *found.slots, *found.leaves)
        if key not in self._known:
            self._known[key] = States(
                {name: self._slots[name] for name in found.slots},
                {name: self._sources[name][:count] for name in found.sources},
                None if found.told is None else self._told[:count],
                buffers=key,
                leaves={name: self._leaves[name][:count] for name in found.leaves},
                ends={name: self._ends[name][:count] for name in ends},
                end_at=self._end_at[:count] if ends else None,
            )
        return self._known[key]

    def _put_ends(self, leaves: Mapping[str, Tensor], first: Tensor) -> list[str]:
        """Name the blocks that get states at the ends of blocks; return the groups with some.

        Fills ``_ends``, -1 for none, and ``_end_at``, the tokens at each end. The list is empty
        unless windows hold states and the prefix cache keeps them.

        Args:
            leaves: by group, int64 ``[num_requests]``, the block that a commit writes; -1 for none.
            first: int64 ``[num_requests]``, the position of each request's first row.
        """
        if not leaves or not self._sizes:
            return []
        names, count = [*leaves], len(first)
        size = self._sizes[names[0]]  # one for all groups
        column = first // size
        self._end_at[:count].copy_((column + 1) * size)
        tables = aligned_states.tables_of_batch(self._runner, names)
        for name, table in zip(names, tables, strict=True):
            last = table.shape[1] - 1
            block = table[:count].long().gather(1, column.clamp(max=last)[:, None])[:, 0]
            own = leaves[name]
            self._ends[name][:count].copy_(torch.where((own >= 0) & (block != own), block, -1))
        return names


def _read(
    runner: Runner,
    groups: Iterable[str],
    metadata_of: object,
    starts: Tensor,
    first: Tensor,
    total: int,
) -> States:
    """Read which blocks of states a forward uses from its metadata, without waiting.

    Groups whose metadata is of no known kind are left out. Where groups disagree on a request's
    accepted drafts, ``told`` has a number beyond any.

    Args:
        runner: the worker's runner.
        groups: names of the groups to read.
        metadata_of: attention metadata by layer; anything but a mapping has none.
        starts: int ``[num_requests + 1]``, each request's first row, and the end.
        first: int64 ``[num_requests]``, the position of each request's first row.
        total: rows, padding included.
    """
    slots, sources, leaves, told = {}, {}, {}, None
    held = holds_states(runner)
    aligned = getattr(runner.cache_config, "mamba_cache_mode", "none") == "align"
    for name in groups:
        layers = runner.kv_cache_config.kv_cache_groups[int(name.partition(".")[2])].layer_names
        metadata = metadata_of.get(layers[0]) if isinstance(metadata_of, Mapping) else None
        found = _columns(metadata, len(first))
        if found is None or metadata is None:
            continue
        columns, accepted = found
        if held:  # one block, whose state is written once drafts are decided
            leaves[name] = torch.where((accepted > 0) & (columns[:, 0] > 0), columns[:, 0], -1)
            source = columns[:, 0]
            columns = torch.where(accepted[:, None] > 0, _NULL_BLOCK, columns)
        else:
            source = columns.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]
        sources[name] = torch.where(first > 0, source, -1)
        slots[name] = _kept(columns, accepted > 0, starts.long(), total)
        _add_checkpoints(slots[name], metadata, starts.long())
        counts = accepted - 1
        if aligned:  # a state that was copied is in the first column, whatever was accepted
            counts = torch.where(counts > 0, counts, -1)
        # All groups have one count; where they have not, it is nobody's.
        told = counts if told is None else torch.where(told == counts, told, _DISAGREED)
    return States(slots, sources, told, leaves=leaves)


def _kept(columns: Tensor, speculates: Tensor, starts: Tensor, total: int) -> Tensor:
    """Return the block that gets the state after each row, int64 ``[total]``; -1 for none.

    Of a request that speculates row j leaves a state in column j; of others only the last row, in
    column 0.
    """
    row = torch.arange(total, device=starts.device)
    owner = torch.searchsorted(starts[1:], row, right=True).clamp(max=len(starts) - 2)
    within, lengths = row - starts[owner], starts.diff()
    column = torch.where(speculates[owner], within, 0)
    block = columns[owner, column.clamp(max=columns.shape[1] - 1)]
    kept = (block != _NULL_BLOCK) & (column < columns.shape[1])
    kept &= speculates[owner] | (within == lengths[owner] - 1)
    return torch.where(kept, block, -1)


def _add_checkpoints(slots: Tensor, metadata: SelectiveMetadata, starts: Tensor) -> None:
    """Write into ``slots`` the blocks that get states in the middle of prompts, if there are any.

    Args:
        slots: int64 ``[num_rows]``, the block after each row, changed in place.
        metadata: of a layer; its ``checkpoint_meta`` names the rows.
        starts: int64 ``[num_requests + 1]``.
    """
    found = getattr(metadata, "checkpoint_meta", None)
    if found is None:
        return
    offsets, blocks = found.checkpoint_offsets.long(), found.state_indices.long()
    first = int(metadata.num_decodes)  # prompts come after them
    begin, end = starts[first : first + len(offsets)], starts[first + 1 : first + 1 + len(offsets)]
    offsets, blocks = offsets[: len(end)], blocks[: len(end)]
    there = (offsets > 0) & (blocks != _NULL_BLOCK)
    row = torch.where(there, begin + offsets, end) - 1
    slots.index_copy_(0, row, torch.where(there, blocks, slots[row]))


def _columns(metadata: Any, count: int) -> tuple[Tensor, Tensor] | None:
    """Read the tables of a batch from the attention metadata of a recurrent layer.

    Returns:
        int64 ``[num_requests, columns]``, the blocks of each request, and int64
        ``[num_requests]``, the rows that the request kept in the step before, the row of the last
        sampled token included; 0 for a request whose kernel does not use it. None for metadata of
        an unknown kind.
    """
    if hasattr(metadata, "non_spec_state_indices_tensor"):
        return _gated_delta(metadata, count)
    if hasattr(metadata, "state_indices_tensor_d"):
        return _selective(metadata, count)
    return None


def _gated_delta(metadata: GatedDeltaMetadata, count: int) -> tuple[Tensor, Tensor]:
    """Read the blocks and kept rows of a batch, as ``_columns``, of a gated delta net.

    Its requests with drafts are marked by a mask.
    """
    mask, others = metadata.spec_sequence_masks, metadata.non_spec_state_indices_tensor
    if mask is None:
        assert others is not None  # the requests are all there
        table = others[:count, None].long()
        return table, table.new_zeros(count)
    mask = mask[:count].bool()
    table = metadata.spec_state_indices_tensor.long()
    columns, accepted = _spread(mask, table), _spread(mask, metadata.num_accepted_tokens.long())
    if others is None or not len(others):
        return columns, torch.where(mask, accepted, 0)
    plain = torch.full_like(columns, _NULL_BLOCK)
    plain[:, 0] = _spread(~mask, others.long())
    return torch.where(mask[:, None], columns, plain), torch.where(mask, accepted, 0)


def _spread(mask: Tensor, values: Tensor) -> Tensor:
    """Put values, which stand one after the other, at the places where a mask is set.

    The other places get any of the values.
    """
    number = (mask.cumsum(0) - 1).clamp(0, len(values) - 1)
    return values.index_select(0, number)


def _selective(metadata: SelectiveMetadata, count: int) -> tuple[Tensor, Tensor]:
    """Read the blocks and kept rows of a batch, as ``_columns``, of Mamba or a short convolution.

    Decodes come first, then prompts. Behind the requests may stand padding, which vLLM counts among
    either of them.
    """
    decodes, table = min(int(metadata.num_decodes), count), metadata.state_indices_tensor_d
    width = 1 if table is None else table.shape[1]
    some = metadata.state_indices_tensor_p if table is None else table
    columns = torch.full((count, width), _NULL_BLOCK, dtype=torch.int64, device=some.device)
    accepted = torch.zeros(count, dtype=torch.int64, device=some.device)
    if decodes and table is not None:
        columns[:decodes] = table[:decodes].long()
        if metadata.num_accepted_tokens is not None:
            accepted[:decodes] = metadata.num_accepted_tokens[:decodes].long()
    if decodes < count:
        columns[decodes:, 0] = metadata.state_indices_tensor_p[: count - decodes].long()
    return columns, accepted
