"""``WindowContext``: the part of a manager that its windows use.

The manager builds one context and hands it to every window, so that a window needs no manager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from .acceptance import Acceptance
from .errors import KVTxnError, shown
from .executor import Executor, Txn
from .hooks import Hooks
from .layers import LayerRef, SlotKind
from .layout import RowLayout
from .log import get_logger
from .metrics import Metrics, as_label
from .slots import SlotRules
from .staging import Stager
from .state_supplier import StateSupplier

log = get_logger()


@attrs.frozen(eq=False, kw_only=True)
class WindowContext:
    """The objects and settings that the windows of one manager share.

    Attributes:
        executor: the object that moves the bytes.
        stager: the object that takes staged rows in.
        metrics: the counters.
        hooks: the callbacks of ``on_commit`` and ``on_abort``.
        acceptance: the object that turns token ids into counts.
        layers: the layers by name.
        refs: the layers in order.
        groups: slots in the smallest cache of each group.
        kinds: the kind of the slots of each group.
        slot_rules: the rules that every slot mapping obeys.
        device: the device of the caches.
        policy: ``"deferred"``, ``"undo"`` or ``"direct"``.
        on_error: ``"fallback"`` or ``"raise"``; see ``TxnConfig``.
        debug: True to compare every commit with the reference.
        may_stop_halfway: True if a failing commit may have written or counted something, so that
            the counters are copied before it.
        reads_back: True if the rows are copied before a deferred commit, so that it can be undone.
        replays: True if a layer has states that take rows in at commit.
        selecting: names of the layers with states of which a commit selects one; their settled
            rows are written by the commit as well.
        on_end: called when a window has ended, before its debug event.
        supplier: commits recurrent states of the engine's own kernels with each window; None
            without any.
        unstaged: the layers that a new window waits for; copied, which is quicker than made anew.
        captured: windows whose commit was captured in a CUDA graph: each replay reads their rows.
        saves_known: groups whose rows the executor has saved once as its contract says.
    """

    executor: Executor
    stager: Stager
    metrics: Metrics
    hooks: Hooks
    acceptance: Acceptance
    layers: Mapping[str, LayerRef]
    refs: tuple[LayerRef, ...]
    groups: Mapping[str, int]
    kinds: Mapping[str, SlotKind]
    slot_rules: SlotRules
    device: torch.device
    policy: str
    on_error: str
    debug: bool
    may_stop_halfway: bool
    reads_back: bool
    replays: bool
    selecting: tuple[str, ...]
    on_end: Callable[[], None]
    supplier: StateSupplier | None = None
    unstaged: dict[str, None] = attrs.field(init=False)
    captured: list[Txn] = attrs.field(init=False, factory=list)
    saves_known: set[str] = attrs.field(init=False, factory=set)

    @unstaged.default
    def _all_layers(self) -> dict[str, None]:
        """Return the name of every layer, in order, with None."""
        return dict.fromkeys(self.layers)

    def new_txn(self, layout: RowLayout, number: int | None = None, *, ended: bool = False) -> Txn:
        """Return the executor's side of a new window, and make the stager ready for its rows.

        Args:
            layout: the window's rows.
            number: the window's number, for messages; None for rows that belong to no window.
            ended: the window is over, and another one may be open: the stager is that one's.
        """
        txn = Txn(self.policy, self.refs, layout, self.metrics.under_policy, number=number)
        if not ended:
            self.stager.begin(layout.num_rows, holds=txn.holds_rows)
        return txn

    def save(self, txn: Txn, group: str) -> None:
        """Call the executor's ``save`` for a group, and put the rows into ``txn.saved``.

        The first result of each group is checked.

        Raises:
            KVTxnError: it is not what ``Executor.save`` has to return.
        """
        saved = self.executor.save(txn, group)
        if group not in self.saves_known:
            members = [ref for ref in self.refs if ref.group == group]
            check_saved(self.executor.name, members, txn.layout.num_rows, saved)
            self.saves_known.add(group)
        txn.saved.update(saved)

    def note_fallback(self, number: int | None, operation: str, error: Exception) -> None:
        """Count a fallback and log it: a warning the first time for an operation, then debug.

        Args:
            number: the window's number; None for a window that could not begin.
            operation: the operation that failed.
            error: the error that the operation raised.
        """
        label = as_label(operation)
        self.metrics.fallbacks[label] += 1
        say = log.warning if self.metrics.fallbacks[label] == 1 else log.debug
        say("window.fell_back", window=number, operation=operation, error=shown(error))


def check_saved(name: str, members: Sequence[LayerRef], num_rows: int, saved: object) -> None:
    """Refuse a result of an executor's ``save`` that breaks the contract.

    Args:
        name: the executor's.
        members: the layers of the group.
        num_rows: rows of the window.
        saved: has to have, by layer name, one tensor per plane.

    Raises:
        KVTxnError: a layer is missing or unknown, or a tensor does not fit its plane.
    """
    names: list[str] = [ref.name for ref in members]
    expected, got = f"by layer name the rows of {names}", f"a {type(saved).__name__}"
    if isinstance(saved, Mapping):
        expected, got = f"rows of {names}", f"rows of {[*saved]}"
        if {*saved} == {*names}:
            pairs = ((_rows_of(ref, num_rows), _given(saved[ref.name]), ref) for ref in members)
            wrong = next(((a, b, ref) for a, b, ref in pairs if a != b), None)
            if wrong is None:
                return
            expected, got = (f"for layer {wrong[2].name!r}, per plane, {wrong[0]}", str(wrong[1]))
    raise KVTxnError(
        "save", f"the executor {name!r} did not return the rows that its save has to",
        expected=expected, got=got, hint="mend the executor's save; its docstring says what it is",
    )  # fmt: skip


def _rows_of(ref: LayerRef, num_rows: int) -> list[str]:
    """Describe the tensors of a layer's saved rows, one per plane, for an error."""
    planes = [([num_rows, *plane.row_shape], plane.cells.element_size()) for plane in ref.planes]
    return [f"{shape} of {size} bytes" for shape, size in planes]


def _given(parts: object) -> list[str] | str:
    """Describe the tensors that an executor returned, for an error."""
    if not isinstance(parts, Sequence):
        return f"a {type(parts).__name__}"
    return [
        f"{list(part.shape)} of {part.element_size()} bytes"
        if isinstance(part, torch.Tensor)
        else f"a {type(part).__name__}"
        for part in parts
    ]
