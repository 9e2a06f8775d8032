"""The windows of a pipeline stage that learns what was accepted some steps later.

Only the last stage samples. In vLLM's V2 runner an earlier stage keeps, in a queue with one entry
per pipeline stage, what the last stage sends it, and takes an entry when it begins the step that
is as many steps later. So that many windows are open at one time: each has slots, saved rows and
prepared launches of its own (a *lane*), and is committed when its entry is taken. Captured graphs
are not concerned: rows are saved before the forward and put back after it.

**Why ``undo`` is right here.** Drafts lie in the request's own slots from the forward on, so an
accepted row is where stock has it at every moment, and whoever reads it finds it: a request that
hits the block in the prefix cache, a later turn, a copy of the block. What the commit writes are
rejected rows alone, and nobody else writes or reads those slots before:

1. The request itself does not run before its entry is taken: vLLM keeps a request's decode steps
   as many steps apart as there are stages, because its inputs come with the entry.
2. Its blocks change hands only in a scheduler's output that names the request among the finished
   or the preempted ones (or brings it anew, as the next turn of a session does). The runner frees
   the request's index when the step of that output begins, before any row of the step is written,
   and counts the index's generation up. (Blocks that leave a sliding window while their request
   runs end before every draft of a step under way.)
3. The commit comes at the very beginning of a step, before the runner frees indices and zeroes or
   copies blocks. So a request whose blocks changed hands in an *earlier* step has another
   generation by then, and one that loses its blocks in *this* step is put back before the new
   owner writes, on the same stream.

Rows of freed requests therefore get slot -1 (padding, which is never written, put back or counted)
before the commit; they stay as stock leaves them, and no block table leads to a rejected one.

**Why ``deferred`` would not be.** Accepted drafts would wait in spare slots until the entry is
taken. In between vLLM may hear of the sampled tokens, publish the block under its hash, and begin a
request that reads it on this stage: how many steps an engine schedules before it looks at a result
is no promise (outputs with a grammar, empty steps and pauses change it). And a request that ended
with its last step has a freed index by then, though its blocks stay in the prefix cache: to skip
its rows would lose accepted ones.

A window whose entry never comes (its requests are all gone, or the step failed) ends without a
write.
"""

from __future__ import annotations

from collections import deque

import attrs
import torch
from torch import Tensor

from ...errors import ConfigError
from ...manager import TransactionManager
from .graph_steps import GraphSteps
from .step import Array


@attrs.define(eq=False)
class _Flight:
    """A step whose acceptance is not known yet.

    Attributes:
        lane: the steps that hold its window.
        batch: the object by which the engine names the step's batch.
    """

    lane: GraphSteps
    batch: object


