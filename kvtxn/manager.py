"""``TransactionManager``: the layers, the executor, and one window at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from types import MappingProxyType

import torch
from torch import Tensor

from . import registry
from .acceptance import Acceptance
from .captured import CapturedRows
from .config import TxnConfig
from .eager import outside_graphs
from .errors import ConfigError, WindowStateError
from .executor import SampledIds, Txn, as_counts
from .hooks import Callback, Hook, Hooks
from .layers import Kind, LayerRef
from .layout import Lengths, RowLayout
from .log import debugging, get_logger
from .metrics import Metrics
from .resolution import by_name, choose_policy, limits_of
from .slots import SlotMappings, SlotRules, Slots
from .staging import Stager
from .states import WindowState
from .tree import KnownParents, Parents, build_layout, known_tree
from .window import Window
from .window_life import WindowLife, WrittenBy

log = get_logger()

_active: ContextVar[TransactionManager | None] = ContextVar("kvtxn_active_manager", default=None)


class TransactionManager:
    """Opens windows over a fixed set of layers. Not thread-safe; one per model runner.

    Args:
        layers: every layer that a window covers, on one device, with distinct names.
        config: see ``TxnConfig``; the default chooses everything.

    Attributes:
        layers: the layers by name.
        groups: slots in the smallest cache of each group.
        kinds: what the slots of each group are.
        policy: the resolved policy; ``policy_reason`` says why "auto" took it.
        executor: who moves the bytes.
        metrics: the counters; see ``snapshot``.
        acceptance: turns token ids into accepted counts, in the configured mode.
        hooks: what ``on_commit`` and ``on_abort`` registered.

    Raises:
        LayerError: no layers, equal names, mixed devices, block sizes or kinds that differ within
            a group, or two layers of a group over the same memory.
        BackendUnavailableError: the backend asked for cannot run here, not this policy, or not
            with layers of these kinds.
    """

    def __init__(self, layers: Iterable[LayerRef], config: TxnConfig | None = None) -> None:
        self.config = config if config is not None else TxnConfig()
        if not isinstance(self.config, TxnConfig):
            raise ConfigError(
                "TransactionManager", "config is not a TxnConfig", got=type(config).__name__
            )
        self.layers: Mapping[str, LayerRef] = MappingProxyType(by_name(layers))
        refs = tuple(self.layers.values())
        #: Layers that a new window waits for; copied, which is quicker than made from ``layers``.
        self.unstaged: dict[str, None] = dict.fromkeys(self.layers)
        self.device = refs[0].device
        self.groups: Mapping[str, int] = MappingProxyType(limits_of(refs))
        self.kinds: Mapping[str, Kind] = MappingProxyType({ref.group: ref.kind for ref in refs})
        kinds = frozenset(kind.name for kind in self.kinds.values())
        backend = registry.resolve(self.config.backend, self.device, kinds)
        self.policy, self.policy_reason = choose_policy(
            self.config.policy,
            backend.capabilities,
            kinds,
            latent=any(ref.is_latent for ref in refs),
        )
        with torch.inference_mode(False):  # its buffers outlive the mode they are made in
            self.executor = registry.build(backend, refs, self.config)
        self.metrics = Metrics.build(self.policy, refs, self.device)
        self._refs, self._counters = refs, self.metrics.rows[0]
        self.acceptance = Acceptance(self.config.acceptance, self.device)
        self.hooks = Hooks()
        self.stager = Stager(self.config, deferred=self.policy == "deferred")
        # A commit that can fail after it did something is undone from what was there before.
        self.may_stop_halfway = self.config.debug or not backend.capabilities.atomic
        self.needs_guard = self.may_stop_halfway and (
            self.config.debug or self.config.on_error == "raise"
        )
        self._slot_rules = SlotRules(
            limits=self.groups,
            kinds=self.kinds,
            device=self.device,
            max_rows=self.config.max_rows,
            check_range=not self.executor.capabilities.checks_range,
            may_share=self.policy != "undo",
        )
        self._layout = lru_cache(maxsize=256)(partial(build_layout, device=self.device))
        self._open: Window | None = None
        self._opened = 0
        log.info(
            "manager.ready",
            layers=len(refs),
            groups=len(self.groups),
            device=str(self.device),
            backend=backend.name,
            policy=self.policy,
            why=self.policy_reason,
        )

    def __repr__(self) -> str:
        return (
            f"<TransactionManager {len(self.layers)} layers on {self.device}, "
            f"policy {self.policy}, backend {self.executor.name}>"
        )

    @property
    def current(self) -> Window | None:
        """The window that is open, if any."""
        return self._open

    def window(
        self,
        draft_len: Lengths,
        slots: Slots = None,
        settled: Lengths = 1,
        *,
        tree: Parents | None = None,
        written_by: WrittenBy = "window",
        captured: CapturedRows | None = None,
    ) -> Window:
        """Begin a window.

        Args:
            draft_len: draft rows per request: an int for all (the number of slots then says
                how many requests there are), or one int per request.
            slots: int ``[num_rows]``, -1 is padding; or one such tensor per group; may be
                left out and given with the first ``stage`` of each group. Copied. For a group
                of recurrent layers ``[num_requests]``, the slot of each request's state.
            settled: rows per request that come before its drafts and are known good.
            tree: the parent of each draft row, as the index of an earlier draft row of the same
                request, or -1 where it continues the settled rows: one sequence for all
                requests alike, or one per request. ``commit`` then takes a path.
            written_by: ``"caller"`` where other code writes the rows through by itself
                between begin and commit (``undo`` and ``direct`` only); there is no staging
                then, and all slots have to be given here.
            captured: the rows of a captured forward that was just replayed (``deferred`` only):
                the window is STAGED at once. Settled rows are written now. Slots on the device
                are read where they are.

        Raises:
            WindowStateError: another window is open.
            SlotMappingError: lengths and slots do not fit together.
            CapacityError: more rows than ``max_rows``, or, under ``undo``, than a ring has slots.
            TreeError: the tree is malformed, or does not fit ``draft_len``.
            BackendUnavailableError: the executor cannot do trees.
            LayerError: captured rows do not fit.
            ConfigError: ``written_by`` or ``captured`` does not go with the policy.
        """
        if torch.compiler.is_compiling():
            return outside_graphs(TransactionManager.window)(
                self,
                draft_len,
                slots,
                settled,
                tree=tree,
                written_by=written_by,
                captured=captured,
            )
        if self._open is not None:
            raise _still_open(self._open)
        self._check_rows(written_by, captured)
        parents = None
        if tree is not None:
            rows = "captured" if captured is not None else written_by
            parents = known_tree(tree, draft_len, self.executor, rows)
        standing = None
        if captured is None:
            mappings = self.mappings(draft_len, settled, self.executor.own_slots, parents)
        else:
            standing, mappings = captured.standing(self, draft_len, slots, settled)
        self._open = window = Window(self, self._opened, mappings, written_by)
        try:
            if standing is None:
                window._begin(slots)
            else:
                window._begin_staged(standing)
        except BaseException:
            self._open = None
            raise
        self._opened += 1
        if debugging():
            log.debug(
                "window.begin", window=window.number, rows=window.num_rows, policy=self.policy
            )
        return window

    def _check_rows(self, written_by: object, captured: object) -> None:
        """Refuse, with a ConfigError, ways to bring rows that do not exist or fit the policy."""
        known = isinstance(written_by, str) and written_by in ("window", "caller")
        if not known or (written_by == "caller" and self.policy == "deferred"):
            raise ConfigError(
                "window",
                f"written_by={written_by!r} does not go with policy {self.policy!r}",
                expected="'window', or 'caller' under undo or direct",
                got=repr(written_by),
                hint="stage the rows, or choose another policy",
            )
        if captured is not None and not isinstance(captured, CapturedRows):
            raise ConfigError(
                "window",
                "captured is not a CapturedRows",
                expected="CapturedRows, or None",
                got=type(captured).__name__,
                hint="stage the rows into a CapturedRows while the forward is captured",
            )

    @contextmanager
    def activate(self) -> Iterator[TransactionManager]:
        """Make this the manager that ``kv_window`` uses, in this context."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)

    def on_commit(self, callback: Callback) -> Hook:
        """Call ``callback`` with an ``EndedWindow`` after each commit; ``remove()`` ends it.

        It is called on the committing thread once the commit's work is enqueued: what it
        enqueues on that stream sees the accepted rows, and no rejected one. A window that
        fell back to direct writes is told of likewise; one that FAILED is not. Inside a
        CUDA-graph capture it is called once, and what it enqueues is captured.

        A hook that raises changes neither bytes nor label, and the other hooks are called:
        ``on_error="fallback"`` logs and counts it, ``"raise"`` lets the first error surface
        from ``commit`` when everything is done.

        Raises:
            ConfigError: not callable, or registered already.
        """
        return self.hooks.add("on_commit", callback)

    def on_abort(self, callback: Callback) -> Hook:
        """Call ``callback`` after each abort, explicit or not; else as ``on_commit``.

        No draft row is accepted then. A window that ends before it has any slots is not told.
        """
        return self.hooks.add("on_abort", callback)

    def bypass(self, reason: str) -> None:
        """Count a step that could have had a window but, for ``reason``, has none; say it once."""
        label = _label(reason)
        self.metrics.bypassed[label] += 1
        if self.metrics.bypassed[label] == 1:
            log.info("window.bypassed", reason=label, says="its rows are written and left as ever")

    def snapshot(self) -> dict[str, float]:
        """All counters by Prometheus name. Waits for the device; never call it in a step."""
        return self.metrics.snapshot()

    # -- for windows --------------------------------------------------------------

    def mappings(
        self,
        draft_len: Lengths,
        settled: Lengths,
        keep: Callable[[str, Tensor], Tensor],
        parents: KnownParents | None = None,
    ) -> SlotMappings:
        """The slots of a new window, none given yet; ``keep`` makes its own copy of a mapping."""
        return SlotMappings(
            self._slot_rules,
            draft_len,
            settled,
            lambda *lengths: self._layout(*lengths, parents),
            keep,
        )

    def new_txn(self, layout: RowLayout) -> Txn:
        """The executor's side of a new window."""
        txn = Txn(self.policy, self._refs, layout, self._counters)
        self.stager.begin(layout.num_rows, holds=txn.holds_rows)
        return txn

    def note_fallback(self, window: WindowLife | None, operation: str, error: Exception) -> None:
        """Count a fallback; say it once per reason, then at debug level.

        Without a window: one that should have begun, and did not.
        """
        label = _label(operation)
        self.metrics.fallbacks[label] += 1
        say = log.warning if self.metrics.fallbacks[label] == 1 else log.debug
        number = None if window is None else window.number
        say("window.fell_back", window=number, operation=operation, error=_shown(error))

    def note_hook_error(self, window: WindowLife, moment: str, error: Exception) -> None:
        """Count a hook that raised; say it once per moment, then at debug level."""
        self.metrics.hook_errors[moment] += 1
        say = log.warning if self.metrics.hook_errors[moment] == 1 else log.debug
        say("hook.failed", window=window.number, hook=moment, error=_shown(error))

    def close(self, window: WindowLife, accepted: object) -> None:
        """A window reached its final state."""
        self.metrics.windows[window.state.value] += 1
        self.stager.reset()
        if self._open is window:
            self._open = None
        if debugging():
            log.debug(
                "window.end",
                window=window.number,
                state=window.state.value,
                accepted=_shown_counts(accepted),
                saved=self._saved(window),
            )

    def _saved(self, window: WindowLife) -> int:
        """Draft rows that were never written. Waits for the device: for debug events only."""
        txn = window._txn
        if txn is None or txn.policy != "deferred":
            return 0
        accepted = window._accepted
        drafts = sum(txn.layout.draft_len)
        if window.state is not WindowState.COMMITTED or accepted is None:
            return drafts if window.state is WindowState.ABORTED else 0
        return drafts - int(txn.layout.kept(as_counts(accepted)).sum())


