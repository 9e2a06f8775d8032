"""``Model``: the model of a manager that the random program compares with.

It is plain Python beside the oracle, written from the promises and not from the code. The test
tells the model of each call after making it, and whether the executor failed in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..window_states import WindowState
from .batches import Batch
from .oracle import Replay
from .rig import Rig


class Model:
    """The expected states, counters and bytes of a manager's windows, one after the other.

    Args:
        rig: the manager; the model writes into its oracle.
        on_error: the manager's setting for failures of its executor.

    Attributes:
        state: the state of the present window; None without one.
        staged: numbers of the staged layers of the present window.
        mapped: groups that have slots.
        rows: draft rows staged, committed, rejected so far.
        outcomes: windows by final state.
    """

    def __init__(self, rig: Rig, on_error: str) -> None:
        self._rig = rig
        self._raises = on_error == "raise"
        self.state: WindowState | None = None
        self.staged: list[int] = []
        self.mapped: list[str] = []
        self.rows = [0, 0, 0]
        self.outcomes: Counter[WindowState] = Counter()
        self._batch: Batch | None = None
        self._before: Replay | None = None

    @property
    def batch(self) -> Batch:
        """The present window's rows."""
        assert self._batch is not None, "no window is open"
        return self._batch

    @property
    def missing(self) -> list[int]:
        """Numbers of the layers that are not staged yet."""
        return [index for index in range(len(self._rig.refs)) if index not in self.staged]

    def begin(self, batch: Batch, mapped: Sequence[str], failed: bool) -> None:
        """Follow the begin of a window; saving the old rows may have failed."""
        self._batch, self._before = batch, self._rig.truth.copy()
        self.state, self.staged, self.mapped = WindowState.OPEN, [], list(mapped)
        if failed:
            self._failed([])

    def map(self, group: str, failed: bool) -> None:
        """Follow a stage that brought a group's slots; saving the old rows may have failed."""
        self.mapped.append(group)
        if failed:
            self._failed(self.staged)

    def stage(self, index: int, failed: bool) -> None:
        """Follow the staging of a layer, which may have failed."""
        batch = self.batch
        if failed and self._raises:
            direct = self._rig.policy == "direct"
            self._adopt(index, [direct or not draft for draft in batch.drafts])
            self._failed(self.staged)
            return
        self.staged.append(index)
        if failed:
            self._failed(self.staged)
        else:
            waiting = self._rig.policy == "deferred" and self.state is WindowState.OPEN
            self._write([index], [not (waiting and draft) for draft in batch.drafts])
        if not self.missing and self.state is WindowState.OPEN:
            self.state = WindowState.STAGED

    def attend(self, failed: bool) -> None:
        """Follow an attention, which changes the window only if it failed."""
        if failed:
            self._failed(self.staged)

    def commit(self, kept: Sequence[bool], failed: bool) -> None:
        """Follow a commit of these rows, with every layer staged."""
        if failed and self._raises:
            self._failed(self.staged)
            return
        if self.state is not WindowState.DIRECT and self._rig.policy != "direct":
            self._take_back(self.staged)
            self._write(self.staged, kept)
        fell_back = failed or self.state is WindowState.DIRECT
        self._end(WindowState.FELL_BACK if fell_back else WindowState.COMMITTED, kept)

    def abort(self, failed: bool) -> None:
        """Follow an abort; a window that had fallen back leaves its rows in the caches."""
        fell_back = failed or self.state is WindowState.DIRECT
        if self.state is not WindowState.DIRECT and self._rig.policy == "undo":
            self._take_back(self.staged)
        if failed and self._raises:
            fell_back = False
        self._end(WindowState.FELL_BACK if fell_back else WindowState.ABORTED)

    def _failed(self, layers: Iterable[int]) -> None:
        """Follow a failure of the executor: all rows are written through, or all taken back."""
        if not self._raises:
            self.state = WindowState.DIRECT
            self._write(layers, [True] * self.batch.num_rows)
            return
        if self._rig.policy != "direct":  # stock has nothing to take back
            self._take_back(layers)
        self._end(WindowState.ABORTED)

    def _write(self, layers: Iterable[int], mask: Sequence[bool]) -> None:
        self._rig.write(self.batch, mask, list(layers))

    def _take_back(self, layers: Iterable[int]) -> None:
        """Restore the draft slots of these layers to their content when the window began."""
        assert self._before is not None
        for index in layers:
            cache = self._rig.caches[index]
            slots = self.batch.slots[cache.spec.group]
            for slot, draft in zip(slots, self.batch.drafts, strict=True):
                if draft:
                    self._rig.truth.write(cache.name, slot, self._before.read(cache.name, slot))

    def _adopt(self, index: int, mask: Sequence[bool]) -> None:
        """Accept old or new words in these rows of a layer whose staging failed half-way."""
        cache = self._rig.caches[index]
        slots, rows = self.batch.slots[cache.spec.group], self.batch.rows[cache.name]
        for slot, row, unsure in zip(slots, rows, mask, strict=True):
            if unsure:
                self._rig.truth.adopt(cache.name, slot, row)

    def _end(self, state: WindowState, kept: Sequence[bool] | None = None) -> None:
        if self.mapped:
            for place, number in enumerate(self.batch.count(kept, self.mapped)):
                self.rows[place] += number
        self.outcomes[state] += 1
        self.state = None
