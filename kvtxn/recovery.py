"""Recovery: after an executor failed, finish its work with the reference, or take it back.

``commit``, ``restore`` and ``go_direct`` decide by ``on_error`` how to treat a failed
executor; they return a ``Failure``, from which the window takes its next state. An exception that
leaves this file means that the repair failed too: the bytes are unknown.

The repairs of rows are idempotent and use only ``kvtxn.row_io``, so it does not matter how far the
executor got, nor why it stopped. A repair of replayed states is not idempotent, because a state
must take each row in exactly once: see ``kvtxn.state_replay``.

No state is written before the commit, settled rows included, so that an abort leaves all states of
the window as they were, and the caller can repeat the step. The states of a ``StateSupplier`` are
committed first. There are no copies of them, so once they are in nothing can be taken back: what
fails behind them is finished by the reference, also under ``on_error="raise"``, which then raises.

In a ring or state, writing a rejected row destroys live data. So layers of these kinds keep
deferring even after a fallback, through the reference: see ``_holds``. Rows of a tree are written
through after a fallback, and kept as well, since commit moves the rows of the accepted path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch
from torch import Tensor

from . import state_replay
from .accepted_forms import SampledIds, as_counts
from .context import WindowContext
from .errors import KVTxnError
from .executor import StagedLayer, Txn
from .formats import words
from .layers import LayerRef
from .row_io import LayerRows, last_writers, read, read_layers, write_layers
from .window_transitions import Event


@attrs.frozen(eq=False)
class Failure:
    """An executor's failure after recovery dealt with it.

    Attributes:
        operation: the operation that failed, such as ``"commit"``.
        error: the error that the executor raised.
        event: the event for the window's state: ``FALL_BACK`` if the reference did the executor's
            work; ``ABORT`` if the caches were restored and ``error`` is to be raised; ``FAIL`` if
            restoring failed as well.
    """

    operation: str
    error: BaseException
    event: Event


# -- an executor acts, and may fail ------------------------------------------------


def go_direct(
    context: WindowContext,
    txn: Txn,
    operation: str,
    error: Exception,
    layers: Sequence[StagedLayer] = (),
) -> Failure:
    """Deal with a failure before commit: write rows straight through from now on, or restore.

    Rows of ``layers``, the layers staged so far, that wait are written now. ``on_error`` decides;
    the result says which of the two was done.
    """

    def write_on() -> None:
        """Make the window direct, and write the rows that wait."""
        txn.go_direct(context.metrics.written_through)
        waiting = [layer for layer in layers if layer.rows]  # under undo they are written already
        if waiting:
            stage_direct(context, txn, waiting)

    return _recover(context, txn, operation, error, write_on, txn.saved, layers)


def commit(context: WindowContext, txn: Txn, accepted: Tensor | SampledIds) -> Failure | None:
    """Call the executor's ``commit``; if it fails, finish the commit, or restore the caches.

    States of replayed layers advance before it. In debug mode the caches are compared with the
    reference after it, and a difference counts as its failure.

    Returns:
        None if the executor committed; else the failure, after its repair.
    """
    before: LayerRows = txn.saved
    counted = None
    try:
        counted = txn.counters.clone() if context.may_stop_halfway else None
        if isinstance(accepted, SampledIds):
            ids = context.executor.capabilities.takes_ids
            accepted = context.acceptance.counted(accepted, txn.layout, takes_ids=ids)
        if context.reads_back and txn.waits:
            layers = state_replay.moved(txn.staged.values())
            before = read_layers((layer.ref for layer in layers), txn.slots)
        if txn.pattern is None:
            txn.pattern = context.stager.layout_token
        if context.replays:
            _advance(context, txn, accepted)
        if txn.waits and txn.layout.has_settled:
            for name in context.selecting:
                context.executor.stage(txn, txn.staged[name])
        context.executor.commit(txn, accepted)  # type: ignore[arg-type]
        if context.debug:
            verify(txn, as_counts(accepted), before)
    except Exception as error:
        if counted is not None:
            txn.counters.copy_(counted)  # count the window once, however often its commit is tried
        return commit_failed(context, txn, accepted, before, error)
    return None


def _advance(context: WindowContext, txn: Txn, accepted: Tensor | SampledIds) -> None:
    """Call the executor's ``advance`` for the staged replayed layers, if there are any.

    The states are copied to ``txn.states_before`` first: without the copies they could not be
    undone, nor advanced again after a failure. Sets ``txn.advanced`` once the executor returned.
    """
    if state_replay.replayed(txn.staged.values()):
        txn.states_before = state_replay.read_states(txn)
        context.executor.advance(txn, accepted)  # type: ignore[arg-type]
        txn.advanced = True


def commit_states(context: WindowContext, number: int | None, sampled: Tensor) -> Exception | None:
    """Let the supplier commit its states; if that raises, let it ``repeat`` the commit.

    Args:
        context: the manager's context, with a supplier.
        number: the window's number, for the log; None without a window.
        sampled: as ``StateSupplier.commit`` takes it.

    Returns:
        The error of ``commit``, counted as a fallback; None without any.

    Raises:
        KVTxnError: ``repeat`` failed, too: states are not those of their requests. The caller ends
            the window in FAILED.
    """
    supplier = context.supplier
    assert supplier is not None
    try:
        supplier.commit(sampled)
    except Exception as error:
        context.note_fallback(number, "states", error)
        try:
            supplier.repeat(sampled)
        except Exception as again:
            raise KVTxnError(
                "commit",
                f"a state did not take in its accepted drafts: {again!r}",
                hint="the state is not that of its request: start the engine again",
            ) from again
        return error
    return None


def finish_rows(context: WindowContext, txn: Txn, accepted: Tensor, error: Exception) -> Failure:
    """Commit the rows by the reference, after the commit of states raised ``error`` and went on.

    Returns:
        The failure with event ``FALL_BACK``, also under ``on_error="raise"``.
    """
    finish_commit(txn, accepted, txn.saved)
    txn.count(txn.kept(accepted))
    if context.on_error == "raise":
        error.add_note("kvtxn: a commit of states failed and went on; all accepted drafts are in")
    return Failure("states", error, Event.FALL_BACK)


def commit_failed(
    context: WindowContext,
    txn: Txn,
    accepted: Tensor | SampledIds,
    before: LayerRows,
    error: Exception,
    sampled: Tensor | None = None,
) -> Failure:
    """Finish a commit that failed and counted nothing, or restore the caches: see ``on_error``.

    What can no longer be restored, since states are in, is finished in any case.

    ``before`` has the rows that the caches held before the commit, by layer name, if any were read
    or saved. ``sampled`` is what states of a supplier are to take in, which the failed commit was
    to commit as well; None if they are in, or if there are none.
    """

    def finish_it() -> None:
        """Commit states that are not in yet, then the rows by the reference, and count."""
        if sampled is not None:
            commit_states(context, txn.number, sampled)
            txn.states_in = True
        known = as_counts(accepted)
        finish_commit(txn, known, before)
        txn.count(txn.kept(known))

    return _recover(context, txn, "commit", error, finish_it, before)


def restore(context: WindowContext, txn: Txn) -> Failure | None:
    """Call the executor's ``restore``; if it raises, the reference puts the saved rows back.

    Returns:
        None if it did not raise; else the failure, whose event says what became of the caches.
    """
    try:
        context.executor.restore(txn)
    except Exception as error:
        return _recover(context, txn, "abort", error, lambda: put_back(txn, txn.saved), txn.saved)
    except BaseException as error:  # interrupted: finish, since putting back twice does no harm
        put_back(txn, txn.saved)
        return Failure("abort", error, Event.ABORT)
    return None


def _recover(
    context: WindowContext,
    txn: Txn,
    operation: str,
    error: Exception,
    repair: Callable[[], None],
    before: LayerRows,
    layers: Sequence[StagedLayer] = (),
) -> Failure:
    """Undo a failed operation if ``on_error`` is ``"raise"``; otherwise call ``repair``.

    Once states of a supplier are in, nothing is undone: ``repair`` is called in any case, and an
    error of its own comes out.

    Args:
        context: the manager's context.
        txn: the window.
        operation: the operation that failed.
        error: its error, which the caller raises if the caches were restored.
        repair: does the operation's work by the torch reference.
        before: the rows to put back, by layer name; empty if the operation had read none yet.
        layers: the staged layers. The failed operation may have half written the settled rows of
            rings among them, which are written again.

    Returns:
        The failure: ``FALL_BACK`` after a repair, which is counted and logged; ``ABORT`` if the
        caches were restored; ``FAIL`` if restoring raised.
    """
    if context.on_error != "raise" or txn.states_in:
        context.note_fallback(txn.number, operation, error)
        repair()
        if context.on_error == "raise":
            error.add_note(f"kvtxn: {operation} failed and was finished, as states were in already")
        return Failure(operation, error, Event.FALL_BACK)
    evicting = [layer for layer in layers if layer.rows and layer.ref.kind.overwrites]
    try:
        if context.policy != "direct":  # a failed write may have left half a row in a live slot
            write_settled(txn, evicting)
        put_back(txn, before)
        txn.check_range()
        state_replay.put_back(txn)
        txn.count(torch.zeros_like(txn.layout.is_draft), aborted=True)
    except BaseException as failure:
        error.add_note(
            f"kvtxn: {operation} failed, and restoring the caches failed too; their content is "
            f"unknown: {failure!r}"
        )
        return Failure(operation, error, Event.FAIL)
    done = "rows already written stay" if context.policy == "direct" else "the caches were restored"
    error.add_note(f"kvtxn: {operation} failed; {done}")
    return Failure(operation, error, Event.ABORT)


# -- windows that fell back --------------------------------------------------------


def _holds(context: WindowContext, ref: LayerRef) -> bool:
    """Return whether this layer's drafts wait for commit even in a window that fell back."""
    return ref.kind.overwrites and context.policy == "deferred"


