"""``Following``: makes the end of a manager's window the outcome of the ledger's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NoReturn

import torch
from torch import Tensor

from ..errors import ConfigError, WindowStateError
from ..hooks import EndedWindow
from ..manager import TransactionManager
from . import books as book
from .digest import REJECTED, UNWRITTEN, as_word
from .groups import Place
from .ledger_state import LedgerState
from .rows import first_of, set_chosen, word_at
from .step import Step


class Following:
    """A ledger's attachment to a manager, made by ``Ledger.follow``.

    Args:
        resolve: ``Ledger.resolve``.
        leave: ``Ledger.leave``.
        state: the ledger's state.
        manager: the manager of the windows.

    Raises:
        ConfigError: this is no manager, or its groups are not the ledger's.
    """

    def __init__(
        self,
        resolve: Callable[[Tensor, Tensor | None], None],
        leave: Callable[[Tensor, Mapping[str, Tensor], Tensor | None], None],
        state: LedgerState,
        manager: TransactionManager,
    ) -> None:
        if not isinstance(manager, TransactionManager):
            raise ConfigError(
                "follow", "this is no manager", expected="a TransactionManager",
                got=type(manager).__name__, hint="pass the manager whose windows end the steps",
            )  # fmt: skip
        _check_groups(state, manager)
        self._resolve: Final = resolve
        self._leave: Final = leave
        self._state: Final = state
        places, kinds = state.books.layout.places, manager.kinds
        self._states: Final = [places[name] for name, kind in kinds.items() if kind.per_request]
        self._rings: Final = [places[name] for name, kind in kinds.items() if kind.name == "ring"]
        #: Under "direct" nothing is taken back: a rejected row or state stays where it is.
        self._takes_back: Final = manager.policy != "direct"
        #: By ring, what its slots held before the step wrote them: int64 ``[num_rows]``.
        self._evicted: dict[Place, Tensor] = {}
        self._sampled: Tensor | None = None
        self._error: Exception | None = None
        #: By group, the requests whose states the last window has left: bool ``[num_requests]``.
        self._left: dict[str, Tensor] = {}
        self._hooks: Final = (manager.on_commit(self._committed), manager.on_abort(self._aborted))
        self.is_removed = False

    def sampled(self, ids: Tensor) -> None:
        """Give the tokens that the engine keeps of the step under way, before its window ends.

        The ledger then knows the next token before a row is computed from it. A window that aborts
        drops them.

        Args:
            ids: int ``[num_requests, n]``, as for ``Ledger.resolve``, which raises its errors when
                the window ends.
        """
        self._sampled = ids

    def ended(self) -> Mapping[str, Tensor] | None:
        """Tell whether a window has ended the step that was written last, and what it left.

        Returns:
            By group of states, bool ``[num_requests]``, the requests whose states the window's
            commit has written; None if no window has ended the step.

        Raises:
            WindowStateError: a window ended without a step.
            ConfigError: a window ended whose rows are not the step's.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        return None if self._state.step is not None else self._left

    def remove(self) -> None:
        """Stop following the manager; the step under way needs a ``resolve`` then."""
        for hook in self._hooks:
            hook.remove()
        self.is_removed = True

    def begin(self, step: Step) -> None:
        """Get ready for a step; the ledger calls this before it writes the step.

        What was sampled for the step before and left by its window is forgotten. If a window can
        take drafts back, the words of the slots in rings that the step will overwrite are kept.

        Raises:
            WindowStateError: the step before has drafts and is still open.
            ConfigError: the step has slots in a group of states.
        """
        before, cause, self._error = self._state.step, self._error, None
        if before is not None and before.drafts is not None:
            raise WindowStateError(
                "write", "the step before this one is still open",
                expected="a window that committed or aborted since that step was written",
                got="none" if cause is None else "a window of other rows",
                hint="open a window for each step with drafts; if it cannot have one, or the "
                "window FAILED, end the step by Ledger.resolve or Ledger.take_back",
            ) from cause  # fmt: skip
        for place in self._states:
            if place.group.name in step.slots:
                raise ConfigError(
                    "write", f"the step has slots in {place.group.name!r}, a group of states",
                    expected="no slots", got="slots",
                    hint="leave the group out of the step's slots: the commit writes its states",
                )  # fmt: skip
        self._sampled = None
        self._left = {}
        self._evicted.clear()
        if self._takes_back and step.drafts is not None:
            for ring in self._rings:
                if ring.group.name in step.slots:
                    where, _ = _words_at(ring, step.slots[ring.group.name], step.num_rows)
                    self._evicted[ring] = self._state.books.words[where]

    # -- the end of a window -----------------------------------------------------------------

    def _committed(self, window: EndedWindow) -> None:
        """End the step under way with the drafts that its window has kept, and their states.

        A window without rows is left alone.

        Raises:
            WindowStateError: no step is under way.
            ConfigError: the window's rows are not the step's.
        """
        if not window.layout.num_rows:
            return  # a window of states alone says nothing of rows
        step, later = self._step_of(window), list(self._state.later)
        counts = _of_requests(step, window, _kept(window))
        ids, self._sampled = self._sampled, None
        self._resolve(counts, ids)
        lines = self._without(later, step)
        if ids is not None:  # the count to compare with what the engine says next
            self._set(book.KEPT, lines, counts)
        self._put_evicted_back(step, counts)
        self._leave_states(step, window, lines, counts)

    def _aborted(self, window: EndedWindow) -> None:
        """End the step under way with no draft accepted; its window has aborted.

        Its settled rows are unwritten, too, unless the window has written them in every layer.
        Under "direct" its states count as rejected. A window without rows is left alone.

        Raises:
            WindowStateError: no step is under way.
            ConfigError: the window's rows are not the step's.
        """
        if not window.layout.num_rows:
            return  # a window of states alone says nothing of rows
        step, later = self._step_of(window), list(self._state.later)
        counts = torch.zeros_like(step.lines, dtype=torch.int64)
        self._sampled = None
        self._resolve(counts, None)
        lines = self._without(later, step)
        # The engine may repeat the step: nobody knows its drafts, and violations are reported once.
        self._set(book.KEPT, lines, counts - 1)
        self._set(book.TOLD, lines, torch.full_like(counts, book.IMPORTED))
        unsettled = ~window.settled.any() if window.layout.has_settled else None
        self._put_evicted_back(step, counts, unsettled)
        if unsettled is not None:
            self._unwrite_settled(step, unsettled)
        if not self._takes_back:
            for place in self._states:
                blocks = _of_requests(step, window, _blocks(window, place), fill=-1)
                self._put(place, blocks, blocks >= 0, REJECTED)

    def _step_of(self, window: EndedWindow) -> Step:
        """Return the step that a window ends.

        An error of a hook may only be logged, so the next ``begin`` or ``ended`` raises once more.

        Raises:
            WindowStateError: no step is under way.
            ConfigError: the window's rows are not the step's.
        """
        try:
            step = self._state.step
            if step is None:
                raise WindowStateError(
                    "follow", f"no step of the ledger goes with window {window.number}",
                    expected="a step that was written and not resolved", got="none",
                    hint="call Ledger.write before the window ends; its end resolves the step",
                )  # fmt: skip
            _check_rows(step, window, on_host=self._state.device.type == "cpu")
        except (WindowStateError, ConfigError) as error:
            self._error = error
            raise
        return step

    def _without(self, later: list[int], step: Step) -> Tensor:
        """Return the line of each request of the step, int64 ``[num_requests]``, or -1.

        It is -1 for a line in ``later``: another request has begun there since the step was
        written, and its facts must not change.
        """
        lines = step.lines.long()
        if not later:
            return lines
        return torch.where(torch.isin(lines, self._state.upload(later)), -1, lines)

    def _set(self, fact: int, lines: Tensor, values: Tensor) -> None:
        """Set a fact of the requests with these lines; a line of -1 is skipped."""
        set_chosen(self._state.books.facts[fact], lines.clamp(min=0), lines >= 0, values)

    def _put_evicted_back(
        self, step: Step, counts: Tensor, unsettled: Tensor | None = None
    ) -> None:
        """Give the slots of rejected drafts in rings the words from before they were overwritten.

        In a step with more rows of a request than its ring has, that may be a row of the step. The
        words that ``begin`` has kept are forgotten then.

        Args:
            step: the step.
            counts: int64 ``[num_requests]``, the drafts that were kept.
            unsettled: bool, on the device: the step's settled rows are unwritten; None: none is.
        """
        for ring, words in self._evicted.items():
            rows = _Rows(step, ring)
            beyond = rows.number - counts[rows.request]
            rejected = rows.is_draft & (beyond >= 0)
            size = ring.group.ring or 1
            under = rows.within - (beyond // size + 1) * size  # the last kept row of the same slot
            kept = self._words_of(step, ring, rows.request, under.clamp(min=0))
            if unsettled is not None:
                kept = torch.where(unsettled, UNWRITTEN, kept)
            words = torch.where(under >= 0, kept, words)
            self._put(ring, step.slots[ring.group.name], rejected, words)
        self._evicted.clear()

    def _words_of(self, step: Step, place: Place, request: Tensor, within: Tensor) -> Tensor:
        """Return the words that rows of a step's requests have to have, int64 ``[n]``.

        Args:
            step: the step.
            place: the group.
            request: int64 ``[n]``, the request of each row.
            within: int64 ``[n]``, the row's number among its request's rows.
        """
        books = self._state.books
        line = step.lines.long()[request].clamp(min=0)
        position = first_of(books, step).long()[request] + within
        position = position.clamp(0, books.sizes.max_length - 1)
        return as_word(books.own[line, position + 1] + books.salts[place.written])

    def _unwrite_settled(self, step: Step, unsettled: Tensor) -> None:
        """Mark the settled rows of a step as unwritten if ``unsettled``, a bool on the device."""
        for name in step.slots:
            place = self._state.books.layout.places[name]
            rows = _Rows(step, place)
            self._put(place, step.slots[name], rows.is_settled & unsettled, UNWRITTEN)

    def _put(self, place: Place, slots: Tensor, chosen: Tensor, words: Tensor | int) -> None:
        """Set the words of chosen slots, no two of them equal, and take their seals; never waits.

        Slots outside the group are skipped.
        """
        where, inside = _words_at(place, slots, len(chosen))
        for known in (self._state.books.words, self._state.seals):
            if known is not None:
                set_chosen(known, where, inside & chosen, words)
            words = UNWRITTEN  # nothing is sealed now

    def _leave_states(self, step: Step, window: EndedWindow, lines: Tensor, counts: Tensor) -> None:
        """Record in which block the commit left the state of each request, after how many tokens.

        Under "direct" the state of a request with a rejected draft is marked as rejected instead.

        Args:
            step: the step.
            window: the window that has committed.
            lines: int64 ``[num_requests]``, -1 for a request whose states get no words; one under
                "direct" is marked all the same.
            counts: int64 ``[num_requests]``, the drafts that were kept.

        Which requests have a state in a group is noted for ``ended``.
        """
        if not self._states:
            return
        number = len(lines)
        rows = step.starts[: number + 1].long().diff()
        drafts = torch.zeros_like(rows) if step.drafts is None else step.drafts[:number].long()
        first = first_of(self._state.books, step)[:number].long()
        taken = rows - drafts + counts
        for place in self._states:
            name = place.group.name
            if name not in window.slots:
                continue
            blocks = _of_requests(step, window, _blocks(window, place), fill=-1)
            self._left[name] = blocks >= 0
            if not self._takes_back:  # the state has taken in every row, rejected ones too
                spoilt = counts < drafts
                self._put(place, blocks, spoilt & (blocks >= 0), REJECTED)
                blocks = torch.where(spoilt, -1, blocks)
            if name in window.crossings:
                crossing = window.crossings[name]
                boundary = _of_requests(step, window, crossing.boundary)
                beyond = _of_requests(step, window, crossing.beyond, fill=-1)
                crosses = (beyond >= 0) & (taken > boundary)
                stays = torch.where(crosses & (boundary > 0), blocks, -1)
                self._leave(lines, {name: stays}, first + boundary)
                blocks = torch.where(crosses, beyond, blocks)
            self._leave(lines, {name: blocks}, first + taken)


class _Rows:
    """The rows of a step, as many as its tensors have room for; made without waiting.

    A row that a later one of its request takes the slot of, in a ring, is neither of the two.

    Attributes:
        request: int64 ``[num_rows]``, the request of each row; any for a row behind the last.
        within: int64 ``[num_rows]``, the number of each row among its request's rows.
        number: int64 ``[num_rows]``, the number of each row among its request's drafts.
        is_draft: bool ``[num_rows]``.
        is_settled: bool ``[num_rows]``.
    """

    def __init__(self, step: Step, place: Place) -> None:
        requests = len(step.lines)
        starts = step.starts[: requests + 1].long()
        row = torch.arange(step.num_rows, device=starts.device)
        self.request = torch.searchsorted(starts[1:], row, right=True).clamp(max=requests - 1)
        settled = counts = starts.diff()
        if step.drafts is not None:
            settled = counts - step.drafts[:requests].long()
        self.within = within = row - starts[self.request]
        self.number = within - settled[self.request]
        real = (row < starts[-1]) & (step.lines.long()[self.request] >= 0)
        if place.group.ring is not None:
            real &= within + place.group.ring >= counts[self.request]
        self.is_draft = real & (self.number >= 0)
        self.is_settled = real & (self.number < 0)


def _words_at(place: Place, slots: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the index of each slot's word, of slot 0 for a slot outside; and which are inside."""
    slot = slots[:number].long()
    inside = (slot >= 0) & (slot < place.num_slots)
    return word_at(place, torch.where(inside, slot, 0)), inside


def _kept(window: EndedWindow) -> Tensor:
    """Return the drafts that a window kept of each of its requests, int64 ``[num_requests]``."""
    kept = window.kept.long()
    return kept.new_zeros(window.layout.num_requests).index_add_(0, window.layout.request, kept)


def _blocks(window: EndedWindow, place: Place) -> Tensor:
    """Return the slot of each request's state, int64 ``[num_requests]``; -1 without rows."""
    slots = window.slots[place.group.name]
    none = slots.new_full((window.layout.num_requests,), -1)
    return none.index_copy_(0, window.layout.request, slots)


def _is_whole(step: Step, window: EndedWindow) -> bool:
    """Tell whether a window has the step's requests from the first on, those without drafts, too.

    So it is if it has settled rows, or as many requests as the step. Else it has the drafts of
    those requests alone that have any.
    """
    return window.layout.has_settled or window.layout.num_requests == len(step.lines)


def _of_requests(step: Step, window: EndedWindow, numbers: Tensor, fill: int = 0) -> Tensor:
    """Return a number for each request of the step, ``fill`` for one that the window leaves out.

    Args:
        step: the step.
        window: its window.
        numbers: int64, one number for each request of the window.
        fill: the number of the others.

    Returns:
        int64 ``[num_requests]``.
    """
    found = numbers.new_full((len(step.lines),), fill)
    if _is_whole(step, window):
        found[: len(numbers)] = numbers
        return found
    assert step.drafts is not None  # or the window has no row
    drafting = step.drafts[: len(step.lines)] > 0
    which = (drafting.cumsum(0) - 1).clamp(0, len(numbers) - 1)
    return torch.where(drafting, numbers[which], found)


# -- checks ------------------------------------------------------------------------------------


def _check_groups(state: LedgerState, manager: TransactionManager) -> None:
    """Refuse, with a ConfigError, a manager whose groups the ledger does not have."""
    for name, kind in manager.kinds.items():
        place = state.books.layout.places.get(name)
        same = False
        if place is not None:
            ring = None if kind.per_request or not kind.reuse else kind.reuse
            shaped = (place.group.is_state, place.group.ring) == (kind.per_request, ring)
            same = shaped and place.num_slots >= manager.groups[name]
        if not same:
            raise ConfigError(
                "follow", "the ledger's groups are not the manager's",
                expected=f"{name!r}, {kind.name}, {manager.groups[name]} slots",
                got=repr([*state.books.layout.places] if place is None else place.group),
                hint="name and describe the ledger's groups as the layers of LayerRef.group are",
            )  # fmt: skip


def _check_rows(step: Step, window: EndedWindow, *, on_host: bool) -> None:
    """Refuse, with a ConfigError, a window whose rows are not the step's.

    A tree with branches is refused, too. On a GPU only numbers of the host are compared.
    """
    layout = window.layout
    if layout.tree is not None and not layout.tree.is_chain:
        _refuse(window, "drafts that are plain sequences", "a tree, whose rows a commit moves")
    if layout.num_requests > len(step.lines):
        _refuse(window, f"at most {len(step.lines)} requests", f"{layout.num_requests}")
    if not on_host or not layout.num_requests:
        return
    number, ends = len(step.lines), step.starts[1:].tolist()
    lengths = step.starts[: number + 1].diff().tolist()
    drafts = [0] * number if step.drafts is None else step.drafts[:number].tolist()
    drafts = [
        most if line >= 0 else 0 for most, line in zip(drafts, step.lines.tolist(), strict=True)
    ]
    which = [index for index in range(number) if drafts[index]]
    if _is_whole(step, window):
        which = [*range(layout.num_requests), *(i for i in which if i >= layout.num_requests)]
    wanted = [drafts[index] for index in which]
    if wanted != [*layout.draft_len]:
        _refuse(window, f"{wanted} draft rows", f"{[*layout.draft_len]}")
    if layout.has_settled and any(
        lengths[index] != layout.settled[index] + layout.draft_len[index] for index in which
    ):
        _refuse(window, f"{lengths} rows of the requests, as in the step", "others")
    rows = [
        row
        for index, known, count in zip(which, layout.settled, layout.draft_len, strict=True)
        for row in range(ends[index] - known - count, ends[index])
    ]
    for name, slots in window.slots.items():
        if name in step.slots and not torch.equal(step.slots[name][rows].long(), slots):
            _refuse(window, f"the step's slots in group {name!r}", "others")


def _refuse(window: EndedWindow, expected: str, got: str) -> NoReturn:
    """Raise a ConfigError: the window's rows are not the step's."""
    raise ConfigError(
        "follow", f"the rows of window {window.number} are not those of the ledger's step",
        expected=expected, got=got,
        hint="give Ledger.write and TransactionManager.window the same requests, in one order; a "
        "window may leave out settled rows, and requests without drafts",
    )  # fmt: skip
