"""The audit of the V2 runner, over vLLM's own messages: nothing is found, unless it is wrong."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from kernels_here import importing_kernels

pytest.importorskip("vllm")

from v2_rig import DRAFTS, LENGTH, REQUESTS, SIZE, Own, Rig

with importing_kernels():
    from kvtxn.integrations.vllm_plugin import runner_parts
    from kvtxn.integrations.vllm_plugin.audit import watch_opening
    from kvtxn.integrations.vllm_plugin.seam import gpu_cache_layout

from kvtxn.integrations.serving.ledger.violation_log import AuditError
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.settings import settings
from kvtxn.integrations.vllm_plugin.runners.hooked_runner import is_hooked
from kvtxn.integrations.vllm_plugin.seam import (
    connectors,
    containment,
    ranks,
)


@pytest.fixture(autouse=True)
def engine_facts(monkeypatch):
    """What a configuration would say of the engine; there is one rank."""
    facts = EngineFacts(device="cuda", runner="v2")
    monkeypatch.setattr(watch_opening.engine_config, "runner_facts", lambda runner: facts)
    monkeypatch.setattr(ranks, "number_of_ranks", lambda: 1)
    monkeypatch.setattr(ranks, "number_of_stages", lambda: 1)
    return facts


@pytest.fixture
def lines(caplog):
    """Return the log's lines, one after the other."""
    with caplog.at_level(logging.INFO, logger="kvtxn"):
        yield Lines(caplog)


class Lines:
    """The lines of a log."""

    def __init__(self, caplog):
        self._caplog = caplog

    def __iter__(self):
        return iter(record.getMessage() for record in self._caplog.records)


def started(**options):
    rig = Rig(**options)
    rig.start()
    return rig


def prompt(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 50, (length,), generator=generator).tolist()


def work(rig, steps=8):
    """Requests that come, hit each other's blocks, are preempted, resumed, and end."""
    one = rig.add("one", prompt(1, 13))
    for _ in range(steps):
        rig.step(chunk=5)
    two = rig.add("two", one.tokens[:11] + prompt(2, 4), hit=one)
    assert two.computed == 8
    for _ in range(3):
        rig.step()
    rig.end(one, preempt=True)
    rig.step()
    one = rig.resume(one)
    for _ in range(4):
        rig.step(chunk=7)
    rig.end(two)
    rig.step()
    return one


@pytest.mark.parametrize("window", [None, 3, 9])
def test_a_healthy_engine(window):
    """Rows are read, drafts are rejected, and nothing is wrong; vLLM's drafter may use buffers."""
    rig = started(window=window)
    work(rig)
    counters = rig.watch.counters()
    assert rig.watch.report() == []
    assert counters["kvtxn_audit_active"] == 1
    assert counters["kvtxn_audit_rows_checked_total"] > 300
    assert counters["kvtxn_audit_unjudged_total"] == 0
    assert counters["kvtxn_audit_steps_total"] == 17


@pytest.mark.parametrize("window", [None, 3])
def test_drafters_that_write_into_the_buffers_before_the_step_is_sealed(window):
    """The step has copies of those buffers, which are made anew each time."""
    rig = Rig(window=window)
    rig.runner.initialize_kv_cache(rig.config)
    rig.watch.drafts_late = True
    rig.watch.begin()
    work(rig)
    step = rig.watch.ledger._state.step or rig.watch.ledger._checked
    buffers = {each.data_ptr() for each in rig.runner.block_tables.slot_mappings}
    assert not buffers & {each.data_ptr() for each in step.slots.values()}
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_rows_checked_total"] > 300


