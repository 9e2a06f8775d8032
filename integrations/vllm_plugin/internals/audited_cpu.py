"""Reading the steps of the V1 runner on a CPU for the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....audit import RowGroup
from . import audited, given_forwards
from .audited import Rows

#: By bytes: as unsigned numbers, those below 0 are the largest.
_UNSIGNED: Final = {4: numpy.uint32, 8: numpy.uint64}
_NO_TOKEN: Final = numpy.int64(-1)

#: The tensors of a step, in the order of ``Rows``.
_Buffers = tuple[
    Tensor, Tensor, Tensor, Tensor | None, dict[str, Tensor], dict[str, Tensor], Tensor
]


class StepReader:
    """Reads the steps of a V1 runner on a CPU into buffers of its own.

    The runner writes into its own buffers again before a step ends, when it drafts. Here the
    numbers of a step stay until the next one is read, and each number of requests has its tensors.

    Args:
        runner: the runner, with its KV cache.
        groups: the groups to read, by name.
    """

    def __init__(self, runner: Any, groups: Mapping[str, RowGroup]) -> None:
        self._runner: Final = runner
        self._sizes: Final = {name: group.block_size for name, group in groups.items()}
        self._layers: Final = {name: given_forwards.layers_of(runner, name) for name in groups}
        #: Layers of chunks are given lengths and tables by chunk.
        self._chunked: Final = {name for name, group in groups.items() if group.chunk is not None}
        requests, rows = int(runner.max_num_reqs), len(runner.input_ids.gpu)
        with torch.inference_mode(False):  # steps write into them in inference mode or not

            def zeros(length: int) -> Tensor:
                return torch.zeros(length, dtype=torch.int64, device="cpu")

            self._starts: Final = zeros(requests + 1)
            self._first: Final = zeros(requests)
            self._drafts: Final = zeros(requests)
            self._tokens: Final = zeros(rows)
            self._positions: Final = zeros(rows)
            self._slots: Final = {name: zeros(rows) for name in groups}
            self._tables: Final = {
                name: torch.zeros_like(audited.own_blocks(self._table(name), requests, size))
                for name, size in self._sizes.items()
            }
        own = (self._starts, self._first, self._drafts, self._tokens, self._positions)
        self._arrays: Final = tuple(tensor.numpy() for tensor in own)
        self._known: dict[tuple[int, bool], _Buffers] = {}

    def _table(self, name: str) -> Any:
        return self._runner.input_batch.block_table[int(name.partition(".")[2])]

    def rows(self, prepared: Any) -> Rows:
        """Read the rows of the forward that comes next, in its context.

        Args:
            prepared: the result of ``_prepare_inputs``.
        """
        runner, metadata = self._runner, prepared[1]
        names = runner.input_batch.req_ids
        number = len(names)
        starts, first, drafted, tokens, positions = self._arrays
        starts[: number + 1] = runner.query_start_loc.np[: number + 1]
        total = int(starts[number])
        positions[:total] = runner.positions.numpy()[:total]
        first[:number] = positions[starts[:number]]
        tokens[:total] = runner.input_ids.gpu.numpy()[:total]
        drafts = metadata is not None and any(metadata.num_draft_tokens)
        if drafts:  # a scheduler at fault may count drafts whose rows the step does not have
            lengths = starts[1 : number + 1] - starts[:number]
            numpy.minimum(metadata.num_draft_tokens, lengths, out=drafted[:number])
        lengths = self._read_groups(
            number, total, first[:number] + numpy.diff(starts[: number + 1])
        )
        buffers = self._known.get((number, drafts))
        if buffers is None:
            buffers = self._known[number, drafts] = self._buffers(number, drafts)
        return Rows(names, *buffers, buffers=buffers, lengths=lengths or None)

    def _read_groups(
        self, number: int, total: int, ends: NDArray[numpy.int64]
    ) -> dict[str, Tensor]:
        """Read the slots and tables that each group's layers are given.

        Args:
            number: of requests.
            total: of rows.
            ends: int64 ``[num_requests]``, the position after each request's last row.

        Returns:
            By group, the lengths that its layers are given, if some are wrong.
        """
        context, starts = given_forwards.context(), self._runner.query_start_loc.gpu
        lengths = {}
        for name, size in self._sizes.items():
            table, layers = self._table(name), self._layers[name]
            # Not its ``np``: where groups differ, vLLM makes tables with memory apart from that.
            slots = given_forwards.slots(context, layers, table.slot_mapping.gpu, total)
            self._slots[name].numpy()[:total] = slots.numpy()[:total]
            given = (
                () if name in self._chunked else given_forwards.metadata(context, layers, starts)
            )
            blocks = given_forwards.blocks(given, table.block_table.gpu)
            blocks = audited.own_blocks(table, number, size, blocks)
            self._tables[name].numpy()[:number] = blocks.numpy()
            wrong = given_forwards.wrong_lengths(given, ends)
            if wrong is not None:
                lengths[name] = wrong
        return lengths

    def _buffers(self, number: int, drafts: bool) -> _Buffers:
        """Return the tensors of steps with a number of requests."""
        return (
            self._starts[: number + 1],
            self._first[:number],
            self._tokens,
            self._drafts[:number] if drafts else None,
            self._slots,
            {name: table[:number] for name, table in self._tables.items()},
            self._positions,
        )


def sampled(runner: Any, output: Any, rows: Rows | None) -> tuple[Tensor, Tensor]:
    """Return accepted drafts, -1 for a request without a token, and the sampled ids.

    Shapes: int64 ``[num_requests]``, and int64 ``[num_requests, n]``, -1 where there is none.

    A request whose prompt goes on after its rows has no token: vLLM samples for it and forgets it.

    Args:
        runner: the runner.
        output: the sampler's.
        rows: the rows of the step; None if they are not known.
    """
    ids = output.sampled_token_ids.numpy()
    real = ids.view(_UNSIGNED[ids.itemsize]) < int(runner.input_batch.vocab_size)
    discarded = runner.discard_request_mask.np[: len(ids)]
    if discarded.any():
        real[discarded] = False
    count = real.sum(1) - 1
    if rows is not None and rows.drafts is not None:
        numpy.minimum(count, rows.drafts.numpy(), out=count)
    return torch.from_numpy(count), torch.from_numpy(numpy.where(real, ids, _NO_TOKEN))