def held_layers(context: WindowContext, txn: Txn) -> dict[str, StagedLayer]:
    """Return the layers whose staged rows a window that fell back still needs at its commit."""
    moves = txn.layout.tree is not None
    staged = txn.staged.items()
    return {name: layer for name, layer in staged if moves or _holds(context, layer.ref)}


def save_evicted(context: WindowContext, txn: Txn, group: str) -> None:
    """Under ``undo``, save the rows in the slots of a ring if the executor has not saved them."""
    if context.policy == "undo" and context.kinds[group].overwrites:
        refs = [ref for ref in txn.layers if ref.group == group and ref.name not in txn.saved]
        txn.saved.update(read_layers(refs, txn.slots))


def save_rings(context: WindowContext, txn: Txn) -> None:
    """Save the rows of rings that a forward will write over, drafts included.

    Leaves out layers that are saved already, whose rows wait, or whose slots are not known; under
    ``direct`` it saves none.
    """
    if context.policy == "direct":
        return
    known = {**txn.saved, **txn.staged}
    rings = [ref for ref in txn.layers if ref.kind.name == "ring" and ref.group in txn.slots]
    refs = [ref for ref in rings if ref.name not in known]
    if refs:  # they come back into these slots, whatever the next step fills in before
        txn.slots = {group: slots.clone() for group, slots in txn.slots.items()}
    txn.saved.update(read_layers(refs, txn.slots))