def test_steps_of_the_same_buffers_are_one_step(monkeypatch):
    """So a GPU's launches recur; who is in the batch and where it stands changes in the buffers."""
    rig, seen = started(), []
    one = rig.add("one", prompt(1, 9))
    rig.add("two", prompt(2, 9))
    write = rig.watch.ledger.write
    monkeypatch.setattr(rig.watch.ledger, "write", lambda step: (seen.append(step), write(step)))
    for _ in range(6):
        rig.step()
    rig.end(one)
    rig.add("three", prompt(3, 9))
    for _ in range(4):
        rig.step()
    assert rig.watch.report() == []
    assert len(seen) == 10
    assert len({*seen}) == len({step.drafts is None for step in seen})
    assert all(len(step.lines) == 2 for step in seen)


@pytest.mark.parametrize("window", [3, 9])
def test_only_narrow_windows_have_their_blocks_compared_when_they_are_full(window):
    """Elsewhere the step itself has read all rows of a block that it fills."""
    rig = started(window=window)
    groups = [group.name for group in rig.watch._published.groups]
    assert groups == (["group.1"] if window == 3 else [])


def test_steps_before_the_engine_has_warmed_up_are_nobodys():
    rig = Rig()
    rig.runner.initialize_kv_cache(rig.config)
    rig.add("warm", prompt(3, 9))
    rig.step()
    assert rig.watch.counters()["kvtxn_audit_active"] == 0
    assert rig.watch.counters()["kvtxn_audit_steps_total"] == 0
    rig.end(rig.running[0])
    rig.watch.begin()
    work(rig)
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_active"] == 1


def slot_off_by_one(rig, batch):
    row = int(batch.query_start_loc[0]) + 2
    rig.runner.block_tables.slot_mappings[0, row] += 1


def lost_write(rig, batch):
    rig.runner.block_tables.slot_mappings[0, int(batch.query_start_loc[0]) + 2] = -1


def wrong_token(rig, batch):
    rig.runner.input_buffers.input_ids[int(batch.query_start_loc[0]) + 2] = 77


@pytest.mark.parametrize("fault", [slot_off_by_one, lost_write, wrong_token])
def test_a_wrong_row_of_a_prompt(fault):
    rig = started()
    request = rig.add("wrong", prompt(4, 13))
    rig.tamper = fault
    rig.step()
    rig.tamper = None
    rig.step()
    [first, *_] = rig.watch.report()
    slot = request.tables[0][0] * SIZE + 2
    assert (first["request"], first["position"], first["slot"], first["step"]) == (
        *("wrong", 2, slot),
        1,
    )


def test_a_count_of_accepted_drafts_that_is_one_too_high():
    """The draft that was not sampled counts as rejected, and its row is read by the next step."""
    rig = started(seed=3)
    request = rig.add("high", prompt(7, 9))
    found = []
    for _ in range(12):
        if len(request.tokens) > LENGTH - 8:
            break
        rig.wrong_count = 1
        before = request.computed + len(request.tokens) - request.computed
        rig.step()
        rig.wrong_count = 0
        if request.computed < before + len(request.drafts):
            request.computed += 1  # what such a count makes of the next step
            request.tokens.append(5)
            rig.step()
            found = rig.watch.report()
            break
    assert found
    assert found[0]["kind"] in ("rejected", "unwritten")


