"""A ledger over a runner's caches: opening it, and ending each step of it.

``open_watch`` opens one on a CPU, ``opening`` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from contextlib import ExitStack, suppress
from typing import Any, Protocol, TypeVar

from ....audit import Key, Scrub
from ....config import TxnConfig
from ....log import get_logger
from ..attach import HookedRunner, stay_out
from ..cpu import cache_layout
from ..internals import (
    Foreign,
    audited,
    audited_states,
    ranks,
    scheduling,
    workers,
)
from ..internals import layers as attention_layers
from ..internals.protocols.runners import BeforeRunner
from ..settings import PluginSettings
from .found_violations import AuditError
from .transfers import WatchedConnector, WatchedConnectorV1, watch_transfers
from .watch import Watch

log = get_logger()

Watched = TypeVar("Watched", bound=Watch)


class AuditedRunner(BeforeRunner):
    """A mixin of vLLM's runners on a GPU that keeps a watch for as long as the KV cache lives.

    Attributes:
        kvtxn_audit: the watch, once the KV cache exists; None where there is nothing to watch.
        kvtxn_settings: the user's settings.
        kvtxn_rank: the worker's rank.
        kvtxn_required: the user wants no engine without kvtxn.
        kvtxn_undo: undoes the hooks of the present steps.
        kvtxn_unhook: undoes the hooks around the runner itself.
    """

    kvtxn: Any = None
    kvtxn_audit: Any = None
    kvtxn_settings: PluginSettings
    kvtxn_config: TxnConfig
    kvtxn_rank: int = 0
    kvtxn_required: bool = False
    kvtxn_on_trial: bool = False
    kvtxn_announce: Callable[[], None] | None = None
    kvtxn_undo: ExitStack
    kvtxn_unhook: ExitStack

    def kvtxn_release(self) -> None:
        """Stop watching: the runner is about to be unhooked."""
        self.kvtxn_audit = None
        getattr(super(), "kvtxn_release", _nothing)()

    def kvtxn_tell(self, tell: Callable[[Watch], None]) -> None:
        """Tell the watch something; an error of the audit's own ends the audit, not the engine."""
        if self.kvtxn_audit is not None:
            self.kvtxn_audit.hear(tell)

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **others: Any
    ) -> None:
        """Open a new ledger for new caches; a profiling run's caches get none."""
        self.kvtxn_audit = None
        self.kvtxn_undo.close()
        super().initialize_kv_cache(kv_cache_config, is_profiling, **others)  # type: ignore[misc]
        if not is_profiling:
            self.kvtxn_audit = join_stages(self, self.kvtxn_open_watch())

    def kvtxn_open_watch(self) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        raise NotImplementedError

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """End the step of an engine that samples nothing: its output is what the forward gave."""
        if audited.samples(self):
            return super().execute_model(*args, **kwargs)  # type: ignore[misc]
        return self.kvtxn_last_part(super().execute_model, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End the step: the drafter has written its rows by then."""
        return self.kvtxn_last_part(super().sample_tokens, grammar_output)  # type: ignore[misc]

    def kvtxn_last_part(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the last part of a step, and end the step of the audit, however the part ends.

        Raises:
            AuditError: see ``end_step``.
        """
        try:
            output = run(*args, **kwargs)
        except BaseException:
            fail_step(self)
            raise
        end_step(self, output)
        return output


class WatchedRunner(HookedRunner, Protocol):
    """A hooked runner that tells a watch of its steps."""

    def kvtxn_tell(self, tell: Callable[[Watch], None]) -> None:
        """Tell the watch something; an error of the audit's own ends the audit, not the engine."""


def end_step(runner: WatchedRunner, output: Foreign) -> None:
    """End a step; adds to its output the requests that read wrong rows, if they are contained.

    Raises:
        AuditError: a wrong row was read, and the user set ``on_violation`` to "raise".
    """
    watch = runner.kvtxn_audit
    if watch is None:
        return
    if watch.scrub is not None:
        runner.kvtxn_tell(Watch.ended)
    wrong = watch.end_step()
    if wrong is not None:
        scheduling.mark(output, wrong)


def fail_step(runner: WatchedRunner) -> None:
    """End a step whose last part raised; that error wins over what the audit finds."""
    watch = runner.kvtxn_audit
    if watch is not None:
        runner.kvtxn_tell(_sampling_failed)
        with suppress(AuditError):
            watch.end_step()


def take_back(watch: Watch) -> None:
    """Tell a watch that the forward has failed."""
    watch.take_back()


def _sampling_failed(watch: Watch) -> None:
    """Tell a watch that what follows the forward has failed; the forward's rows are there.

    But a drafter that has rows of its own may not have written them, and states may not have been
    moved to where the next step looks for them.
    """
    if watch.drafts_late or watch.states:
        watch.take_back()


def _compare_bytes(runner: HookedRunner, watch: Watch) -> None:
    """Let a watch compare the bytes of rows and states, too; if that is impossible, log why.

    Nothing is poisoned on a CPU: its attention multiplies masked rows by zero, and a NaN comes
    through that.

    Raises:
        RequiredError: it is impossible, and the user requires the audit.
    """
    try:
        layers, facts = attention_layers.target_layers(runner)
        drafters = attention_layers.rows_of_drafters(runner)
        watched = [layer for layer in (*layers, *drafters) if layer.group in watch.groups]
        refs = cache_layout.layer_refs(watched, facts.kv_cache_dtype)
        refs += audited_states.state_refs(runner, watch.states)
        watch.scrub = Scrub(watch.ledger, refs, every=runner.kvtxn_settings.audit_every)
        watch.drafts_late = bool(drafters)
        missing = {*watch.groups, *watch.states} - {ref.group for ref in refs}
        why = f"no layer of {', '.join(sorted(missing))} has rows that can be addressed"
        error: Exception | None = None
    except Exception as refused:
        missing, why, error, watch.scrub = {*watch.groups}, str(refused), refused, None
    if missing:
        say_without_bytes(runner, why, error)


def say_without_bytes(runner: HookedRunner, why: str, error: Exception | None) -> None:
    """Log that the bytes of some rows or states are not compared, and why.

    Raises:
        RequiredError: the user requires the audit.
    """
    if runner.kvtxn_required:
        stay_out(why, runner.kvtxn_rank, required=True, error=error)
    effect = "digests are compared, and no bytes"
    log.warning("kvtxn.audit_without_bytes", rank=runner.kvtxn_rank, why=why, effect=effect)


def shared_key() -> Key | None:
    """Return the key that this rank shares with its peers, who call this, too; None without any."""
    return ranks.from_first(Key.new()) if ranks.number_of_ranks() > 1 else None


def on_all_ranks(
    runner: HookedRunner,
    key: Key | None,
    watch: Watched | None,
    why: str | None,
    error: Exception | None,
) -> Watched | None:
    """Return a watch if each rank has one, else None, and log why.

    Ranks compare what they wrote: a rank that is watched would wait for one that is not.

    Args:
        runner: the runner.
        key: as ``shared_key`` returned it; the peers call this, too.
        watch: this rank's watch; None if it cannot be watched.
        why: the reason for that.
        error: the error that was met.

    Raises:
        RequiredError: a rank has none, and the user requires the audit.
    """
    if key is not None and not all(ranks.of_all(watch is not None)):
        why, watch = why or "another rank cannot be watched", None
    if watch is None:
        stay_out(str(why), runner.kvtxn_rank, required=runner.kvtxn_required, error=error)
    elif key is not None:
        watch.asks_peers = ranks.are_asked_together(runner)
    return watch


def join_stages(runner: HookedRunner, watch: Watched | None) -> Watched | None:
    """Let the ranks of all pipeline stages stop together; every rank must call this.

    vLLM awaits the answer of the last stage, so nobody would hear a rank of another one.
    """
    raises = runner.kvtxn_settings.on_violation == "raise"
    if raises and ranks.number_of_stages() > 1 and ranks.on_all_stages(watch is not None):
        assert watch is not None
        watch.join_stages()
    return watch


def say_active(runner: HookedRunner, watch: Watch) -> None:
    """Log that a worker is watched, and which of its KV-cache groups are not."""
    rank = runner.kvtxn_rank
    watch.left_out = audited.groups_left_out(runner, [*watch.groups, *watch.states])
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


def _nothing() -> None:
    """Do nothing."""


def open_watch(runner: HookedRunner) -> Watch | None:
    """Open a ledger over a runner's new caches.

    Returns:
        The watch; None if that is impossible on some rank, and then the reason is logged.

    Raises:
        RequiredError: it is impossible, and the user requires the audit.
    """
    key = shared_key()
    why, error, watch = None, None, None
    try:
        groups, states = audited.row_groups(runner), audited_states.state_groups(runner)
        why = nothing_to_audit(groups, states)
        if why is None:
            room, wanted = audited.room(runner), runner.kvtxn_settings
            watch = Watch(
                *(groups, room, runner.kvtxn_rank, wanted.on_violation),
                states=states,
                record=wanted.record,
                key=key,
            )
            watch.found.log_tokens = wanted.log_tokens
    except Exception as failed:
        why, error = f"the ledger cannot be made: {failed}", failed
    watch = on_all_ranks(runner, key, watch, why, error)
    if watch is None:
        return None
    if runner.kvtxn_settings.audit == "bytes":
        _compare_bytes(runner, watch)
    follow_transfers(runner, watch)
    say_active(runner, watch)
    return watch


def nothing_to_audit(groups: Sized, states: Sized) -> str | None:
    """Say that there is nothing to audit; None if there is."""
    if groups or states:
        return None
    return "there is nothing to audit: no layer of this model keeps rows or states that are known"


def follow_transfers(
    runner: HookedRunner, watch: Watch, mixin: type[WatchedConnector] = WatchedConnectorV1
) -> None:
    """Let a watch follow the rows of a KV connector; if that fails, the audit ends.

    Without it, rows that the connector brings would be taken for wrong ones.
    """
    try:
        watch.transfers = watch_transfers(runner, watch.ledger, watch.groups, watch.stop, mixin)
    except Exception as error:
        watch.stop(error)
