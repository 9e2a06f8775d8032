"""The passes as Triton kernels: one launch to write, one to check, one to resolve.

A step of an engine with recurrent layers has one more, before it writes: states are read before
they are written over.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from ...audit.books import Books
from ...audit.byte_books import ByteBooks
from ...audit.digest import REJECTED
from ...audit.group_lines import group_lines
from ...audit.new_requests import Change
from ...audit.passes import Passes
from ...audit.rows import first_of
from ...audit.step import Step, Stretch
from ...audit.violation import KIND_NUMBER
from ..launching.repeated_launch import ALIGNED
from . import change_kernel, compare_kernel, resolve_kernel, write_kernel
from .byte_passes import TritonBytePasses
from .launches import Launches
from .plan import Addresses, contiguous, with_numbers
from .staging import Staging
from .step_input import TritonStepInput

#: Tokens of a request that begins, at a time.
_TOKENS: Final = 512
#: Rows that a program writes at a time.
_ROWS: Final = 128
#: Draft rows that a program marks at a time.
_DRAFTS: Final = 16
#: Stands for each number that 32 bits do not hold: no cache has so many blocks.
_NO_BLOCK: Final = (1 << 31) - 1
#: The arguments of a change that differ between launches: the numbers, and how many there are.
_VARY: Final = (0, 6, 7, 8, 9)
#: Journal entries that are looked through at a time, where something was found.
_ENTRIES: Final = 1024


class TritonPasses(Passes):
    """The audit's passes over one ledger's books, as launches of Triton kernels.

    Slots and sources are wanted as int64, tables as int32, and all tensors contiguous in their last
    dimension; others are converted, which takes a launch each, and cannot be replayed from a graph.
    A ``Step`` object that is given again is launched with the addresses that were noted down at
    first.

    Args:
        books: on a GPU.

    Attributes:
        splits: programs that share one request's rows of one group.
    """

    name = "triton"
    splits: ClassVar[int] = 8

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return the reason why the kernels cannot run on this device; None on a GPU."""
        return None if device.type == "cuda" else "its kernels need a GPU"

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        device = books.words.device
        self._groups: Final = group_lines(books)
        self._key: Final = books.key.constants(device)
        self._num_groups: Final = len(books.layout.places)
        self._addresses: Final = {what: Addresses(books) for what in ("slots", "tables", "sources")}
        self._held: dict[str, dict[str, Tensor]] = {}
        self._staging: Final = Staging(device)
        self._changing: Final = Launches(change_kernel.change_books, 2, device)
        self._writing: Final = Launches(write_kernel.write_rows, 6, device)
        self._checking: Final = Launches(compare_kernel.compare_rows, 5, device)
        self._comparing_states: Final = Launches(compare_kernel.compare_states, 4, device)
        self._resolving: Final = Launches(resolve_kernel.resolve_rows, 5, device)
        lines, columns = books.own.shape
        #: Columns of ``own``, lines, journal entries, and violations that can wait.
        self._sizes: Final = (columns, lines, len(books.journal), len(books.found))
        none = torch.empty(1, dtype=torch.int64, device=device)
        self._unread: Final = none
        padding = torch.full((1,), -1, device=device)
        nothing = torch.zeros(2, dtype=torch.int64, device=device)
        self._padding: Final = Step(padding, nothing, nothing[:1], nothing[:0], {})

    def change(self, change: Change) -> None:
        """Begin requests, hand out blocks and release lines in the books, in one launch.

        See ``Passes.change``. With seals the blocks that are handed out lose theirs.
        """
        new, given, numbers = change.new, change.given, array("q")
        pieces: list[memoryview | Tensor] = [] if new is None else [*new.owns]
        if new is not None:
            numbers.extend(new.fields)
        begun = (0, 0) if new is None else (new.num_tokens, len(new.owns))
        for place, blocks in given:
            base, stride = place.base, place.stride
            numbers.extend([n for block in blocks for n in (base + block * stride, stride)])
        handed, requests = sum([len(blocks) for _, blocks in given]), begun[1]
        numbers.extend(change.released)
        pieces.append(memoryview(numbers))
        packed, seals, books = self._staging.put(pieces), change.seals, self.books
        arguments = (
            packed, self._key, books.own, books.facts, books.words, self._or_unread(seals),
            *begun, handed, len(change.released), *self._sizes[:2], seals is not None, _TOKENS,
        )  # fmt: skip
        kind = seals is None, packed.data_ptr() % ALIGNED
        self._changing.launch((requests + handed + 1, 1, 1), arguments, kind, _VARY)

    def input(self) -> TritonStepInput:
        """Return the kernels that prepare an engine's numbers, over the same pinned memory."""
        return TritonStepInput(self.books, self._staging)

    def write(self, step: Step) -> None:
        """Compare the states that a step reads, then record the rows that it writes.

        See ``Passes.write``.
        """
        if step.sources or step.told is not None:
            self._compare_states(step)
        if self._writing.again(step):
            return
        step = contiguous(step)
        step = step if len(step.lines) else self._padding  # no launch has no program
        books, requests = self.books, len(step.lines)
        arguments = (
            step.lines, step.starts, first_of(books, step), self._or_unread(step.positions),
            self._or_unread(step.parents), step.tokens, self._or_unread(step.drafts),
            self._table("slots", step.slots, torch.int64), self._groups, self._key, books.words,
            books.owners, books.own, books.facts, books.journal, books.counters,
            books.fingerprints, requests, step.num_rows, *self._sizes[:3],
            step.drafts is not None, step.positions is not None, _are_trees(step),
            step.first is None, self._num_groups, _ROWS,
        )  # fmt: skip
        recurs = self._as_they_are("slots", step.slots)
        self._writing.first(step, (requests, 1, 1), arguments, recurs=recurs)

    def _compare_states(self, step: Step) -> None:
        """Compare the states that a step continues, and the counts that its engine was told."""
        if self._comparing_states.again(step):
            return
        step = contiguous(step)
        books = self.books
        arguments = (
            step.lines, step.starts, first_of(books, step), self._or_unread(step.positions),
            self._table("sources", step.sources, torch.int64), self._or_unread(step.told),
            self._groups, books.words, books.owners, books.own, books.facts, books.journal,
            books.found, books.counters, books.ages, step.num_rows, *self._sizes,
            step.told is not None, step.first is None, self._num_groups, _ENTRIES,
        )  # fmt: skip
        recurs = self._as_they_are("sources", step.sources)
        self._comparing_states.first(step, (len(step.lines), 1, 1), arguments, recurs=recurs)

    def check(self, step: Step) -> None:
        """Compare the rows that a step reads with the readers' digests; report what is wrong.

        See ``Passes.check``.
        """
        if self._checking.again(step):
            return
        step = contiguous(step)
        first = first_of(self.books, step)
        given = (step.lines, first, step.starts, step, None, step.num_rows)
        grid, arguments = self._compare(*given)
        recurs = self._as_they_are("tables", step.tables)
        self._checking.first(step, grid, arguments, recurs=recurs)

    def inspect(self, stretch: Stretch) -> None:
        """Compare rows that are published or exported; report what is wrong.

        See ``Passes.inspect``.
        """
        lines, first, end = (
            each.contiguous() for each in (stretch.lines, stretch.first, stretch.end)
        )
        given = (lines, first, end, with_numbers(stretch), stretch.kind, 0)
        grid, arguments = self._compare(*given)
        self._checking.launch(grid, arguments)

    def _compare(
        self,
        lines: Tensor,
        low: Tensor,
        high: Tensor,
        read: Step | Stretch,
        kind: str | None,
        num_rows: int,
    ) -> tuple[tuple[int, int, int], tuple[object, ...]]:
        """Return the grid and the arguments of a launch of ``compare_rows``; launch nothing.

        ``kind`` is that of a stretch; None: a step reads.
        """
        books = self.books
        # A table without columns has no address, as if the group were not read.
        tables = {
            name: table if table.shape[1] else table.new_full((len(table), 1), -1)
            for name, table in read.tables.items()
        }
        return (len(lines), self._num_groups, self.splits), (
            lines, low, high, self._table("tables", tables, torch.int32, read),
            self._groups, books.words, books.own, books.facts, books.journal, books.found,
            books.counters, books.ages, -1 if kind is None else KIND_NUMBER[kind], num_rows,
            *self._sizes, kind is None, kind == "exported", self._num_groups, self.splits,
            _ENTRIES,
        )  # fmt: skip

    def byte_passes(self, books: ByteBooks) -> TritonBytePasses:
        """Return the kernels of a scrub over the same ledger."""
        return TritonBytePasses(books, self._groups, self._key, self._table, self._as_they_are)

    def resolve(
        self, step: Step, accepted: Tensor, sampled: Tensor | None, besides: int = 0
    ) -> None:
        """Mark the rows of rejected drafts, and count the kept ones as their requests' own.

        See ``Passes.resolve``. A step without requests only clears ``OPEN``.
        """
        if not step.lines.shape[0]:
            step, accepted, sampled = self._padding, self._unread, None
        ids = None if sampled is None else sampled.contiguous()
        given = (accepted,) if ids is None else (accepted, ids)
        if self._resolving.again(step, given, besides):
            return
        step = contiguous(step)
        books = self.books
        arguments = (
            step.lines, step.starts, first_of(books, step), step.tokens,
            self._or_unread(step.drafts), accepted, self._or_unread(ids),
            self._table("slots", step.slots, torch.int64), self._groups, self._key, books.words,
            books.own, books.facts, books.counters, step.num_rows, *self._sizes[:2],
            0 if ids is None else ids.shape[1], besides, REJECTED, step.drafts is not None,
            _are_trees(step), self._num_groups, _DRAFTS,
        )  # fmt: skip
        recurs = self._as_they_are("slots", step.slots)
        grid = (len(step.lines), 1, 1)
        self._resolving.first(step, grid, arguments, given, besides, at=5, recurs=recurs)

    def _as_they_are(self, what: str, tensors: Mapping[str, Tensor]) -> bool:
        """Tell whether the last table of this sort has the addresses of these tensors themselves.

        It has not where a tensor was converted: the next launch has to convert it again.
        """
        held = self._held[what]
        return all(held[name] is tensor for name, tensor in tensors.items())

    def _or_unread(self, tensor: Tensor | None) -> Tensor:
        """Return the tensor, or one int64 element that a kernel does not read in place of None."""
        return self._unread if tensor is None else tensor

    def _table(
        self,
        what: str,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        read: Step | Stretch | None = None,
    ) -> Tensor:
        """Return the table of a step's tensors by group, see ``Addresses.of``.

        Keep the tensors alive.

        Args:
            what: the sort of the tensors, such as "slots"; each has a table of its own.
            tensors: by group; those of another dtype or layout are converted.
            dtype: the dtype that the kernels read.
            read: as for ``Addresses.of``.
        """
        right = {name: _as(tensor, dtype) for name, tensor in tensors.items()}
        self._held[what] = right  # converted ones live until the next launch of this sort
        return self._addresses[what].of(right, read)


def _are_trees(step: Step) -> bool:
    """Tell whether a step has drafts, and parents that make them trees."""
    return step.parents is not None and step.drafts is not None


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a dtype that is contiguous in its last dimension; itself if it is that.

    Numbers that int32 does not hold become -1, or a block that no cache has.
    """
    if tensor.dtype is not dtype:
        if dtype is torch.int32 and tensor.dtype is torch.int64:
            tensor = tensor.clamp(-1, _NO_BLOCK)  # what is cut off could name another block
        return tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