class PipelineSteps:
    """The windows of one model runner on a pipeline stage before the last one.

    Args:
        manager: over the target's layers on this stage, under ``undo`` or ``direct``, in the order
            of ``slots``' groups.
        slots: the runner's slot mappings, int64 ``[num_groups, n]``, filled before each forward.
        query_len: most rows that a request with drafts has.
        depth: number of steps after which a step's acceptance is known.

    Attributes:
        manager: as given.
        layers: the target's on this stage, in the order of the forward.
        lanes: the steps that take turns; each has a window of its own.
        deferred: False: drafts never wait outside their slots.
        waits: False, likewise.

    Raises:
        ConfigError: the policy is ``deferred``, or a setting has no effect, see ``GraphSteps``.
    """

    deferred = False
    waits = False

    def __init__(
        self, manager: TransactionManager, slots: Tensor, query_len: int, depth: int
    ) -> None:
        if manager.policy == "deferred":
            raise ConfigError(
                "PipelineSteps",
                "drafts cannot wait on a pipeline stage before the last one",
                expected="policy 'undo' or 'direct'",
                got=manager.policy,
                hint="choose policy 'undo' for this stage",
            )
        self.manager = manager
        self.layers = tuple(manager.layers.values())
        self._slots = slots
        shape = (len(manager.groups), min(manager.config.max_rows, slots.shape[1]))
        self.lanes = tuple(
            GraphSteps(
                manager,
                torch.full(shape, -1, dtype=torch.int64, device=manager.device),
                query_len,
                beside=True,
            )
            for _ in range(depth)
        )
        self._turn = 0
        self._flights: deque[_Flight | None] = deque([None] * depth)
        self._due: _Flight | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device that the steps hold."""
        return sum(lane.nbytes + lane.windows.slots.nbytes for lane in self.lanes)

    def warm_up(self) -> None:
        """Launch every kernel that a step may launch, for each lane; caches stay as they are."""
        for lane in self.lanes:
            lane.warm_up()

    # -- the beginning of a step: an earlier one's acceptance -----------------------------

    def advance(self, batch: object, freed: Array | None) -> None:
        """Begin a step, and take the earlier step whose acceptance is due now, for ``commit``.

        Its window loses the rows of freed requests. If ``batch`` is not the one that is due, its
        window ends without a commit. So does one that was due before and not committed.

        Args:
            batch: the batch whose acceptance comes, the object that ``begin`` was given; None if
                none comes.
            freed: numpy bool ``[num_requests]`` of that batch: True for requests that are gone.
        """
        self.settle()
        self._turn = (self._turn + 1) % len(self.lanes)
        due = self._flights.popleft()
        self._flights.append(None)
        if due is None:
            return
        if batch is None or due.batch is not batch:
            self._leave(due.lane)
            return
        self._due = due
        assert freed is not None  # a batch comes
        if freed.any():
            self._forget(due.lane, freed)

    def commit(self, sampled: Tensor) -> None:
        """Put back the rejected rows of the step that ``advance`` has taken; nothing without one.

        Args:
            sampled: int ``[num_requests]`` of that step's batch, on the device: the number of
                tokens sampled for each.
        """
        due, self._due = self._due, None
        if due is not None:
            due.lane.commit(sampled)

    def settle(self) -> None:
        """Abort the window of a due step that was not committed; the caches stay as they are.

        Nothing is done if no step is due.
        """
        due, self._due = self._due, None
        if due is not None:
            self._leave(due.lane)

    def _forget(self, lane: GraphSteps, freed: Array) -> None:
        """Turn the rows of freed requests in a lane's window into padding, which no commit writes.

        Args:
            lane: the lane; nothing is done if it has no window.
            freed: numpy bool ``[num_requests]``, True for requests that are gone.
        """
        window = lane.window
        if window is None:
            return
        starts = window.layout.starts
        for request in freed[: window.layout.num_requests].nonzero()[0].tolist():
            lane.windows.slots[:, starts[request] : starts[request + 1]].fill_(-1)

    def _leave(self, lane: GraphSteps) -> None:
        """Abort a lane's window, if it has one, without writing: its slots become padding."""
        if lane.window is not None:
            lane.windows.slots.fill_(-1)
            lane.abandon()

    # -- the step itself --------------------------------------------------------------------

    def begin(self, drafts: Array | None, lengths: Array, prefilling: Array, batch: object) -> None:
        """Begin the window of the forward that comes next, in the lane whose turn it is.

        Its slots are in place, and are copied. Without drafts, or if they cannot be copied, which
        counts as a fallback, the step has no window.

        Args:
            drafts: numpy int32 ``[num_requests]``, draft rows of each request; None without drafts.
            lengths: numpy int32 ``[num_requests]``, rows of each request, drafts included.
            prefilling: numpy bool ``[num_requests]``, True for requests still at their prompt.
            batch: an object by which ``advance`` will name this batch.
        """
        lane = self.lanes[self._turn]
        self._leave(lane)
        if drafts is not None:
            try:
                self._copy(lane, int(lengths[: int((drafts > 0).sum())].sum()))
            except Exception as error:
                lane.miss(error)
                drafts = None
        lane.begin(drafts, lengths, prefilling)
        self._flights[-1] = None if lane.window is None else _Flight(lane, batch)

    def _copy(self, lane: GraphSteps, count: int) -> None:
        """Copy the slots of the batch's first rows, which the runner overwrites in later steps.

        Nothing is copied if the lane has room for fewer.
        """
        slots = lane.windows.slots
        if count <= slots.shape[1]:  # else the step has no window
            slots[:, :count].copy_(self._slots[:, :count])

    def abandon(self) -> None:
        """Abort all windows without writing, and forget every step whose acceptance is to come."""
        self._due = None
        self._flights = deque([None] * len(self.lanes))
        for lane in self.lanes:
            self._leave(lane)
