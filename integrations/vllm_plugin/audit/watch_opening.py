"""Opens the watch of a hooked runner: its memory, its caches, and all that it is to hear of."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from torch import Tensor

from ....audit import Key, Ledger, RowGroup, Scrub, WeightWatch, Window
from ....audit.books import Sizes
from ....layers import LayerRef
from ....log import get_logger
from ...pytest_audit import engines as pytest_audit
from ...serving.ledger.shared_identities import SharedIdentities, read_key, share
from ...serving.ledger.transfers import TransferWatch
from ...serving.ledger.watch import Watch
from ..cpu import cache_layout
from ..policy.settings import PluginSettings
from ..policy.supported import last_stage_only, no_bytes
from ..runners.hooked_runner import HookedRunner, stay_out
from ..seam import (
    aligned_states,
    audited_requests,
    audited_states,
    connectors,
    engine_config,
    ranks,
    workers,
)
from ..seam import layers as attention_layers
from ..seam import weights as engine_weights
from ..seam.engine_protocols import WorkerWrapper
from ..seam.gpu_cache_layout import CachePlan, is_given, planned
from ..seam.gpu_cache_layout import layer_refs as device_refs
from ..seam.hooks import mix_in
from ..seam.request_blocks import RequestBlocks
from ..seam.runner_protocols import Runner
from .watched_connectors import WatchedConnector, WatchedConnectorV1

log = get_logger()

#: The parameters of ``Ledger`` that a watch leaves as they are.
_DEFAULTS: Final = Ledger.__init__.__kwdefaults__ or {}
#: Bytes that Triton's passes of a scrub take, whatever the sizes.
_LISTS: Final = 4 << 20
_NOTHING: Final = (
    "there is nothing to audit: no layer of this model keeps rows or states that are known"
)


def ledger_bytes(plan: CachePlan, blocks: int, lines: int, length: int, *, scrubs: bool) -> int:
    """Return the bytes of a ledger, and with ``scrubs`` of its scrub, over a cache.

    Args:
        plan: the cache.
        blocks: its blocks.
        lines: the requests that the ledger knows at one time.
        length: positions of a request.
        scrubs: bytes are compared, too.
    """
    groups = [
        RowGroup(f"group.{number}", plan.block_size, blocks, pool="blocks")
        for number in range(plan.groups)
    ]
    total = Sizes(lines, length, _DEFAULTS["journal"], _DEFAULTS["capacity"]).num_bytes(groups)
    if scrubs:
        total += Scrub.num_bytes(groups, {groups[0].name: plan.layers}, lines) + _LISTS
    return total


def cache_bytes_left(runner: Runner, settings: PluginSettings, available: int) -> int:
    """Return the bytes of KV cache, in whole blocks, for which the ledger beside it has room, too.

    Args:
        runner: the worker's runner, before its cache is made.
        settings: "bytes" makes the ledger larger.
        available: free bytes, for both.

    Returns:
        ``available`` itself, if the user gives the size of the cache, if the plan for blocks is not
        known, or if the calculation fails, which is logged as a warning.
    """
    try:
        plan = None if is_given(runner) else planned(runner)
        if plan is None:
            return available
        room, scrubs = audited_requests.room(runner), settings.audit == "bytes"
        lines = 2 * room.requests + 9
        fixed = ledger_bytes(plan, 1, lines, room.length, scrubs=scrubs)
        each = ledger_bytes(plan, 2, lines, room.length, scrubs=scrubs) - fixed
        blocks = max(available - fixed, 0) // (plan.block_bytes + each)
        return int(blocks * plan.block_bytes)
    except Exception as error:
        hint = "the ledger may run out of GPU memory: lower gpu_memory_utilization"
        log.warning("kvtxn.audit_memory_not_reserved", why=repr(error), hint=hint)
        return available


def reserve_memory(wrapper: WorkerWrapper, settings: PluginSettings) -> None:
    """Let vLLM size the KV cache without the memory of the ledger.

    Nothing without an audit, or on a runner that kvtxn has not hooked.
    """
    runner = workers.runner_of(wrapper)
    if settings.audit != "off" and hasattr(runner, "kvtxn_unhook"):
        undo = workers.less_cache_memory(wrapper, partial(cache_bytes_left, runner, settings))
        runner.kvtxn_unhook.callback(undo)


def open_watch(
    runner: HookedRunner,
    *,
    on_device: bool = False,
    lacking: str | None = None,
    lines: int | None = None,
    mixin: type[WatchedConnector] = WatchedConnectorV1,
) -> Watch | None:
    """Open a ledger over a runner's new caches; None, and the reason is logged, if a rank cannot.

    The watch follows a connector's transfers, weights and adapters, and compares bytes if the user
    wants that. On a device it is warmed up; if that fails, the audit ends. Pipeline stages that
    cannot be watched beside the last one have none.

    Args:
        runner: the runner.
        on_device: the device runs behind the host.
        lacking: the reason why this runner cannot be watched; None if it can.
        lines: as for ``Watch``.
        mixin: is put before the class of a KV connector, whose transfers it tells.

    Raises:
        RequiredError: it is impossible, and the user requires the audit.
    """
    if on_device:
        facts = engine_config.runner_facts(runner)
        late = last_stage_only(facts.runner, facts.method is not None, facts.last_stage)
        if late is not None:  # the last stage is watched: there, the engine has its audit
            stay_out(late, runner.kvtxn_rank)
            return None
    watch = _watch_of_all_ranks(runner, lacking, lines, on_device=on_device)
    if watch is None:
        return None
    if runner.kvtxn_settings.audit == "bytes":
        _compare_bytes(runner, watch, on_device=on_device)
    follow_transfers(runner, watch, mixin)
    follow_weights(runner, watch)
    follow_adapters(runner, watch)
    if on_device:
        try:
            _follow_copies(runner, watch)
            watch.warm_up()
        except Exception as failed:
            watch.stop(failed)
    say_active(runner, watch)
    return watch


def new_state_reader(runner: HookedRunner, watch: Watch) -> audited_states.DeviceStateReader | None:
    """Make a reader of the states that a watch compares; None if it compares none."""
    if not watch.states:
        return None
    return audited_states.DeviceStateReader(runner, watch.states, watch.ledger.device)


def _follow_copies(runner: HookedRunner, watch: Watch) -> None:
    """Let a watch follow the states that a runner copies for its prefix cache, if it keeps any.

    Sets ``watch.kept_states``. Copies that the host makes are not followed here; see
    ``HostCopies``.
    """
    watch.kept_states = audited_states.block_sizes(runner, watch.states)
    if watch.kept_states and not aligned_states.lacks_context(runner):
        held = audited_states.holds_states(runner)
        undo = aligned_states.tell_copies(runner, watch.states, partial(_carry, runner), held=held)
        runner.kvtxn_undo.callback(undo)


def _carry(runner: HookedRunner, copies: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Record the copies of states in the ledger of a runner's watch, if there is one that watches.

    An error ends the audit and is not raised.

    Args:
        runner: the runner.
        copies: as for ``Ledger.carry``.
    """
    watch = runner.kvtxn_audit
    if watch is not None:
        watch.hear(lambda watch: watch.ledger.carry(copies))


