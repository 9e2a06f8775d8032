"""``Watching``: the ledger beside one scheduler of SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor

from ...audit import Scrub, WeightWatch
from ...errors import LayerError
from ...log import get_logger
from ..serving.audit_settings import AuditSettings
from ..serving.ledger.part import LedgerPart
from ..serving.ledger.rank_agreement import Wrong
from ..serving.ledger.step_forms import StepForms
from ..serving.ledger.watch import Watch
from ..serving.step import Arrival, PlannedStep, Rows, States
from .metrics import Metrics
from .seam import engine_facts
from .seam.adapter import Adapter
from .seam.containment import Containment
from .seam.host_slots import HostSlots
from .seam.pools import STATES, WINDOWS, SlotSpace, controller_of, layer_refs, slot_spaces
from .seam.protocols import GenerationBatchResult, ModelRunner, ScheduleBatch, Scheduler
from .seam.ranks import TensorRanks
from .seam.requests import Requests
from .seam.states import StateReader, state_group, state_slots
from .seam.steps import ForwardStep, StepReader

log = get_logger()

Result = TypeVar("Result")


class Steps:
    """The steps of a scheduler as the ledger reads them; see ``LedgerReader``.

    Args:
        watch: the watch over its rows.
        reader: reads the forwards.
        states: reads their states; None if none are watched.
    """

    ready: Literal["planned", "forward", "later"] = "forward"

    def __init__(self, watch: Watch, reader: StepReader, states: StateReader | None) -> None:
        self.watch: Watch | None = watch
        self._reader: Final = reader
        self._states: Final = states

    def open(self, is_ready: Callable[[], None]) -> Watch | None:
        """Return the watch: SGLang's caches stay those of its start."""
        return self.watch

    def begin(self) -> None:
        """Do nothing: who comes and goes is known when the forward begins."""

    def read(self, step: PlannedStep, inputs: Mapping[str, object]) -> tuple[Rows, States | None]:
        """Return the rows of the step that is about to run, and its states, None if not watched."""
        assert isinstance(step, ForwardStep)
        rows = self._reader.rows(step)
        return rows, None if self._states is None else self._states.states(step, rows)

    def returning(self, name: str) -> Arrival:
        """Refuse to describe a request that the ledger does not know; it forgets none that runs.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"the ledger was not told of request {name!r}")

    def sampled(self, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``counts`` and ``ids``: how many tokens each request has sampled, and which."""
        assert counts is not None  # the adapter has them
        return counts, ids

    def mark(self, output: object, wrong: Wrong) -> None:
        """Do nothing: wrong rows are contained when SGLang takes in the step's result."""


