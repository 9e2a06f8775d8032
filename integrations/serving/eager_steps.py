"""The windows of a model runner whose forward calls each layer from Python.

A step goes ``plan`` (which rows of the batch are drafts), ``begin`` (before the
target's forward), ``commit`` (after sampling). Whatever fails, the step ends as stock would end
it, is counted by reason, and the next step starts afresh; unless ``on_error="raise"``, under which
the caches are restored and the error surfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor

from ...accepted_forms import SampledIds
from ...config import TxnConfig
from ...errors import CapacityError, KVTxnError, LayerError
from ...layers import LayerRef
from ...log import get_logger
from ...manager import TransactionManager
from ...row_io import Places, Selection, read, select, write
from ...window import Window
from ...window_transitions import WindowState

log = get_logger()


@attrs.frozen(eq=False)
class Plan:
    """The draft rows of one step, without the requests that have none.

    Attributes:
        requests: int64, the places in the batch of the requests that have drafts.
        draft_len: number of drafts of each of these requests.
        rows: int64 ``[sum(draft_len)]``, the drafts' rows in the batch: the last of each request.
    """

    requests: Tensor
    draft_len: tuple[int, ...]
    rows: Tensor

    @classmethod
    def build(cls, drafts: Sequence[int], ends: Sequence[int], device: torch.device) -> Plan | None:
        """Return the plan of a step; None if no request has a draft.

        Args:
            drafts: number of draft rows of each request of the batch.
            ends: one past the last row of each request in the batch.
            device: the device of the plan's tensors.
        """
        requests = [r for r, count in enumerate(drafts) if count > 0]
        if not requests:
            return None
        rows = [row for r in requests for row in range(ends[r] - drafts[r], ends[r])]
        return cls(
            torch.tensor(requests, device=device),
            tuple(drafts[r] for r in requests),
            torch.tensor(rows, device=device),
        )


@attrs.frozen(eq=False)
class LentSlots:
    """The slots of a group's drafts in one step; where their rows lie is found once.

    Attributes:
        slots: int64 ``[num_drafts]``.
        chosen: all of them but padding.
        read_at: where rows are read, by the layout of a plane.
        written_at: where rows are written, by the layout of a plane.
    """

    slots: Tensor
    chosen: Selection
    read_at: Places = attrs.field(factory=dict)
    written_at: Places = attrs.field(factory=dict)

    @classmethod
    def of(cls, slots: Tensor) -> LentSlots:
        """Return those of a group's slots."""
        return cls(slots, select(slots, torch.ones_like(slots, dtype=torch.bool)))

    def read(self, ref: LayerRef) -> list[Tensor]:
        """Return a layer's rows, one tensor of words per plane."""
        return [read(plane, self.slots, self.read_at) for plane in ref.planes]

    def write(self, ref: LayerRef, rows: Sequence[Tensor]) -> None:
        """Write a layer's rows, one tensor of words per plane."""
        for plane, part in zip(ref.planes, rows, strict=True):
            write(plane, part, self.chosen, self.written_at)


