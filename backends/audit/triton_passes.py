"""The passes as Triton kernels: one launch to write, one to check, one to resolve.

A step of an engine with recurrent layers has one more, before it writes: states are read before
they are written over. Where graphs of whole forwards begin with the first two, what the host says
between two steps waits for the next graph, which begins with all three.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from ...audit.beginning import Beginning
from ...audit.books import Books
from ...audit.byte_books import ByteBooks
from ...audit.changes import Change
from ...audit.digest import REJECTED
from ...audit.group_lines import group_lines
from ...audit.groups import Place
from ...audit.passes import Passes, Stretch
from ...audit.rows import first_of
from ...audit.step import Step
from ...audit.violation import KIND_NUMBER
from ..launching.repeated_launch import ALIGNED
from . import change_kernel, compare_kernel, resolve_kernel, write_kernel
from .byte_passes import TritonBytePasses
from .going_on import GoingOn
from .launches import Launches
from .plan import Addresses, contiguous
from .staging import Staging
from .waiting import Waiting

#: Tokens of a request that begins, at a time.
_TOKENS: Final = 512
#: Rows that a program writes at a time.
_ROWS: Final = 128
#: Draft rows that a program marks at a time, and sampled tokens that it counts.
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
        self._on_gpu: Final = device.type == "cuda"
        self._groups: Final = group_lines(books)
        self._key: Final = books.key.constants(device)
        self._num_groups: Final = len(books.layout.places)
        self._addresses: Final = {what: Addresses(books) for what in ("slots", "tables", "sources")}
        self._held: dict[str, dict[str, Tensor]] = {}
        self._staging: Final = Staging(device)
        self._waiting: Final = Waiting(books, self._key)
        self._next: Final = self._waiting.next
        self._changing: Final = Launches(change_kernel.change_books, 2, device)
        self._putting: Final = Launches(change_kernel.put_numbers, 1, device)
        self._counting: Final = Launches(change_kernel.count_tokens, 1, device)
        self._writing: Final = Launches(write_kernel.write_rows, 6, device)
        self._checking: Final = Launches(compare_kernel.compare_rows, 5, device)
        self._going_on: Final = Launches(compare_kernel.compare_states, 4, device)
        self._resolving: Final = Launches(resolve_kernel.resolve_rows, 4, device)
        lines, columns = books.own.shape
        self._constants: Final = (columns, lines, len(books.journal), len(books.found))
        none = torch.empty(1, dtype=torch.int64, device=device)
        self._unread: Final = none
        padding = torch.full((1,), -1, device=device)
        nothing = torch.zeros(2, dtype=torch.int64, device=device)
        self._padding: Final = Step(padding, nothing, nothing[:1], nothing[:0], {})

    def restart(self) -> None:
        """Begin anew, as ``Passes.restart`` describes."""
        self._waiting.restart()

    def begin(self, beginning: Beginning) -> None:
        """Begin requests, as ``Passes.begin`` describes."""
        self.settle()
        self._change(beginning.packed, beginning.num_tokens, beginning.num_requests, 0, 0, None)

    def change(self, change: Change) -> None:
        """Put in place what a step changes, as ``Passes.change`` describes."""
        self.settle()
        coming, given, numbers = change.coming, change.given, array("q")
        pieces: list[memoryview | Tensor] = [] if coming is None else [*coming.owns]
        if coming is not None:
            numbers.extend(coming.fields)
        begun = (0, 0) if coming is None else (coming.num_tokens, len(coming.owns))
        for place, blocks in given:
            base, stride = place.base, place.stride
            numbers.extend([n for block in blocks for n in (base + block * stride, stride)])
        handed = sum([len(blocks) for _, blocks in given])
        numbers.extend(change.released)
        pieces.append(memoryview(numbers))
        packed = self._staging.put(pieces)
        self._change(packed, *begun, handed, len(change.released), change.seals)

    def _change(
        self,
        packed: Tensor,
        tokens: int,
        requests: int,
        blocks: int,
        released: int,
        seals: Tensor | None,
    ) -> None:
        """Launch ``change_books``."""
        books = self.books
        columns, lines = self._sizes()[:2]
        arguments = (
            packed, self._key, books.own, books.facts, books.words, self._or_unread(seals),
            tokens, requests, blocks, released, columns, lines, seals is not None, _TOKENS,
        )  # fmt: skip
        kind = seals is None, packed.data_ptr() % ALIGNED
        self._changing.launch((requests + blocks + 1, 1, 1), arguments, kind, _VARY)

    def hand_out_later(self, given: Sequence[tuple[Place, Sequence[int]]]) -> bool:
        """Hand out blocks with the next step, as ``Passes.hand_out_later`` describes."""
        return self._next.add(given)

    def resolve_later(self, step: Step, accepted: Any, sampled: Any, besides: int) -> bool:
        """Resolve the last step before the next one, as ``Passes.resolve_later`` describes."""
        return self._waiting.resolve_later(step, accepted, sampled, besides)

    def can_wait(self, step: Step, accepted: Tensor, sampled: Tensor) -> bool:
        """Tell whether an outcome can wait, as ``Passes.can_wait`` describes."""
        return self._waiting.can_wait(step, accepted, sampled)

    def going_on(
        self, accepted: Tensor, sampled: Tensor, besides: int, places: Sequence[Place | None]
    ) -> GoingOn | None:
        """Return a call for steps like the last one, as ``Passes.going_on`` describes."""
        if not self._waiting.graphs_save or self._next.is_read():
            return None  # the outcome of the step that begins could not wait, or blocks could not
        return GoingOn(self._waiting, accepted, sampled, besides, places)

    def put_later(self, target: Tensor, numbers: Sequence[int]) -> bool:
        """Put numbers in place before the next step, as ``Passes.put_later`` describes."""
        return self._next.put_lines(target, numbers)

    def settle(self) -> None:
        """Do what waits for the next step, as ``Passes.settle`` describes."""
        waiting = self._next
        waiting.told += 1
        if waiting.resolves:
            waiting.resolves = False
            self._waiting.resolve_last()
        if waiting.blocks:
            pairs, count = waiting.take()
            self._change(pairs, 0, 0, count, 0, None)
        if waiting.lines:
            target, lines = waiting.take_lines()
            self._put(target[: len(lines)], lines)

    def launch_step(self, step: Step) -> None:
        """Launch what a graph begins with, as ``Passes.launch_step`` describes."""
        self.settle()
        self._waiting.use(step)
        self._waiting.take()
        self._write(step)
        self.check(step)
        if not (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            self._next.launched()

    def replayed(self, step: Step | None) -> None:
        """Hear that a graph writes a step, as ``Passes.replayed`` describes."""
        self._waiting.replayed(step)

    @property
    def num_steps(self) -> int | None:
        """The steps that were launched, as ``Passes.num_steps`` describes."""
        return self._next.steps if self._next.used else None

    def put(self, target: Tensor, numbers: Sequence[int] | Tensor) -> None:
        """Copy numbers of the host, as ``Passes.put`` describes."""
        if not len(target):
            return
        if self._next.lines:
            self.settle()
        self._next.told += 1
        given = numbers if isinstance(numbers, Tensor) else memoryview(array("q", numbers))
        self._put(target, self._staging.put([given]))

    def _put(self, target: Tensor, packed: Tensor) -> None:
        """Launch ``put_numbers``."""
        count = target.shape[0]
        kind = target.dtype, packed.data_ptr() % ALIGNED, target.data_ptr() % ALIGNED
        grid = (-(-count // _TOKENS), 1, 1)
        self._putting.launch(grid, (packed, target, count, _TOKENS), kind)

    def count(
        self,
        ids: Tensor,
        left_out: Tensor,
        end: int,
        counts: Tensor,
        kept: Tensor,
        drafts: Tensor | None = None,
    ) -> None:
        """Count sampled tokens, as ``Passes.count`` describes."""
        ids = ids.contiguous()
        number, width = ids.shape
        tensors = (ids, left_out, counts, kept)
        kind = tuple([(each.dtype, each.data_ptr() % ALIGNED) for each in tensors])
        self._counting.launch((number, 1, 1), (*tensors, width, end, _DRAFTS), kind)
        if drafts is not None:
            counts.clamp_(max=drafts + 1)

    def write(self, step: Step) -> None:
        """Note the rows that a step writes, as ``Passes.write`` describes."""
        self.settle()
        self._next.launched()
        self._write(step)
        self._waiting.written(step)

    def _write(self, step: Step) -> None:
        """Launch what notes the rows of a step."""
        if step.sources or step.told is not None:
            self._compare_states(step)
        saves = self._waiting.saves(step)
        if self._writing.again(step, number=saves):
            return
        saved = self._waiting.saved or (self._unread, self._unread)
        step = contiguous(step)
        step = step if len(step.lines) else self._padding  # no launch has no program
        books, requests = self.books, len(step.lines)
        arguments = (
            step.lines, step.starts, first_of(books, step), self._or_unread(step.positions),
            step.tokens, self._or_unread(step.drafts),
            self._table("slots", step.slots, torch.int64), self._groups, self._key, books.words,
            books.owners, books.own, books.facts, books.journal, books.counters,
            books.fingerprints, *saved, requests, step.num_rows,
            *self._sizes()[:3], step.drafts is not None, step.positions is not None,
            step.first is None, saves, self._num_groups, _ROWS,
        )  # fmt: skip
        recurs = self._as_they_are("slots", step.slots)
        self._writing.first(step, (requests, 1, 1), arguments, number=saves, recurs=recurs)

    def _compare_states(self, step: Step) -> None:
        """Compare the states that a step continues, and its counts, before it writes."""
        if self._going_on.again(step):
            return
        step = contiguous(step)
        books = self.books
        arguments = (
            step.lines, step.starts, first_of(books, step), self._or_unread(step.positions),
            self._table("sources", step.sources, torch.int64), self._or_unread(step.told),
            self._groups, books.words, books.owners, books.own, books.facts, books.journal,
            books.found, books.counters, step.num_rows, *self._sizes(), step.told is not None,
            step.first is None, self._num_groups, _ENTRIES,
        )  # fmt: skip
        recurs = self._as_they_are("sources", step.sources)
        self._going_on.first(step, (len(step.lines), 1, 1), arguments, recurs=recurs)

    def check(self, step: Step) -> None:
        """Check the rows that a step reads, as ``Passes.check`` describes."""
        if self._checking.again(step):
            return
        step = contiguous(step)
        first = first_of(self.books, step)
        given = (step.lines, first, step.starts, step.tables, None, step.num_rows)
        grid, arguments = self._compare(*given)
        recurs = self._as_they_are("tables", step.tables)
        self._checking.first(step, grid, arguments, recurs=recurs)

    def inspect(self, stretch: Stretch) -> None:
        """Check a stretch of rows, as ``Passes.inspect`` describes."""
        self.settle()
        lines, first, end = (
            each.contiguous() for each in (stretch.lines, stretch.first, stretch.end)
        )
        grid, arguments = self._compare(lines, first, end, stretch.tables, stretch.kind, 0)
        self._checking.launch(grid, arguments)

    def _compare(
        self,
        lines: Tensor,
        low: Tensor,
        high: Tensor,
        tables: Mapping[str, Tensor],
        kind: str | None,
        num_rows: int,
    ) -> tuple[tuple[int, int, int], tuple[object, ...]]:
        """Return the grid and the arguments of a launch of ``compare_rows``."""
        books = self.books
        # A table without columns has no address, as if the group were not read.
        tables = {
            name: table if table.shape[1] else table.new_full((len(table), 1), -1)
            for name, table in tables.items()
        }
        return (len(lines), self._num_groups, self.splits), (
            lines, low, high, self._table("tables", tables, torch.int32), self._groups,
            books.words, books.own, books.facts, books.journal, books.found, books.counters,
            -1 if kind is None else KIND_NUMBER[kind], num_rows, *self._sizes(),
            kind is None, kind == "exported", self._num_groups, self.splits, _ENTRIES,
        )  # fmt: skip

    def byte_passes(self, books: ByteBooks) -> TritonBytePasses:
        """Return the kernels of a scrub over the same ledger."""
        return TritonBytePasses(books, self._groups, self._key, self._table, self._as_they_are)

    def resolve_again(self, step: Step, accepted: Any, sampled: Any, besides: int) -> bool:
        """Resolve a step as before, as ``Passes.resolve_again`` describes."""
        self._next.told += 1
        given = (accepted,) if sampled is None else (accepted, sampled)
        waits = self._next.blocks or self._next.lines
        return not waits and self._resolving.again(step, given, besides)

    def resolve(
        self, step: Step, accepted: Tensor, sampled: Tensor | None, besides: int = 0
    ) -> None:
        """Mark the rejected rows, as ``Passes.resolve`` describes."""
        self.settle()
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
            books.own, books.facts, books.counters, step.num_rows, *self._sizes()[:2],
            0 if ids is None else ids.shape[1], besides, REJECTED, step.drafts is not None,
            self._num_groups, _DRAFTS,
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

    def _sizes(self) -> tuple[int, int, int, int]:
        """Return columns of ``own``, lines, journal entries, and violations that can wait."""
        return self._constants

    def _or_unread(self, tensor: Tensor | None) -> Tensor:
        return self._unread if tensor is None else tensor

    def _table(self, what: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the addresses of a step's tensors, one per group."""
        right = {name: _as(tensor, dtype) for name, tensor in tensors.items()}
        self._held[what] = right  # converted ones live until the next launch of this sort
        return self._addresses[what].of(right)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a dtype that is contiguous in its last dimension."""
    if tensor.dtype is not dtype:
        if dtype is torch.int32 and tensor.dtype is torch.int64:
            tensor = tensor.clamp(-1, _NO_BLOCK)  # what is cut off could name another block
        return tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
