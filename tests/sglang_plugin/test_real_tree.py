"""Containing with SGLang's own radix tree, allocator and requests, where its sources are.

Run them with the folder of an unpacked wheel on ``PYTHONPATH``; CI has none.
"""

from __future__ import annotations

import inspect
from array import array
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import sglang_sources
import torch
from kvtxn.integrations.sglang_plugin.seam import retraction
from kvtxn.integrations.sglang_plugin.seam.host_slots import HostSlots

pytestmark = pytest.mark.skipif(not sglang_sources.available(), reason="no sources of SGLang")
CACHE = "sglang.srt.mem_cache"


@pytest.fixture
def engine(monkeypatch):
    return make(monkeypatch, 1)


def pages(tokens, page):
    """Return a page of tokens for each."""
    return array("q", [100 * token + each for token in tokens for each in range(page)])


def make(monkeypatch, page):
    """A scheduler's tree of two texts: 1 to 8, which a request has locked, and 1 to 4, 20.

    With pages each number stands for a page of tokens.
    """
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    unified, params, token, paged, pools, parts, base, radix = sglang_sources.modules(
        *(f"{CACHE}.unified_radix_cache", f"{CACHE}.cache_init_params"),
        *(f"{CACHE}.allocator.token", f"{CACHE}.allocator.paged", f"{CACHE}.memory_pool"),
        *(f"{CACHE}.unified_cache.components", f"{CACHE}.base_prefix_cache"),
        f"{CACHE}.radix_cache",
    )
    of_pool = torch.float32, "cpu", SimpleNamespace(), False
    allocator = (
        token.TokenToKVPoolAllocator(64, *of_pool)
        if page == 1
        else paged.PagedTokenToKVPoolAllocator(64 * page, page, *of_pool)
    )
    table = pools.ReqToTokenPool(4, 32, "cpu", False)
    given = params.CacheInitParams(
        disable=False, req_to_token_pool=table, page_size=page,
        token_to_kv_pool_allocator=allocator, tree_components=(parts.ComponentType.FULL,),
    )  # fmt: skip
    tree = unified.UnifiedRadixCache(given)
    tree.swa_reprefill_tail_tokens = lambda req=None: 0  # imports kernels

    def insert(tokens, slots, known=0):
        key = radix.RadixKey(pages(tokens, page) if page > 1 else array("q", tokens), None)
        values = torch.tensor(slots, dtype=torch.int64)
        return tree.insert(
            base.InsertParams(key=key, value=values, prev_prefix_len=known)
        ).last_device_node

    def match(tokens):
        key = radix.RadixKey(pages(tokens, page) if page > 1 else array("q", tokens), None)
        return tree.match_prefix(base.MatchPrefixParams(key=key)).device_prefix_len

    slots = allocator.alloc(9 * page).tolist()
    one = insert(range(1, 9), slots[: 8 * page])
    insert([1, 2, 3, 4, 20], [*slots[: 4 * page], *slots[8 * page :]], 4 * page)
    return SimpleNamespace(
        tree_cache=tree, req_to_token_pool=table, token_to_kv_pool_allocator=allocator,
        lock=tree.lock(one), slots=slots, match=match,
    )  # fmt: skip


def places(numbers):
    return set(numbers.tolist())


def test_rows_that_a_request_has_locked_stay(engine):
    """All others leave the tree, and their slots are free."""
    free = engine.token_to_kv_pool_allocator.available_size()
    assert engine.slots[8] in retraction.rows_of_tree(engine, places)
    retraction.empty_tree(engine)
    assert engine.slots[8] not in retraction.rows_of_tree(engine, places)
    assert engine.slots[7] in retraction.rows_of_tree(engine, places)
    assert engine.match(range(1, 9)) == 8
    assert engine.match([1, 2, 3, 4, 20]) == 4
    assert engine.token_to_kv_pool_allocator.available_size() == free + 1
    engine.tree_cache.sanity_check()


