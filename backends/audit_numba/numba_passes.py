"""The ledger's passes on a CPU, compiled: the usual step is a few calls, whatever its size.

What a step writes is written here. What it reads is compared here, too; but once something is
wrong, the passes in torch, which are the specification, look at the step again and report it.
"""

from __future__ import annotations

from typing import Final

import numpy
import torch
from torch import Tensor

from ...audit import books as book
from ...audit.books import Books
from ...audit.byte_books import ByteBooks
from ...audit.byte_passes import BytePasses
from ...audit.group_lines import group_lines
from ...audit.new_requests import PackedRequests
from ...audit.rows import Batch
from ...audit.step import Step, Stretch
from ...audit.torch_passes import TorchPasses
from .compare_rows import compare_rows, compare_states, compare_stretches
from .engine_input import begin_requests
from .numba_byte_passes import NumbaBytePasses
from .step_arrays import StepReader, ints
from .step_input import NumbaStepInput
from .write_rows import resolve_rows, write_rows

_NOTHING: Final = numpy.zeros((0, 0), numpy.int64)


class NumbaPasses(TorchPasses):
    """The passes over one ledger's books, compiled when they are made, or loaded from the disk.

    Args:
        books: on a CPU.

    Attributes:
        reader: the arrays of steps.
    """

    name = "numba"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return the reason why these passes cannot run on a device; None on a CPU."""
        return None if device.type == "cpu" else "its passes are for CPUs"

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._groups: Final = group_lines(books).numpy()
        self._key: Final = books.key.constants(torch.device("cpu")).numpy()
        self.reader: Final = StepReader(books)
        self._words: Final = books.words.numpy()
        self._owners: Final = books.owners.numpy()
        self._own: Final = books.own.numpy()
        self._facts: Final = books.facts.numpy()
        self._entries: Final = books.journal.numpy()
        self._counters: Final = books.counters.numpy()
        self._fingerprints: Final = books.fingerprints.numpy()
        self._compile()

    def _compile(self) -> None:
        """Compile every function, by calling it for a step without requests; undo the effects."""
        none = torch.zeros(0, dtype=torch.int64)
        starts = torch.zeros(1, dtype=torch.int64)
        step = Step(none, starts, None, none, {}, told=none, positions=none)
        before = self._counters.copy(), self._fingerprints.copy()
        self.write(step)
        self.check(step)
        self.inspect(Stretch(none, none, none, {}, "published"))
        self.resolve(step, none, None)
        self.begin(PackedRequests(none, 0, 0))
        self._counters[:], self._fingerprints[:] = before

    def input(self) -> NumbaStepInput:
        """Return the compiled code that prepares an engine's numbers."""
        return NumbaStepInput(self.books, self.reader)

    def begin(self, new: PackedRequests) -> None:
        """Put the digests and facts of new requests in place, as ``Passes.change`` describes."""
        numbers = new.num_tokens, new.num_requests
        begin_requests(new.packed.numpy(), *numbers, self._key, self._own, self._facts)

    def write(self, step: Step) -> None:
        """Compare the states that a step reads, then record the rows that it writes.

        See ``Passes.write``. A wrong state is reported by the passes in torch, before the rows are
        written.
        """
        read = self.reader.filled(step)
        if step.sources or step.told is not None:
            compared = compare_states(
                read.requests, read.sources, read.told, self._groups, self._words,
                self._owners, self._own, self._facts, read.num_rows,
            )  # fmt: skip
            if compared < 0:
                self._check_states(step, Batch.of(self.books, step))
            else:
                self._counters[book.STATES_CHECKED] += compared
        write_rows(
            read.requests, read.positions, read.parents, read.tokens, read.slots, self._groups,
            self._key, self._words, self._owners, self._own, self._facts, self._entries,
            self._counters, self._fingerprints, read.num_rows,
        )  # fmt: skip

    def check(self, step: Step) -> None:
        """Compare the rows that a step reads, and count them.

        If any is wrong, torch checks and reports. See ``Passes.check``.
        """
        read = self.reader.read(step)
        compared = compare_rows(
            read.requests, read.tables, read.table_lines, read.block_maps, self._groups,
            self._words, self._own, self._facts, read.num_rows,
        )  # fmt: skip
        if compared < 0:
            super().check(step)
        else:
            self._counters[book.ROWS_CHECKED] += compared

    def inspect(self, stretch: Stretch) -> None:
        """Compare rows that are published or exported, and count them.

        Torch reports if any is wrong. See ``Passes.inspect``.
        """
        compared = compare_stretches(
            ints(stretch.lines), ints(stretch.first), ints(stretch.end),
            self.reader.tables(stretch.tables), ints(stretch.table_lines),
            self.reader.by_group(stretch.block_maps), self._groups, self._words, self._own,
            self._facts, stretch.kind == "exported",
        )  # fmt: skip
        if compared < 0:
            super().inspect(stretch)
        else:
            self._counters[book.ROWS_CHECKED] += compared

    def byte_passes(self, books: ByteBooks) -> BytePasses:
        """Return the passes of a scrub over the same ledger."""
        return NumbaBytePasses(books, self._groups, self.reader)

    def resolve(
        self, step: Step, accepted: Tensor, sampled: Tensor | None, besides: int = 0
    ) -> None:
        """Mark the rows of rejected drafts, and count the kept ones as their requests' own.

        See ``Passes.resolve``.
        """
        read = self.reader.read(step)
        ids = _NOTHING if sampled is None else ints(sampled)
        resolve_rows(
            read.requests, read.parents, read.tokens, ints(accepted), besides, ids, read.slots,
            self._groups, self._key, self._words, self._own, self._facts, self._counters,
            read.num_rows,
        )  # fmt: skip
