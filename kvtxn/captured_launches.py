"""The launches that an executor prepares for windows over a captured forward.

A captured forward reads and writes the same storage at every replay, so all that a window's
commit needs is known before the first step. An executor may prepare launches over this storage
(``Executor.captured_launches``). If an executor prepares none, the window calls the executor's
``save`` and ``commit`` instead, with the same result. None are asked for where a layer has
recurrent states: there ``advance`` and ``commit`` follow copies of the states, as in any window.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import attrs
from torch import Tensor

from .layout import RowLayout
from .row_io import LayerRows
from .state_supplier import Capture


@attrs.frozen(eq=False, kw_only=True)
class CapturedPlaces:
    """The tensors that all windows over one captured forward share.

    Attributes:
        policy: ``"deferred"``, ``"undo"`` or ``"direct"``.
        slots: int64 ``[num_groups, n]``, groups in the order of the executor's layers; the engine
            fills the slots of a step before its forward.
        rows: by layer name ``[max_rows, *row_shape]`` per plane, any strides: where drafts wait
            under ``deferred``, where the old rows are saved under ``undo``; empty under ``direct``.
        counters: int64 ``[lines, 4]``, see ``Txn.count``.
        filled: under ``undo``, the part of ``slots`` that a window may have, int64
            ``[num_groups, max_rows or fewer]``, where the engine may fill in the slots of its next
            step before it aborts a window; else None.
        saved_slots: like ``filled``: where its content is kept for such an abort.
    """

    policy: str
    slots: Tensor
    rows: LayerRows
    counters: Tensor
    filled: Tensor | None = None
    saved_slots: Tensor | None = None


_NO_REPLAYS: Final[Mapping[int, Callable[[], None]]] = MappingProxyType({})


class LayoutLaunches(abc.ABC):
    """The launches of windows of one layout; each may be called any number of times.

    Neither ``save`` nor ``commit`` waits for the device; one that raises wrote and counted nothing.

    Attributes:
        replays: commits that the executor has captured, by the address of the contiguous int32
            tensor that the commit reads ``sampled`` from. A window calls a replay in place of
            ``commit``.
        with_states: by the same addresses, commits that were captured together with those of the
            states of a ``StateSupplier``. One that raises wrote and counted nothing.
        saves_slots: ``save`` copies the slots of the layout's rows, too, to
            ``CapturedPlaces.saved_slots``. Else the window copies all of ``filled`` by itself,
            before each ``save``: one launch more in a step.
    """

    saves_slots: bool = False
    replays: Mapping[int, Callable[[], None]] = _NO_REPLAYS
    with_states: Mapping[int, Callable[[], None]] = _NO_REPLAYS

    @abc.abstractmethod
    def save(self) -> None:
        """Under ``undo``, copy the rows in the slots of all drafts to ``CapturedPlaces.rows``."""

    @abc.abstractmethod
    def commit(self, sampled: Tensor) -> None:
        """Write the kept rows, or under ``undo`` put the rejected ones back, and count.

        Args:
            sampled: signed int ``[num_requests]`` or longer, any stride, on the device: the number
                of tokens sampled for each request, its accepted drafts plus one. The window has
                checked the tensor, but no value in it: counts clamp.
        """

    def recurs_with_states(self, sampled: Tensor) -> bool:
        """Count a commit of rows and states; tell whether to capture both by ``capture_with``.

        An executor that does not capture counts nothing and answers False, as here.

        Args:
            sampled: as for ``commit``, contiguous int32.
        """
        return False

    def capture_with(  # noqa: B027 - an executor need not capture
        self, sampled: Tensor, states: Callable[[], None], capture: Capture | None
    ) -> None:
        """Capture a commit together with that of states, for ``with_states``, if possible.

        An executor that does not capture does nothing, as here.

        Args:
            sampled: as for ``commit``, contiguous int32. The launch reads it where it lies now.
            states: makes the launches of the states. They were made once before.
            capture: as ``StateSupplier.capture``; None: the executor captures.
        """

    def warm_up(self, sampled: Tensor) -> None:
        """Launch everything once while every slot is -1, before the first step; here: ``commit``.

        Args:
            sampled: as for ``commit``.
        """
        self.commit(sampled)


class CapturedLaunches(abc.ABC):
    """The prepared launches of one executor over one set of ``CapturedPlaces``."""

    @abc.abstractmethod
    def prepare(self, layout: RowLayout) -> LayoutLaunches:
        """Prepare the launches of windows of a layout that has rows. Launches nothing.

        Windows of this layout start with the first row of every group's slots.
        """

    def variants(self) -> Iterator[RowLayout]:
        """Yield one layout for each way in which the kernels can be compiled; here: none."""
        return iter(())