def test_pages_leave_the_tree_for_one_wrong_row(monkeypatch):
    """The page of a row, and the whole text behind it; what a request has locked stays."""
    page = 16
    engine = make(monkeypatch, page)
    free = engine.token_to_kv_pool_allocator.available_size()
    wrong, locked = engine.slots[8 * page + 5], engine.slots[7 * page + 5]
    assert wrong in retraction.rows_of_tree(engine, places)
    retraction.empty_tree(engine)
    assert wrong not in retraction.rows_of_tree(engine, places)
    assert locked in retraction.rows_of_tree(engine, places)
    assert engine.token_to_kv_pool_allocator.available_size() == free + page
    engine.tree_cache.unlock(engine.lock)
    retraction.empty_tree(engine)
    assert locked not in retraction.rows_of_tree(engine, places)
    assert engine.token_to_kv_pool_allocator.available_size() == 64 * page
    engine.tree_cache.sanity_check()


def test_a_row_leaves_once_its_request_has_given_its_lock_back(engine):
    """As a retraction does."""
    engine.tree_cache.unlock(engine.lock)
    retraction.empty_tree(engine)
    assert retraction.rows_of_tree(engine, places) == set()
    assert engine.match(range(1, 9)) == 0
    assert engine.token_to_kv_pool_allocator.available_size() == 64
    engine.tree_cache.sanity_check()


def test_a_session_between_turns_is_asked_for(engine):
    """SGLang's own tree answers; no session is there, so no slot is given back."""
    free = engine.token_to_kv_pool_allocator.available_size()
    retraction.end_sessions(engine, places, {1}, [])
    assert not engine.tree_cache.session_records()
    assert engine.token_to_kv_pool_allocator.available_size() == free


class Anything:
    """AuditSettings of SGLang's that are all off."""

    def __getattr__(self, name):
        return None


class Batch:
    """A batch of one request."""

    batch_is_full = True

    def __init__(self, *reqs):
        self.reqs = list(reqs)

    def filter_batch(self, *, keep_indices):
        self.reqs = [self.reqs[number] for number in keep_indices]


@pytest.fixture
def running(engine, monkeypatch):
    """A request of SGLang's that runs on the locked text, with two rows of its own."""
    batches, sampling, common, scheduler, _ = sglang_sources.modules(
        *("sglang.srt.managers.schedule_batch", "sglang.srt.sampling.sampling_params"),
        *(f"{CACHE}.common", "sglang.srt.managers.scheduler"),
        "sglang.srt.disaggregation.utils",
    )
    for module in (batches, common, scheduler):
        for name in ("get_disagg", "get_serving", "get_spec"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Anything)
    monkeypatch.setattr(scheduler, "compute_weight_version_spans", lambda *a, **k: None)
    own = sampling.SamplingParams(max_new_tokens=8)
    req = batches.Req("a", "", array("q", range(1, 10)), own)
    req.output_ids = array("q", [30])
    engine.req_to_token_pool.alloc([req])
    line = engine.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    slots = engine.token_to_kv_pool_allocator.alloc(2).tolist()
    line[:10] = torch.tensor([*engine.slots[:8], *slots])
    req.kv.cache_protected_len = 8
    req.kv.kv_committed_len = req.kv.kv_allocated_len = 10
    req.lock = engine.lock
    engine.running_batch = engine.last_batch = Batch(req)
    engine.chunked_req, engine.waiting_queue, engine.ended = req, [], []
    engine.send_abort_output = lambda output, req: engine.ended.append(output)
    engine._release_aborted_request = lambda req: None
    return req


def test_a_request_is_retracted_by_sglangs_own_functions(engine, running):
    """It waits with its tokens, and holds nothing; then the tree lets its rows go."""
    retraction.retract(engine, {running: None}, [Batch(running)])
    assert engine.waiting_queue == [running]
    assert (engine.running_batch.reqs, engine.chunked_req) == ([], None)
    assert running.is_retracted
    assert not retraction.holds_rows(running)
    assert [*running.output_ids] == [30]
    running.init_next_round_input(engine.tree_cache)
    assert running.prefix_len == 0  # though the tree has eight rows of it
    assert running.skip_radix_cache_insert
    retraction.empty_tree(engine)
    assert engine.token_to_kv_pool_allocator.available_size() == 64
    engine.tree_cache.sanity_check()


