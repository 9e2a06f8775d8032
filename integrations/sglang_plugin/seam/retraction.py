"""Retracting and ending requests of SGLang, and taking rows out of its prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

from torch import Tensor

from ....log import get_logger
from .pools import controller_of
from .protocols import Req, ScheduleBatch, Scheduler

log = get_logger()

#: More slots than a host has.
_EVERY: Final = 1 << 40
#: The attribute of a request that leaves no row in the tree because it was retracted.
_KEPT_OUT: Final = "kvtxn_kept_out"
#: What the client of a request that ends is told.
WHY_ENDED: Final = (
    "The request read wrong rows of the KV cache, and {why}. "
    "The server's log has the rows, as kvtxn.audit_violation."
)


def pass_over_retracted(scheduler: Scheduler) -> None:
    """Set ``enable_overlap`` of the scheduler's result processor, also if it runs without overlap.

    Only so does SGLang pass over retracted requests when it takes a step in: without overlap none
    is retracted while its step is under way.
    """
    object.__setattr__(scheduler.batch_result_processor, "enable_overlap", True)


@contextmanager
def hidden(requests: Collection[Req], *, prompts: Sequence[Req] = ()) -> Iterator[None]:
    """Mark requests as retracted for a while: SGLang takes in no token of a retracted request.

    With ``prompts`` they are marked as prompts that go on, without logprobs. What was changed in a
    request is put back at the end.

    Args:
        requests: the requests.
        prompts: all requests of a step that has logprobs of prompts. SGLang cuts these out one
            request after another, and forgets those of a retracted one. Of a prompt that goes on it
            takes them off. Of several such prompts it streams all but one, without a token, and
            then takes the logprobs of one token for sent.
    """
    before = [
        (req, req.is_retracted, req.inflight_middle_chunks, req.return_logprob) for req in requests
    ]
    sent = [
        (req, req.send_output_token_logprobs_offset)
        for req in prompts
        if req.inflight_middle_chunks > 0
    ]
    for req, *_ in before:
        req.is_retracted = not prompts
        if prompts:
            req.inflight_middle_chunks = max(req.inflight_middle_chunks, 1)
            req.return_logprob = False
    try:
        yield
    finally:
        for req, retracted, chunks, logprobs in before:
            req.is_retracted, req.inflight_middle_chunks = retracted, chunks
            req.return_logprob = logprobs
        for req, offset in sent:
            req.send_output_token_logprobs_offset = offset


def has_input_logprobs(batch: ScheduleBatch) -> bool:
    """Tell whether a step computed prompts and was asked for logprobs."""
    extends = getattr(getattr(batch, "forward_mode", None), "name", "") in ("EXTEND", "MIXED")
    return extends and bool(getattr(batch, "return_logprob", False))


def holds_rows(req: Req) -> bool:
    """Tell whether a request has a line of the table, and is not finished."""
    return req.kv.req_pool_idx is not None and not req.finished()


def searches_beams(req: Req) -> bool:
    """Tell whether a request has beams, whose rows SGLang does not give back at a retraction."""
    return getattr(req, "beam_group", None) is not None


def is_session(req: Req) -> bool:
    """Tell whether a request is a turn of a streaming session, which keeps its rows."""
    return bool(getattr(getattr(req, "session", None), "streaming", False))


def take_back_grammars(requests: Sequence[Req], dropped: Collection[Req], result: object) -> None:
    """Roll back the grammars of dropped requests by the tokens that a step has sampled for them.

    Nothing is done unless ``result`` says that grammars have taken the step's tokens in. With
    drafts they may, while the next step is launched.

    Args:
        requests: the step's, in its order.
        dropped: requests whose tokens are dropped.
        result: SGLang's, of the step.
    """
    if not getattr(result, "grammar_advanced", False):
        return
    kept = getattr(result, "grammar_retained_tokens", None)
    for number, req in enumerate(requests):
        tokens = int(req.inflight_middle_chunks <= 0) if kept is None else len(kept[number] or ())
        if req in dropped and req.grammar is not None and tokens:
            req.grammar.rollback(tokens)


def retract(
    scheduler: Scheduler, requests: Mapping[Req, str | None], batches: Iterable[ScheduleBatch]
) -> None:
    """Compute requests again, or end them; a request that SGLang fails to retract ends.

    They leave all batches, and give their rows back; the ones to compute again come first among the
    waiting. Requests without rows are left alone. That one cannot even be ended is logged.

    Args:
        scheduler: SGLang's.
        requests: the requests, and why each of them ends; None: it is computed again.
        batches: the batches that are under way.
    """
    here = {req: why for req, why in requests.items() if holds_rows(req)}
    if not here:
        return
    for batch in {
        id(b): b for b in (*batches, scheduler.running_batch, scheduler.last_batch)
    }.values():
        if batch is not None and not here.keys().isdisjoint(batch.reqs):
            keep = [number for number, req in enumerate(batch.reqs) if req not in here]
            batch.filter_batch(keep_indices=keep)
            batch.batch_is_full = False
    if scheduler.chunked_req in here:
        scheduler.chunked_req = None
    again, aborted = [], getattr(scheduler, "_pending_chunked_abort_req", None)
    for req, why in here.items():
        goes_on = why is None and req.to_finish is None and req is not aborted
        if goes_on and _retracted(scheduler, req):
            again.append(req)
            continue
        try:
            _end(scheduler, req, "SGLang could not retract it" if goes_on else why)
        except Exception as error:  # the others are still to be computed again
            log.warning("kvtxn.audit_not_ended", request=req.rid, exc_info=error)
    scheduler.waiting_queue[:0] = again


def _retracted(scheduler: Scheduler, req: Req) -> bool:
    """Let a request give its rows back, to be computed again; tell whether SGLang has done so.

    It reads and leaves no row of a cache from then on. SGLang's error is logged.
    """
    from sglang.srt.managers.schedule_batch import retract_all

    try:
        retract_all(
            reqs=[req],
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
            offload_kv=False,
        )
    except Exception as error:
        log.warning("kvtxn.audit_not_retracted", request=req.rid, exc_info=error)
        return False
    req.time_stats.set_wait_queue_entry_time()  # else it may count as one that waited too long
    _keep_apart(req)
    return True


def _keep_apart(req: Req) -> None:
    """Let a request read no row of a cache, and leave none there; SGLang knows such requests.

    Rows of a tree that cannot be emptied yet would come back to it, by a hit or as it is inserted.
    """
    if not req.skip_radix_cache_insert:
        req.skip_radix_cache_insert = True
        setattr(req, _KEPT_OUT, True)
    req._compute_max_prefix_len = _no_prefix  # hides the method of this request alone


def let_in(scheduler: Scheduler) -> None:
    """Let waiting requests that ``retract`` kept out of the tree leave rows there again.

    The tree has no wrong row any more. Only a tree with sliding windows needs that: else a prompt
    in chunks keeps the slots of all its rows with a window, and may wait for more than there are.
    """
    if scheduler.tree_cache.supports_swa():
        for req in scheduler.waiting_queue:
            if vars(req).pop(_KEPT_OUT, False):
                req.skip_radix_cache_insert = False


def _no_prefix(input_len: int) -> int:
    """Return 0, the rows of a prompt that may be found in a cache."""
    return 0


def _end(scheduler: Scheduler, req: Req, why: str | None) -> None:
    """End a request, and tell its client why; it gives its rows back, and none gets into the tree.

    Args:
        scheduler: SGLang's.
        req: the request.
        why: what its client is told; None: it was aborted meanwhile.
    """
    from sglang.srt.disaggregation.utils import prepare_abort
    from sglang.srt.managers.scheduler import _make_abort_req
    from sglang.srt.mem_cache import common

    given, status = req.to_finish, None if why is None else int(HTTPStatus.INTERNAL_SERVER_ERROR)
    message = "Aborted" if why is None else WHY_ENDED.format(why=why)
    if why is None and given is not None:
        message, status = given.message, given.status_code
    prepare_abort(req, message, status)
    req.to_finish, req.finished_output = None, True  # nothing is streamed behind the reason
    scheduler._release_aborted_request(req)
    if req.kv.req_pool_idx is not None:
        common.release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    reason = req.finished_reason.to_json()
    scheduler.send_abort_output(_make_abort_req(req, finished_reason=reason), req)


# -- the prefix cache ------------------------------------------------------------------------


def rows_of_tree(scheduler: Scheduler, places: Callable[[Tensor], set[int]]) -> set[int]:
    """Return the places of the rows in the tree on the device; empty without prefix sharing.

    Args:
        scheduler: SGLang's.
        places: returns the places that numbers of the table lead to.
    """
    tree = scheduler.tree_cache
    if not tree.supports_prefix_sharing() or not tree.evictable_size() + tree.protected_size():
        return set()
    return places(tree.all_values_flatten())


def empty_tree(scheduler: Scheduler) -> None:
    """Let all rows and states leave the tree that nobody has locked, and their copies on the host.

    Nothing is done without prefix sharing.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = scheduler.tree_cache
    if not tree.supports_prefix_sharing():
        return
    windows = tree.swa_evictable_size() if tree.supports_swa() else 0
    states = tree.mamba_evictable_size() if tree.supports_mamba() else 0
    rows = max(tree.evictable_size(), tree.full_evictable_size())
    tree.evict(EvictParams(num_tokens=rows, swa_num_tokens=windows, mamba_num=states))
    if controller_of(scheduler) is not None:
        for component in tree.tree_components:
            tree.evict_host(_EVERY, component)


def end_sessions(
    scheduler: Scheduler,
    places: Callable[[Tensor], set[int]],
    suspects: Collection[int] | None,
    running: Iterable[Req],
) -> None:
    """Let streaming sessions between two turns give back their rows if some are in doubt.

    A session whose turn runs is left alone.

    Args:
        scheduler: SGLang's.
        places: as for ``rows_of_tree``.
        suspects: the places of rows in doubt; None: every row is.
        running: requests that run; one of them may be a session's turn.
    """
    tree, table = scheduler.tree_cache, scheduler.req_to_token_pool.req_to_token
    held = {req.kv.req_pool_idx for req in running}
    for name, kv in tree.session_records().items():
        if kv.req_pool_idx is None or kv.req_pool_idx in held:
            continue
        own = places(table[kv.req_pool_idx, : kv.kv_allocated_len])
        if suspects is None or not own.isdisjoint(suspects):
            tree.release_session(name)