class EagerSteps:
    """The windows of one model runner.

    Args:
        manager: over the target's layers; one group per KV-cache group.
        vocab_size: sampled ids at or above it do not count as tokens.

    Attributes:
        manager: as given.
        window: the step's window while it is open.
    """

    def __init__(self, manager: TransactionManager, vocab_size: int) -> None:
        self.manager = manager
        self.window: Window | None = None
        self._vocab_size = vocab_size
        self._plan: Plan | None = None
        self._masked: dict[str, Tensor] = {}
        self._slots: Mapping[str, Tensor] = {}
        self._drafts: dict[str, LentSlots] = {}
        self._lent: tuple[LayerRef, list[Tensor]] | None = None

    # -- the runner's side --------------------------------------------------------

    def plan(self, rows: Callable[[], tuple[Sequence[int], Sequence[int]]]) -> None:
        """Note which rows of the step are drafts; without any, or if it fails, there is no plan.

        Args:
            rows: returns the drafts of each request, and one past the last row of each.
        """
        self._plan = None
        with self._guard("begin"):
            self._plan = Plan.build(*rows(), self.manager.device)

    def begin(self, find: Callable[[], Mapping[str, Tensor] | str]) -> None:
        """Open the window of a planned step over the slots of its drafts; nothing without a plan.

        Where there are no slots, or more rows than the manager takes, the step has no window and is
        counted as bypassed. Any other failure counts as a fallback, or raises, as ``fail`` says.

        Args:
            find: returns the batch's slots by group, one per row, or per request for layers with a
                state; or why the step cannot have a window.
        """
        plan = self._plan
        if plan is None:
            return
        with self._guard("begin"):
            slots = find()
            if isinstance(slots, str):
                self.manager.bypass(slots)
                return
            deferred = self.manager.policy == "deferred"
            self._slots = {
                group: slots[group][plan.requests if kind.per_request else plan.rows]
                for group, kind in self.manager.kinds.items()
            }
            try:
                self.window = self.manager.window(
                    plan.draft_len,
                    self._slots,
                    settled=0,
                    written_by="window" if deferred else "caller",
                )
            except CapacityError:
                self.manager.bypass("max_rows")

    def commit(self, sampled: Callable[[], Tensor]) -> None:
        """Commit the accepted drafts, and end the step; without a window do nothing.

        If the commit fails, the step falls back, or the error is raised, as ``fail`` says; the step
        has ended all the same.

        Args:
            sampled: returns the ids that were sampled, int ``[num_requests, n]``, -1 for none;
                called only if they are wanted.
        """
        window, plan = self.window, self._plan
        if window is None or plan is None:
            return
        try:
            with self._guard("commit"):
                ids = SampledIds(sampled()[plan.requests], vocab_size=self._vocab_size)
                accepted = self.manager.acceptance.from_ids(ids, plan.draft_len)
                window.commit(accepted)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Forget the step, and abort its window if the window is still open.

        A slot that is still lent gets its bytes back. A failure of that is counted or raised, as
        ``fail`` says.
        """
        with self._guard("abort"):
            self._put_back()
        self.window = self._plan = None
        self._masked.clear()
        self._drafts.clear()
        self._slots = {}
        window = self.manager.current  # also one that an interrupt has left behind
        if window is not None and not window.state.is_final:
            with self._guard("abort"):
                window.abort()

    # -- the attention's side (deferred) ------------------------------------------

    @property
    def deferring(self) -> bool:
        """Tell whether draft rows are kept out of the cache right now."""
        return (
            self.window is not None
            and self.manager.policy == "deferred"
            and self.window.state in (WindowState.OPEN, WindowState.STAGED)
        )

    def without_drafts(self, group: str, slots: Tensor) -> Tensor:
        """Return a copy of the batch's slots, -1 for draft rows; made once per step and group."""
        if group not in self._masked:
            assert self._plan is not None
            masked = slots.clone()
            masked[self._plan.rows] = -1
            self._masked[group] = masked
        return self._masked[group]

    def stage(self, ref: LayerRef, *parts: Tensor) -> None:
        """Stage copies of the draft rows of a batch's keys and values (or latents).

        Call it while ``deferring`` alone. The other rows stay the caller's to write, at the slots
        that ``without_drafts`` returns; where drafts do not wait, all rows are.

        Args:
            ref: the layer.
            *parts: ``[num_rows, ...]`` each, of the whole batch.
        """
        assert self.window is not None
        assert self._plan is not None
        rows = self._plan.rows
        self.window.stage(ref, *(part.index_select(0, rows) for part in parts))

    def lend(self, ref: LayerRef) -> None:
        """Remember the bytes in the slots of a layer's drafts: the engine may write all its rows.

        Call it while ``deferring``, once the slots are known and before the layer's rows are
        written; ``take_back`` has to follow. If it fails, the step falls back, as ``fail`` says. So
        it does where a layer writes twice in a step, or before another one has attended.
        """
        assert self.window is not None
        with self._guard("stage"):
            if self._lent is not None or ref.name not in self.window.missing:
                raise LayerError(
                    "stage",
                    f"layer {ref.name!r} writes twice, or before another layer has attended",
                    hint="use policy 'undo', which takes rows in any order",
                )
            if ref.group not in self._drafts:
                self._drafts[ref.group] = LentSlots.of(self._slots[ref.group])
            self._lent = ref, self._drafts[ref.group].read(ref)

    def take_back(self) -> None:
        """Stage the drafts of the layer that has slots lent, and put the bytes below them back.

        Nothing happens without such a layer. If that fails, the step falls back, as ``fail`` says,
        and the drafts stay written.
        """
        window = self.window
        if self._lent is None or window is None or not self.deferring:
            self._put_back()
            return
        ref, _ = self._lent
        operation = "stage"
        try:
            stored = zip(self._drafts[ref.group].read(ref), ref.planes, strict=True)
            window.stage(ref, *(rows.view(plane.format.dtype) for rows, plane in stored))
            operation = "attend"
            self._put_back()
        except Exception as error:
            try:
                self.fail(operation, error)
            finally:
                self._put_back()

    def _put_back(self) -> None:
        """Put the bytes below a layer's drafts back, if its slots are lent; then they are not.

        In a window that fell back drafts stay written.
        """
        if self._lent is not None and self.window is not None:
            ref, before = self._lent
            if self.window.state is not WindowState.DIRECT:
                self._drafts[ref.group].write(ref, before)
        self._lent = None

    # -- failures -----------------------------------------------------------------

    def fail(self, operation: str, error: Exception) -> None:
        """Count and log a failure; the step goes on without a window, as stock.

        An open window falls back: its staged rows are written. If the window has ended, the failure
        is logged only, at debug.

        Raises:
            Exception: ``error``, under ``on_error="raise"``, or if the caches' bytes are unknown.
        """
        window = self.window
        if window is None:
            if self.manager.config.on_error == "raise":
                raise error
            self.manager.note_fallback(operation, error)
        elif window.state in (WindowState.OPEN, WindowState.STAGED):
            window.fall_back(operation, error)
        elif self.manager.config.on_error == "raise" or window.state is WindowState.FAILED:
            raise error  # The caches' bytes are unknown, so going on could produce wrong tokens.
        else:
            log.debug("window.failed_again", operation=operation, error=repr(error))

    @contextmanager
    def _guard(self, operation: str) -> Iterator[None]:
        """Give an exception of the block to ``fail``, as that of the operation."""
        try:
            yield
        except Exception as error:
            self.fail(operation, error)