def _still_open(window: Window) -> WindowStateError:
    """The error for a second window beside one that is not over."""
    state = window.state
    return WindowStateError(
        "window",
        f"window {window.number} is still {state.name}",
        state=state.name,
        hint="its hooks are still to be called: begin the next one after commit or abort returned"
        if state.is_final
        else "commit it or call manager.current.abort(); one window at a time",
    )


def _label(reason: str) -> str:
    """A reason as part of a Prometheus name."""
    return re.sub(r"[^a-zA-Z0-9_]+", "_", str(reason)) or "unnamed"


def _shown_counts(accepted: object) -> object:
    if isinstance(accepted, (Tensor, SampledIds)):
        return as_counts(accepted).tolist()
    return accepted


def _shown(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:  # an error that cannot be shown must not stop the recovery
        return type(error).__name__


def kv_window(
    draft_len: Lengths,
    slots: Slots = None,
    settled: Lengths = 1,
    *,
    tree: Parents | None = None,
    written_by: WrittenBy = "window",
    captured: CapturedRows | None = None,
) -> Window:
    """``TransactionManager.window`` of the active manager.

    Raises:
        WindowStateError: no manager is active in this context.
    """
    manager = _active.get()
    if manager is None:
        raise WindowStateError(
            "kv_window",
            "no manager is active",
            hint="wrap the call in `with manager.activate():`",
        )
    return manager.window(
        draft_len, slots, settled, tree=tree, written_by=written_by, captured=captured
    )