def _watch_of_all_ranks(
    runner: HookedRunner, lacking: str | None, lines: int | None, *, on_device: bool
) -> Watch | None:
    """Make a watch over a runner's groups of rows and states, if every rank can have one.

    Every rank has to call this. If one cannot be watched, or has nothing to watch, none is, and the
    reason is logged.

    Args:
        runner: the runner.
        lacking: the reason why it cannot be watched; None if it can.
        lines: as for ``Watch``.
        on_device: the device runs behind the host.

    Raises:
        RequiredError: it is impossible, and the user requires the audit.
    """
    key, wanted = shared_key(), runner.kvtxn_settings
    shared = read_key(wanted.audit_store, wanted.audit_key_file)
    if key is not None and wanted.audit_key_file is not None:
        shared = ranks.from_first(shared)
    why, error, watch = lacking, None, None
    try:
        groups, states = audited_requests.row_groups(runner), audited_states.state_groups(runner)
        why = lacking if groups or states else _NOTHING
        if why is None:
            watch = Watch(
                *(groups, audited_requests.room(runner), runner.kvtxn_rank, wanted.on_violation),
                states=states,
                record=wanted.record,
                key=key,
                shared_key=shared,
                ranks=ranks,
                device=audited_requests.runner_device(runner) if on_device else "cpu",
                drafts=audited_requests.most_drafts(runner) if on_device else None,
                lines=lines,
                stale=wanted.stale,
            )
            watch.found.log_tokens = wanted.log_tokens
            watch.found.logs_all = pytest_audit.is_wanted()
    except Exception as failed:
        why, error = f"the ledger cannot be made: {failed}", failed
    return on_all_ranks(runner, key, watch, why, error)