#: The ends of a window after its commit. (A window that was aborted may end in the second as well.)
_TAKEN_IN = (WindowState.COMMITTED, WindowState.FELL_BACK)


@attrs.frozen(eq=False)
class StateRows:
    """The draft rows of one layer with a state in one step, request by request.

    Attributes:
        requests: the places in the batch of the requests that have drafts.
        draft_len: the number of drafts of each of these requests.
        slots: int64 ``[num_requests]``, the slot of each request's state.
        parts: ``[num_rows, *shape]`` each: the tensors that the layer stages.
    """

    requests: tuple[int, ...]
    draft_len: tuple[int, ...]
    slots: Tensor
    parts: tuple[Tensor, ...]


class StateSteps(EagerSteps):
    """The windows of a model runner, some of whose layers replay rows into a state.

    The forward takes settled rows into the states by itself; drafts it computes over copies. Each
    state takes in exactly the accepted drafts. An engine with one state per request has nothing to
    fall back to: after a step without a commit a state would be behind its request. So the draft
    rows of each layer with a state are kept here as well as in the window. Where a window ends
    without having taken them in, or where there is none, they are taken in one layer at a time.

    Args:
        manager: over the target's layers, under policy ``deferred``.
        vocab_size: sampled ids at or above it do not count as tokens.
    """

    def __init__(self, manager: TransactionManager, vocab_size: int) -> None:
        super().__init__(manager, vocab_size)
        self._rows: dict[str, StateRows] = {}
        self._staged: set[str] = set()
        self._taken_in = False

    def verified(self, ref: LayerRef, rows: StateRows) -> None:
        """Keep the draft rows of a layer with a state; stage them too if the step's window defers.

        A stage that fails makes the step fall back, as ``fail`` says; the kept rows still reach the
        state. In a step without a plan the rows are kept unchecked.

        Raises:
            KVTxnError: the rows are not the drafts of the step's plan. Nothing is kept. A draft
                among the other rows is in its request's state already.
        """
        plan = self._plan
        if plan is not None:
            planned = tuple(plan.requests.tolist()), plan.draft_len
            if planned != (rows.requests, rows.draft_len):
                raise KVTxnError(
                    "verify",
                    f"layer {ref.name!r} verifies other rows than the step has drafts",
                    expected=f"drafts {planned[1]} of requests {planned[0]}",
                    got=f"drafts {rows.draft_len} of requests {rows.requests}",
                    hint="start the engine without windows over states, and report this",
                )
        self._rows[ref.name] = rows
        window = self.window
        if window is None or not self.deferring:
            return
        try:
            window.stage(ref, rows.parts)
        except Exception as error:
            if ref.name not in window.missing:
                self._staged.add(ref.name)
            self.fail("stage", error)
        else:
            self._staged.add(ref.name)

    def commit(self, sampled: Callable[[], Tensor]) -> None:
        """Commit the accepted drafts; afterwards every state has taken them in.

        States that the window did not bring up to date, or without a window, take in their kept
        rows one layer at a time. The step is over then.

        Raises:
            KVTxnError: a layer with a state did not verify the drafts, or a state did not take them
                in. The engine must not go on.
        """
        rows, staged = self._rows, self._staged
        if self._plan is not None:
            self._check_all(rows)
        self._taken_in = False
        super().commit(sampled)
        done = staged if self._taken_in else set()
        try:
            for name in rows.keys() - done:
                self._take_in(self.manager.layers[name], rows[name], sampled())
        except Exception as error:
            raise KVTxnError(
                "commit",
                f"a state did not take in its accepted drafts: {error!r}",
                hint="the state is not that of its request: start the engine again",
            ) from error
        self._forget()

    def _check_all(self, rows: Mapping[str, StateRows]) -> None:
        """Refuse a step with drafts that a layer did not verify, whose state has them then.

        Raises:
            KVTxnError: there is such a layer.
        """
        layers = self.manager.layers.items()
        without = [name for name, ref in layers if ref.replay and name not in rows]
        if without:
            raise KVTxnError(
                "commit",
                f"layer {without[0]!r} took the drafts of this step in before they were accepted",
                expected="draft rows of every layer with a state",
                got=f"{len(without)} layers without any",
                hint="start the engine without windows over states, and report this",
            )

    def abandon(self) -> None:
        """Forget the step; a window that is still open is aborted, so no state takes a draft in.

        Where the forward failed, the layers that it reached have taken the settled rows in by
        themselves. An engine must not go on with these requests: vLLM does not repeat a step, whose
        tokens it counts as computed when it schedules them.
        """
        self._taken_in = self.window is not None and self.window.state in _TAKEN_IN
        super().abandon()
        self._forget()

    def _forget(self) -> None:
        """Drop the step's draft rows."""
        self._rows, self._staged = {}, set()

    def _take_in(self, ref: LayerRef, rows: StateRows, sampled: Tensor) -> None:
        """Let a layer's states take in the accepted drafts, in a window of this layer alone.

        Args:
            ref: the layer.
            rows: its draft rows of the step.
            sampled: int ``[num_requests, n]``, the sampled token ids, which say what was accepted.
        """
        log.debug("states.taken_in_alone", layer=ref.name, requests=len(rows.requests))
        most = max(sum(rows.draft_len), 1)
        config = TxnConfig(policy="deferred", backend="torch", max_rows=most, on_error="raise")
        manager = TransactionManager([ref], config)
        ids = SampledIds(sampled[list(rows.requests)], vocab_size=self._vocab_size)
        accepted = manager.acceptance.from_ids(ids, rows.draft_len)
        with manager.window(rows.draft_len, rows.slots, settled=0) as window:
            window.stage(ref, rows.parts)
            window.commit(accepted)
