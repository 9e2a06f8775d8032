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

from ...errors import CapacityError
from ...layers import LayerRef
from ...layout import RowLayout
from ...log import get_logger
from ...manager import TransactionManager
from ...states import WindowState
from ...window import Window

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
        self._batch: RowLayout | None = None
        self._directly = False

    # -- the runner's side --------------------------------------------------------

    def plan(self, rows: Callable[[], tuple[Sequence[int], Sequence[int]]]) -> None:
        """Take the step's drafts per request, and where each request's rows end."""
        self._plan = None
        with self._guard("begin"):
            self._plan = Plan.build(*rows(), self.manager.device)

    def begin(self, find: Callable[[], Mapping[str, Tensor] | str]) -> None:
        """Open the window of a planned step.

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
            try:
                self.window = self.manager.window(
                    plan.draft_len,
                    {
                        group: slots[group][plan.requests if kind.per_request else plan.rows]
                        for group, kind in self.manager.kinds.items()
                    },
                    settled=0,
                    written_by="window" if deferred else "caller",
                )
            except CapacityError:
                self.manager.bypass("max_rows")

    def commit(self, sampled: Callable[[], Tensor]) -> None:
        """Commit the accepted drafts; ``sampled`` gives ids ``[num_requests, n]``, -1 for none."""
        window, plan = self.window, self._plan
        if window is None or plan is None:
            return
        if self._directly:
            self.abandon()
            return
        try:
            with self._guard("commit"):
                accepted = self.manager.acceptance.from_ids(
                    sampled()[plan.requests], plan.draft_len, vocab_size=self._vocab_size
                )
                window.commit(accepted)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Forget the step, and abort its window if the window is still open."""
        window, self.window, self._plan = self.window, None, None
        self._masked.clear()
        self._batch = None
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
        """Copy the batch's slots, with -1 for draft rows; the caller's slots stay as they are."""
        if self._directly:
            return slots
        if group not in self._masked:
            assert self._plan is not None
            masked = slots.clone()
            masked[self._plan.rows] = -1
            self._masked[group] = masked
        return self._masked[group]

    def stage(self, ref: LayerRef, *parts: Tensor) -> None:
        """Stage copies of the draft rows of a batch's keys and values (or latents)."""
        assert self.window is not None
        assert self._plan is not None
        rows = self._plan.rows
        self.window.stage(ref, *(part.index_select(0, rows) for part in parts))

    def batch_layout(self, starts: Tensor) -> RowLayout:
        """Return a layout of the whole batch, in which no row of the batch is in the cache yet."""
        if self._batch is None:
            lengths = tuple(starts.diff().tolist())
            self._batch = RowLayout.build((0,) * len(lengths), lengths, self.manager.device)
        return self._batch

    # -- the self-test's side -----------------------------------------------------

    @contextmanager
    def written_directly(self) -> Iterator[None]:
        """Let the engine write draft rows as all others, and leave the commits out.

        The attention still reads the window, so its sums are those of a window's steps.
        """
        self._directly = True
        try:
            yield
        finally:
            self._directly = False

    # -- failures -----------------------------------------------------------------

    def fail(self, operation: str, error: Exception) -> None:
        """Count and log a failure; the step goes on without a window, as stock."""
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
        try:
            yield
        except Exception as error:
            self.fail(operation, error)