def _compare_bytes(runner: HookedRunner, watch: Watch, *, on_device: bool) -> None:
    """Let a watch compare the bytes of rows and states, too; if that is impossible, log why.

    Of groups whose layers cannot be addressed, that is logged as well. Nothing is poisoned unless
    the user asks for it: not every attention of a GPU skips masked rows, and that of a CPU
    multiplies them by zero, which a NaN comes through.

    Raises:
        RequiredError: some bytes cannot be compared, and the user requires the audit.
    """
    error, missing = None, {*watch.groups, *watch.states}
    layer_refs = device_refs if on_device else cache_layout.layer_refs
    try:
        layers, facts = attention_layers.target_layers(runner)
        addressed = not (on_device and watch.groups)
        why = None if addressed else no_bytes(str(facts.attention), facts.kv_cache_dtype)
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


def _new_scrub(runner: HookedRunner, watch: Watch, refs: list[LayerRef]) -> Scrub:
    """Make the scrub of a watch; it poisons what is dead if the user asks for that, and logs where.

    A drafter's own rows are not dead where the target's are, so engines that have such are left as
    they are; and so are states that the prefix cache keeps, and states without drafts.
    """
    wanted = runner.kvtxn_settings
    poisoned: list[str] = []
    windows: dict[str, Window] = {}
    if wanted.poison and not watch.drafts_late:
        poisoned = sorted({ref.group for ref in refs} - {*watch.states})
        if audited_requests.most_drafts(runner) and not aligned_states.is_aligned(runner):
            recurrent = [ref for ref in refs if ref.group in watch.states]
            windows = audited_states.past_windows(runner, recurrent)
            others = {ref.group for ref in recurrent if ref.name not in windows}
            poisoned += sorted({*watch.states} - others)
    if wanted.poison:
        log.info("kvtxn.audit_poisons", rank=runner.kvtxn_rank, groups=poisoned)
    return Scrub(watch.ledger, refs, every=wanted.audit_every, poison=poisoned, windows=windows)


def shared_key() -> Key | None:
    """Return a new key that the ranks of each layer share; None with one rank alone.

    All of the ranks must call this.
    """
    return ranks.from_first(Key.new()) if ranks.number_of_ranks() > 1 else None


def on_all_ranks(
    runner: HookedRunner,
    key: Key | None,
    watch: Watch | None,
    why: str | None,
    error: Exception | None,
) -> Watch | None:
    """Return the watch if each rank has one, else None, and log why.

    Ranks compare what they wrote: a rank that is watched would wait for one that is not. With
    ``key``, every rank must call this.

    Args:
        runner: the worker's runner.
        key: the key that all ranks share; None if ranks do not compare, and each is on its own.
        watch: this rank's; None if it has none.
        why: why it has none.
        error: what was raised, if anything.

    Raises:
        RequiredError: there is none, and the user wants no engine without kvtxn.
    """
    if key is not None and not all(ranks.of_all(watch is not None)):
        why, watch = why or "another rank cannot be watched", None
    if watch is None:
        stay_out(str(why), runner.kvtxn_rank, required=runner.kvtxn_required, error=error)
    elif key is not None:
        watch.asks_peers = ranks.are_asked_together(runner)
    return watch


def join_stages(runner: HookedRunner, watch: Watch | None) -> Watch | None:
    """Let the ranks of all pipeline stages stop together; return ``watch``.

    Every rank must call this. Nothing is done unless ``on_violation`` is "raise" and all stages
    have a watch. vLLM awaits the answer of the last stage, so nobody would hear a rank of another
    one.
    """
    raises = runner.kvtxn_settings.on_violation == "raise"
    if raises and ranks.number_of_stages() > 1 and ranks.on_all_stages(watch is not None):
        assert watch is not None
        watch.join_stages()
    return watch


def follow_transfers(
    runner: HookedRunner, watch: Watch, mixin: type[WatchedConnector] = WatchedConnectorV1
) -> None:
    """Let a watch follow the rows of a KV connector, if there is one; if it fails, the audit ends.

    Without it, rows that the connector brings would be taken for wrong ones. The runner gets
    ``kvtxn_requests``, and ``kvtxn_undo`` unhooks the connector.
    """
    try:
        connector = connectors.connector()
        if connector is None:
            return
        ledger = watch.ledger
        states = [group.name for group in ledger.groups if group.is_state]
        state_sizes = audited_states.block_sizes(runner, states)
        checksums = connectors.BlockBytes(runner, ledger.books.key).checksums
        for name in [*watch.groups, *state_sizes]:  # a kernel is compiled now, and not in a step
            checksums(name, [0])
        requests = runner.kvtxn_requests = RequestBlocks()
        transfers = TransferWatch(
            ledger,
            watch.groups,
            state_sizes,
            partial(connectors.transfers, runner, requests),
            partial(connectors.flushed, runner, requests),
            checksums,
            requests.tables,
            watch.stop,
            _shared_identities(runner, watch),
        )
        runner.kvtxn_undo.callback(mix_in(connector, mixin, kvtxn_transfers=transfers))
        watch.transfers = transfers
    except Exception as error:
        watch.stop(error)


