"""``Adapter``: overhears one scheduler's steps by three hooks, and tells a part of them.

    run_batch                      the step begins
      ModelRunner.forward          its rows are in place: told on its stream, in front of it
      forward_batch_generation     what was sampled, while it is on the device still
    run_batch                      the step has ended

Under overlap the schedule stream changes the table of slots only behind the forward's reads, so
whatever is launched in front of the forward reads the table as the forward does. The outcome comes
from the model worker, before the scheduler copies it to the host on a third stream. A batch with a
grammar is sampled after the last step was taken in; its step ends then.

No exception of kvtxn's reaches SGLang, unless the user asks for it: the audit ends with one
sentence in the log, and the scheduler goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol, TypeVar

from torch import Tensor

from ...serving.ledger.part import LedgerPart
from ...serving.ledger.violation_log import AuditError
from .containment import Containment
from .protocols import (
    ForwardBatch,
    GenerationBatchResult,
    ModelRunner,
    ModelWorker,
    Req,
    ScheduleBatch,
    Scheduler,
)
from .requests import Requests
from .states import StateReader
from .steps import ForwardStep, StepReader

Result = TypeVar("Result")


class Heard(Protocol):
    """Hears of rows and states that change beside the steps; see the calls of ``Ledger``."""

    def carried(self, copies: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Hear which slots were copied, by group, as the device alone knows."""

    def left(self, blocks: Tensor, lengths: Tensor) -> None:
        """Hear which slots have got the states of the step's requests, and after which lengths."""

    def arrived(self, step: ForwardStep) -> None:
        """Hear that the requests of a step with prompts are known, and its forward comes next."""


