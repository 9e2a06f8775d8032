"""Reading the steps of the V1 runner on a CPU for the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Final

import attrs
import torch
from torch import Tensor

from ....audit import RowGroup
from ....audit.step_input import StepBuffers, StepInput
from ...serving.step import Rows
from . import audited, audited_v1, given_forwards
from .protocols.layers import BatchMetadata, ForwardContext
from .protocols.runners import BlockTable, Prepared, RunnerV1


def ids_and_positions(inputs: Mapping[str, object]) -> tuple[object, object]:
    """Return the ids and the positions that a model is called with, given its arguments."""
    return inputs.get("input_ids"), inputs.get("positions")


class StepReader:
    """Reads the steps of a V1 runner on a CPU into buffers of its own.

    The runner writes into its own buffers again before a step ends, when it drafts. Here the
    numbers of a step stay until the next one is read, and each number of requests has its tensors.

    Args:
        runner: the runner, with its KV cache.
        groups: the groups to read, by name.
        step_input: copies what the runner says.
    """

    def __init__(
        self, runner: RunnerV1, groups: Mapping[str, RowGroup], step_input: StepInput
    ) -> None:
        self._runner: Final = runner
        self._input: Final = step_input
        self._sizes: Final = {name: group.block_size for name, group in groups.items()}
        self._numbers: Final = {name: int(name.partition(".")[2]) for name in groups}
        self._layers: Final = {name: given_forwards.layers_of(runner, name) for name in groups}
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
                    torch.zeros_like(audited.own_blocks(self._table(name), requests, size))
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
                else audited.own_blocks(table, number, self._sizes[name])
                for name, table in tables.items()
            ),
            lengths=tuple(runner.seq_lens for _ in tables),
        )
        self._input.copy_step(source, self._own, self._first, self._drafts, 0)

    def _table(self, name: str) -> BlockTable:
        return self._runner.input_batch.block_table[self._numbers[name]]

    def rows(self, prepared: Prepared, tokens: object = None, positions: object = None) -> Rows:
        """Read the rows of the forward that comes next, in its context.

        Args:
            prepared: the result of ``_prepare_inputs``.
            tokens: the ids that the model is called with; None if it is called with no ids.
            positions: the positions likewise.
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

        Args:
            number: of requests.
            tokens: the model's argument.
            positions: likewise.

        Returns:
            The buffers, which are the same object where the tensors are, and the names of groups
            whose layers are given lengths of their own.
        """
        runner, context = self._runner, given_forwards.context()
        starts, odd = runner.query_start_loc.gpu, []
        total = int(runner.query_start_loc.np[number])
        given: list[Tensor] = [
            starts,
            given_forwards.argument(positions, runner.positions, total),
            given_forwards.argument(tokens, runner.input_ids.gpu, total),
        ]
        for name, size in self._sizes.items():
            table, metadata = self._table(name), self._metadata(context, name)
            # Not its ``np``: where groups differ, vLLM makes tables with memory apart from that.
            own = table.slot_mapping.gpu
            blocks = given_forwards.blocks(metadata, table.block_table.gpu, number)
            if size != int(table.block_size):
                blocks = audited.own_blocks(table, number, size, blocks)
            lengths = given_forwards.lengths(metadata, runner.seq_lens, starts)
            if lengths is None:
                odd.append(name)
                lengths = given_forwards.NO_LENGTHS
            slots = given_forwards.slots(context, self._layers[name], own, total)
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
        """Return the metadata of a group's layers that say what its requests read."""
        if name in self._chunked:
            return ()
        starts = self._runner.query_start_loc.gpu
        return given_forwards.metadata(context, self._layers[name], starts)

    def _wrong_lengths(
        self, names: Sequence[str] | Mapping[str, int], rows: Rows
    ) -> dict[str, Tensor]:
        """Return, by group, the lengths that its layers are given, if some are wrong."""
        context, found = given_forwards.context(), {}
        ends = (self._first[: len(rows.names)] + rows.starts.diff()).numpy()
        starts = self._runner.query_start_loc.gpu
        for name in names:
            wrong = given_forwards.wrong_lengths(self._metadata(context, name), ends, starts)
            if wrong is not None:
                found[name] = wrong
        return found

    def _rows(self, number: int, drafts: bool) -> Rows:
        """Return the rows of steps with a number of requests."""
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


class SampledReader(audited_v1.SampledReader):
    """Reads what a V1 runner on a CPU has sampled into buffers of its own.

    A request whose prompt goes on after its rows has no token: vLLM samples for it and forgets it.
    """

    def of_step(self, ids: Tensor, rows: Rows | None) -> tuple[Tensor, Tensor]:
        """Return the number of sampled tokens of each request, and their ids, as ``sampled`` does.

        Args:
            ids: that were sampled, int ``[num_requests, n]``.
            rows: the rows of the step; None if they are not known. A request has no more tokens
                than drafts and one.
        """
        return self.sampled(ids, None if rows is None else rows.drafts)