def test_a_request_is_ended_by_sglangs_own_functions(engine, running):
    """Its client hears why, and nothing of it is in the tree."""
    retraction.retract(engine, {running: "it was tried twice"}, [])
    (output,) = engine.ended
    assert output.rid == "a"
    assert output.finished_reason["type"] == "abort"
    assert (
        "wrong rows of the KV cache, and it was tried twice." in output.finished_reason["message"]
    )
    assert running.finished()
    assert engine.waiting_queue == []
    assert engine.match([*range(1, 10), 30]) == 8
    retraction.empty_tree(engine)
    assert engine.token_to_kv_pool_allocator.available_size() == 64


def test_an_abort_of_a_chunk_is_not_lost(engine, running):
    """SGLang keeps it elsewhere, and drops it once the request holds no rows."""
    engine._pending_chunked_abort_req = running
    retraction.retract(engine, {running: None}, [])
    (output,) = engine.ended
    assert output.finished_reason["message"] == "Aborted"
    assert engine.waiting_queue == []


@pytest.fixture
def processor(monkeypatch):
    """SGLang's own functions that take results in; whom they tell are mocks."""
    (module,) = sglang_sources.modules(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
    )
    for name in ("get_memory", "get_observability", "get_exec", "get_disagg"):
        monkeypatch.setattr(module, name, Anything)
    monkeypatch.setattr(module, "checkpoint_kv_cache", MagicMock())
    kind = module.SchedulerBatchResultProcessor
    monkeypatch.setattr(kind, "_get_prefill_hidden_capture_mode", lambda *_: None)
    for name in ("_handle_finish_state_updated_req", "_apply_decode_logprobs"):
        monkeypatch.setattr(kind, name, MagicMock())
    known = {name: MagicMock() for name in kind.__slots__}
    known |= {"is_generation": True, "enable_overlap": False, "enable_overlap_mlx": False}
    made = kind(**known)
    made.logprob_result_processor.calculate_num_input_logprobs = lambda req, end, start: end - start
    retraction.pass_over_retracted(SimpleNamespace(batch_result_processor=made))
    return made


def step_of_two():
    """Two requests, a batch of them, and its result."""
    reqs = [MagicMock(name=name) for name in "ab"]
    for req in reqs:
        req.finished = lambda: False
        req.is_retracted, req.inflight_middle_chunks, req.output_ids = False, 0, []
        req.discard_output_reason = req.beam_group = req.grammar = None
        req.return_sampling_mask = req.return_hidden_states = False
        req.return_logprob = True
    batch = SimpleNamespace(
        reqs=reqs, return_logprob=True, return_hidden_states=False, decoding_reqs=None,
        prefill_stats=None, forward_mode=SimpleNamespace(name="EXTEND"), has_grammar=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: True), batch_size=lambda: 2,
        mamba_track_mask_cpu=None,
    )  # fmt: skip
    result = MagicMock()
    result.copy_done = result.auxiliary_host_output = None
    result.routed_experts_output = result.indexer_topk_output = None
    result.next_token_ids = torch.tensor([7, 8])
    result.extend_input_len_per_req = [4, 5]
    result.extend_logprob_start_len_per_req = [0, 0]
    return reqs, batch, result


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("hides", [True, False])
def test_sglang_takes_a_prompt_in_without_a_hidden_request(processor, hides, waits):
    """The other one gets its token, and the logprobs of its own prompt."""
    (one, other), batch, result = step_of_two()
    one.is_retracted = waits and hides
    assert retraction.has_input_logprobs(batch)
    with retraction.hidden([one] if hides else [], prompts=batch.reqs):
        processor.process_batch_result_prefill(batch, result)
    assert (one.output_ids, other.output_ids) == ([] if hides else [7], [8])
    added = processor.logprob_result_processor.add_logprob_return_values.call_args_list
    assert [call.args[1:3] for call in added] == [*([] if hides else [(one, 0)]), (other, 4)]
    assert not processor.logprob_result_processor.add_input_logprob_return_values.called
    held = one.is_retracted, one.inflight_middle_chunks, one.return_logprob
    assert held == (waits and hides, 0, True)