class Adapter:
    """Tells a part what one scheduler and its target's runner do.

    Args:
        scheduler: SGLang's.
        part: hears of the steps.
        reader: reads the forwards.
        requests: the requests that hold rows.
        ended: called once if the audit fails.
        heard: hears of copies, and of states, that no step tells of.
        trees: rows of accepted drafts are moved, after the outcome of their step.
        states: reads the states of a hybrid; None if none are watched.
        containment: hears of each forward, and ends the ledger's steps; None if ``part`` does.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        part: LedgerPart,
        reader: StepReader,
        requests: Requests,
        ended: Callable[[Exception], None],
        heard: Heard,
        *,
        trees: bool = False,
        states: StateReader | None = None,
        containment: Containment | None = None,
    ) -> None:
        self._containment: Final = containment
        self._runner: Final[ModelRunner] = scheduler.tp_worker.model_runner
        self._part: Final = part
        self._reader: Final = reader
        self._requests: Final = requests
        self._ended: Final = ended
        self._batch: ScheduleBatch | None = None
        #: The forward whose outcome is not known yet.
        self._step: ForwardStep | None = None
        self._samples_later = False
        self.active = True
        self._heard: Final = heard
        #: What is told after the outcome of the step: rows were moved, states were written.
        self._behind: list[Callable[[], None]] = []
        self._in_forward = False
        self._follow(scheduler.model_worker)
        if trees:
            pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
            pool.move_kv_cache = partial(self._moves_rows, pool.move_kv_cache)
        if states is not None:
            states.follow(self._committed, self._copied)

    def _follow(self, worker: ModelWorker) -> None:
        """Hear what a worker's ``forward_batch_generation`` returns.

        The attribute hides the method of this worker alone.
        """
        worker.forward_batch_generation = partial(self._generated, worker.forward_batch_generation)

    def _moves_rows(self, move: Callable[..., None], *slots: Tensor, **named: Tensor) -> None:
        """Let a pool copy rows, and note which, to be told after the step's outcome."""
        move(*slots, **named)
        self._tell(partial(self._note_move, *slots, **named))

    def _note_move(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Read which rows were copied, to be told after the step's outcome.

        The parameters are SGLang's, by name.
        """
        moves = self._reader.moves(src_loc, tgt_loc)
        self._behind.append(partial(self._heard.carried, moves))

    def _committed(self, read: Callable[[], list[tuple[Tensor, Tensor]]]) -> None:
        """Read which states were written, to be told after the step's outcome."""
        self._tell(lambda: self._behind.extend(partial(self._heard.left, *each) for each in read()))

    def _copied(self, read: Callable[[], Mapping[str, tuple[Tensor, Tensor]]]) -> None:
        """Tell which states were copied, unless the forward runs, whose own copies are told."""
        if not self._in_forward:
            self._tell(lambda: self._heard.carried(read()))

    def _tell(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` if the audit is active; an error ends the audit, AuditError is raised."""
        if not self.active:
            return
        try:
            tell()
        except AuditError:
            raise
        except Exception as error:
            self.active = False
            self._step = None
            self._ended(error)

    # -- hook A: the step --------------------------------------------------------------------

    def run_batch(self, run: Callable[[], Result], batch: ScheduleBatch) -> Result:
        """Run one step of the scheduler; return its result. The part hears of its begin and end.

        If the part fails, the audit ends, and SGLang goes on.

        Args:
            run: SGLang's own ``run_batch``, with its arguments.
            batch: the step's.

        Raises:
            AuditError: a wrong row was read, and the user set ``on_violation`` to "raise".
        """
        self._batch, self._step, self._samples_later = batch, None, False
        self._tell(self._part.step_begins)
        try:
            result = run()
        except BaseException:
            self._tell(self._part.step_failed)
            raise
        finally:
            self._batch = None
        if not self._samples_later:
            self._tell(partial(self._step_ended, result))
        return result

    def _step_ended(self, result: object) -> None:
        """End the part's step; where wrong rows are contained, only say that all was launched.

        The ledger's step ends then when the result is taken in.
        """
        if self._containment is None:
            self._part.step_ended(result)
        else:
            self._part.launched()

    def _generated(
        self, generate: Callable[..., GenerationBatchResult], *args: object, **kwargs: object
    ) -> GenerationBatchResult:
        """Run a worker's forwards, tell what was sampled, and return their result."""
        result = generate(*args, **kwargs)
        self._tell(partial(self._tell_generated, result))
        return result

    def _tell_generated(self, result: GenerationBatchResult) -> None:
        """Tell what was sampled; of a batch that is sampled later ``_sample_later`` tells it."""
        later = result.delay_sample_func
        if later is None:
            self._tell_sampled(result)
        else:
            result.delay_sample_func = partial(self._sample_later, later, result)
            self._samples_later = True

    def _sample_later(self, sample: Callable[[], object], result: GenerationBatchResult) -> object:
        """Sample a batch whose forward has run, tell what was sampled, and end its step.

        Returns what ``sample`` does.
        """
        done = sample()
        self._tell(partial(self._tell_sampled, result))
        self._tell(partial(self._step_ended, result))
        return done

    def _tell_sampled(self, result: GenerationBatchResult) -> None:
        """Tell the part what the step has sampled, once, then what was noted behind the outcome."""
        step, self._step = self._step, None
        outcome = None if step is None else self._reader.outcome(step, result)
        if outcome is not None:
            self._part.sampled(*outcome)
        behind, self._behind = self._behind, []
        for tell in behind:
            tell()

    # -- hook B: the forward -----------------------------------------------------------------

    def forward(
        self, run: Callable[[], Result], runner: ModelRunner, batch: ForwardBatch
    ) -> Result:
        """Run a forward of a model runner, and return its output.

        The part hears of it if the runner is the watched one, in a step, and requests are in the
        batch. If the part fails, the audit ends, and SGLang goes on; an AuditError and what the
        forward raises are raised.

        Args:
            run: SGLang's own ``forward``, with its arguments.
            runner: the runner; a drafter's rows are in a pool of its own.
            batch: the forward's.
        """
        if runner is not self._runner or self._batch is None or not self.active:
            return run()
        self._tell(partial(self._tell_forward, self._batch, batch))
        if self._step is None:
            return run()
        self._in_forward = True
        try:
            output = run()
        except BaseException as error:
            self._tell(partial(self._part.failed, error))
            raise
        finally:
            self._in_forward = False
        self._tell(self._part.forward_ended)
        return output

    def _tell_forward(self, scheduled: ScheduleBatch, batch: ForwardBatch) -> None:
        """Tell the part who came and went, and that a forward begins; nothing of an idle batch."""
        if not batch.rids:  # an idle batch
            return
        self._behind.clear()  # of a step without an outcome
        keeps = getattr(scheduled, "mamba_track_mask_cpu", None)
        step = self._step = ForwardStep(batch, list(scheduled.reqs), keeps is None or any(keeps))
        self._part.requests_changed(partial(self._requests.changes, step))
        if step.extends:
            self._heard.arrived(step)
        self._part.forward_begins(step, {})
        if self._containment is not None:
            self._containment.read(step)

    # -- hook C: ends ------------------------------------------------------------------------

    def released(self, req: Req) -> None:
        """Note that a request is about to give back its rows, unless the audit has ended."""
        self._tell(partial(self._requests.released, req))

    def flushed(self, forget: Callable[[], None]) -> None:
        """Forget every row and request, as the caches are empty; an error ends the audit.

        Args:
            forget: clears the ledger.
        """
        self._tell(self._requests.forget)
        self._tell(forget)
