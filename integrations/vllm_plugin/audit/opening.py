"""Opening a ledger over a runner's caches on a GPU, or saying why that is impossible."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from ....audit import Key, RowGroup, Scrub, StateGroup, Window
from ....layers import LayerRef
from ....log import get_logger
from ..attach import stay_out
from ..internals import (
    aligned_states,
    audited,
    audited_states,
    audited_v2,
    carried_states,
    config,
)
from ..internals import layers as attention_layers
from ..policy.engine import EngineFacts
from .expected import last_stage_only, no_bytes
from .graph_watch import GraphWatch
from .runner import (
    AuditedRunner,
    follow_transfers,
    nothing_to_audit,
    on_all_ranks,
    say_active,
    say_without_bytes,
    shared_key,
)
from .transfers import WatchedConnector, WatchedConnectorV1

log = get_logger()


def open_device_watch(
    runner: AuditedRunner,
    lacking: str | None,
    lines: int | None,
    mixin: type[WatchedConnector] = WatchedConnectorV1,
) -> GraphWatch | None:
    """Open a ledger over a runner's new caches on a GPU.

    Args:
        runner: the runner.
        lacking: the reason why this runner cannot be watched; None if it can.
        lines: as for ``Watch``.
        mixin: for the class of a KV connector.

    Returns:
        The watch; None if that is impossible on some rank, and then the reason is logged.

    Raises:
        RequiredError: it is impossible, and the user requires the audit.
    """
    facts = config.runner_facts(runner)
    late = last_stage_only(facts.runner, facts.method is not None, facts.last_stage)
    if late is not None:  # the last stage is watched: there, the engine has its audit
        stay_out(late, runner.kvtxn_rank)
        return None
    key = shared_key()
    why, error, watch = lacking, None, None
    try:
        groups, states = audited.row_groups(runner), audited_states.state_groups(runner)
        why = nothing_to_audit(groups, states) or lacking
        if why is None:
            watch = _new_watch(runner, groups, states, lines, key)
    except Exception as failed:
        why, error = f"the ledger cannot be made: {failed}", failed
    watch = on_all_ranks(runner, key, watch, why, error)
    if watch is None:
        return None
    if runner.kvtxn_settings.audit == "bytes":
        _compare_bytes(runner, watch, facts)
    follow_transfers(runner, watch, mixin)
    try:
        _follow_copies(runner, watch)
        watch.warm_up()
    except Exception as failed:
        watch.stop(failed)
    say_active(runner, watch)
    return watch


def _follow_copies(runner: AuditedRunner, watch: GraphWatch) -> None:
    """Let a watch follow the states that a runner copies between blocks."""
    watch.kept_states = audited_states.block_sizes(runner, watch.states)
    if watch.kept_states and not carried_states.lacks_context(runner):
        held = audited_states.holds_states(runner)
        undo = carried_states.tell_copies(runner, watch.states, partial(_carry, runner), held=held)
        runner.kvtxn_undo.callback(undo)


def _carry(runner: AuditedRunner, copies: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Tell a runner's watch which states are copied."""
    runner.kvtxn_tell(lambda watch: watch.ledger.carry(copies))


def _new_watch(
    runner: AuditedRunner,
    groups: Mapping[str, RowGroup],
    states: Mapping[str, StateGroup],
    lines: int | None,
    key: Key | None,
) -> GraphWatch:
    """Make a watch over a runner's groups of rows, and of states."""
    wanted = runner.kvtxn_settings
    watch = GraphWatch(
        groups,
        audited.room(runner),
        runner.kvtxn_rank,
        wanted.on_violation,
        device=audited_v2.runner_device(runner),
        drafts=audited.most_drafts(runner),
        states=states,
        lines=lines,
        record=wanted.record,
        key=key,
    )
    watch.found.log_tokens = wanted.log_tokens
    return watch


def _compare_bytes(runner: AuditedRunner, watch: GraphWatch, facts: EngineFacts) -> None:
    """Let a watch compare the bytes of rows and states, too; if that is impossible, log why.

    Nothing is poisoned unless the user asks for it: not every attention of a GPU skips masked rows.

    Raises:
        RequiredError: it is impossible, and the user requires the audit.
    """
    from ..gpu.runner import layer_refs

    error, missing = None, {*watch.groups, *watch.states}
    try:
        layers, loaded = attention_layers.target_layers(runner)
        why = no_bytes(str(loaded.attention), facts.kv_cache_dtype) if watch.groups else None
        if why is None:
            drafters = attention_layers.rows_of_drafters(runner)
            watched = [layer for layer in (*layers, *drafters) if layer.group in watch.groups]
            refs = layer_refs(watched, facts.kv_cache_dtype)
            refs += audited_states.state_refs(runner, watch.states)
            watch.drafts_late = bool(drafters)
            watch.scrub = _new_scrub(runner, watch, refs)
            missing -= {ref.group for ref in refs}
            named = ", ".join(sorted(missing))
            why = f"no layer of {named} has rows or states that can be addressed"
    except Exception as refused:
        why, error, watch.scrub = repr(refused), refused, None
    if missing:
        say_without_bytes(runner, why, error)


def _new_scrub(runner: AuditedRunner, watch: GraphWatch, refs: list[LayerRef]) -> Scrub:
    """Make the scrub of a watch; it poisons what is dead if the user asks for that.

    A drafter's own rows are not dead where the target's are, so engines that have such are left as
    they are; and so are states that the prefix cache keeps, and states without drafts.
    """
    wanted = runner.kvtxn_settings
    poisoned: list[str] = []
    windows: dict[str, Window] = {}
    if wanted.poison and not watch.drafts_late:
        poisoned = sorted({ref.group for ref in refs} - {*watch.states})
        if audited.most_drafts(runner) and not aligned_states.is_aligned(runner):
            recurrent = [ref for ref in refs if ref.group in watch.states]
            windows = audited_states.past_windows(runner, recurrent)
            others = {ref.group for ref in recurrent if ref.name not in windows}
            poisoned += sorted({*watch.states} - others)
    if wanted.poison:
        log.info("kvtxn.audit_poisons", rank=runner.kvtxn_rank, groups=poisoned)
    return Scrub(watch.ledger, refs, every=wanted.audit_every, poison=poisoned, windows=windows)
