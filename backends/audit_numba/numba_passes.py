"""The ledger's passes on a CPU, compiled: the usual step is a few calls, whatever its size.

What a step writes is written here. What it reads is compared here, too; but once something is
wrong, the passes in torch, which are the specification, look at the step again and report it.
"""

from __future__ import annotations

from operator import is_
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from ...audit import books as book
from ...audit.beginning import Beginning
from ...audit.books import Books
from ...audit.byte_books import ByteBooks
from ...audit.byte_passes import BytePasses
from ...audit.group_lines import group_lines
from ...audit.passes import Stretch
from ...audit.rows import Batch
from ...audit.step import Step
from ...audit.step_buffers import StepBuffers
from ...audit.torch_passes import TorchPasses
from .compare_rows import compare_rows, compare_states, compare_stretches
from .engine_input import OUTSIDE_BUFFERS, begin_requests, copy_step, count_tokens, reaches
from .numba_byte_passes import NumbaBytePasses
from .requests import fill_first, well_formed
from .step_arrays import NONE, StepArrays, StepReader, ints
from .whole_steps import MALFORMED, WRONG, resolve_well_formed, write_and_compare
from .write_rows import resolve_rows, write_rows

_NOTHING: Final = numpy.zeros((0, 0), numpy.int64)
#: Arrays of tensors that are remembered; beyond, all are forgotten.
_MAX_REMEMBERED: Final = 2048


