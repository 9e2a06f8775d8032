"""``TransactionManager``: the layers, the executor, and one window at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import NoReturn

import attrs
import torch
from torch import Tensor

from . import registry
from .acceptance import Acceptance
from .captured_windows import CapturedWindows
from .compile_guard import never_compiled
from .config import TxnConfig
from .context import WindowContext
from .draft_tree import Parents, as_parents, check_fit, per_request
from .errors import BackendUnavailableError, ConfigError, ManagerCopyError, WindowStateError
from .executor import Executor
from .hooks import Callback, Hook, Hooks
from .layer_set import CacheMemory, by_name, limits_of
from .layers import LayerRef, SlotKind
from .layout import Lengths
from .log import DEBUG, get_logger, shows
from .metrics import Metrics, as_label
from .policy_choice import choose_policy
from .row_io import LayerRows
from .slots import SlotMappings, SlotRules, Slots
from .staging import Stager
from .state_supplier import StateSupplier
from .turn import Turn
from .window import Window, WrittenBy

log = get_logger()

_active: ContextVar[TransactionManager | None] = ContextVar("kvtxn_active_manager", default=None)


class TransactionManager:
    """Opens windows over a fixed set of layers. Not thread-safe; one per model runner.

    Args:
        layers: every layer that a window covers, on one device, with distinct names.
        config: see ``TxnConfig``; by default policy and backend are chosen for this machine.

    Attributes:
        layers: the layers by name.
        groups: slots in the smallest cache of each group.
        kinds: the kind of the slots of each group.
        policy: the resolved policy; ``policy_reason`` says why "auto" chose it.
        executor: the object that moves the bytes.
        metrics: the counters; see ``snapshot``.
        acceptance: turns token ids into accepted counts, in the configured mode.
        hooks: the callbacks that ``on_commit`` and ``on_abort`` registered.
        context: the parts of the manager that windows use.

    Raises:
        LayerError: no layers, equal names, mixed devices, block sizes or kinds that differ within
            a group, two layers of a group over the same memory, or a cache that moved since its
            layer was described.
        BackendUnavailableError: the named backend cannot run here, cannot carry out the policy, or
            cannot hold layers of these kinds.
    """

    def __init__(self, layers: Iterable[LayerRef], config: TxnConfig | None = None) -> None:
        self.config = config if config is not None else TxnConfig()
        if not isinstance(self.config, TxnConfig):
            raise ConfigError(
                "TransactionManager", "config is not a TxnConfig", got=type(config).__name__
            )
        self.layers: Mapping[str, LayerRef] = MappingProxyType(by_name(layers))
        self._turn = Turn()
        refs = tuple(self.layers.values())
        self._memory = CacheMemory(refs)
        self._memory.check("TransactionManager")
        self.device = refs[0].device
        self.groups: Mapping[str, int] = MappingProxyType(limits_of(refs))
        self.kinds: Mapping[str, SlotKind] = MappingProxyType({ref.group: ref.kind for ref in refs})
        kinds = frozenset[str]().union(*(ref.needs for ref in refs))
        backend = registry.resolve(self.config.backend, self.device, kinds)
        self.policy: str
        self.policy_reason: str
        self.policy, self.policy_reason = choose_policy(
            self.config.policy,
            backend.capabilities,
            kinds,
            latent=any(ref.is_latent for ref in refs),
        )
        self._backend = backend
        self.executor = self._new_executor()
        self.metrics = Metrics.build(self.policy, refs, self.device)
        self.acceptance = Acceptance(self.config.acceptance, self.device)
        self.hooks = Hooks()
        selecting = tuple(ref.name for ref in refs if ref.states and not ref.replay)
        # A commit that can fail after it did something is undone from a copy made before it.
        several_calls = self.config.debug or bool(selecting)
        may_stop_halfway = several_calls or not backend.capabilities.atomic
        undone = self.config.debug or self.config.on_error == "raise"
        self.context = WindowContext(
            executor=self.executor,
            stager=self._new_stager(),
            metrics=self.metrics,
            hooks=self.hooks,
            acceptance=self.acceptance,
            layers=self.layers,
            refs=refs,
            groups=self.groups,
            kinds=self.kinds,
            slot_rules=SlotRules(
                limits=self.groups,
                kinds=self.kinds,
                replayed={ref.group for ref in refs if ref.replay}
                - {ref.group for ref in refs if not ref.replay},
                device=self.device,
                max_rows=self.config.max_rows,
                check_range=not self.executor.capabilities.checks_range,
                may_share=self.policy != "undo",
            ),
            device=self.device,
            policy=self.policy,
            on_error=self.config.on_error,
            debug=self.config.debug,
            may_stop_halfway=may_stop_halfway,
            reads_back=may_stop_halfway and undone,
            replays="replayed" in kinds,
            selecting=selecting,
            on_end=self._turn.end,  # not a method of the manager, which would be a reference cycle
        )
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

    def __reduce__(self) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``.

        Raises:
            ManagerCopyError: always.
        """
        raise ManagerCopyError(
            "TransactionManager",
            "a manager can be neither copied nor pickled: its windows write the caches that it was "
            "made with, and no two managers may write the same",
            hint="copy the caches, and make new LayerRef objects and a new TransactionManager of "
            "the copies; in an object of your own, do so in __deepcopy__",
        )

    @property
    def current(self) -> Window | None:
        """The window that is open or calls its hooks; None without one."""
        return self._turn.current()

    @never_compiled
    def window(
        self,
        draft_len: Lengths,
        slots: Slots = None,
        settled: Lengths = 1,
        *,
        tree: Parents | None = None,
        written_by: WrittenBy = "window",
    ) -> Window:
        """Begin a window.

        If the executor fails in it, the window is DIRECT from the start, or the error is raised:
        see ``TxnConfig.on_error``.

        Args:
            draft_len: draft rows per request: an int for all (the number of requests then
                follows from the number of slots), or one int per request.
            slots: int ``[num_rows]``, -1 is padding; or one such tensor per group; may be
                left out and given with the first ``stage`` of each group. Copied. For a group
                of recurrent layers ``[num_requests]``, the slot of each request's state; or
                ``StateSlots``, where replayed states are kept at block boundaries.
            settled: rows per request that come before its drafts and are known good.
            tree: the parent of each draft row, as the index of an earlier draft row of the same
                request, or -1 if the row continues the settled rows: one sequence for all
                requests alike, or one per request. ``commit`` then takes a path.
            written_by: ``"caller"`` if other code writes the rows through by itself
                between begin and commit (``undo`` and ``direct`` only); no layer is staged
                then, and all slots have to be given here.

        Raises:
            WindowStateError: another window is open.
            LayerError: a cache moved since its layer was described, or was resized since the
                manager was made.
            SlotMappingError: lengths and slots do not fit together.
            CapacityError: more rows than ``max_rows``; or, under ``undo``, a request with more rows
                that have slots than its ring has.
            TreeError: the tree is malformed, or does not fit ``draft_len``.
            BackendUnavailableError: the executor cannot do trees.
            ConfigError: ``written_by`` does not go with the policy.
        """
        self._turn.check_free()
        self._memory.check("window")
        self._check_writer(written_by)
        parents = None
        if tree is not None:
            self._check_trees(written_by)
            parents = as_parents(tree)
            if isinstance(draft_len, int):  # else the layout compares them
                forest = per_request(parents, 1)
                check_fit(forest, [draft_len] * len(forest))
        own = self.executor.own_slots
        mappings = SlotMappings(self.context.slot_rules, draft_len, settled, parents, own)
        window = Window(self.context, self._turn.begun, mappings, written_by)
        self._turn.window = window
        try:
            window._begin(slots)
            if shows(DEBUG):
                log.debug(
                    "window.begin", window=window.number, rows=window.num_rows, policy=self.policy
                )
        except BaseException:  # the caller gets no window that it could end
            self._turn.end()
            raise
        self._turn.begun += 1
        return window

    def captured_windows(
        self,
        slots: Tensor,
        rows: LayerRows | None = None,
        position: Tensor | None = None,
        *,
        states: StateSupplier | None = None,
        beside: bool = False,
    ) -> CapturedWindows:
        """Make the windows over one captured forward, which all read and write the same tensors.

        Args:
            slots: int64 ``[num_groups, n]`` on the caches' device, groups in the order of
                ``groups``; the engine fills the slots of a step before its window begins, -1 is
                padding. They are read in place; a window that is still open when the next step's
                are there is aborted in its own. One slot per row, or, of recurrent layers, one per
                request.
            rows: by layer name at least ``[max_rows, *row_shape]`` per part of ``LayerRef.kept``,
                any strides: the tensors in which the forward leaves drafts, or, of layers with
                states, all rows; under ``deferred`` alone. ``CapturedRows.rows`` are such tensors.
                None allocates them.
            position: int64, at least ``[max_rows]``: the tensor of marks that the forward reads, if
                it was captured already; None allocates it. All of it becomes -1.
            states: recurrent states, beside the manager's layers, that the engine's own kernels
                advance. Each window commits them before its rows, or with them; such windows end
                by ``commit_sampled``. See ``StateSupplier``.
            beside: let one of these windows be open beside the manager's other windows; among
                themselves they still take turns. ``slots`` has to be memory of their own, and two
                windows that are open at one time must have no slot in common.

        Raises:
            SlotMappingError: ``slots`` cannot be read in place.
            LayerError: ``rows`` or ``position`` do not fit, or a cache moved. (The window of a step
                does not look again: the captured forward has the caches' addresses as well.)
            ConfigError: ``rows`` are given, and drafts do not wait under the policy; or ``states``
                is no ``StateSupplier``.
            WindowStateError: ``position`` is given while a window is open.
        """
        self._memory.check("captured_windows")
        turn, context = self._turn, self.context
        if states is not None:
            if not isinstance(states, StateSupplier):
                raise ConfigError(
                    "captured_windows",
                    "states cannot be committed",
                    expected="a StateSupplier",
                    got=type(states).__name__,
                    hint="leave states out, or see kvtxn.state_supplier",
                )
            context = attrs.evolve(context, supplier=states)
        if beside:  # slots and rows of a window wait in its executor and its stager
            turn = Turn(beside=turn)
            executor, stager = self._new_executor(), self._new_stager()
            context = attrs.evolve(context, on_end=turn.end, executor=executor, stager=stager)
        return CapturedWindows(context, turn, slots, rows, position, slots_stay=beside)

    def _new_executor(self) -> Executor:
        """Build an executor over the layers."""
        with torch.inference_mode(False):  # its buffers outlive the mode they are made in
            return registry.build(self._backend, tuple(self.layers.values()), self.config)

    def _new_stager(self) -> Stager:
        """Make what takes the rows of a window in."""
        layers = tuple(self.layers.values())
        return Stager(self.config, layers, deferred=self.policy == "deferred")

    def _check_writer(self, written_by: object) -> None:
        """Refuse, with a ConfigError, a ``written_by`` that does not go with the policy."""
        known = isinstance(written_by, str) and written_by in ("window", "caller")
        if not known or (written_by == "caller" and self.policy == "deferred"):
            raise ConfigError(
                "window",
                f"written_by={written_by!r} does not go with policy {self.policy!r}",
                expected="'window', or 'caller' under undo or direct",
                got=repr(written_by),
                hint="stage the rows, or choose another policy",
            )

    def _check_trees(self, written_by: object) -> None:
        """Refuse draft trees if the executor cannot do them, or if rows are not staged.

        Raises:
            BackendUnavailableError: the executor cannot do trees.
            ConfigError: the rows are written by the caller.
        """
        if not self.executor.capabilities.trees:
            raise BackendUnavailableError(
                "window",
                f"the {self.executor.name} executor cannot do draft trees",
                hint="choose another backend, or draft plain sequences",
            )
        if written_by != "window":
            raise ConfigError(
                "window",
                "a draft tree does not go with rows that are written by the caller",
                expected="rows that are staged",
                got=written_by,
                hint="stage the rows: commit moves them, so the window has to hold them",
            )

    @contextmanager
    def activate(self) -> Iterator[TransactionManager]:
        """Make this the manager that ``kv_window`` uses within the ``with`` block."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)

    def on_commit(self, callback: Callback) -> Hook:
        """Call ``callback`` with an ``EndedWindow`` after each commit, until ``remove()``.

        The callback is called on the committing thread once the commit's work is enqueued: work
        that it enqueues on that stream sees the accepted rows, and no rejected one. It is called
        for windows that fell back to direct writes, and not for windows that FAILED. Inside a
        CUDA-graph capture it is called once, and the work that it enqueues is captured.

        A hook that raises changes neither bytes nor state, and the other hooks are called:
        ``on_error="fallback"`` logs and counts the error; under ``"raise"`` the first error
        surfaces from ``commit`` when everything is done.

        Raises:
            ConfigError: ``callback`` cannot be called, or is registered already.
        """
        return self.hooks.add("on_commit", callback)

    def on_abort(self, callback: Callback) -> Hook:
        """Call ``callback`` after each abort, explicit or not; otherwise like ``on_commit``.

        No draft row is accepted then. No hook is called for a window that never had slots.
        """
        return self.hooks.add("on_abort", callback)

    def bypass(self, reason: str) -> None:
        """Count a step that could have had a window and has none; log each reason once."""
        label = as_label(reason)
        self.metrics.bypassed[label] += 1
        if self.metrics.bypassed[label] == 1:
            effect = "no window for this step: all its rows are written and stay, as without kvtxn"
            log.info("window.bypassed", reason=label, effect=effect)

    def snapshot(self) -> dict[str, float]:
        """Return all counters by Prometheus name. Waits for the device; never call it in a step."""
        return self.metrics.snapshot()

    def note_fallback(self, operation: str, error: Exception) -> None:
        """Count a window that could not begin because ``operation`` failed, and log it.

        A warning the first time for an operation, then a debug event.
        """
        self.context.note_fallback(None, operation, error)


def kv_window(
    draft_len: Lengths,
    slots: Slots = None,
    settled: Lengths = 1,
    *,
    tree: Parents | None = None,
    written_by: WrittenBy = "window",
) -> Window:
    """Begin a window of the active manager; see ``TransactionManager.window``.

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
    return manager.window(draft_len, slots, settled, tree=tree, written_by=written_by)
