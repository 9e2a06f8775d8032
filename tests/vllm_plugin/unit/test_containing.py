"""``contain``: which requests of a scheduler are computed again, and which end with an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvtxn.integrations.serving.ledger.rank_agreement import Wrong
from kvtxn.integrations.vllm_plugin.audit.audited_scheduler import ContainingScheduler
from kvtxn.integrations.vllm_plugin.seam import containment
from kvtxn.integrations.vllm_plugin.seam.hooks import swap_class

#: Each request's blocks of four rows, and its computed tokens; all have four in this step.
TABLES = {"a": [1, 2, 3], "b": [1, 4, 5], "c": [6, 7, 8]}
COMPUTED = 12


class Scheduler:
    """What ``contain`` touches of vLLM's scheduler.

    Args:
        ending: where a release collects the requests that end with an error.
    """

    def __init__(self, ending):
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=10)
        self.kv_cache_manager = self
        self.grammar_compile_error_reqs = ending
        self.running = [
            SimpleNamespace(
                request_id=name, num_computed_tokens=COMPUTED, is_finished=lambda: False
            )
            for name in TABLES
        ]
        self.requests = {each.request_id: each for each in self.running}
        self.evicted, self.preempted = set(), []

    def get_block_ids(self, name):
        return (TABLES[name],)

    def evict_blocks(self, blocks):
        self.evicted |= {*blocks}

    def _preempt_request(self, request, timestamp, *, drop_stale_output):
        assert drop_stale_output
        self.preempted.append(request.request_id)


def again(scheduler, wrong):
    """Contain, with every preempted request back in its place; returns the names."""
    running = list(scheduler.running)
    spoilt = containment.contain(scheduler, wrong, dict.fromkeys(TABLES, 4))
    assert [each.request_id for each in scheduler.running] == [
        name for name in TABLES if name not in spoilt
    ]
    scheduler.running = running
    return spoilt


@pytest.fixture(params=[set, dict])
def ending(request):
    """The form up to vLLM 0.32, and that of 0.33."""
    outputs = pytest.importorskip("vllm.outputs")
    if request.param is dict and not hasattr(outputs, "RequestError"):
        pytest.skip("this release has no errors of requests")
    return request.param()


def test_a_request_that_is_spoilt_again_ends_with_an_error(ending):
    scheduler = Scheduler(ending)
    wrong = Wrong(frozenset({"a"}), frozenset({2}))
    assert again(scheduler, wrong) == {"a"}
    assert (scheduler.preempted, scheduler.evicted) == (["a"], {2, 3})
    assert not ending
    assert scheduler.running[0].skip_reading_prefix_cache
    assert again(scheduler, wrong) == {"a"}
    assert set(ending) == {"a"}
    if isinstance(ending, dict):  # vLLM hands it to the request's client
        error = ending["a"]
        assert type(error).__name__ == "RequestError"
        assert "kvtxn.audit_violation" in error.message
        assert not error.retryable


def test_a_request_that_only_shares_a_block_never_ends(ending):
    """It reads its own block, which is right; another request's table led there."""
    scheduler = Scheduler(ending)
    for reader in ("b", "b"):
        assert again(scheduler, Wrong(frozenset({reader}), frozenset({1}))) == {"a", "b"}
    assert set(ending) == {"b"}


def test_a_request_never_ends_for_rows_of_earlier_weights(ending):
    """Computed again they were right; weights have changed again since."""
    scheduler = Scheduler(ending)
    for _ in range(3):
        assert again(scheduler, Wrong(blocks=frozenset({2}), aged=frozenset({"a"}))) == {"a"}
    assert not ending
    assert again(scheduler, Wrong(frozenset({"a"}), frozenset({2}))) == {"a"}
    assert not ending


def test_bytes_that_changed_end_every_request_that_has_them(ending):
    """Earlier tokens may come from them; nothing that is cached is trusted."""
    scheduler = Scheduler(ending)
    wrong = Wrong(frozenset({"b"}), frozenset({1}), frozenset({1}))
    assert again(scheduler, wrong) == {"a", "b"}
    assert set(ending) == {"a", "b"}
    assert scheduler.evicted == set(range(1, 10))


def test_wrong_reads_that_were_not_kept_spoil_every_request():
    """Nobody knows their readers, so nobody ends."""
    scheduler = Scheduler(set())
    for _ in range(2):
        assert again(scheduler, Wrong(lost=True)) == {*TABLES}
    assert scheduler.evicted == set(range(1, 10))
    assert not scheduler.grammar_compile_error_reqs