def stage_direct(context: WindowContext, txn: Txn, layers: Sequence[StagedLayer]) -> None:
    """Write every row; of rings under ``deferred``, whose drafts must still wait, the settled ones.

    Under ``deferred`` no state is written. Rows that attention or the commit still reads stay in
    ``txn.staged``.
    """
    held = [layer for layer in layers if _holds(context, layer.ref)]
    write_through(txn, [layer for layer in layers if layer not in held])
    write_settled(txn, held)
    # Attention goes on reading staged rows if it read them before, even rows without a slot.
    reads = context.policy == "deferred" or txn.layout.tree is not None
    txn.staged.update({layer.ref.name: layer for layer in (layers if reads else held)})


def finish_direct(context: WindowContext, txn: Txn, accepted: Tensor | None) -> None:
    """End a window that fell back: write the rows that still wait for the outcome, and count.

    These are kept drafts of rings under ``deferred``, of states and of trees. Rows of rings that a
    rejected draft lies over come back. All other rows are written already, and stay.

    Args:
        context: the manager's context.
        txn: the window.
        accepted: the acceptance of a commit; None for an abort, which keeps no draft.
    """
    before = {
        ref.name: txn.saved[ref.name]
        for ref in txn.layers
        if ref.name in txn.saved and ref.kind.overwrites
    }
    finish(txn, accepted, before, held_layers(context, txn).values())
    aborted = accepted is None
    kept = torch.zeros_like(txn.layout.is_draft) if accepted is None else txn.kept(accepted)
    txn.count(kept, aborted=aborted)


# -- repairs -----------------------------------------------------------------------


def _staged_rows(layers: Iterable[StagedLayer]) -> LayerRows:
    """Return the rows of staged layers by layer name."""
    return {layer.ref.name: layer.rows for layer in layers}


