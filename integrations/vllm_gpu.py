"""Steps of a model runner on a GPU: plan on the host, one launch before or after the forward.

Knows nothing of vLLM. The forward may be a replayed CUDA graph, so nothing is handed to it:
``begin`` marks the step's draft rows in a fixed buffer, ``commit`` moves the accepted ones.
Whatever fails, the step ends as stock would end it, is counted by reason, and after a fault
the next steps go straight through for a while; unless ``on_error="raise"``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..backends.fixed_window import FixedWindow
from ..backends.triton_executor import TritonExecutor
from ..errors import BackendUnavailableError, incomplete
from ..executor import StagedLayer
from ..layers import LayerRef
from ..layout import RowLayout
from ..manager import TransactionManager
from ..rows import LayerRows, write_layers
from ..states import WindowState

#: Steps without a window after a first fault; doubled at each further one, up to the limit.
_REST: Final = 8
_LONGEST_REST: Final = 4096

#: How windows end, as counters call it; to look it up takes the host longer than to count.
_COMMITTED: Final = WindowState.COMMITTED.value
_FELL_BACK: Final = WindowState.FELL_BACK.value
_ABORTED: Final = WindowState.ABORTED.value

#: Numbers of requests for which everything is prepared at the start.
_READY: Final = 256

#: Batches of which is known what becomes of them; beyond, all are judged anew.
_MOST_BATCHES: Final = 1024


@attrs.define(eq=False)
class Step:
    """One forward with drafts.

    Attributes:
        layout: the requests with drafts, which lead the batch.
        staged: layers whose drafts wait, where the host sees the forward.
        direct: rows go straight into the cache: something failed.
    """

    layout: RowLayout
    staged: list[LayerRef] = attrs.Factory(list)
    direct: bool = False


class GpuSteps:
    """The windows of one model runner.

    Args:
        manager: over the target's layers, in the order of ``slots``' groups.
        slots: the runner's slot mappings, int64 ``[num_groups, n]``, filled before each forward.
        query_len: most rows that a request with drafts has.
        rows: where draft rows wait, see ``FixedWindow``.

    Attributes:
        manager: as given.
        window: the fixed buffers.
        query_len: as given.
        layers: the target's, in the order of the forward.
        deferred: whether draft rows wait.
        step: the forward that is under way, if it has a window.
    """

    def __init__(
        self,
        manager: TransactionManager,
        slots: Tensor,
        query_len: int,
        rows: LayerRows | None = None,
    ) -> None:
        executor = manager.executor
        if not isinstance(executor, TritonExecutor):
            raise BackendUnavailableError(
                "vllm",
                "windows inside CUDA graphs need the Triton executor",
                expected="backend 'triton' or 'auto'",
                got=repr(executor.name),
            )
        self.manager = manager
        self.layers = executor.layers
        self.query_len = query_len
        self.step: Step | None = None
        self.deferred = manager.policy == "deferred"
        self._undoes = manager.policy == "undo"
        self._direct = manager.policy == "direct"
        self._slots = slots
        with torch.inference_mode(False):
            counters = manager.metrics.rows[0]
            self.window = FixedWindow(executor, slots, counters, undo=self._undoes, rows=rows)
        self._windows = manager.metrics.windows
        self._judged: dict[tuple[bytes, ...], RowLayout | str | None] = {}
        self._pause = _REST
        self._rest = 0
        self.layout = lru_cache(maxsize=1024)(
            lambda drafts, settled: RowLayout.build(drafts, settled, manager.device)
        )

    def warm_up(self) -> None:
        """Launch whatever steps may launch, and plan the usual ones; writes into no cache.

        Overwrites the runner's slots, so no step may be under way.
        """
        if self._direct:
            return
        most = min(_READY, self.manager.config.max_rows // self.query_len)
        drafts = self.query_len - 1
        with torch.inference_mode():
            usual = [self.layout((drafts,) * n, (1,) * n) for n in range(1, most + 1) if drafts]
            self.window.warm_up(usual)

    # -- a step ---------------------------------------------------------------------

    def begin(self, drafts: Any, lengths: Any, prefilling: Any) -> None:
        """Plan the forward that comes next; slots are in place.

        Args:
            drafts: numpy int32 ``[num_requests]``, draft rows of each; None where there are none.
            lengths: numpy int32 ``[num_requests]``, rows of each.
            prefilling: numpy bool ``[num_requests]``: its rows are still the prompt's.
        """
        if self.step is not None:
            self.abandon()
        layout = None
        try:
            if drafts is not None:
                layout = self._plan(drafts, lengths, prefilling)
            if self.deferred:
                self.window.show(layout)
            elif layout is not None and self._undoes:
                self.window.save(layout)
        except Exception as error:
            self._failed("begin", error)
            layout = None
            if self.deferred:
                self.window.show(None)  # if even this fails, rows would be lost: let it out
        if layout is not None:
            self.step = Step(layout)

    def _plan(self, drafts: Any, lengths: Any, prefilling: Any) -> RowLayout | None:
        """The layout of the requests with drafts; None, and the reason counted, without one."""
        key = (drafts.tobytes(), lengths.tobytes(), prefilling.tobytes())
        try:
            judged = self._judged[key]
        except KeyError:
            if len(self._judged) >= _MOST_BATCHES:
                self._judged.clear()
            judged = self._judged[key] = self._judge(drafts, lengths, prefilling)
        if isinstance(judged, str):
            self.manager.bypass(judged)
            return None
        if judged is not None and self._rest > 0:
            self._rest -= 1
            self.manager.bypass("resting")
            return None
        return judged

    def _judge(self, drafts: Any, lengths: Any, prefilling: Any) -> RowLayout | str | None:
        """A batch's layout, or why it has none; None without drafts."""
        count = int((drafts > 0).sum())
        if count == 0:
            return None
        drafts, lengths = drafts[:count], lengths[:count]
        longest = int(lengths.max())
        for applies, reason in (
            (not drafts.all(), "order"),
            (longest > self.query_len, "long_query"),
            (int(lengths.sum()) > self.manager.config.max_rows, "max_rows"),
            (prefilling[:count].any(), "prompt_with_drafts"),
        ):
            if applies:
                return reason
        return self.layout(tuple(drafts.tolist()), tuple((lengths - drafts).tolist()))

    def waits(self, ref: LayerRef) -> None:
        """The drafts of one more layer wait, in a forward that the host sees."""
        assert self.step is not None
        self.step.staged.append(ref)

    def commit(self, sampled: Tensor) -> None:
        """Make the accepted rows durable.

        Args:
            sampled: int ``[num_requests]`` of the batch, on the device: tokens sampled for each.
        """
        step = self.step
        if step is None:
            return
        if step.staged and not step.direct and len(step.staged) < len(self.layers):
            there = {ref.name for ref in step.staged}  # something else wrote the others' rows
            missing = [ref.name for ref in self.layers if ref.name not in there]
            self.fell_back(incomplete("OPEN", missing, len(self.layers)))
        self.step = None
        outcome = _FELL_BACK
        if step.direct:
            self._count(step.layout, sampled)
        else:
            try:
                if self._direct:
                    self._count(step.layout, sampled)
                else:
                    self.window.commit(step.layout, sampled)
                outcome = _COMMITTED
                self._pause = _REST
            except Exception as error:
                self._failed("commit", error)
                self._repair(step.layout, sampled)
                self._count(step.layout, sampled)
        self._windows[outcome] += 1

    def abandon(self) -> None:
        """The step came to nothing: no draft row stays."""
        step, self.step = self.step, None
        if step is None or step.direct:
            return
        if self._undoes:
            none = torch.ones(
                step.layout.num_requests, dtype=torch.int32, device=self.manager.device
            )
            self.window.commit(step.layout, none)
        self._windows[_ABORTED] += 1

    # -- failures -------------------------------------------------------------------

    def fell_back(self, error: Exception) -> None:
        """The attention failed: the drafts that wait go into the cache now.

        The caller writes the rows of the layers that follow, as stock does.
        """
        step = self.step
        assert step is not None
        self._failed("attend", error)
        step.direct = True
        waiting = self.window.staged(step.staged, step.layout.num_rows)
        self._write(waiting, step.layout, step.layout.is_draft)

    def _failed(self, operation: str, error: Exception) -> None:
        if self.manager.config.on_error == "raise":
            raise error
        self.manager.note_fallback(None, operation, error)
        self._rest, self._pause = self._pause, min(2 * self._pause, _LONGEST_REST)

    def _repair(self, layout: RowLayout, sampled: Tensor) -> None:
        """The reference finishes a commit. If it fails rows are lost, so its error gets out."""
        kept = layout.kept(sampled[: layout.num_requests] - 1)
        layers = self.window.staged(self.layers, layout.num_rows)
        self._write(layers, layout, kept if self.deferred else layout.is_draft & ~kept)

    def _write(self, layers: list[StagedLayer], layout: RowLayout, mask: Tensor) -> None:
        order = list(self.manager.groups)
        slots = {
            group: self._slots[number, : layout.num_rows] for number, group in enumerate(order)
        }
        rows = {layer.ref.name: layer.rows for layer in layers}
        write_layers([layer.ref for layer in layers], rows, slots, mask)

    def _count(self, layout: RowLayout, sampled: Tensor) -> None:
        """Count a window whose rows were written through."""
        drafts = int(sum(layout.draft_len))
        kept = layout.kept(sampled[: layout.num_requests] - 1).sum()
        lines = self.manager.metrics.rows[1]
        lines[:, 0] += drafts
        lines[:, 1] += kept
        lines[:, 2] += drafts - kept
