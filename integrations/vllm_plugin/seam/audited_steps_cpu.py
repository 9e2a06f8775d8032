"""Reading the steps of the V1 runner on a CPU for the ledger, as its layers are given them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Final

import attrs
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....audit import RowGroup
from ....audit.step_input import StepBuffers, StepInput
from ...serving.step import Rows
from . import audited_requests
from .runner_protocols import (
    BatchMetadata,
    BlockTable,
    ForwardContext,
    Prepared,
    Runner,
    RunnerV1,
)


def ids_and_positions(inputs: Mapping[str, object]) -> tuple[object, object]:
    """Return the ids and the positions among the arguments of a model's call; None if missing.

    Args:
        inputs: its keyword arguments.
    """
    return inputs.get("input_ids"), inputs.get("positions")


class StepReader:
    """Reads the steps of a V1 runner on a CPU into buffers of its own.

    The runner writes into its own buffers again before a step ends, when it drafts. Here the
    numbers of a step stay until the next one is read, and each number of requests has its tensors.
    """

    def __init__(
        self, runner: RunnerV1, groups: Mapping[str, RowGroup], step_input: StepInput
    ) -> None:
        self._runner: Final = runner
        self._input: Final = step_input
        self._sizes: Final = {name: group.block_size for name, group in groups.items()}
        self._numbers: Final = {name: int(name.partition(".")[2]) for name in groups}
        self._layers: Final = {name: layers_of(runner, name) for name in groups}
        #: Layers of chunks are given lengths and tables by chunk.
        self._chunked: Final = {name for name, group in groups.items() if group.chunk is not None}
        requests, rows = int(runner.max_num_reqs), len(runner.input_ids.gpu)
        with torch.inference_mode(False):  # steps write into them in inference mode or not

            def zeros(length: int) -> Tensor:
                return torch.zeros(length, dtype=torch.int64, device="cpu")

            self._first: Final = zeros(requests)
            self._drafts: Final = zeros(requests)
            self._own: Final = StepBuffers(
                starts=zeros(requests + 1),
                positions=zeros(rows),
                tokens=zeros(rows),
                slots=tuple(zeros(rows) for _ in groups),
                tables=tuple(
                    torch.zeros_like(audited_requests.own_blocks(self._table(name), requests, size))
                    for name, size in self._sizes.items()
                ),
            )
        self._drafted: Final = self._drafts.numpy()
        self._given: tuple[Tensor, ...] = ()
        self._source: StepBuffers | None = None
        self._known: dict[tuple[int, bool], Rows] = {}
        self._warm_up()

    def _warm_up(self) -> None:
        """Copy a step without requests, so that nothing is compiled in a request's step.

        What is compiled depends on the dtypes and layouts of the runner's own buffers.
        """
        runner, number = self._runner, int(self._runner.max_num_reqs)
        tables = {name: self._table(name) for name in self._sizes}
        source = StepBuffers(
            starts=torch.zeros_like(runner.query_start_loc.gpu),
            positions=runner.positions,
            tokens=runner.input_ids.gpu,
            slots=tuple(table.slot_mapping.gpu for table in tables.values()),
            tables=tuple(
                table.block_table.gpu
                if self._sizes[name] == int(table.block_size)
                else audited_requests.own_blocks(table, number, self._sizes[name])
                for name, table in tables.items()
            ),
            lengths=tuple(runner.seq_lens for _ in tables),
        )
        self._input.copy_step(source, self._own, self._first, self._drafts, 0)

    def _table(self, name: str) -> BlockTable:
        """Return the runner's block table of a group."""
        return self._runner.input_batch.block_table[self._numbers[name]]

    def rows(self, prepared: Prepared, tokens: object = None, positions: object = None) -> Rows:
        """Return the rows of the forward that comes next; call it in the forward's context.

        Its tensors are those of the step before: they are filled anew. ``lengths`` has those groups
        alone whose layers are given a wrong length.

        Args:
            prepared: what vLLM's ``_prepare_inputs`` returned.
            tokens: the ids that the model is given; None: the runner's own.
            positions: the positions that the model is given; None: the runner's own.
        """
        names, metadata = self._runner.input_batch.req_ids, prepared[1]
        number = len(names)
        drafts = False
        if metadata is not None and any(metadata.num_draft_tokens):
            # A scheduler at fault may count drafts whose rows the step does not have.
            self._drafted[:number] = metadata.num_draft_tokens
            drafts = True
        source, odd = self._read_groups(number, tokens, positions)
        right = self._input.copy_step(source, self._own, self._first, self._drafts, number)
        known = self._known.get((number, drafts))
        if known is None:
            known = self._rows(number, drafts)
        if known.names != names:
            known = attrs.evolve(known, names=[*names])
        self._known[number, drafts] = known
        if right and not odd:
            return known
        lengths = self._wrong_lengths(odd if right else self._sizes, known)
        return attrs.evolve(known, lengths=lengths or None)

    def _read_groups(
        self, number: int, tokens: object, positions: object
    ) -> tuple[StepBuffers, Sequence[str]]:
        """Find the buffers that the model and its layers are given; as a rule, the runner's own.

        Returns:
            The buffers, which are the same object where the tensors are, and the names of groups
            whose layers are given lengths of their own.
        """
        runner, context = self._runner, forward_context()
        starts, odd = runner.query_start_loc.gpu, []
        total = int(runner.query_start_loc.np[number])
        given: list[Tensor] = [
            starts,
            given_argument(positions, runner.positions, total),
            given_argument(tokens, runner.input_ids.gpu, total),
        ]
        for name, size in self._sizes.items():
            table, metadata = self._table(name), self._metadata(context, name)
            # Not its ``np``: where groups differ, vLLM makes tables with memory apart from that.
            own = table.slot_mapping.gpu
            blocks = given_blocks(metadata, table.block_table.gpu, number)
            if size != int(table.block_size):
                blocks = audited_requests.own_blocks(table, number, size, blocks)
            lengths = given_lengths(metadata, runner.seq_lens, starts)
            if lengths is None:
                odd.append(name)
                lengths = NO_LENGTHS
            slots = given_slots(context, self._layers[name], own, total)
            given += slots, blocks, lengths
        if self._source is None or not all(map(is_, given, self._given)):
            self._given = tuple(given)
            self._source = StepBuffers(
                starts=starts,
                positions=given[1],
                tokens=given[2],
                slots=tuple(given[3::3]),
                tables=tuple(given[4::3]),
                lengths=tuple(given[5::3]),
            )
        return self._source, odd

    def _metadata(self, context: ForwardContext, name: str) -> Sequence[BatchMetadata]:
        """Return the metadata of a group's layers that say what its requests read.

        None of layers that attend by chunks.
        """
        if name in self._chunked:
            return ()
        starts = self._runner.query_start_loc.gpu
        return given_metadata(context, self._layers[name], starts)

    def _wrong_lengths(
        self, names: Sequence[str] | Mapping[str, int], rows: Rows
    ) -> dict[str, Tensor]:
        """Return, by group, the lengths that its layers are given, of groups with a wrong one."""
        context, found = forward_context(), {}
        ends = (self._first[: len(rows.names)] + rows.starts.diff()).numpy()
        starts = self._runner.query_start_loc.gpu
        for name in names:
            wrong = wrong_lengths(self._metadata(context, name), ends, starts)
            if wrong is not None:
                found[name] = wrong
        return found

    def _rows(self, number: int, drafts: bool) -> Rows:
        """Make the rows of steps with a number of requests, without names: views of the buffers."""
        own = self._own
        return Rows(
            names=[],
            starts=own.starts[: number + 1],
            first=self._first[:number],
            tokens=own.tokens,
            drafts=self._drafts[:number] if drafts else None,
            slots=dict(zip(self._sizes, own.slots, strict=True)),
            tables={
                name: table[:number] for name, table in zip(self._sizes, own.tables, strict=True)
            },
            positions=own.positions,
            buffers=object(),
        )


