"""Hooks SGLang where the user asks for an audit, and opens it beside each scheduler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from ...errors import KVTxnError
from ...log import get_logger
from ..serving.audit_settings import AuditSettings
from ..serving.given_settings import RequiredError
from ..serving.ledger.violation_log import say_logged_alone
from .metrics import Metrics
from .seam import engine_facts, hook_points
from .seam.protocols import (
    ForwardBatch,
    GenerationBatchResult,
    InternalState,
    ModelRunner,
    NextBatchPlan,
    Req,
    ScheduleBatch,
    Scheduler,
)
from .seam.ranks import TensorRanks
from .settings import read_settings
from .supported import ARGUMENTS, cannot_contain, cannot_watch, left_out
from .watching import Watching

log = get_logger()

_EFFECT: Final = "this engine runs as if kvtxn were not there"
_REST: Final = "the other rows of this engine are watched"


def start(text: str) -> None:
    """Put hooks into SGLang in this process, unless the settings say "off".

    A release that is not as expected gets none, and that is logged as a warning.

    Args:
        text: the settings.

    Raises:
        SystemExit: the settings are not valid, or the release is unknown, and the user wants no
            engine without an audit.
    """
    try:
        settings = read_settings(text)
        if settings.audit == "off":
            return
        wrong = hook_points.moved()
        if not wrong:
            hook_points.hook(Hooks(settings).around())
            return
    except KVTxnError as error:
        raise SystemExit(f"kvtxn: {error}") from error
    release = hook_points.release()
    why = f"SGLang {release} is not as this release of kvtxn knows it: {'; '.join(wrong)}"
    if settings.required:
        raise SystemExit(f"kvtxn: {RequiredError('audit', why)}")
    log.warning("kvtxn.audit_inactive", why=why, effect=_EFFECT)


class Hooks:
    """The functions around SGLang's; all find the audit of this process's scheduler here.

    Args:
        settings: the user's.
    """

    def __init__(self, settings: AuditSettings) -> None:
        self._settings: Final = settings
        #: Why wrong reads cannot be contained; empty if they can, or need not be.
        self._uncontained: Final = (
            hook_points.moved(hook_points.CONTAINING) if settings.on_violation == "contain" else []
        )
        self._scheduler: Scheduler | None = None
        self._watching: Watching | None = None
        self._metrics: Metrics | None = None

    def around(self) -> dict[str, hook_points.Hook]:
        """Return our function by the dotted name of each hook point.

        Points of ``OPTIONAL`` are left out if this release lacks them, those of ``CONTAINING`` that
        are hooked unless wrong reads are wanted contained and can be.
        """
        forward, run_batch, flush, release, _ = hook_points.HOOK_POINTS
        opens, state, weights = hook_points.OPTIONAL
        ours: dict[str, hook_points.Hook] = {
            forward: self.forward, run_batch: self.run_batch, flush: self.flush_cache,
            release: self.release_kv_cache,
        }  # fmt: skip
        more: dict[str, hook_points.Hook] = {
            opens: self.opens, state: self.get_internal_state, weights: self.weights_updated,
        }  # fmt: skip
        if self._contains:
            takes_in, plans, *_ = hook_points.CONTAINING
            ours |= {takes_in: self.process_batch_result, plans: self.get_next_batch_to_run}
        for target, function in more.items():
            if not hook_points.moved({target: hook_points.OPTIONAL[target]}):
                ours[target] = function
        return ours

    @property
    def _contains(self) -> bool:
        """True if the user wants wrong reads contained, and nothing known speaks against it."""
        return self._settings.on_violation == "contain" and not self._uncontained

    # -- the audit of a scheduler ------------------------------------------------------------

    def _of(self, scheduler: Scheduler) -> Watching | None:
        """Return a scheduler's audit, opened when first asked for; None if it could not be opened.

        Raises:
            RequiredError: as by ``_open``.
        """
        if self._scheduler is not scheduler:
            self._scheduler, self._watching = scheduler, None
            self._watching = self._open(scheduler)
        return self._watching

    def _open(self, scheduler: Scheduler) -> Watching | None:
        """Open the audit of a scheduler; if that is impossible, log why and return None.

        It is, if the user requires it, also where wrong reads cannot be contained as wanted; else
        that is logged, and so is what is not watched. Where they are contained, every rank must
        call this: all open theirs, or none does. The metrics of this process are made, too.

        Raises:
            RequiredError: it is impossible, and the user requires it.
        """
        error: Exception | None = None
        without: dict[str, str] = {}
        rank, watching = engine_facts.rank(), None
        try:
            page = engine_facts.metrics_of(scheduler)
            self._metrics = None if page is None else Metrics(*page, rank)
            facts = engine_facts.facts(scheduler, ARGUMENTS)
            why = cannot_watch(facts)
            if self._contains and (reason := cannot_contain(facts)) is not None:
                self._uncontained.append(reason)
            if why is None and self._uncontained and self._settings.required:
                why = f"wrong rows cannot be contained: {'; '.join(self._uncontained)}"
            if why is None:
                without = left_out(facts)
                watching = Watching(
                    scheduler,
                    self._settings,
                    rank,
                    trees=facts.trees,
                    left_out=without,
                    contains=self._contains,
                )
        except Exception as failed:
            why, error = f"the ledger cannot be made: {failed!r}", failed
        # Ranks that contain wrong reads meet in each step, so all of them do, or none.
        if self._contains and not all(TensorRanks.of(scheduler).of_all(watching is not None)):
            why, watching = why or "the ledger of another rank cannot be made", None
        if watching is not None:
            for left in without.values():
                log.warning("kvtxn.audit_partial", rank=rank, why=left, effect=_REST)
            if self._uncontained:
                say_logged_alone("; ".join(self._uncontained))
            size, release = watching.watch.ledger.books.num_bytes, hook_points.release()
            log.info("kvtxn.audit_active", rank=rank, bytes=size, sglang=release)
            return watching
        if self._settings.required:
            raise RequiredError("audit", str(why)) from error
        log.warning("kvtxn.audit_inactive", rank=rank, why=why, effect=_EFFECT, exc_info=error)
        if self._metrics is not None:
            self._metrics.show({"kvtxn_audit_active": 0})
        return None

    def report(self) -> dict[str, object] | None:
        """Return ``Watching.report`` of this process's audit; None if nothing is watched."""
        return None if self._watching is None else self._watching.report()

    # -- the hooks ---------------------------------------------------------------------------

    def opens(
        self, original: Callable[..., None], scheduler: Scheduler, *args: object, **kwargs: object
    ) -> None:
        """Let SGLang make a scheduler, then open its audit, so that no request waits for it.

        Raises:
            RequiredError: it has no audit, and the user requires it.
        """
        original(scheduler, *args, **kwargs)
        self._of(scheduler)

    def run_batch(
        self,
        original: Callable[..., GenerationBatchResult],
        scheduler: Scheduler,
        batch: ScheduleBatch,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Run a scheduler's step, and return SGLang's result.

        If the audit watches the scheduler, the metrics are brought up to date before, and the step
        is watched.
        """
        watching = self._of(scheduler)
        if watching is not None and self._metrics is not None:
            watching.show(self._metrics)
        if watching is None:
            return original(scheduler, batch, *args, **kwargs)
        return watching.run_batch(partial(original, scheduler, batch, *args, **kwargs), batch)

    def process_batch_result(
        self,
        original: Callable[..., object],
        scheduler: Scheduler,
        batch: ScheduleBatch,
        result: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Take in a step's result, without tokens spoilt by wrong rows; return what SGLang does."""
        run = partial(original, scheduler, batch, result, *args, **kwargs)
        return run() if self._watching is None else self._watching.take_in(run, batch, result)

    def get_next_batch_to_run(
        self,
        original: Callable[..., NextBatchPlan],
        scheduler: Scheduler,
        *args: object,
        **kwargs: object,
    ) -> NextBatchPlan:
        """Return SGLang's plan of a step, made after spoilt requests are retracted."""
        run = partial(original, scheduler, *args, **kwargs)
        contained = None if self._watching is None else self._watching.containment
        return run() if contained is None else contained.plan(run)

    def forward(
        self,
        original: Callable[..., object],
        runner: ModelRunner,
        forward_batch: ForwardBatch,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Run a forward of a model runner, watched if there is an audit; return SGLang's result."""
        watching = self._watching
        if watching is None:
            return original(runner, forward_batch, *args, **kwargs)
        return watching.adapter.forward(
            partial(original, runner, forward_batch, *args, **kwargs), runner, forward_batch
        )

    def release_kv_cache(
        self, original: Callable[..., None], req: Req, *args: object, **kwargs: object
    ) -> None:
        """Note that a request gives back its rows, and let it do so."""
        if self._watching is not None:
            self._watching.adapter.released(req)
        original(req, *args, **kwargs)

    def flush_cache(
        self, original: Callable[..., bool], scheduler: Scheduler, *args: object, **kwargs: object
    ) -> bool:
        """Let SGLang empty the caches, and the audit forget them; False if SGLang refuses."""
        done = original(scheduler, *args, **kwargs)
        if done and self._watching is not None:
            self._watching.flushed()
        return done

    def weights_updated(
        self, original: Callable[..., object], updater: object, *args: object, **kwargs: object
    ) -> object:
        """Note that an update of the weights has succeeded, before SGLang may flush the cache.

        Return what SGLang's function does.
        """
        if self._watching is not None:
            self._watching.weights_changed()
        return original(updater, *args, **kwargs)

    def get_internal_state(
        self,
        original: Callable[..., InternalState],
        scheduler: Scheduler,
        *args: object,
        **kwargs: object,
    ) -> InternalState:
        """Return a scheduler's state, which ``/server_info`` shows, with the report as "kvtxn".

        Without an audit, or if the report fails, which is logged, the state is SGLang's own.
        """
        output = original(scheduler, *args, **kwargs)
        try:
            found = self.report()
            if found is not None:
                output.internal_state["kvtxn"] = found
        except Exception as error:
            log.warning("kvtxn.no_report", why=repr(error), effect="the audit goes on")
        return output
