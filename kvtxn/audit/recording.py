"""``RecordingLedger``: a ledger that also remembers the life of every slot, to be looked at.

The recording is a list of runs: neighbouring slots, of neighbouring positions of one request, to
which one thing happened at one time. A step has two times: ``2 * step`` is its forward and
``2 * step + 1`` the end of its sampling, when drafts are accepted or rejected. Blocks that are
handed out before a step's forward count to that forward.

A ledger that records reads every step on the host. It is for looking at short runs; a serving
engine has a plain ``Ledger``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from .admission import Admission, admissions_of
from .arguments import listed
from .digest import REJECTED
from .groups import Group
from .ledger import Ledger
from .rows import Batch, blocks_read, first_visible, in_ring, word_at
from .step import Step, Stretch
from .violation import Violation

#: The things that can happen to a slot; a run has an index into this tuple.
HAPPENINGS: Final = (
    "handed_out",  # its block was given away, or its forward failed: it counts as unwritten
    "durable",  # a row was written that will not be taken back
    "draft",  # the row of a draft token was written, or staged by a window
    "kept",  # the draft was accepted
    "rejected",  # the draft was rejected
    "published",  # other requests can find the row by its tokens from now on
    "found",  # a request that comes found the row in the cache, and goes on from it
    "exported",  # the row left the engine
    "imported",  # a row from outside was put here
    "copied",  # the engine copied another block's row here
)
_NUMBER: Final = {name: number for number, name in enumerate(HAPPENINGS)}

#: The numbers of a run, in this order: the time, an index into ``HAPPENINGS``, the group's number,
#: the first slot, the number of slots, the request's number (-1: none), and the first row's
#: position (-1: none).
RUN_FIELDS: Final = ("time", "happening", "group", "slot", "count", "request", "position")


@attrs.define
class Life:
    """A request, as a recording knows it.

    Attributes:
        name: the engine's name of the request.
        begin: the time at which it was first admitted.
        end: the time at which it was released; None while it is admitted.
        admitted: number of times that its tokens were given: 1, and 1 more for each resumption and
            each further turn of a session.
        reused: rows that were in the cache when it was admitted first.
        rows: rows written for it.
        drafts: draft rows among them.
        accepted: accepted drafts.
    """

    name: str
    begin: int
    end: int | None = None
    admitted: int = 0
    reused: int = -1
    rows: int = 0
    drafts: int = 0
    accepted: int = 0


class RecordingLedger(Ledger):
    """A ledger that records; its arguments are those of ``Ledger``.

    Args:
        groups: all groups of layers.
        most: the number of runs that are kept; later ones are counted, not kept.
        **sizes: the other arguments of ``Ledger``.
    """

    def __init__(self, groups: Sequence[Group], *, most: int = 400_000, **sizes: Any) -> None:
        super().__init__(groups, **sizes)
        self._most = most
        self._begin()

    def _begin(self) -> None:
        """Begin an empty recording at step 0; the one before is lost."""
        self._runs = array("q")
        self._dropped = 0
        self._last_whole = 0
        self._step = 0
        self._steps: list[list[int]] = []
        self._lives: list[Life] = []
        self._number: dict[str, int] = {}
        self._by_line: dict[int, int] = {}
        self._arrived: set[int] = set()
        self._open_batch: list[tuple[int, int, int, int, int]] = []
        self._found: list[dict[str, Any]] = []

    # -- what a ledger is told -----------------------------------------------------------------

    def change(
        self,
        gone: Iterable[str] = (),
        admissions: Iterable[Admission] = (),
        given: Mapping[str, Sequence[int] | Tensor] | None = None,
    ) -> list[int]:
        """Do what ``Ledger.change`` says; record who ends, who begins, and blocks handed out.

        A request that comes again goes on with the life that it had.
        """
        gone = listed("release", "gone", gone, "a list of names")
        admissions = admissions_of("change", admissions)
        leaving = [self.line(name) for name in gone if name in self]
        lines = super().change(gone, admissions, given)
        for line in leaving:
            self._lives[self._by_line.pop(line)].end = 2 * self._step + 1
        for each, line in zip(admissions, lines, strict=True):
            request = each.request
            if request not in self._number:
                self._number[request] = len(self._lives)
                self._lives.append(Life(request, 2 * self._step + 2))
            number = self._by_line[line] = self._number[request]
            self._arrived.add(number)
            self._lives[number].admitted += 1
            self._lives[number].end = None
        for group, blocks in (given or {}).items():
            self._add_blocks("handed_out", group, _numbers(blocks))
        return lines

    def reset(self) -> None:
        """Forget every row and request; record that all blocks are handed out, all lives end."""
        for group in self.groups:
            self._add_blocks("handed_out", group.name, range(group.num_blocks))
        for life in self._lives:
            life.end = life.end or 2 * self._step + 1
        self._by_line.clear()
        super().reset()

    def restart(self) -> None:
        """Forget everything, the recording included."""
        super().restart()
        self._begin()

    def copy(
        self, group: str, source: Sequence[int] | Tensor, target: Sequence[int] | Tensor
    ) -> None:
        """Copy blocks; record the slots copied to, before the next step."""
        super().copy(group, source, target)
        self._add_blocks("copied", group, _numbers(target))

    def carry(self, copies: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Copy slots; record the slots copied to, at the end of the last step."""
        super().carry(copies)
        for group, (source, target) in copies.items():
            pairs = zip(_numbers(source), _numbers(target), strict=True)
            slots = sorted(there for here, there in pairs if 0 <= here != there)
            self._add("copied", self.books.layout.places[group].index, -1, -1, slots, after=1)

    def write(self, step: Step) -> None:
        """Begin a step; record its durable rows and drafts, and rows that new requests found."""
        super().write(step)
        self._step += 1
        requests, rows, drafts = 0, 0, 0
        self._open_batch = list(self._batch(step))
        for index, (request, first, row, count, draft) in enumerate(self._open_batch):
            if request < 0:
                continue
            if request in self._arrived:
                self._arrived.remove(request)
                self._add_stretch("found", step, index, request, 0, first)
            settled = count - draft
            self._add_rows("durable", step, request, first, row, settled)
            self._add_rows("draft", step, request, first + settled, row + settled, draft)
            life = self._lives[request]
            life.reused = first if life.reused < 0 else life.reused
            life.rows += count
            life.drafts += draft
            requests, rows, drafts = requests + 1, rows + count, drafts + draft
        self._steps.append([requests, rows, drafts, 0])

    def resolve(
        self,
        accepted: Tensor | Sequence[int],
        sampled: Tensor | Sequence[Sequence[int]] | None = None,
        *,
        besides: int = 0,
    ) -> None:
        """End a step as ``Ledger.resolve`` does; record its drafts as "kept" and "rejected" runs.

        ``sampled`` counts here, too: a draft whose row is of another token is rejected, unless its
        request was released meanwhile. Released requests count by ``accepted`` alone.
        """
        step = self._state.step
        super().resolve(accepted, sampled, besides=besides)
        assert step is not None  # or the ledger has raised
        kept_of, own = _numbers(accepted), _numbers(self.kept(step))
        for index, (request, first, row, count, draft) in enumerate(self._open_batch):
            if request < 0:
                continue
            kept = min(max(kept_of[index] - besides, 0), draft)
            if self._lives[request].end is None:  # the row may be of another token than was sampled
                kept = min(kept, own[index])
            settled = count - draft
            if step.parents is None:
                stays = [True] * kept + [False] * (draft - kept)
            else:
                stays = self._not_rejected(step, row + settled, draft)
            at = settled
            for stay, run in groupby(stays):
                what, number = "kept" if stay else "rejected", len([*run])
                self._add_rows(what, step, request, first + at, row + at, number, after=1)
                at += number
            self._lives[request].accepted += kept
            self._steps[-1][3] += kept

    def _not_rejected(self, step: Step, row: int, count: int) -> list[bool]:
        """Return for each draft of a request in a step whether ``resolve`` left it unmarked.

        Args:
            step: the step.
            row: the request's first draft row in it.
            count: its drafts.
        """
        stays = torch.ones(count, dtype=torch.bool, device=self.device)
        for name, slots in step.slots.items():
            place, slot = self.books.layout.places[name], slots[row : row + count].long()
            inside = (slot >= 0) & (slot < place.num_slots)
            words = self.books.words[word_at(place, torch.where(inside, slot, 0))]
            stays &= ~(inside & (words == REJECTED))
        return stays.tolist()

    def take_back(self, step: Step) -> None:
        """Take a step back; record its rows as unwritten, like those of blocks handed out."""
        super().take_back(step)
        for request, _, row, count, _ in self._open_batch:
            if request >= 0:
                self._add_rows("handed_out", step, -1, -1, row, count, after=1)

    def inspect(self, stretch: Stretch) -> None:
        """Check rows that are published, exported or imported, and record them as such.

        Rows of requests that are not admitted are not recorded.
        """
        super().inspect(stretch)
        firsts, ends = _numbers(stretch.first), _numbers(stretch.end)
        for index, line in enumerate(_numbers(stretch.lines)):
            if line in self._by_line:
                what, request = stretch.kind, self._by_line[line]
                self._add_stretch(what, stretch, index, request, firsts[index], ends[index])

    def violations(self) -> list[Violation]:
        """Return the violations found since the last call, and record them."""
        new = super().violations()
        for violation in new:
            number = self._number.get(violation.request or "", -1)
            self._found.append({**violation.as_dict(), "number": number})
        return new

    # -- what is kept --------------------------------------------------------------------------

    def recording(self) -> dict[str, Any]:
        """Return the recording, as plain data that JSON can hold.

        Returns:
            ``groups``, ``requests``, ``steps`` (for each step its requests, rows, drafts and
            accepted drafts), ``happenings``, ``runs`` (flat: ``RUN_FIELDS`` of one run after
            another, in the order of time), ``violations``, and ``dropped``: the number of runs
            beyond ``most``. Where some were dropped, ``whole_steps`` is the last step whose runs
            are all there.
        """
        return {
            "groups": [
                {
                    "name": group.name,
                    "block_size": group.block_size,
                    "num_blocks": group.num_blocks,
                    "is_state": group.is_state,
                    "pool": group.pool,
                    "window": group.window,
                }
                for group in self.groups
            ],
            "requests": [attrs.asdict(life) for life in self._lives],
            "steps": [list(step) for step in self._steps],
            "happenings": list(HAPPENINGS),
            "run_fields": list(RUN_FIELDS),
            "runs": self._runs.tolist(),
            "dropped": self._dropped,
            "whole_steps": self._last_whole if self._dropped else self._step,
            "violations": [dict(each) for each in self._found],
        }

    def _batch(self, step: Step) -> Iterable[tuple[int, int, int, int, int]]:
        """Yield each request's number, first position, first row, rows, and drafts.

        The number of padding, and of a request without rows, is -1.
        """
        batch = Batch.of(self.books, step)
        columns = (batch.lines, batch.first, batch.starts, batch.counts, batch.drafts)
        for line, first, start, count, drafts in zip(*map(_numbers, columns), strict=True):
            request = self._by_line[line] if line >= 0 and count > 0 else -1
            yield request, first, start, count, drafts

    def _add_rows(
        self,
        what: str,
        step: Step,
        request: int,
        position: int,
        row: int,
        count: int,
        after: int = 0,
    ) -> None:
        """Record rows of one request, in every group that they are written to; none for count 0.

        Args:
            what: one of ``HAPPENINGS``.
            step: the step that has the rows.
            request: the request's number; -1: none.
            position: the first row's position; -1: none.
            row: the first row's number in the step.
            count: the number of rows.
            after: 0 for the step's forward, 1 for the end of its sampling.
        """
        if count <= 0:
            return
        for name, slots in step.slots.items():
            place = self.books.layout.places[name]
            there = slots[row : row + count].tolist()
            self._add(what, place.index, request, position, there, after)

    def _add_stretch(
        self,
        what: str,
        read: Step | Stretch,
        index: int,
        request: int,
        first: int,
        end: int,
    ) -> None:
        """Record the rows of a request from ``first`` to ``end - 1`` that its tables lead to.

        Of rows that are "found", those that a query at ``end`` sees. Positions without a block are
        left out.
        """
        for name in read.tables:
            place = self.books.layout.places[name]
            ends = torch.tensor([end])
            low = max(first, int(first_visible(place, ends, ends))) if what == "found" else first
            if low < end:
                position = torch.arange(low, end)
                size = place.group.block_size
                at = in_ring(place, position)
                own = blocks_read(read, name, index).cpu()
                if not len(own):
                    continue
                blocks = own[(at // size).clamp(max=len(own) - 1)]
                inside = (at // size < len(own)) & (blocks >= 0)
                slots = torch.where(inside, blocks * size + at % size, -1)
                self._add(what, place.index, request, low, slots.tolist())

    def _add_blocks(self, what: str, group: str, blocks: Iterable[int]) -> None:
        """Record whole blocks, for no request; they count to the next forward."""
        place = self.books.layout.places[group]
        size = place.group.block_size
        slots = [block * size + offset for block in sorted(blocks) for offset in range(size)]
        self._add(what, place.index, -1, -1, slots, after=2)

    def _add(
        self,
        what: str,
        group: int,
        request: int,
        position: int,
        slots: Sequence[int],
        after: int = 0,
    ) -> None:
        """Record what happened to slots, one run for each stretch of neighbours; -1 is no slot.

        The time is ``after`` half-steps after the last step's forward.
        """
        time, number, begin = 2 * self._step + after, _NUMBER[what], 0
        for index in range(1, len(slots) + 1):
            if index < len(slots) and slots[index] == slots[index - 1] + 1 and slots[begin] >= 0:
                continue
            if slots[begin] >= 0:
                first = position + begin if position >= 0 else -1
                run = (time, number, group, slots[begin], index - begin, request, first)
                self._keep(run)
            begin = index

    def _keep(self, run: tuple[int, ...]) -> None:
        """Append a run to the recording; count it as dropped if ``most`` runs are there."""
        if len(self._runs) >= self._most * len(RUN_FIELDS):
            self._last_whole = self._last_whole if self._dropped else run[0] // 2 - 1
            self._dropped += 1
            return
        self._runs.extend(run)


def _numbers(values: Tensor | Sequence[int]) -> list[int]:
    """Return numbers as a list on the host."""
    return values.tolist() if isinstance(values, Tensor) else list(values)