#: The lengths of requests of which none are known.
NO_LENGTHS: Final = torch.zeros(0, dtype=torch.int32)


def layers_of(runner: Runner, group: str) -> tuple[str, ...]:
    """Return the names of the layers of a KV-cache group."""
    number = int(group.partition(".")[2])
    return tuple(runner.kv_cache_config.kv_cache_groups[number].layer_names)


def forward_context() -> ForwardContext:
    """Return the context of the forward that is about to run."""
    from vllm.forward_context import get_forward_context

    found: ForwardContext = get_forward_context()
    return found


def given_argument(given: object, own: Tensor, total: int) -> Tensor:
    """Return the tokens or positions that the model is called with, int ``[num_rows]`` at least.

    That is ``given`` if it is a vector of the same dtype with other values in the forward's rows;
    else ``own``.

    Args:
        given: the model's argument; None, or of more dimensions, where it takes something else.
        own: the runner's buffer, of which the argument is a part as a rule.
        total: the rows of the forward.
    """
    if not isinstance(given, Tensor) or given.data_ptr() == own.data_ptr():
        return own
    plain = given.dim() == 1 and len(given) >= total and given.dtype == own.dtype
    return given if plain and not torch.equal(given[:total], own[:total]) else own


def given_slots(context: ForwardContext, layers: Sequence[str], own: Tensor, total: int) -> Tensor:
    """Return the slots that layers write a forward's rows to, int ``[total]`` at least.

    Those of the first layer that has other ones than the runner, ``own``; else ``own``. Rows that a
    layer is given no slot for are written nowhere, -1. In microbatches it is ``own``.
    """
    by_layer = context.slot_mapping
    last: Tensor | None = own
    if isinstance(by_layer, dict):
        for layer in layers:
            given: Tensor | None = by_layer.get(layer)
            if given is None or given is last:
                continue
            last = given
            if given.data_ptr() == own.data_ptr() and len(given) >= total:
                continue
            whole = torch.nn.functional.pad(given, (0, max(0, total - len(given))), value=-1)
            if not torch.equal(whole[:total], own[:total]):
                return whole
    return own


