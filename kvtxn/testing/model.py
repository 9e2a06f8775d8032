"""What a window must have done by now: the model that the random program compares with.

Plain Python beside the oracle; it knows promises, not code. It is told of
each call after it was made, and whether the executor failed in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..states import WindowState
from .batches import Batch
from .oracle import Replay
from .rig import Rig


class Model:
    """A manager's windows, one after the other.

    Args:
        rig: the manager; the model writes into its oracle.
        on_error: what the manager does when its executor fails.

    Attributes:
        state: of the present window; None where there is none.
        staged: layers of the present window, by index.
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
        """Layers still to come, by index."""
        return [index for index in range(len(self._rig.refs)) if index not in self.staged]

    def begin(self, batch: Batch, mapped: Sequence[str], failed: bool) -> None:
        """A window began, or was meant to; saving the old rows may have failed."""
        self._batch, self._before = batch, self._rig.truth.copy()
        self.state, self.staged, self.mapped = WindowState.OPEN, [], list(mapped)
        if failed:
            self._failed([])

    def map(self, group: str, failed: bool) -> None:
        """A group got its slots with a stage; saving the old rows may have failed."""
        self.mapped.append(group)
        if failed:
            self._failed(self.staged)

    def stage(self, index: int, failed: bool) -> None:
        """A layer came in, or was meant to."""
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
        """Somebody looked; only a failure changes anything."""
        if failed:
            self._failed(self.staged)

    def commit(self, kept: Sequence[bool], failed: bool) -> None:
        """Every layer was in, and these rows were kept."""
        if failed and self._raises:
            self._failed(self.staged)
            return
        if self.state is not WindowState.DIRECT and self._rig.policy != "direct":
            self._take_back(self.staged)
            self._write(self.staged, kept)
        fell_back = failed or self.state is WindowState.DIRECT
        self._end(WindowState.FELL_BACK if fell_back else WindowState.COMMITTED, kept)

    def abort(self, failed: bool) -> None:
        """No draft was kept; a window that had fallen back leaves its rows where they are."""
        fell_back = failed or self.state is WindowState.DIRECT
        if self.state is not WindowState.DIRECT and self._rig.policy == "undo":
            self._take_back(self.staged)
        if failed and self._raises:
            fell_back = False
        self._end(WindowState.FELL_BACK if fell_back else WindowState.ABORTED)

    def _failed(self, layers: Iterable[int]) -> None:
        """The executor failed: everything is written through, or everything taken back."""
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
        """Draft slots of these layers hold again what they held when the window began."""
        assert self._before is not None
        for index in layers:
            cache = self._rig.caches[index]
            slots = self.batch.slots[cache.spec.group]
            for slot, draft in zip(slots, self.batch.drafts, strict=True):
                if draft:
                    self._rig.truth.write(cache.name, slot, self._before.read(cache.name, slot))

    def _adopt(self, index: int, mask: Sequence[bool]) -> None:
        """A layer whose staging failed half-way: these rows may be old or new, word by word."""
        cache = self._rig.caches[index]
        slots, rows = self.batch.slots[cache.spec.group], self.batch.rows[cache.name]
        for slot, row, unsure in zip(slots, rows, mask, strict=True):
            if unsure:
                self._rig.truth.adopt(cache.name, slot, row)

    def _end(self, state: WindowState, kept: Sequence[bool] | None = None) -> None:
        if self.mapped:
            kept = [False] * self.batch.num_rows if kept is None else kept
            staged, committed = self.batch.count(kept, self.mapped)
            for place, number in enumerate((staged, committed, staged - committed)):
                self.rows[place] += number
        self.outcomes[state] += 1
        self.state = None