class NumbaPasses(TorchPasses):
    """The passes over one ledger's books, compiled when they are made; this takes some seconds.

    Args:
        books: on a CPU.
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
        self._read: Final = StepReader(books)
        self._words: Final = books.words.numpy()
        self._owners: Final = books.owners.numpy()
        self._own: Final = books.own.numpy()
        self._facts: Final = books.facts.numpy()
        self._entries: Final = books.journal.numpy()
        self._counters: Final = books.counters.numpy()
        self._fingerprints: Final = books.fingerprints.numpy()
        self._seen: Final = numpy.zeros(books.facts.shape[1], numpy.bool_)
        self._copied: tuple[object, ...] = (None,) * 4
        self._copies: tuple[Any, ...] = ()
        self._arrays: dict[int, tuple[Tensor, Any]] = {}
        self._compile()

    def _compile(self) -> None:
        """Call every function for a step without requests, whose effects are undone."""
        none = torch.zeros(0, dtype=torch.int64)
        starts = torch.zeros(1, dtype=torch.int64)
        step = Step(none, starts, None, none, {}, told=none, positions=none)
        plain = Step(none, starts, None, none, {}, positions=none)
        self.takes(step, none)
        before = self._counters.copy(), self._fingerprints.copy()
        self.write(step)
        self.check(step)
        self.write_and_check(plain)
        self.inspect(Stretch(none, none, none, {}, "published"))
        self.resolve(step, none, None)
        self.resolve_taken(step, none, None)
        self.reaches(step, none)
        self.begin(Beginning(none, 0, 0))
        no_ids = torch.zeros(0, 1, dtype=torch.int32)
        self.count(no_ids, torch.zeros(0, dtype=torch.bool), 0, none, no_ids.long())
        self._counters[:], self._fingerprints[:] = before

    def takes(
        self,
        step: Step,
        accepted: Tensor | None = None,
        besides: int = 0,
        *,
        released: bool = False,
    ) -> bool:
        """Tell whether a step is well-formed, as ``Passes.takes`` describes."""
        read = self._read.read(step) if released else self._filled(step)
        right: bool = well_formed(
            *read.requests, read.drafts, ints(accepted), besides, self._facts, self._own.shape[1],
            read.num_rows, released, self._seen,
        )  # fmt: skip
        return right

    def _filled(self, step: Step) -> StepArrays:
        """Return the arrays of a step, once ``Books.first`` is filled where that is to be done."""
        read = self._read.read(step)
        if step.first is None:
            fill_first(read.starts, read.positions, read.first[: len(read.lines)], read.num_rows)
        return read

    def begin(self, beginning: Beginning) -> None:
        """Do what ``Passes.begin`` says."""
        numbers = beginning.num_tokens, beginning.num_requests
        begin_requests(beginning.packed.numpy(), *numbers, self._key, self._own, self._facts)

    def copy_step(
        self,
        source: StepBuffers,
        target: StepBuffers,
        first: Tensor,
        drafts: Tensor,
        number: int,
    ) -> bool:
        """Do what ``Passes.copy_step`` says; buffers that come again are not looked at again."""
        given = source, target, first, drafts
        if not all(map(is_, given, self._copied)):
            self._copied = given
            self._copies = _copies_of(*given)
        if not self._copies:
            return super().copy_step(source, target, first, drafts, number)
        right: int = copy_step(*self._copies, number)
        if right == OUTSIDE_BUFFERS:
            return super().copy_step(source, target, first, drafts, number)  # says what is wrong
        return bool(right)

    def reaches(self, step: Step, ends: Tensor) -> bool:
        """Do what ``Passes.reaches`` says."""
        read = self._read.read(step)
        found: bool = reaches(*read.requests, read.drafts, self._array_of(ends))
        return found

    def count(
        self,
        ids: Tensor,
        left_out: Tensor,
        end: int,
        counts: Tensor,
        kept: Tensor,
        drafts: Tensor | None = None,
    ) -> None:
        """Do what ``Passes.count`` says."""
        most = NONE if drafts is None else self._array_of(drafts)
        found = self._array_of(counts), self._array_of(kept)
        count_tokens(ids.numpy(), self._array_of(left_out), most, end, *found)

    def _array_of(self, tensor: Tensor) -> Any:
        """Return the array of a tensor that comes again and again."""
        known = self._arrays.get(id(tensor))
        if known is None:
            if len(self._arrays) >= _MAX_REMEMBERED:
                self._arrays.clear()
            known = self._arrays[id(tensor)] = tensor, tensor.numpy()  # its id stays its own
        return known[1]

    def write(self, step: Step) -> None:
        """Do what ``Passes.write`` says."""
        read = self._filled(step)
        if step.sources or step.told is not None:
            compared = compare_states(
                *read.requests, read.drafts, read.sources, read.told, self._groups, self._words,
                self._owners, self._own, self._facts, read.num_rows,
            )  # fmt: skip
            if compared < 0:
                self._check_states(step, Batch.of(self.books, step))
            else:
                self._counters[book.STATES_CHECKED] += compared
        write_rows(
            *read.requests, read.positions, read.tokens, read.drafts, read.slots, self._groups,
            self._key, self._words, self._owners, self._own, self._facts, self._entries,
            self._counters, self._fingerprints, read.num_rows,
        )  # fmt: skip

    def write_and_check(self, step: Step) -> bool:
        """Do what ``Passes.write_and_check`` says; the usual step is one call."""
        read = self._read.read(step)
        if step.sources or step.told is not None or not read.shared:
            return super().write_and_check(step)
        compared = write_and_compare(
            *read.requests, step.first is None, read.positions, read.tokens, read.drafts,
            read.slots, read.tables, self._groups, self._key, self._words, self._owners, self._own,
            self._facts, self._entries, self._counters, self._fingerprints, self._seen,
            read.num_rows,
        )  # fmt: skip
        if compared == WRONG:
            super().check(step)
        return bool(compared != MALFORMED)

    def check(self, step: Step) -> None:
        """Do what ``Passes.check`` says."""
        read = self._read.read(step)
        compared = compare_rows(
            *read.requests, read.drafts, read.tables, self._groups, self._words, self._own,
            self._facts, read.num_rows,
        )  # fmt: skip
        if compared < 0:
            super().check(step)
        else:
            self._counters[book.ROWS_CHECKED] += compared

    def inspect(self, stretch: Stretch) -> None:
        """Do what ``Passes.inspect`` says."""
        compared = compare_stretches(
            ints(stretch.lines), ints(stretch.first), ints(stretch.end),
            self._read.tables(stretch.tables), self._groups, self._words, self._own, self._facts,
            stretch.kind == "exported",
        )  # fmt: skip
        if compared < 0:
            super().inspect(stretch)
        else:
            self._counters[book.ROWS_CHECKED] += compared

    def byte_passes(self, books: ByteBooks) -> BytePasses:
        """Return the passes of a scrub over the same ledger."""
        return NumbaBytePasses(books, self._groups, self._read)

    def resolve_taken(
        self, step: Step, accepted: Tensor, sampled: Tensor | None, besides: int = 0
    ) -> bool:
        """Do what ``Passes.resolve_taken`` says, in one call."""
        read = self._read.read(step)
        ids = _NOTHING if sampled is None else self._ints_of(sampled)
        done: bool = resolve_well_formed(
            *read.requests, read.tokens, read.drafts, self._ints_of(accepted), besides, ids,
            read.slots, self._groups, self._key, self._words, self._own, self._facts,
            self._counters, self._seen, read.num_rows,
        )  # fmt: skip
        return done

    def _ints_of(self, tensor: Tensor) -> Any:
        """Return the array of a tensor, which is remembered if it comes again."""
        known = self._arrays.get(id(tensor))
        return ints(tensor) if known is None else known[1]

    def resolve(
        self, step: Step, accepted: Tensor, sampled: Tensor | None, besides: int = 0
    ) -> None:
        """Do what ``Passes.resolve`` says."""
        read = self._read.read(step)
        ids = _NOTHING if sampled is None else ints(sampled)
        resolve_rows(
            *read.requests, read.tokens, read.drafts, ints(accepted), besides, ids, read.slots,
            self._groups, self._key, self._words, self._own, self._facts, self._counters,
            read.num_rows,
        )  # fmt: skip


def _copies_of(
    source: StepBuffers, target: StepBuffers, first: Tensor, drafts: Tensor
) -> tuple[Any, ...]:
    """Return the arrays that ``engine_input.copy_step`` gets; they share the tensors' memory.

    Empty without groups, and if the groups' arrays differ in dtype or layout: nothing is compiled
    for that.
    """

    def arrays(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return tuple(each.numpy() for each in tensors)

    several = [arrays(many) for many in (source.slots, source.tables, source.lengths)]
    mine = [arrays(many) for many in (target.slots, target.tables)]
    kinds = [{(each.dtype, each.flags.c_contiguous) for each in many} for many in several]
    if any(len(kind) != 1 for kind in kinds):
        return ()
    theirs = arrays((source.starts, source.positions, source.tokens))
    own = arrays((target.starts, target.positions, target.tokens))
    return *theirs, *several, *own, *mine, *arrays((first, drafts))