class Watching:
    """The ledger beside one scheduler.

    When it is made, every pass is launched, HiCache's copies are followed, and the worker's and the
    pools' methods are wrapped. ``on_violation="contain"`` without ``contains`` becomes "log".

    Args:
        scheduler: SGLang's, with its caches.
        settings: the user's.
        rank: its tensor-parallel rank, for the log.
        trees: drafts form trees.
        left_out: names of the groups that are not watched.
        contains: what is read wrongly is contained; every rank has to say the same.

    Attributes:
        watch: the watch over its rows.
        containment: contains wrong reads; None if nothing does.
        adapter: overhears its steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: AuditSettings,
        rank: int,
        *,
        trees: bool = False,
        left_out: Collection[str] = (),
        contains: bool = False,
    ) -> None:
        runner = scheduler.tp_worker.model_runner
        device, room = torch.device(runner.device), engine_facts.room(scheduler)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        spaces = slot_spaces(scheduler, windows=WINDOWS not in left_out)
        hybrid = engine_facts.is_hybrid(scheduler) and STATES not in left_out
        self._scheduler: Final = scheduler
        cannot = settings.on_violation == "contain" and not contains
        ranks = TensorRanks.of(scheduler)
        self.watch: Final = Watch(
            {space.group.name: space.group for space in spaces},
            room,
            rank,
            "log" if cannot else settings.on_violation,
            ranks=ranks,
            states={STATES: state_group(scheduler)} if hybrid else None,
            record=settings.record,
            device=device,
            drafts=engine_facts.most_drafts(scheduler),
            lines=room.requests,
            stale=settings.stale,
        )
        self.watch.left_out = sorted(left_out)
        self.watch.found.log_tokens = settings.log_tokens
        # Updates are told; a sample would take experts that were moved for other weights.
        moving = engine_facts.weights_move(scheduler)
        sampled = {} if moving else {"target": _parameters(runner)}
        self.watch.weights = WeightWatch(self.watch.ledger, sampled, settings.weights_every)
        if settings.audit == "bytes":
            self._compare_bytes(spaces, settings, rank, trees=trees)
        reader = StepReader(scheduler.req_to_token_pool, spaces, room.requests, device, trees=trees)
        states = StateReader(scheduler, device) if hybrid else None
        self.part: Final = LedgerPart(Steps(self.watch, reader, states))
        self.containment: Final = (
            Containment(scheduler, self.watch.ledger, spaces, states=hybrid) if contains else None
        )
        if self.containment is not None:
            self.watch.finds_more = self.containment.finds_more
            self.watch.found.first_blocks = self.containment.first_blocks
            if ranks.number > 1:
                self.watch.join_stages()
        with self._on_forward_stream(), torch.inference_mode():
            self._compile(reader, states, engine_facts.most_drafts(scheduler))
            self.watch.begin()
            if device.type == "cuda":  # steps may be on a stream that the event loop makes later
                torch.cuda.current_stream(device).synchronize()
        self._host: Final = self._follow_host(spaces, hybrid=hybrid)
        self.adapter: Final = Adapter(
            scheduler,
            self.part,
            reader,
            Requests(room.requests),
            self.watch.stop,
            self,
            trees=trees,
            states=states,
            containment=self.containment,
        )

    def run_batch(
        self, run: Callable[[], GenerationBatchResult], batch: ScheduleBatch
    ) -> GenerationBatchResult:
        """Run a step of the scheduler, and return its result.

        The adapter and the containment hear of it; without these, or once the audit has ended, it
        just runs. Raises as ``Adapter.run_batch``.
        """
        whole = partial(self.adapter.run_batch, run, batch) if self.adapter.active else run
        return whole() if self.containment is None else self.containment.launch(whole, batch)

    def take_in(self, run: Callable[[], Result], batch: ScheduleBatch, result: object) -> Result:
        """Let the scheduler take in a step's result, and return what ``run`` does.

        Where wrong reads are contained, this goes by ``Containment.take_in``.
        """
        if self.containment is None:
            return run()
        return self.containment.take_in(run, batch, result, self.watch.end_step)

    def _follow_host(self, spaces: Sequence[SlotSpace], *, hybrid: bool) -> HostSlots | None:
        """Begin to follow HiCache's copies to the host and back; return None without HiCache."""
        controller = controller_of(self._scheduler)
        if controller is None:
            return None
        groups: dict[str, tuple[object, int]] = {
            space.group.name: (space.pool, space.number) for space in spaces
        }
        if hybrid:
            states = self._scheduler.req_to_token_pool.mamba_pool
            groups[STATES] = states, state_slots(self._scheduler)
        tell = self.watch.hear
        return HostSlots(controller, groups, self.carried, lambda what: tell(lambda _: what()))

    def carried(self, copies: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Tell the ledger which rows or states were copied, behind the forwards launched so far.

        Args:
            copies: by group, the slots copied from and to, int64 ``[n]`` each, on any device.
        """
        device, here = self.watch.ledger.device, copies
        moved = {name: (one.to(device), other.to(device)) for name, (one, other) in here.items()}
        self._await_schedule(each for pair in moved.values() for each in pair)
        with self._on_forward_stream():
            self.watch.hear(lambda watch: watch.ledger.carry(moved))

    def _await_schedule(self, tensors: Iterable[Tensor]) -> None:
        """Let the stream of the forwards wait for ``tensors`` of the present one, and hold these.

        Nothing is done on a CPU, without overlap, or on that stream itself.
        """
        if self.watch.ledger.device.type != "cuda" or not self._scheduler.enable_overlap:
            return
        stream = self._scheduler.forward_stream
        if stream != torch.cuda.current_stream():
            stream.wait_stream(torch.cuda.current_stream())
            for each in tensors:
                each.record_stream(stream)

    def arrived(self, step: ForwardStep) -> None:
        """Tell the ledger what a storage of HiCache's has brought for the requests of a step."""
        host, table = self._host, self._scheduler.req_to_token_pool.req_to_token
        if host is not None:
            self.watch.hear(lambda watch: host.arrived(watch.ledger, step, table))

    def left(self, blocks: Tensor, lengths: Tensor) -> None:
        """Tell the ledger which states were written once the step's drafts were decided.

        Nothing is told if no step is under way.

        Args:
            blocks: int64 ``[num_requests]``, the slot that got each request's state; -1 for none.
            lengths: int64 ``[num_requests]``, the tokens that each state has taken in; -1 for none.
        """
        step = self.watch.under_way
        if step is not None:
            blocks_of = {STATES: blocks}
            self.watch.hear(lambda watch: watch.ledger.leave(step.lines, blocks_of, lengths))

    def _compile(self, reader: StepReader, states: StateReader | None, drafts: int) -> None:
        """Launch every pass over steps of padding, like this engine's; no request waits for it.

        The ledger forgets everything then.
        """
        ledger, scrub, forms = self.watch.ledger, self.watch.scrub, StepForms()
        for rows, counts, ids in reader.paddings(drafts):
            empty = None if states is None else states.padding(rows)
            step = forms.step(rows, torch.full_like(rows.starts[1:], -1), empty, copies=False)
            if scrub is not None:
                scrub.compare(step)
            ledger.write_and_check(step)
            ledger.resolve(counts, ids, besides=1)
            if scrub is not None:
                scrub.seal(step, counts, besides=1)
        ledger.restart()

    def _compare_bytes(
        self, spaces: Sequence[SlotSpace], settings: AuditSettings, rank: int, *, trees: bool
    ) -> None:
        """Let the watch compare the bytes of rows, too; if that is impossible, log why.

        It is with draft trees, HiCache, or rows that do not lie by slot.

        Raises:
            LayerError: it is impossible, and the user requires the audit.
        """
        try:
            if trees or controller_of(self._scheduler) is not None:
                what = "trees" if trees else "HiCache"
                raise LayerError("Scrub", f"rows of {what} are copied, and their checksums are not")
            every = settings.audit_every
            self.watch.scrub = Scrub(self.watch.ledger, layer_refs(spaces), every=every)
        except LayerError as error:
            if settings.required:
                raise
            effect = "digests are compared, and no bytes"
            log.warning("kvtxn.audit_without_bytes", rank=rank, why=str(error), effect=effect)

    def _on_forward_stream(self) -> AbstractContextManager[object]:
        """Return a context whose launches go to the stream of the forwards, if it is another."""
        if self.watch.ledger.device.type != "cuda" or not self._scheduler.enable_overlap:
            return nullcontext()
        return torch.cuda.stream(self._scheduler.forward_stream)

    def weights_changed(self) -> None:
        """Note that the target has other weights; the next step begins an epoch."""
        if self.watch.weights is not None:
            self.watch.weights.changed("target")

    def flushed(self) -> None:
        """Forget every row and request, as the caches were emptied.

        That often follows an update of the weights, so the next step begins an epoch. Copies on the
        host and what was to be contained are forgotten, too.
        """
        self.weights_changed()
        self.adapter.flushed(self._forget)
        if self.containment is not None:
            self.containment.forget()
        if self._host is not None:
            self._host.forget()

    def _forget(self) -> None:
        """Let the watch forget every row and request, on the stream of the forwards."""
        with self._on_forward_stream():
            self.watch.forget()

    def show(self, metrics: Metrics) -> None:
        """Bring this scheduler's metrics up to date every few seconds; an error ends the audit."""
        active = self.adapter.active and not self.watch.stopped
        try:
            with self._on_forward_stream():
                metrics.update(self.watch.ledger, active=active)
        except Exception as error:
            self.watch.stop(error)

    def report(self) -> dict[str, object]:
        """Return ``{"counters": ..., "violations": ...}``; waits for the device.

        With the setting ``record`` also ``"recording"``.
        """
        with self._on_forward_stream():
            found: dict[str, object] = {"counters": self.watch.counters()}
            found["violations"] = self.watch.report()
            recording = self.watch.recording()
            return found if recording is None else {**found, "recording": recording}


def _parameters(runner: ModelRunner) -> Callable[[], list[Tensor]]:
    """Return a function that lists the parameters of a runner's model anew, detached."""
    return lambda: [each.detach() for each in runner.model.parameters()]