def given_metadata(
    context: ForwardContext, layers: Sequence[str], starts: Tensor
) -> list[BatchMetadata]:
    """Return the metadata of layers that say plainly what the requests of the batch read.

    In order, each once; none in microbatches. Left out are metadata without tables and lengths of
    requests, and metadata of other requests: of parts of requests, or of the sampling requests
    alone.
    """
    found: list[BatchMetadata] = []
    by_layer, last = context.attn_metadata, None
    if isinstance(by_layer, dict):
        for layer in layers:
            given = by_layer.get(layer)
            if given is None or given is last:
                continue
            last = given
            ours = getattr(given, "query_start_loc", None)
            if ours is None or not (_is_own(ours, starts) or _is_whole(ours, starts)):
                continue
            if hasattr(given, "block_table") and hasattr(given, "seq_lens"):
                found.append(given)
    return found


def _is_own(given: Tensor, own: Tensor) -> bool:
    """Tell whether two tensors begin at the same address."""
    return given.data_ptr() == own.data_ptr()


def _is_whole(given: Tensor, starts: Tensor) -> bool:
    """Tell whether first rows are those of the batch from its first request on.

    The metadata of a part of the batch, such as of its prompts, count rows from 0 anew.
    """
    number = len(given)
    return 0 < number <= len(starts) and int(given[-1]) == int(starts[number - 1])


def given_blocks(metadata: Sequence[BatchMetadata], own: Tensor, number: int) -> Tensor:
    """Return the table that a forward reads through, int32 ``[num_requests, blocks]`` at least.

    That of the first layer which has another one than the runner, ``own``; else ``own``. Tables of
    another width are passed over: their blocks have another size.
    """
    for each in metadata:
        given: Tensor = each.block_table
        # A table of another width is of blocks of another size.
        if _is_own(given, own) or given.shape[1:] != own.shape[1:]:
            continue
        if len(given) < number or not torch.equal(given, own[: len(given)]):
            return given
    return own


def given_lengths(metadata: Sequence[BatchMetadata], own: Tensor, starts: Tensor) -> Tensor | None:
    """Return the runner's lengths, ``own``, if all metadata have them; ``NO_LENGTHS`` without any.

    None if some have others, or rows that begin elsewhere than ``starts``.
    """
    for each in metadata:
        if not (_is_own(each.seq_lens, own) and _is_own(each.query_start_loc, starts)):
            return None
    return own if metadata else NO_LENGTHS


def wrong_lengths(
    metadata: Sequence[BatchMetadata], ends: NDArray[numpy.int64], starts: Tensor
) -> Tensor | None:
    """Return the number of rows that each request's attention reads, if one of them is wrong.

    A request that is given a row of its neighbour reads one row more than it has, and the neighbour
    one fewer.

    Args:
        metadata: those of one group's layers, in order; the first that is wrong is returned.
        ends: int64 ``[num_requests]``, the right numbers: the position after each request's last
            row.
        starts: int32 ``[num_requests + 1]`` at least, the runner's first row of each request.

    Returns:
        int ``[num_requests]``, a copy; None if all are right.
    """
    number = len(ends)
    for each in metadata:
        given: Tensor = each.seq_lens[:number]
        if not _is_own(each.query_start_loc, starts) and len(each.query_start_loc) > number:
            rows, own = (one[: number + 1].diff() for one in (each.query_start_loc, starts))
            given = given + rows - own
        if (given.numpy() != ends).any():
            return given.clone()
    return None