@pytest.mark.parametrize("same", [False, True], ids=["another token", "the same token"])
def test_a_position_that_goes_back_by_one(same):
    """The row of an accepted draft is computed again, of the token that was sampled last.

    If that is the draft's own token, the row is right.
    """
    rig = started(seed=3)
    request = rig.add("low", prompt(7, 9))
    while True:
        before = request.computed
        rig.step()
        if request.computed - before > len(request.fed):  # a draft was accepted
            break
    position = request.computed - 1
    slot = request.tables[0][position // SIZE] * SIZE + position % SIZE
    last = request.tokens[position] if same else request.tokens[-1]
    assert same or last != request.tokens[position]
    request.computed, seen = position, []

    def fed_again(rig, batch):
        seen.append(int(rig.runner.input_buffers.positions[0]))
        rig.runner.input_buffers.input_ids[0] = last

    rig.tamper = fed_again
    rig.step()
    found = rig.watch.report()
    assert seen == [position]
    if same:
        assert found == []
    else:
        first = found[0]
        assert (first["kind"], first["request"]) == ("foreign", "low")
        assert (first["position"], first["slot"]) == (position, slot)


def test_blocks_that_are_handed_out_are_unwritten():
    """Rows of whoever had the block before are no rows of its new owner."""
    rig = started()
    one = rig.add("one", prompt(10, 9))
    rig.step()
    rig.end(one)
    rig.free = one.tables[0] + rig.free
    two = rig.add("two", one.tokens[:9])
    rig.tamper = lost_write
    rig.step()
    [first] = rig.watch.report()
    assert (first["kind"], first["request"], first["position"]) == ("unwritten", "two", 2)
    assert two.tables[0][0] == one.tables[0][0]


def test_it_raises_where_the_user_wants_it():
    """Some steps later at most: nobody waits for the device."""
    rig = started(on_violation="raise")
    request = rig.add("wrong", prompt(11, 9))
    rig.tamper = slot_off_by_one
    rig.step()
    rig.tamper = None
    for _ in range(6):  # the counters are looked at in the eighth step, and read in the next
        rig.step()
    rig.step()
    assert len(request.tokens) < LENGTH - 8
    with pytest.raises(AuditError, match="wrong"):
        rig.step()


def test_what_is_contained_is_marked_in_the_steps_output():
    rig = started(on_violation="contain")
    inner = SimpleNamespace(sampled_token_ids=None)
    rig.runner.output = SimpleNamespace(model_runner_output=inner)
    rig.add("wrong", prompt(13, 9))
    rig.tamper = slot_off_by_one
    rig.step()
    assert inner.kvtxn_wrong.requests == {"wrong"}


@pytest.mark.parametrize("wanted", [False, True])
def test_every_violation_is_logged_where_tests_want_to_hear_of_theirs(monkeypatch, wanted):
    monkeypatch.delenv("KVTXN_PYTEST_AUDIT", raising=False)
    if wanted:
        monkeypatch.setenv("KVTXN_PYTEST_AUDIT", "{}")
    assert started().watch.found.logs_all == wanted


def test_an_error_of_the_audits_own_ends_the_audit_alone(lines):
    rig = started()
    rig.add("one", prompt(14, 9))
    rig.step()
    rig.ledger.reader.rows = None
    rig.step()
    rig.step()
    assert rig.watch.counters()["kvtxn_audit_active"] == 0
    assert any("audit_inactive" in line for line in lines)


def test_stages_before_the_last_are_left_out_where_there_are_drafts(monkeypatch, lines):
    facts = EngineFacts(device="cuda", runner="v2", last_stage=False)
    monkeypatch.setattr(watch_opening.engine_config, "runner_facts", lambda runner: facts)
    rig = Rig()
    rig.runner.initialize_kv_cache(rig.config)
    assert rig.watch is None
    assert "pipeline stages before the last" in [*lines][-1]


@pytest.mark.parametrize("window", [None, 9])
def test_memory_is_counted_before_the_cache_is_sized(window):
    """Cache and ledger together fill what is free; groups share blocks, and so the words."""
    rig = Rig(window=window)
    groups = rig.config.kv_cache_groups
    specs = {f"{name}.{n}": g.kv_cache_spec for g in groups for name in g.layer_names for n in "ab"}
    rig.runner.get_kv_cache_spec = lambda: specs
    plan = gpu_cache_layout.planned(rig.runner)
    page = 2 * SIZE * 8 * 4
    assert plan == gpu_cache_layout.CachePlan(2 * page, SIZE, len(groups), 2 * len(groups))
    wanted = settings({"kvtxn": {"audit": "bytes"}}, 1, "cuda")
    free = 200 << 20
    kept = watch_opening.cache_bytes_left(rig.runner, wanted, free)
    lines, length = 2 * REQUESTS + 9, LENGTH + DRAFTS + 1
    taken = watch_opening.ledger_bytes(plan, kept // (2 * page), lines, length, scrubs=True)
    assert free - (64 << 10) < kept + taken <= free
    rig.runner.cache_config.kv_cache_memory_bytes = free
    assert watch_opening.cache_bytes_left(rig.runner, wanted, free) == free


def test_while_a_watch_pauses_nothing_is_judged_and_nothing_is_contained(monkeypatch):
    rig = started(on_violation="contain")
    old = rig.add("old", prompt(1, 9))
    for _ in range(4):
        rig.step()
    checked = rig.watch.counters()["kvtxn_audit_rows_checked_total"]
    rig.watch.begun = False
    marked = []
    monkeypatch.setattr(containment, "mark", lambda output, wrong: marked.append(wrong))
    rig.end(old)
    rig.add("new", prompt(2, 9))
    for _ in range(4):
        rig.step()
    assert rig.watch.counters()["kvtxn_audit_rows_checked_total"] == checked
    assert rig.watch.counters()["kvtxn_audit_active"] == 0
    assert (rig.watch.report(), marked) == ([], [])
    rig.end(rig.running[0])
    rig.watch.begin()
    rig.add("newest", prompt(3, 9))
    for _ in range(4):
        rig.step()
    assert rig.watch.counters()["kvtxn_audit_active"] == 1
    assert rig.watch.counters()["kvtxn_audit_rows_checked_total"] > 9
    assert (rig.watch.report(), marked) == ([], [])


def test_rows_that_were_forgotten_are_not_read_again():
    """The engine has slept: what is computed afterwards is right, a hit on old rows is not."""
    rig = started()
    old = rig.add("old", prompt(1, 9))
    for _ in range(3):
        rig.step()
    steps = rig.watch.counters()["kvtxn_audit_steps_total"]
    rig.end(old)
    rig.watch.forget()
    rig.add("new", prompt(1, 9))
    for _ in range(3):
        rig.step()
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_steps_total"] == steps + 3
    assert rig.watch.counters()["kvtxn_audit_unjudged_total"] == 0
    rig.add("wrong", prompt(1, 9), hit=old)
    rig.step()
    assert {(each["request"], each["kind"]) for each in rig.watch.report()} == {
        ("wrong", "unwritten")
    }


class MostDrafts:
    """Draws as many drafts as there can be, of which by turns all and all but one are accepted."""

    def __init__(self):
        self._drawn = 0

    def randrange(self, first, last=None):
        if last is not None:
            return first + 7
        self._drawn += 1
        return first - 1 if self._drawn % 2 else first - 2


def test_drafts_are_put_in_place_where_others_are(monkeypatch):
    """Steps whose requests have the same drafts as before copy none to the device."""
    rig = started()
    reader, given = rig.ledger.reader.rows, rig.watch.ledger.input
    puts, put = [], given.put
    there = reader._there.data_ptr()
    noted = lambda target, numbers: (puts.append(target.data_ptr() == there), put(target, numbers))  # noqa: E731
    monkeypatch.setattr(given, "put", noted)
    rig.chance = MostDrafts()
    drafts = []
    rig.tamper = lambda rig, batch: drafts.append(batch.num_draft_tokens_per_req.tolist())
    for number in range(3):
        rig.add(f"request {number}", prompt(number, 9))
    for _ in range(10):
        rig.step()
        assert reader._there[:3].tolist() == reader._on_device[:3].tolist() == drafts[-1]
    assert 0 < puts.count(True) < 10
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_unjudged_total"] == 0


def test_a_scheduler_that_only_ends_requests_is_heard():
    """Such a step has no forward."""
    rig = started()
    for name in ("one", "two"):
        rig.add(name, prompt(1, 9))
    for _ in range(3):
        rig.step()
    for request in [*rig.running]:
        rig.end(request)
    rig.runner.forward = lambda: rig._tell({})
    rig.runner.execute_model(None)
    assert "one" not in rig.watch.ledger
    rig.runner.forward = None
    rig.add("two", prompt(2, 9))  # another one of this name
    for _ in range(3):
        rig.step()
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_active"] == 1


class Connector:
    """Stands for a connector, whose methods the ledger follows."""


class Active:
    """Stands for the object by which the V2 runner calls its connector."""

    def pre_forward(self, scheduler_output):
        """Begin the step's transfers."""


def no_bytes(self, group, blocks):
    """The checksums of blocks in a runner without caches."""
    return torch.zeros(len(blocks), 2, dtype=torch.int64)


def test_a_connector_finds_the_requests_of_the_v2_runner(monkeypatch):
    """This runner keeps no list of its requests; the ledger notes what it is told of them.

    A block is its request's when that has ended, too, until another one gets it.
    """
    connector = Connector()
    monkeypatch.setattr(connectors, "connector", lambda: connector)
    monkeypatch.setattr(connectors.BlockBytes, "checksums", no_bytes)
    rig = Rig()
    rig.runner.kv_connector = Active()
    rig.start()
    one = rig.add("one", prompt(1, 9))
    loose = SimpleNamespace(store_gpu_blocks=[one.tables[0][1]], load_gpu_blocks=[])
    tell = rig.runner.update_requests

    def told(scheduler_output):
        scheduler_output.kv_connector_metadata = loose
        tell(scheduler_output)

    monkeypatch.setattr(rig.runner, "update_requests", told)
    for _ in range(3):
        rig.step()

    def owner():
        [stored] = connectors.transfers(rig.runner, rig.runner.kvtxn_requests, loose).stores
        return stored.request, stored.begin, stored.blocks

    assert owner() == ("one", 1, loose.store_gpu_blocks)
    rig.end(one)
    rig.step()
    assert owner() == ("one", 1, loose.store_gpu_blocks)
    rig.free.insert(0, loose.store_gpu_blocks[0])
    rig.add("two", prompt(2, 9))
    rig.step()
    assert owner() == ("two", 0, loose.store_gpu_blocks)
    assert not rig.watch.stopped


class Later(Own):
    """A runner of a release whose methods take more, or less, where the ledger needs nothing."""

    def prepare_inputs(self, scheduler_output, batch_desc):
        return "inputs"

    def update_pp_decode_requests(self, outputs):
        self.told = outputs


def test_methods_that_the_ledger_does_not_need_take_what_they_like():
    runner = Later()
    wanted = settings({"kvtxn": {"audit": "ledger"}}, 1, "cuda")
    runner_parts.attach(runner, wanted, 0, EngineFacts(device="cuda", runner="v2"), windows=False)
    assert is_hooked(runner)
    assert runner.prepare_inputs("scheduled", "desc") == "inputs"
    runner.update_pp_decode_requests("outputs")
    assert runner.told == "outputs"


def test_outputs_that_cannot_be_read_end_the_audit_alone():
    rig = started()
    rig.add("one", prompt(1, 9))
    rig.runner.prepare_attn(rig._batch(LENGTH))
    rig.watch.scrub = object()
    assert rig.runner.sample(None, None, None) == "sampled"
    assert rig.watch.stopped


def test_a_forward_that_failed_before_it_was_told_is_never_told():
    """Else a dummy run, for which vLLM makes metadata as well, would be taken for it."""
    rig = started()
    rig.ledger.reader.ready = "later"  # as where states or a connector are watched
    rig.add("one", prompt(1, 9))

    def forward():
        rig.runner.prepare_attn(rig._batch(LENGTH))
        raise ValueError("before the metadata are made")

    rig.runner.forward = forward
    with pytest.raises(ValueError, match="metadata"):
        rig.runner.execute_model(None)
    rig.ledger.is_ready()
    assert rig.watch.steps == 0
    assert not rig.watch.stopped