@pytest.mark.parametrize("hides", [True, False])
def test_sglang_takes_a_decoded_token_in_without_a_hidden_request(processor, monkeypatch, hides):
    """Also where it runs without overlap."""
    (one, other), batch, result = step_of_two()
    batch.forward_mode.name = "DECODE"
    monkeypatch.setattr(
        type(processor), "_normalize_decode_outputs", lambda *_, **__: ([[7], [8]], None)
    )
    assert not retraction.has_input_logprobs(batch)
    with retraction.hidden([one] if hides else []):
        processor.process_batch_result_decode(batch, result)
    assert (one.output_ids, other.output_ids) == ([] if hides else [7], [8])


def test_without_overlap_sglang_is_told_to_look_for_retracted_requests():
    (module,) = sglang_sources.modules(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
    )
    kind = module.SchedulerBatchResultProcessor
    processor = kind(**{**dict.fromkeys(kind.__slots__), "enable_overlap": False})
    retraction.pass_over_retracted(SimpleNamespace(batch_result_processor=processor))
    assert processor.enable_overlap is True


def test_a_copy_to_the_host_names_what_is_read_of_it():
    """And the engine of transfers has the two calls that are wrapped."""
    (module,) = sglang_sources.modules(f"{CACHE}.l2_transfer")
    assert {"host_pool", "host_indices", "device_indices", "is_draft"} <= {
        *module.L2Transfer._fields
    }
    for name in ("submit_device_to_host", "submit_host_to_device"):
        assert inspect.signature(getattr(module.L2TransferEngine, name)).parameters["transfers"]


class Rows:
    """Rows on the device or the host, which SGLang's engine of transfers copies."""

    size, layer_num = 12, 1

    def __init__(self):
        self.rows = torch.zeros(self.size, dtype=torch.int64)

    def prepare_transfer_indices(self, host, device, backend):
        return host, device

    def backup_from_device_all_layer_physical(self, pool, host, device, backend):
        self.rows[host] = pool.rows[device]

    def load_to_device_per_layer_physical(self, pool, host, device, *_, **__):
        pool.rows[device] = self.rows[host]

    def alloc(self, number):
        return torch.arange(number)


def test_what_sglangs_engine_copies_is_what_the_ledger_hears(monkeypatch):
    """Both ways, in the group's numbers; none of a drafter's rows."""
    (module,) = sglang_sources.modules(f"{CACHE}.l2_transfer")
    monkeypatch.setattr(module, "device_module", MagicMock())
    monkeypatch.setattr(module.envs.SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES, "get", lambda: 0)
    engine, device, host = module.L2TransferEngine("kernel"), Rows(), Rows()
    monkeypatch.setattr(module, "shared_host_layout_domains", lambda pools: [])
    entries = [SimpleNamespace(host_pool=host, device_pool=device)]
    controller = SimpleNamespace(
        l2_transfer_engine=engine, enable_storage=False,
        mem_pool_host=SimpleNamespace(entries=entries),
    )  # fmt: skip
    heard = []
    HostSlots(controller, {"group.0": (device, 100)}, heard.append, lambda tell: tell())
    device.rows[3:6] = torch.tensor([7, 8, 9])
    copy = {"host_pool": host, "device_pool": device}
    there = {"host_indices": torch.tensor([0, 2, 4]), "device_indices": torch.tensor([3, 4, 5])}
    engine.submit_device_to_host([module.L2Transfer(**copy, **there)])
    back = {"host_indices": torch.tensor([4, 0]), "device_indices": torch.tensor([10, 11])}
    engine.submit_host_to_device(
        [module.L2Transfer(**copy, **back), module.L2Transfer(**copy, **back, is_draft=True)],
        transfer_layer_id_max=1,
    )
    assert device.rows[10:].tolist() == [9, 7]
    told = [[each.tolist() for each in copies["group.0"]] for copies in heard]
    assert told == [[[3, 4, 5], [100, 102, 104]], [[104, 100], [10, 11]]]