def test_requests_that_share_no_block_go_on():
    scheduler = Scheduler(set())
    assert again(scheduler, Wrong(frozenset({"a"}))) == {"a"}
    assert again(scheduler, Wrong(frozenset({"b"}), frozenset({1}))) == {"a", "b"}


def test_steps_under_way_are_spoilt_with_the_one_that_read():
    """A scheduler that is a step ahead has counted the rows of two steps as computed."""
    scheduler = Scheduler(set())
    scheduler.running[0].num_in_flight_tokens = 8
    assert again(scheduler, Wrong(frozenset({"a"}))) == {"a"}
    assert scheduler.evicted == {2, 3}


@pytest.mark.parametrize("how", ["gone", "finished", "preempted", "resumed"])
@pytest.mark.parametrize("who", ["reader", "another"])
def test_requests_that_left_a_step_spoil_what_nobody_knows(how, who):
    """Nothing that is cached is trusted, and others are computed again, by no fault of theirs."""
    scheduler = Scheduler(set())
    left = scheduler.running[2]
    if how == "gone":
        del scheduler.requests["c"]
    elif how == "finished":
        left.is_finished = lambda: True
    elif how == "resumed":
        left.num_stale_output_tokens = 4
    if how != "resumed":
        scheduler.running.remove(left)
    stays = [each.request_id for each in scheduler.running]
    wrong = Wrong(frozenset({"c"}))
    if who == "another":
        wrong = Wrong(frozenset({"a"}), frozenset({2}))
    found = containment.contain(scheduler, wrong, dict.fromkeys(TABLES, 4))
    assert found == {*stays} | ({"c"} & scheduler.requests.keys())
    assert scheduler.evicted == set(range(1, 10))
    assert scheduler.preempted == stays[::-1]
    assert not scheduler.running
    counts = {
        each.request_id: each.kvtxn_contained
        for each in scheduler.requests.values()
        if hasattr(each, "kvtxn_contained")
    }
    if how in ("preempted", "resumed"):
        assert left.drop_stale_output
        assert left.skip_reading_prefix_cache
        assert counts["c"] == (who == "reader")
    assert counts["a"] == (who == "another")
    assert counts["b"] == 0
    assert not scheduler.grammar_compile_error_reqs


class WholeScheduler(Scheduler):
    """One that takes outputs in."""

    def update_from_output(self, scheduler_output, output):
        return [each.request_id for each in self.running]


def taken_in(scheduler, wrong):
    """The requests that run when vLLM takes in the output of a step with wrong reads."""
    swap_class(scheduler, ContainingScheduler)
    output = SimpleNamespace(sampled_token_ids=[])
    if wrong is not None:
        containment.mark(output, wrong)
    step = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(TABLES, 4))
    return scheduler.update_from_output(step, output)


def test_a_step_is_contained_before_its_output_is_taken_in(lines):
    assert taken_in(WholeScheduler(set()), Wrong(frozenset({"a"}), frozenset({2}))) == ["b", "c"]
    assert "kvtxn.audit_contained" in lines[0]
    assert taken_in(WholeScheduler(set()), None) == ["a", "b", "c"]
    assert len(lines) == 1
    assert taken_in(WholeScheduler(set()), Wrong(stale=frozenset({2}))) == ["a", "b", "c"]
    assert taken_in(WholeScheduler(set()), Wrong(lost=True)) == []


@pytest.mark.parametrize("part", ["get_block_ids", "evict_blocks", "_preempt_request"])
def test_an_error_while_containing_does_not_end_the_engine(monkeypatch, lines, part):
    """Wrong rows are logged alone then; no request is lost."""

    def fail(*args, **kwargs):
        raise RuntimeError("planted")

    monkeypatch.setattr(WholeScheduler, part, fail, raising=False)
    assert taken_in(WholeScheduler(set()), Wrong(frozenset({"a"}))) == ["a", "b", "c"]
    (line,) = lines
    assert "kvtxn.audit_cannot_contain" in line
    assert "planted" in line


def test_stale_blocks_leave_the_prefix_cache_and_their_readers_go_on():
    scheduler = WholeScheduler(set())
    assert taken_in(scheduler, Wrong(stale=frozenset({0, 2, 4}))) == ["a", "b", "c"]
    assert scheduler.evicted == {2, 4}
    assert scheduler.preempted == []