def _shared_identities(runner: HookedRunner, watch: Watch) -> SharedIdentities | None:
    """Open the store of identities that this worker shares with other engines.

    None if the user names no store, or no key is shared. ``kvtxn_undo`` closes it.
    """
    url = runner.kvtxn_settings.audit_store
    if url is None or watch.shared_key is None:
        return None
    number = ranks.number_of_ranks(), ranks.own_number(), ranks.number_of_stages()
    layouts = {
        name: [workers.version(), *number, runner.kvtxn_rank, connectors.block_layout(runner, name)]
        for name in watch.groups
    }

    def weights(drafter: bool) -> int | None:
        known, beside = watch.weights, engine_weights.rotary_positions(runner, drafter=drafter)
        return None if known is None else known.content(beside, drafter=drafter)

    place = f"process {os.getpid()} on {socket.gethostname()}, rank {runner.kvtxn_rank}"
    shared = share(
        watch.ledger, url, layouts, weights, place, names=runner.kvtxn_settings.log_tokens
    )
    runner.kvtxn_undo.callback(shared.close)
    return shared


def say_without_bytes(runner: HookedRunner, why: str, error: Exception | None) -> None:
    """Log a warning that the bytes of some rows or states are not compared, and why.

    Raises:
        RequiredError: the user requires the audit.
    """
    if runner.kvtxn_required:
        stay_out(why, runner.kvtxn_rank, required=True, error=error)
    effect = "digests are compared, and no bytes"
    log.warning("kvtxn.audit_without_bytes", rank=runner.kvtxn_rank, why=why, effect=effect)


def say_active(runner: HookedRunner, watch: Watch) -> None:
    """Log that a worker is watched, and set and warn of its KV-cache groups that are not."""
    rank = runner.kvtxn_rank
    watch.left_out = audited_requests.groups_left_out(runner, [*watch.groups, *watch.states])
    if watch.left_out:
        effect = f"{', '.join(watch.left_out)}: rows or states there are not compared"
        log.warning("kvtxn.audit_partial", rank=rank, effect=effect)
    log.info(
        "kvtxn.audit_active",
        rank=rank,
        groups=len(watch.groups) + len(watch.states),
        bytes=watch.ledger.books.num_bytes,
        vllm=workers.version(),
    )


# -- weights that change ----------------------------------------------------------------------


def follow_weights(runner: HookedRunner, watch: Watch) -> None:
    """Let a watch hear of weights that a runner's models load; if that fails, the audit ends.

    Without it, rows of earlier weights would count as those of the present ones.
    """
    try:
        every = runner.kvtxn_settings.weights_every
        watch.weights = WeightWatch(watch.ledger, engine_weights.parameters(runner), every)
        runner.kvtxn_undo.callback(engine_weights.follow_loads(runner, watch.weights.changed))
    except Exception as error:
        watch.stop(error)


def follow_adapters(runner: HookedRunner, watch: Watch) -> None:
    """Let the ledger hear of LoRA adapters that are loaded; if that fails, the audit ends.

    Without it, an adapter would count as the files that lie there when a request comes.
    """
    try:
        runner.kvtxn_undo.callback(audited_requests.follow_adapters(runner))
    except Exception as error:
        watch.stop(error)


def weights_changed(wrapper: WorkerWrapper, weights: str) -> None:
    """Let a worker's audit begin an epoch with the next step, because weights have changed.

    The worker may be asleep; without an audit nothing happens.

    Args:
        wrapper: the worker.
        weights: as for ``WeightWatch.changed``.
    """
    watch = getattr(workers.runner_of(wrapper), "kvtxn_audit", None)
    if watch is not None and watch.weights is not None:
        watch.weights.changed(weights)


def follow_updates(wrapper: WorkerWrapper) -> Callable[[], None]:
    """Let a worker's audit hear of weights that vLLM updates, or loses in a sleep.

    Returns:
        A function that undoes it.
    """
    return engine_weights.follow_updates(wrapper, partial(weights_changed, wrapper))
