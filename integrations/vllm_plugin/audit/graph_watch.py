"""``GraphWatch``: a ``DeviceWatch`` whose steps are written and checked by captured forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from ....audit import RecordingLedger, Step
from ....audit.graph_steps import NewBlocks, Repeat
from ..internals.audited import Rows
from .device_watch import LOOK_SOON, DeviceWatch
from .watch import Watch


class GraphWatch(DeviceWatch):
    """A worker's ledger on a GPU, where graphs of whole forwards may do a step's passes.

    Args:
        given: as for ``DeviceWatch``.
        named: likewise.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._captured: Final[list[Step]] = []  # graphs have the addresses of their tensors
        self._idle = 0  # replays that were for no step, and counted as one by the device
        self._repeat: Repeat | None = None  # the ledger's call for a step like the last one
        self._quiet_until = 0  # the next step at which more is due than that call
        #: Replayed steps, by the number of requests, and whether they had no drafts.
        self._sized: Final[dict[tuple[int, bool], Step]] = {}

    def begin(self) -> None:
        """Watch from now on: the engine has warmed up."""
        self._idle = self._quiet_until = 0
        self._sized.clear()
        DeviceWatch.begin(self)

    def can_be_in_graphs(self) -> bool:
        """Tell whether graphs of whole forwards can write and check the steps.

        They cannot where something has to be launched between two of a step's passes, or read.
        """
        reads = isinstance(self.ledger, RecordingLedger)
        return not (reads or self.states or (self._caches_prefixes and self._published.groups))

    def launch_of(self, rows: Rows) -> Callable[[], None]:
        """Return a launch that a graph begins with, so that its replays write and check steps.

        Launches it once, over padding alone, which compiles its kernels.

        Args:
            rows: where the forward finds the rows of a step.
        """
        self._catch_up()
        self._hide()
        step = Watch._form(self, rows, self._buffer.all[: len(rows.starts) - 1], None)[0]
        self.ledger.launch_step(step)
        self._captured.append(step)
        return partial(self.ledger.launch_step, step)

    def before_replay(self, included: bool) -> None:
        """Hear that a graph of a whole forward is replayed now.

        Args:
            included: the graph writes and checks the step.
        """
        self._catch_up()
        self.waits, self._repeat = False, None
        if self.stopped or self._due is None:
            self._hide()  # a forward of nobody's, to keep ranks in step, say
            if included:
                self._idle += 1
                self.ledger.replayed(None)
        elif included:
            step, self._due = self._due, None
            self.ledger.replayed(step)
            self._sized[step.lines.shape[0], step.drafts is None] = step
        else:
            self._write_and_check()

    def repeat(self, grown: NewBlocks) -> bool:
        """Tell the ledger all at once: what was sampled last, new blocks, and the same step again.

        It is the one call of a steady step, whose graph is replayed next.

        Args:
            grown: for each request that gets blocks its new ones, by KV-cache group.

        Returns:
            False if these have to be told one after the other; nothing was told then.
        """
        outcome, repeat, number = self.outcome, self._repeat, self.steps + 1
        if repeat is None or number >= self._quiet_until:
            repeat = self._repeat = self._find_repeat(number)
        if repeat is None or outcome is None:
            return False
        accepted, sampled = outcome
        if not repeat.same(accepted, sampled, grown):
            return False
        self.steps, self.outcome, self.waits = number, None, True
        self.under_way = self._last
        return True

    def repeat_without(self, gone: Iterable[str], names: Sequence[str], grown: NewBlocks) -> bool:
        """Tell the ledger the same, and that some requests of the last step ended.

        Args:
            gone: names of requests that ended.
            names: those of the step, which a graph wrote with as many requests before.
            grown: as for ``repeat``.

        Returns:
            As ``repeat``.
        """
        outcome, repeat, number = self.outcome, self._repeat, self.steps + 1
        last, lines = self._last, self.ledger.lines_of(names)
        step = None if last is None else self._sized.get((len(names), last.drafts is None))
        if outcome is None or step is None or lines is None:
            return False
        if repeat is None or number >= self._quiet_until:
            repeat = self._repeat = self._find_repeat(number)
        if repeat is None:
            return False
        put = self._buffer.all, self._buffer.padded(lines)
        if not self.ledger.repeat_fewer(repeat, step, *outcome, grown, put):
            return False
        self._batch = list(names), self._buffer.holds(len(lines))
        self._left.update(dict.fromkeys(gone))
        self.steps, self.outcome, self.waits = number, None, True
        self.under_way = self._last = step
        return True

    def _find_repeat(self, number: int) -> Repeat | None:
        """Look at what is due at a step, and find the ledger's call for one like the last.

        Args:
            number: of the step that is about to be told.

        Returns:
            The call; None if there is none.
        """
        step, outcome = self._last, self.outcome
        if step is None or outcome is None or self._batch is None or self.stopped:
            return None
        self._look(number)
        waits = self._glance is not None
        self._quiet_until = number + 1 if waits else (number // LOOK_SOON + 1) * LOOK_SOON
        if self._repeat is not None:
            return self._repeat
        names: list[str | None] = [None] * (1 + max(index for _, index in self._numbers))
        for name, index in self._numbers:
            names[index] = name
        return self.ledger.repeat(step, *outcome, 1, names)

    def counters(self) -> dict[str, float]:
        """Return the audit's counters; replays that were for no step count as none."""
        found, steps = DeviceWatch.counters(self), "kvtxn_audit_steps_total"
        return {**found, steps: found[steps] - self._idle} if steps in found else found
