"""``Containment``: wrong reads in SGLang's scheduler; nobody reads the rows again.

    get_next_batch_to_run    a batch is planned
    run_batch                its step is launched; the ledger's passes are in front of the forward
    process_batch_result     its tokens are taken in: under overlap, once the next step is launched

So the ledger knows which requests have read wrong rows in a step before SGLang takes in the tokens
of that step. These requests lose their tokens of that step, and of each later step that is already
launched. SGLang takes in no token of a retracted request, so these requests are marked as retracted
while a step is taken in, and are retracted afterwards. SGLang has to sample a batch as it was
launched, and to run one as it was planned, so a request of such a batch waits for the next plan.

SGLang cannot drop one node of its radix tree. So if a wrong row is in the tree, all rows leave it
that no request has locked; whoever had locked a wrong one has been retracted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Final, TypeVar

import attrs
from torch import Tensor

from ....audit import Ledger
from ....audit.counter_copy import CounterCopy
from ....log import get_logger
from ...serving.ledger.rank_agreement import Wrong
from ...serving.ledger.violation_log import say_logged_alone
from . import retraction
from .pools import STATES, SlotSpace
from .protocols import NextBatchPlan, Req, ScheduleBatch, Scheduler
from .steps import ForwardStep

Result = TypeVar("Result")

log = get_logger()

#: A request that reads wrong rows for the second time ends.
_ONCE: Final = 1
#: Steps until rows that others than requests have locked are given up: all ranks count the same.
_MOST_TRIES: Final = 128
#: The attribute by which a request has the number of its steps that read wrong rows.
_TIMES: Final = "kvtxn_contained"

_TWICE: Final = "computing it again did not help"
_CHANGED: Final = "rows that it may have read before have changed"
_SESSION: Final = "SGLang computes no turn of a streaming session again"


@attrs.define(eq=False)
class UnderWay:
    """A step that was launched and whose result is not taken in.

    Attributes:
        batch: SGLang's; its requests may leave it later.
        requests: the requests as the step was launched.
        numbers: the numbers in the table of the rows that it writes, int64 ``[num_rows]``; None if
            the ledger was not told of it.
        rows: rows of each request; empty if the ledger was not told of the step.
        counters: what was found until then.
        result: SGLang's.
        dropped: the requests whose tokens are dropped.
    """

    batch: ScheduleBatch
    requests: list[Req]
    numbers: Tensor | None = None
    rows: Sequence[int] = ()
    counters: CounterCopy | None = None
    result: object = None
    dropped: set[Req] = attrs.field(factory=set)


class Containment:
    """Contains what the steps of one scheduler read wrongly.

    Args:
        scheduler: SGLang's.
        ledger: the ledger over its rows.
        spaces: the spaces of slots that are watched.
        states: slots of recurrent states are watched.

    Attributes:
        first_blocks: by group, the number of its slot 0 among those of all groups.
    """

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, spaces: Sequence[SlotSpace], *, states: bool
    ) -> None:
        self._scheduler: Final = scheduler
        self._ledger: Final = ledger
        self._spaces: Final = spaces
        self._states: Final = states
        first, firsts = 0, {}
        for space in spaces:
            firsts[space.group.name] = first
            first += space.group.num_blocks
        self.first_blocks: Final[Mapping[str, int]] = {**firsts, STATES: first}
        self._under_way: Final[deque[UnderWay]] = deque()
        self._spare: list[CounterCopy] = []
        self._taken: UnderWay | None = None
        self._planned: ScheduleBatch | None = None
        #: Requests to be computed again; the reason of one that ends instead.
        self._again: Final[dict[Req, str | None]] = {}
        #: Places of wrong rows that may be in the tree; None if every row of it is in doubt.
        self._suspects: set[int] | None = set()
        #: One of them was in the tree: HiCache may have it on the host alone by now.
        self._in_tree = False
        self._tries = 0
        retraction.pass_over_retracted(scheduler)

    # -- steps -------------------------------------------------------------------------------

    def launch(self, run: Callable[[], Result], batch: ScheduleBatch) -> Result:
        """Run a step and return its result; it is under way until ``take_in``, unless it raises.

        Tokens of requests that are to be computed again are dropped. SGLang may let grammars take
        in tokens of the steps before it, so their dropped requests count as retracted meanwhile.

        Args:
            run: SGLang's own ``run_batch``, with its arguments.
            batch: the step's.
        """
        self._planned = None
        before = {req for step in self._under_way for req in step.dropped}
        requests = list(batch.reqs)
        step = UnderWay(batch, requests, dropped={req for req in requests if req in self._again})
        self._under_way.append(step)
        try:
            with retraction.hidden(before):
                step.result = result = run()
        except BaseException:
            self._under_way.pop()
            raise
        return result

    def read(self, step: ForwardStep) -> None:
        """Note the rows that the step under way writes, and begin to copy the ledger's counters.

        The ledger's passes over the forward were launched, and the forward comes next.

        Args:
            step: the forward.
        """
        now, batch = self._under_way[-1], step.batch
        now.numbers = batch.out_cache_loc.clone()
        spans = batch.extend_seq_lens_cpu if step.extends else None
        now.rows = [step.drafts + 1] * len(step.requests) if spans is None else list(spans)
        spare = self._spare.pop() if self._spare else None
        now.counters = self._ledger.copy_counters(spare, prints=False)

    def finds_more(self) -> bool:
        """Wait for the step that is taken in, and tell whether violations found until it ran wait.

        False without waiting if the ledger was not told of the step, or was asked already.
        """
        step = self._taken
        if step is None or step.counters is None:
            return False
        copy, step.counters = step.counters, None
        copy.wait()
        self._spare.append(copy)
        return self._ledger.findings.has_more(copy)

    def take_in(
        self,
        run: Callable[[], Result],
        batch: ScheduleBatch,
        result: object,
        verdict: Callable[[], Wrong | None],
    ) -> Result:
        """Let SGLang take in the result of a step, without what was sampled of wrong rows.

        Spoilt requests of no other step are retracted afterwards. An error of the containment is
        logged, and wrong rows stay.

        Args:
            run: SGLang's own ``process_batch_result``, with its arguments.
            batch: the step's.
            result: likewise.
            verdict: ends the ledger's step; every rank has to call it. Returns what all ranks have
                read wrongly.

        Returns:
            What ``run`` returned.
        """
        step = self._taken = self._step_of(result)
        wrong = verdict()
        if wrong is not None or self._suspects:
            self._try(lambda: self._contain(step, wrong or Wrong()))
        dropped = set[Req]() if step is None else step.dropped
        prompts = batch.reqs if retraction.has_input_logprobs(batch) else ()
        with retraction.hidden(dropped, prompts=prompts):
            done = run()
        self._taken = None
        self._tries += self._in_tree
        self._try(self._compute_again)
        return done

    def _step_of(self, result: object) -> UnderWay | None:
        """Return the step that a result is of; it and all steps before it are under way no longer.

        None if no step under way has this result; then all stay.
        """
        if not any(step.result is result for step in self._under_way):
            return None
        while (step := self._under_way.popleft()).result is not result:
            pass
        return step

    def plan(self, run: Callable[[], NextBatchPlan]) -> NextBatchPlan:
        """Retract spoilt requests, then let SGLang plan a step; return its plan.

        No step waits for the last plan any more.

        Args:
            run: SGLang's own ``get_next_batch_to_run``, with its arguments.
        """
        self._planned = None
        self._try(self._compute_again)
        plan = run()
        self._planned = getattr(plan, "batch_to_run", None)
        return plan

    def forget(self) -> None:
        """Forget all steps, spoilt requests and suspect rows, as the caches were emptied."""
        self._under_way.clear()
        self._again.clear()
        self._suspects, self._in_tree, self._tries, self._planned = set(), False, 0, None

    def _try(self, call: Callable[[], object]) -> None:
        """Call a function; an error of it is logged, and leaves wrong rows where they are."""
        try:
            call()
        except Exception as error:
            say_logged_alone(f"containing failed: {error!r}", error)

    # -- what is spoilt ----------------------------------------------------------------------

    def _contain(self, step: UnderWay | None, wrong: Wrong) -> None:
        """Find the requests that wrong rows spoil; their tokens are dropped from now on.

        A request is spoilt if it read a wrong row, or if its table has a wrong one, or one that a
        spoilt request has written since. Of the latter the ledger knows nothing. So a request is
        looked for that has found such a row in the tree, before the row could leave. One that
        searches beams is left as it is, which is logged; places of wrong rows become suspects for
        the tree.

        Args:
            step: the step that is taken in; None if it is not known.
            wrong: what the ranks have read wrongly.
        """
        steps = [*([] if step is None else [step]), *self._under_way]
        known = set() if step is None else {req.rid for req in step.dropped}
        readers = wrong.readers
        live = {req: self._places_of(req) for req in self._live(steps)}
        places = set(wrong.blocks) - {*self.first_blocks.values()}
        places |= self._suspects_in_tree()
        for each in steps:
            places |= self._written(each, lambda req: req.rid in readers)
        spoilt, grown = set[Req](), True
        while grown:
            found = {
                req
                for req, own in live.items()
                if wrong.lost or req.rid in readers or not places.isdisjoint(own)
            } - spoilt
            for each in steps:
                places |= self._written(each, found.__contains__)
            spoilt, grown = spoilt | found, bool(found)
        # What was retracted since the step, and reads again, may have read wrongly then or now.
        counted = wrong.requests - known
        ends = {req: self._why_ends(req, counted, live[req] & wrong.changed) for req in spoilt}
        again = {req: why for req, why in ends.items() if not retraction.searches_beams(req)}
        if len(again) < len(spoilt):
            say_logged_alone("a request that searches beams cannot be computed again")
        for each in steps:
            mine = {req for req in each.requests if req in again}
            retraction.take_back_grammars(each.requests, mine - each.dropped, each.result)
            each.dropped |= mine
        self._again.update({req: self._again.get(req) or why for req, why in again.items()})
        states = self.first_blocks[STATES]
        every = wrong.lost or bool(wrong.changed) or any(block >= states for block in places)
        self._suspects = None if every or self._suspects is None else self._suspects | places
        if again or wrong.blocks or wrong.lost:
            log.warning(
                "kvtxn.audit_contained",
                requests=sorted(req.rid for req in again),
                blocks=sorted(wrong.blocks),
            )

    def _live(self, steps: Sequence[UnderWay]) -> set[Req]:
        """Return the requests of these steps and of SGLang's batches that hold rows and go on."""
        batches = (self._scheduler.running_batch, self._scheduler.last_batch, self._planned)
        running = [[*batch.reqs] for batch in batches if batch is not None]
        every = chain(*running, *(step.requests for step in steps), [self._scheduler.chunked_req])
        return {req for req in every if req is not None and retraction.holds_rows(req)}

    def _places(self, numbers: Tensor) -> set[int]:
        """Return the places that numbers of the table lead to, of all groups; none of padding."""
        found: set[int] = set()
        for space in self._spaces:
            first = self.first_blocks[space.group.name]
            found.update(first + slot for slot in space.slots(numbers).tolist() if slot > 0)
        return found

    def _places_of(self, req: Req) -> set[int]:
        """Return the places of a request's rows, and of its state, if states are watched."""
        pool, line = self._scheduler.req_to_token_pool, req.kv.req_pool_idx
        found = self._places(pool.req_to_token[line, : req.kv.kv_allocated_len])
        if self._states:
            slot = int(pool.req_index_to_mamba_index_mapping[line])
            found |= {self.first_blocks[STATES] + slot} if slot > 0 else set()
        return found

    def _written(self, step: UnderWay, chosen: Callable[[Req], bool]) -> set[int]:
        """Return the places of the rows that a step has written for the chosen of its requests.

        Empty if the ledger was not told of the step.
        """
        found: set[int] = set()
        if step.numbers is None:
            return found
        parts = step.numbers[: sum(step.rows)].split(list(step.rows))
        for req, part in zip(step.requests, parts, strict=False):  # beams' rows lie behind
            if chosen(req):
                found |= self._places(part)
        return found

    def _why_ends(self, req: Req, readers: Collection[str], changed: Collection[int]) -> str | None:
        """Return why a spoilt request ends; None if it is computed again.

        It ends if it reads wrong rows for the second time, which is counted in an attribute of the
        request; if rows that it may have read before have changed; or as a turn of a session.

        Args:
            req: the request.
            readers: names of the requests that read wrong rows in this step.
            changed: places of its rows that changed at an unknown time.
        """
        times = getattr(req, _TIMES, 0) + (req.rid in readers)
        setattr(req, _TIMES, times)
        if times > _ONCE:
            return _TWICE
        if changed:
            return _CHANGED
        return _SESSION if retraction.is_session(req) else None

    # -- what is done ------------------------------------------------------------------------

    def _compute_again(self) -> None:
        """Retract the spoilt requests of no batch that is still to be launched or sampled.

        Once all are retracted, sessions with suspect rows end, and the tree is emptied if suspects
        were in it. While some stay there, the next call tries again, 128 steps at most.
        """
        if not self._again and self._suspects == set():
            return
        later = "delay_sample_func"  # of a step that is sampled later
        batches = [step.batch for step in self._under_way if getattr(step.result, later, None)]
        batches += [] if self._planned is None else [self._planned]
        waiting = {req for batch in batches for req in batch.reqs}
        ready = {req: why for req, why in self._again.items() if req not in waiting}
        for req in ready:
            del self._again[req]
        every = [step.batch for step in self._under_way]
        self._in_tree |= self._suspects is None or bool(self._suspects_in_tree())
        retraction.retract(self._scheduler, ready, every)
        if self._again:
            return
        suspects, running = self._suspects, self._live(list(self._under_way))
        retraction.end_sessions(self._scheduler, self._places, suspects, running)
        if self._in_tree:
            retraction.empty_tree(self._scheduler)
        if suspects is None:  # rows that innocent requests have locked are not in doubt
            self._suspects = set[int]().union(*map(self._places_of, running))
            self._suspects = retraction.rows_of_tree(self._scheduler, self._places) - self._suspects
        else:
            self._suspects = self._suspects_in_tree()
        self._in_tree = bool(self._suspects)
        if not self._in_tree:
            self._tries = 0
            retraction.let_in(self._scheduler)
        elif self._tries >= _MOST_TRIES:  # copies to the host lock rows for a while
            self._suspects, self._in_tree, self._tries = set(), False, 0
            say_logged_alone("wrong rows of the radix tree are locked by others than requests")

    def _suspects_in_tree(self) -> set[int]:
        """Return the places of known wrong rows that are in the tree; empty if none are known."""
        if not self._suspects:
            return set()
        return self._suspects & retraction.rows_of_tree(self._scheduler, self._places)
