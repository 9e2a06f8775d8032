"""A window's state, what a failure does to it, and how it ends; the base of ``Window``.

A window whose executor failed goes DIRECT, and the reference in ``kvtxn.recovery``
finishes what the executor left; where even that fails, the label says FAILED.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

import torch
from torch import Tensor

from . import recovery
from .errors import WindowStateError, not_allowed
from .executor import SampledIds, StagedLayer, Txn, as_counts
from .hooks import Moment, ended
from .layers import LayerRef
from .rows import LayerRows, read_layers
from .slots import SlotMappings
from .states import Event, WindowState, after, allowed

if TYPE_CHECKING:
    from .manager import TransactionManager

#: Who writes rows through under ``undo``: ``stage``, or the caller's own code.
WrittenBy = Literal["window", "caller"]


class WindowLife:
    """The state of one window, and every change to it that is not a plain stage or commit.

    Attributes:
        number: counts the manager's windows from 0.
        fallback_reason: the operation whose failure made the window DIRECT, or None.
    """

    def __init__(
        self,
        manager: TransactionManager,
        number: int,
        mappings: SlotMappings,
        written_by: WrittenBy,
    ) -> None:
        self.number = number
        self.fallback_reason: str | None = None
        self._manager = manager
        self._executor = manager.executor
        self._mappings = mappings
        self._written_by = written_by
        self._state = WindowState.OPEN
        self._missing = manager.unstaged.copy()
        self._txn: Txn | None = None
        self._accepted: Tensor | SampledIds | None = None
        self._hook_error: Exception | None = None
        self._waits = False  # all groups have slots, and staging has nothing to write

    # -- what it is ---------------------------------------------------------------

    @property
    def state(self) -> WindowState:
        """Where the window stands."""
        return self._state

    @property
    def num_rows(self) -> int | None:
        """Rows of the window; None until the first slot mapping, if ``draft_len`` is an int."""
        return self._mappings.num_rows

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the layers that are not staged yet."""
        return tuple(self._missing)

    def __repr__(self) -> str:
        return f"<Window {self.number} {self._state.name}, {len(self._missing)} layers missing>"

    # -- failures and the end ------------------------------------------------------

    def fall_back(self, operation: str, error: Exception) -> None:
        """The caller's own code failed: give this window up, and write what is staged directly.

        From here on the caller writes the rows of layers that are not staged; commit only
        counts. Not for windows with a draft tree, whose commit has to move rows it was given.

        Args:
            operation: what failed; becomes ``fallback_reason`` and a label of the metrics.
            error: what it raised; logged, or raised again under ``on_error="raise"``.

        Raises:
            WindowStateError: the window is over or fell back already, has no slots yet, or has a
                draft tree.
        """
        if not allowed(self._state, Event.FALL_BACK):
            self._refuse("fall_back", Event.FALL_BACK)
        txn = self._txn
        if txn is None or txn.layout.tree is not None:
            why = "no slots yet" if txn is None else "a draft tree"
            raise WindowStateError(
                "fall_back",
                f"the window has {why}, in state {self._state.name}",
                state=self._state.name,
                hint="abort it; then the rows are the caller's to write",
            )
        self._on_failure(operation, error, tuple(txn.staged.values()))
        self._missing.clear()
        self._written_by = "caller"

    def _on_failure(
        self, operation: str, error: Exception, layers: Sequence[StagedLayer] = ()
    ) -> None:
        """An executor failed before commit: go direct and lose nothing, or restore and raise."""
        txn = self._txn
        assert txn is not None
        if self._manager.config.on_error == "raise":
            self._take_back_and_raise(operation, error, txn.saved, layers)
        self._enter_direct(operation, error)
        txn.policy, txn.counters = "direct", self._manager.metrics.rows[1]
        if self._written_by == "window":
            waiting = [layer for layer in layers if layer.rows]  # under undo they are written
            self._or_fail(lambda: self._write_without_executor(txn, waiting))

    # Rings and states keep their policy even after a fallback, carried out by the reference:
    # written through, a rejected row would evict a live one for good. Rows of a tree are written
    # through, but held as well, since commit moves those of the accepted path.

    def _holds(self, ref: LayerRef) -> bool:
        """Whether drafts of this layer wait for commit even in a window that fell back."""
        return ref.kind.overwrites and self._manager.policy == "deferred"

    def _held_layers(self) -> dict[str, StagedLayer]:
        """Layers whose rows commit still needs, in a window that fell back."""
        if self._txn is None:
            return {}
        moves = self._txn.layout.tree is not None
        staged = self._txn.staged.items()
        return {name: layer for name, layer in staged if moves or self._holds(layer.ref)}

    def _save_what_is_evicted(self, txn: Txn, group: str) -> None:
        """Under ``undo``, save what the slots of a ring hold, where the executor did not."""
        if self._manager.policy == "undo" and self._manager.kinds[group].overwrites:
            refs = [ref for ref in txn.layers if ref.group == group and ref.name not in txn.saved]
            self._or_fail(lambda: txn.saved.update(read_layers(refs, txn.slots)))

    def _write_without_executor(self, txn: Txn, layers: Sequence[StagedLayer]) -> None:
        """Write all rows, but of layers that hold drafts back the settled ones."""
        held = [layer for layer in layers if self._holds(layer.ref)]
        recovery.write_through(txn, [layer for layer in layers if layer not in held])
        recovery.write_settled(txn, held)
        # Attention goes on reading what it read before, whatever the slots are.
        reads = self._manager.policy == "deferred" or txn.layout.tree is not None
        waiting = layers if reads else held
        txn.staged.update({layer.ref.name: layer for layer in waiting})

    def _finish_held(self, txn: Txn, accepted: Tensor | None) -> None:
        """End a window that fell back: write what rings, states and trees held back."""
        before = {ref.name: txn.saved[ref.name] for ref in txn.layers if ref.name in txn.saved}
        before = {name: rows for name, rows in before.items() if self._evicts(name)}
        recovery.finish(txn, accepted, before, self._held_layers().values())

    def _evicts(self, name: str) -> bool:
        return self._manager.layers[name].kind.overwrites

    def _enter_direct(self, operation: str, error: Exception) -> None:
        self._state = after(self._state, Event.FALL_BACK)
        self.fallback_reason = operation
        self._manager.note_fallback(self, operation, error)

    def _or_fail(self, repair: Callable[[], None]) -> None:
        """Run a repair; where even that fails, the bytes are unknown and the label says so."""
        try:
            repair()
        except BaseException:
            self._finish(Event.FAIL)
            raise

    def _act_commit(self, txn: Txn, counts: Tensor | SampledIds) -> None:
        """The executor's commit; on failure finish it, or restore and raise."""
        before: LayerRows = txn.saved
        config = self._manager.config
        counted = txn.counters.clone() if self._manager.may_stop_halfway else None
        try:
            if txn.policy == "deferred" and self._manager.needs_guard:
                before = recovery.read_back(txn)
            txn.pattern = self._manager.stager.pattern
            self._executor.commit(txn, counts)  # type: ignore[arg-type]
            if config.debug:
                recovery.verify(txn, as_counts(counts), before)
        except Exception as error:
            if counted is not None:
                txn.counters.copy_(counted)  # a window counts once, however often it is tried
            if config.on_error == "raise":
                self._take_back_and_raise("commit", error, before)
            self._enter_direct("commit", error)
            known = as_counts(counts)
            self._or_fail(lambda: recovery.finish_commit(txn, known, before))
            self._or_fail(lambda: txn.count(txn.kept(known)))
        except BaseException:
            self._finish(Event.FAIL)  # interrupted half-way: nothing can be promised
            raise

    def _act_restore(self, txn: Txn) -> None:
        """The executor's restore; on failure the reference does it."""
        try:
            self._executor.restore(txn)
        except Exception as error:
            if self._manager.config.on_error == "raise":
                self._take_back_and_raise("abort", error, txn.saved)
            self._enter_direct("abort", error)
            self._or_fail(lambda: recovery.put_back(txn, txn.saved))
        except BaseException:  # interrupted: finish, since putting back twice does no harm
            self._or_fail(lambda: recovery.put_back(txn, txn.saved))
            self._finish(Event.ABORT)
            raise

    def _take_back_and_raise(
        self,
        operation: str,
        error: Exception,
        before: LayerRows,
        layers: Sequence[StagedLayer] = (),
    ) -> NoReturn:
        """``on_error="raise"``: restore the caches, then let the executor's error surface."""
        txn = self._txn
        assert txn is not None
        evicting = [layer for layer in layers if layer.rows and layer.ref.kind.overwrites]
        try:
            if self._manager.policy != "direct":  # else half a row could be where one was live
                recovery.write_settled(txn, evicting)
            recovery.put_back(txn, before)
            txn.count(torch.zeros_like(txn.layout.is_draft), aborted=True)
        except BaseException as failure:
            self._finish(Event.FAIL)
            error.add_note(f"kvtxn: {operation} failed, and so did restoring: {failure!r}")
        else:
            self._finish(Event.ABORT)
            error.add_note(f"kvtxn: {operation} failed; the caches were restored")
        raise error

    def _finish(self, event: Event, accepted: object = None) -> None:
        """Label the end, call the hooks, and let go of everything the window held."""
        self._state = after(self._state, event)
        try:
            if event is not Event.FAIL:
                self._tell("on_commit" if event is Event.COMMIT else "on_abort")
        finally:
            self._manager.close(self, accepted)
            if self._txn is not None:
                self._txn.staged = {}

    def _tell(self, moment: Moment) -> None:
        """Call the hooks; whatever they do, the caches are right and the label stands."""
        callbacks = self._manager.hooks[moment]
        if not callbacks or self._txn is None:
            return
        accepted = None if self._accepted is None else as_counts(self._accepted)
        window = ended(self.number, self._state, self._txn, accepted, not self._missing)
        for callback in callbacks:
            try:
                callback(window)
            except Exception as error:
                error.add_note(f"kvtxn: from an {moment} hook; the window is {self._state.name}")
                self._manager.note_hook_error(self, moment, error)
                self._hook_error = self._hook_error or error

    def _surface(self) -> None:
        """Under ``on_error="raise"``, raise the first hook's error, once everything is done."""
        if self._hook_error is not None and self._manager.config.on_error == "raise":
            raise self._hook_error

    def _refuse(self, operation: str, event: Event, detail: str = "") -> NoReturn:
        wanted = " or ".join(state.name for state in WindowState if allowed(state, event))
        raise not_allowed(operation, self._state.name, wanted, self._state.is_final, detail)