def write_through(txn: Txn, layers: Sequence[StagedLayer]) -> None:
    """Write all rows of these layers, as stock would: settled, accepted and rejected alike.

    Replayed layers have no rows to write. Of a captured forward only drafts are written.
    """
    txn.check_range()
    layers = state_replay.moved(layers)
    draft = txn.layout.is_draft
    rows = draft if txn.drafts_alone else torch.ones_like(draft)
    refs = [layer.ref for layer in layers]
    write_layers(refs, _staged_rows(layers), txn.slots, txn.permit(rows))


def write_settled(txn: Txn, layers: Sequence[StagedLayer]) -> None:
    """Write the settled rows of these layers, as staging does under ``deferred``: not of states.

    A captured forward has written its settled rows by itself.
    """
    layers = [layer for layer in layers if not layer.ref.states]
    if layers and not txn.drafts_alone:
        txn.check_range()
        refs = [layer.ref for layer in layers]
        write_layers(refs, _staged_rows(layers), txn.slots, txn.permit(~txn.layout.is_draft))


def finish_commit(txn: Txn, accepted: Tensor, before: LayerRows) -> None:
    """Bring the caches to where the executor's commit should have brought them; count nothing."""
    finish(txn, accepted, before, txn.staged.values() if txn.holds_rows else ())


def finish(
    txn: Txn, accepted: Tensor | None, before: LayerRows, waiting: Iterable[StagedLayer]
) -> None:
    """Put back the rows from ``before`` where no draft is kept, then write the kept drafts.

    Of selected states the settled rows are written before the kept drafts.

    The order matters: a kept row and a rejected row may have the same slot. No draft is kept and no
    state changes if ``accepted`` is None. Else states that did not take their settled and kept rows
    in take them in now.
    """
    txn.check_range()
    draft = txn.layout.is_draft
    kept = torch.zeros_like(draft) if accepted is None else txn.kept(accepted)
    put_back(txn, before, txn.permit(draft) & ~kept)
    if accepted is None:
        return
    waiting = state_replay.moved(waiting)
    rows, refs = _staged_rows(waiting), [layer.ref for layer in waiting]
    selecting = [ref for ref in refs if ref.states]
    write_layers(selecting, rows, txn.slots, txn.permit(~draft))
    write_layers(refs, rows, txn.slots, kept, txn.sources(accepted))
    state_replay.finish(txn, accepted)


def put_back(txn: Txn, before: LayerRows, mask: Tensor | None = None) -> None:
    """Write rows that were read earlier back to their slots: masked rows, or every draft.

    States are put back whatever ``mask`` says: each row of a request has the request's state.
    """
    if before:
        txn.check_range()
        draft = txn.layout.is_draft
        refs = [ref for ref in txn.layers if ref.name in before]
        states = [ref for ref in refs if ref.states]
        write_layers(states, before, txn.slots, txn.permit(torch.ones_like(draft)))
        rows = [ref for ref in refs if not ref.states]
        write_layers(rows, before, txn.slots, txn.permit(draft) if mask is None else mask)


def verify(txn: Txn, accepted: Tensor, before: LayerRows) -> None:
    """Compare the caches with the bytes that a commit must leave. Waits for the device.

    Kept rows are compared if the window holds them; under ``undo`` it does so for trees only.
    ``before`` has the rows that the caches held before the window wrote drafts.

    Raises:
        RuntimeError: a layer's bytes differ; the message names the layers.
    """
    kept, draft = txn.kept(accepted), txn.layout.is_draft
    order, sources = torch.arange(len(draft), device=draft.device), txn.sources(accepted)
    if sources is not None:
        order = torch.where(draft, sources, order)
    wrong = state_replay.wrong_states(txn, accepted)
    for ref in txn.layers:
        if ref.name not in before:
            continue
        layer, slots = txn.staged.get(ref.name), txn.slots[ref.group]
        stays = kept | txn.permit(~draft) if ref.states else kept  # a commit writes these rows
        rejected, written = (slots >= 0) & draft & ~kept, (slots >= 0) & stays
        if ref.kind.overwrites:  # a kept row may have taken the slot of a rejected one
            rejected &= ~torch.isin(slots, slots[written])
            written = last_writers(slots, written)
        for i, (plane, old) in enumerate(zip(ref.planes, before[ref.name], strict=True)):
            now = words(read(plane, slots))
            good = torch.equal(now[rejected], words(old)[rejected])
            if txn.holds_rows and layer is not None:
                good &= torch.equal(now[written], words(layer.rows[i])[order[written]])
            if not good and ref.name not in wrong:
                wrong.append(ref.name)
    if wrong:
        raise RuntimeError(f"commit left wrong bytes in {', '.join(wrong)}")
