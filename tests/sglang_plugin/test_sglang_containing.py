"""With ``"on_violation": "contain"`` texts are the model's although rows were wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from attrs import evolve
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import starting, watching
from kvtxn.integrations.sglang_plugin.seam import hook_points, retraction
from test_rare_steps import TakesInFirst
from test_sglang_faults import foreign_line, given_twice, lost_write, wrong_slot
from toy_contained import ReadingToy, sglang_modules
from toy_sglang import decodes

from kvtxn.audit import books

SETTINGS = AuditSettings(audit="ledger", on_violation="contain")


@pytest.fixture
def contained(on_a_cpu, monkeypatch):
    """Makes a toy whose wrong reads are contained."""
    monkeypatch.setattr(hook_points, "moved", lambda *args, **kwargs: [])
    toys = []

    def make(kind=ReadingToy, settings=SETTINGS, **more):
        hooks = starting.Hooks(settings)
        toy = kind(hooks.around(), **more)
        toy.kvtxn, toy.aborts = hooks, 0
        toys.append(toy)
        return toy

    for name, module in sglang_modules(lambda: toys[-1]).items():
        monkeypatch.setitem(sys.modules, name, module)
    return make


class ReadingFirst(TakesInFirst, ReadingToy):
    """Takes in the last result between planning a step and running it."""

    def __init__(self, hooks=None, **more):
        ReadingToy.__init__(self, hooks, **more)

    def plan_step(self, running_batch=None, last_batch=None):
        return ReadingToy.plan_step(self, running_batch, last_batch)

    def step(self):
        plan, self.plan = self.plan, None

        def plans():
            batch = plan().batch_to_run
            while batch is not None and self.results:
                self.take_in(*self.results.popleft())
            return batch

        self.plan = plans
        try:
            super(ReadingToy, self).step()
        finally:
            self.plan = plan
        for _, result in self.results:
            result.delay_sample_func = None


def plants(toy, plant, after=8):
    """Let a fault be planted once into a step that decodes, and return where."""
    return toy.plants(plant, lambda batch: decodes(batch) and toy.events["steps"] > after)


def violations(toy):
    return toy.kvtxn.report()["violations"]


FAULTS = [wrong_slot, lost_write, foreign_line, given_twice]
#: Faults after which the table gives a slot back twice, and another never.
OF_SLOTS = (foreign_line, given_twice)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", ["overlap", "in turn", "takes in first"])
def test_texts_are_right_although_a_row_was_wrong(contained, plant, drafts, kind, caplog):
    """Nobody's request ends, no slot is lost, no wrong row stays in the tree."""
    which = ReadingFirst if kind == "takes in first" else ReadingToy
    toy = contained(which, drafts=drafts, overlap=kind != "in turn", seed=4)
    toy.retracts = 0
    planted = plants(toy, plant)
    toy.serve(12)
    assert planted
    assert violations(toy)
    assert "kvtxn.audit_contained" in caplog.text
    assert "kvtxn.audit_cannot_contain" not in caplog.text
    assert toy.clean_texts()
    assert toy.ended == []
    assert len(toy.done) == 12
    toy.check(slots=plant not in OF_SLOTS)


def test_violations_that_nobody_has_read_spoil_every_request(contained, caplog):
    """More were found than the device keeps: they are counted, and their readers unknown."""
    toy = contained(seed=4)

    def lost_findings(toy, batch):
        toy.kvtxn._watching.watch.ledger.books.counters[books.LIMIT] = 0
        return lost_write(toy, batch)

    plants(toy, lost_findings)
    toy.serve(12)
    assert violations(toy) == []
    assert toy.kvtxn._watching.containment.first_blocks == {"group.0": 0, "group.2": 1201}
    assert "kvtxn.audit_contained" in caplog.text
    assert toy.clean_texts()
    assert (toy.ended, len(toy.done)) == ([], 12)
    toy.check()


@pytest.mark.parametrize("plant", FAULTS, ids=lambda x: x.__name__)
def test_without_containing_texts_are_wrong(contained, plant):
    """The toy's model reads what it is given."""
    toy = contained(settings=AuditSettings(audit="ledger"), seed=4)
    toy.retracts = 0
    plants(toy, plant)
    toy.serve(12)
    assert not toy.clean_texts()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("drafts", [0, 3])
def test_faults_amid_retraction_aborts_and_flushes(contained, seed, drafts):
    """Several faults, one after another, in a busy engine."""
    toy = contained(drafts=drafts, seed=seed, overlap=seed % 3 > 0)
    toy.retracts, toy.aborts = 0.1, 0.02
    found = 0
    for _ in range(3):
        planted = plants(toy, FAULTS[seed % len(FAULTS)], toy.events["steps"] + seed)
        toy.serve(14)
        found += len(planted)
        assert toy.flush()
    assert found
    assert toy.ended == []
    assert toy.clean_texts()
    assert len(toy.done) == 42
    toy.check(slots=FAULTS[seed % len(FAULTS)] not in OF_SLOTS)


@pytest.mark.parametrize("chunk", [4, 12])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_wrong_node_of_the_tree_leaves_it(contained, chunk, overlap):
    """Two readers of the node, one of them in chunks: each is computed again, and once."""
    toy = contained(overlap=overlap, chunk=chunk, seed=2)
    toy.retracts = 0
    prompt = [*range(1, 25)]
    toy.offer(prompt, 3)
    toy.serve(0)
    freed = [slot for key, slot in toy.tree_cache.slots.items() if 4 < len(key) < 9]
    for slot in freed:  # others write there, and leave nothing in the tree
        toy.content[slot] = (49, True)
    other = toy.offer([40] * 12, 3)
    toy.token_to_kv_pool_allocator.free_slots.extendleft(freed)
    toy.serve(0)
    toy.tree_cache.slots = {k: s for k, s in toy.tree_cache.slots.items() if k[1] != 40}
    for slot in toy.token_to_kv_pool_allocator.free_slots.copy():
        if slot in freed:
            toy.token_to_kv_pool_allocator.free_slots.remove(slot)
    free, known = toy.token_to_kv_pool_allocator.free_slots, toy.tree_cache.slots.values()
    free.extend({*range(1, 1201)} - {*free} - {*known})
    readers = [toy.offer([*prompt, 30 + number] * 1, 5) for number in range(2)]
    toy.serve(0)
    assert {each["request"] for each in violations(toy)} == {each.rid for each in readers}
    assert other in toy.done
    assert toy.tree_cache.emptied == 1
    assert toy.clean_texts()
    assert toy.ended == []
    toy.check()


def test_rows_that_a_spoilt_chunk_has_written_are_nobodys(contained):
    """They are in the tree before the chunk's result is taken in, and another request reads them.

    None of the rows that this one reads is a wrong one for the ledger.
    """
    toy = contained(chunk=6, seed=4)
    toy.retracts = 0
    toy.offer([40] * 5, 19)
    for _ in range(3):
        toy.step()
    prompt, readers = [*range(1, 25)], []
    readers.append(toy.offer(prompt, 4))

    def fault(toy, batch):
        chunk = batch.forward_batch.forward_mode.name == "EXTEND" and batch.before == [12]
        if chunk and len(readers) == 1:
            toy.row(readers[0])[3] = toy.row(toy.running[0])[2]
            readers.append(toy.offer(prompt, 4))

    toy.fault = fault
    toy.serve(0)
    assert {each["request"] for each in violations(toy)} == {readers[0].rid}
    assert toy.events["hits"] > 0
    assert toy.clean_texts()
    assert toy.ended == []
    toy.check(slots=False)


def locks_the_tree(toy, plans):
    """Let copies to the host lock all rows of the tree for a number of looks."""
    tree, tried = toy.tree_cache, []
    evict = tree.evict

    def evicts(params):
        tried.append(params)
        if len(tried) > plans:
            evict(params)

    tree.evict = evicts
    return tried


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("doubts_all", [True, False])
def test_nobody_reads_rows_of_a_spoilt_chunk_that_a_copy_has_locked(contained, overlap, doubts_all):
    """The ledger takes them for right, so whoever finds them before they can leave is spoilt."""
    toy = contained(chunk=6, seed=4, overlap=overlap)
    toy.retracts = 0
    toy.offer([40] * 5, 19)
    for _ in range(3):
        toy.step()
    prompt, readers = [*range(1, 25)], []
    readers.append(toy.offer(prompt, 4))
    tried = locks_the_tree(toy, 5)

    def fault(toy, batch):
        extends = batch.forward_batch.forward_mode.name == "EXTEND"
        if extends and batch.before == [12] and len(readers) == 1:
            other = toy.row(toy.running[0])[2]
            toy.row(readers[0])[3] = other
            readers.append(None)
            if doubts_all:
                toy.kvtxn._watching.watch.ledger.findings.lost += 1

    toy.fault = fault
    while not tried:
        toy.step()
    readers[1] = toy.offer(prompt, 4)
    toy.serve(0)
    assert len(tried) > 5
    assert toy.clean_texts()
    assert toy.ended == []
    for key, slot in toy.tree_cache.slots.items():
        assert toy.content[slot] == (key[-1], True)


def row_of_the_tree(toy, batch):
    """A row is written where the tree has one, which other requests read."""
    number = toy.row(batch.reqs[1])[2]
    assert int(number) in toy.tree_cache.slots.values()
    batch.forward_batch.out_cache_loc[0] = number
    return batch.reqs[1].rid


def test_a_scheduler_that_plans_nothing_does_not_give_up(contained, caplog):
    """It plans thousands of times while one copy to the host takes place."""
    toy = contained(seed=4)
    toy.retracts = 0
    planted, tried = plants(toy, row_of_the_tree), locks_the_tree(toy, 1000)
    toy.serve(12, steps=0)
    while not tried:
        toy.step()
    for _ in range(1000):
        toy.kvtxn._watching.containment.plan(lambda: None)
    assert planted
    assert len(tried) > 1000
    toy.serve(12)
    assert "locked by others than requests" not in caplog.text
    assert toy.clean_texts()
    toy.check()


@pytest.mark.parametrize("plans", [3, 1000])
def test_rows_that_a_copy_has_locked_leave_the_tree_later(contained, caplog, plans):
    """The next plans try again, and give up with a sentence."""
    toy = contained(seed=4)
    toy.retracts = 0
    planted, tried = plants(toy, row_of_the_tree), locks_the_tree(toy, plans)
    toy.serve(30 if plans == 3 else 90)
    assert planted
    gave_up = "locked by others than requests" in caplog.text
    assert gave_up == (plans == 1000)
    assert toy.clean_texts()
    assert toy.ended == []
    if not gave_up:
        assert len(tried) > plans
        toy.check()


def test_rows_that_hicache_has_on_the_host_alone_leave_it_too(contained, monkeypatch):
    """A retraction makes room, and SGLang may take the wrong row for it: the host has a copy."""
    toy = contained(seed=4)
    toy.retracts = 0
    tree, planted, release = toy.tree_cache, plants(toy, row_of_the_tree), toy.release

    def releases(req, insert=True):
        release(req, insert)
        if planted and not insert:
            locked = tree.locked()
            gone = [key for key, slot in tree.slots.items() if slot not in locked]
            toy.token_to_kv_pool_allocator.free([tree.slots.pop(key) for key in gone])

    toy.release = releases
    toy.serve(30)
    assert planted
    assert tree.emptied == 1
    assert toy.clean_texts()


@pytest.mark.parametrize("windows", [True, False])
def test_requests_are_let_into_a_clean_tree_where_windows_need_it(contained, windows):
    """Their rows with a window would keep their slots, and a long prompt would never be done."""
    toy = contained(seed=4)
    toy.retracts = 0
    toy.tree_cache.supports_swa = lambda: windows
    toy.tree_cache.swa_evictable_size = lambda: 0
    planted = plants(toy, lost_write)
    toy.serve(12)
    (again,) = (req for req in toy.done if req.rid == planted[0].request)
    assert again.waits == [1]
    assert again.skip_radix_cache_insert != windows
    assert toy.clean_texts()
    toy.check()


def test_a_request_that_sglang_fails_to_end_takes_no_other_one_with_it(contained, caplog):
    """All others are computed again."""
    toy = contained(seed=4)
    toy.retracts = 0
    planted, broken = plants(toy, foreign_line), []

    def fails(req):
        broken.append(req)
        raise RuntimeError("broken")

    toy._release_aborted_request = fails
    plan = toy.fault

    def fault(toy, batch):
        plan(toy, batch)
        for req in batch.reqs:
            if planted and req.rid == planted[0].request:
                req.session = SimpleNamespace(streaming=True)

    toy.fault = fault
    toy.serve(12)
    assert len(broken) == 1
    assert "kvtxn.audit_not_ended" in caplog.text
    assert len(toy.done) == 11
    assert toy.clean_texts()


def test_a_second_wrong_read_ends_the_request(contained):
    """With a reason that says so; its rows do not get into the tree, and others run on."""
    toy = contained(seed=4)
    toy.retracts = 0
    first = toy.offer([*range(1, 15)], 12)
    for number in range(3):
        toy.offer([20 + number, *range(1, 12)], 12)

    def fault(toy, batch):
        decodes = batch.forward_batch.forward_mode.name == "DECODE"
        if decodes and first in batch.reqs:
            number = batch.reqs.index(first)
            batch.forward_batch.out_cache_loc[number] = 0  # lost, each time

    toy.fault = fault
    toy.serve(0)
    (req, reason), *others = toy.ended
    assert (req, others) == (first, [])
    assert reason["type"] == "abort"
    assert "computing it again did not help" in reason["message"]
    assert toy.released == [first]
    assert first.finished_output
    assert toy.clean_texts()
    assert len(toy.done) == 4
    toy.check()


def test_a_request_that_lives_through_updates_of_weights_goes_on(contained):
    """Its rows are computed again after each; a second update is no second wrong read."""
    toy = contained(seed=4, settings=evolve(SETTINGS, stale="alarm"))
    toy.retracts = 0
    for number in range(3):
        toy.offer([20 + number, *range(1, 12)], 16)
    decoded = []

    def fault(toy, batch):
        if batch.forward_batch.forward_mode.name == "DECODE":
            decoded.append(batch)
            if len(decoded) in (4, 10, 16):
                toy.kvtxn._watching.weights_changed()

    toy.fault = fault
    toy.serve(0)
    assert len(decoded) > 16
    assert not toy.ended
    assert len(toy.done) == 3
    counters = toy.kvtxn._watching.watch.counters()
    assert counters["kvtxn_audit_violations_total_stale"] > 3
    toy.check()


@pytest.mark.parametrize("overlap", [True, False])
def test_an_abort_that_comes_meanwhile_ends_the_request(contained, overlap):
    """It is not computed again; its client gets SGLang's reason."""
    toy = contained(seed=4, overlap=overlap)
    toy.retracts = 0
    planted = plants(toy, lost_write)
    take, aborted = toy.take_in, []

    def takes(batch, result):
        for req in batch.requests if planted and not aborted else ():
            if req.rid == planted[0].request:
                req.to_finish = SimpleNamespace(message="Aborted", status_code=None)
                aborted.append(req)
        return take(batch, result)

    toy.take_in = takes
    toy.serve(12)
    assert [req for req, _ in toy.ended] == aborted
    assert toy.ended[0][1]["message"] == "Aborted"
    assert toy.clean_texts()
    toy.check()


def test_a_turn_of_a_session_ends_and_a_session_between_turns_gives_back_its_rows(contained):
    """SGLang keeps a session's rows when it retracts the turn."""
    toy = contained(seed=4)
    toy.retracts = 0
    planted = plants(toy, foreign_line)
    plan = toy.fault

    def fault(toy, batch):
        plan(toy, batch)
        if planted and not toy.tree_cache.sessions:
            writer = next(req for req in batch.reqs if req.rid == planted[0].writer)
            kept = SimpleNamespace(req_pool_idx=8, kv_allocated_len=40)
            toy.req_to_token_pool.req_to_token[8, :40] = toy.row(writer)[:40]
            toy.tree_cache.sessions["one"] = kept
            next(r for r in batch.reqs if r.rid == planted[0].request).session = SimpleNamespace(
                streaming=True
            )

    toy.req_to_token_pool.free_slots.remove(8)
    closed = []
    toy.tree_cache.release_session = closed.append
    toy.fault = fault
    toy.serve(12)
    ((req, reason),) = toy.ended
    assert req.rid == planted[0].request
    assert "no turn of a streaming session" in reason["message"]
    assert closed == ["one"]
    assert toy.clean_texts()


def test_an_error_while_containing_leaves_the_engine_running(contained, caplog, monkeypatch):
    """It is logged, and violations are counted on."""
    toy = contained(seed=4)
    toy.retracts = 0
    monkeypatch.setattr(retraction, "is_session", lambda req: 1 / 0)
    plants(toy, lost_write)
    toy.serve(12)
    assert "kvtxn.audit_cannot_contain" in caplog.text
    assert "wrong rows are logged and not contained" in caplog.text
    assert violations(toy)
    assert len(toy.done) == 12


def test_more_wrong_reads_than_are_kept_are_everybodys(contained):
    """Of a read that was counted alone nobody knows the reader."""
    toy = contained(seed=4)
    toy.retracts = 0
    seen = []

    def fault(toy, batch):
        if not seen and toy.events["steps"] > 10 and len(batch.reqs) > 2:
            toy.kvtxn._watching.watch.ledger.findings.lost += 1
            lost_write(toy, batch)
            seen.extend(batch.reqs)

    toy.fault = fault
    toy.serve(12)
    assert toy.events["retracted"] >= len(seen) > 2
    assert toy.clean_texts()
    toy.check()


class ThreadRanks:
    """Ranks that are threads of this process."""

    number = 2

    def __init__(self):
        self.barrier, self.values, self.own = threading.Barrier(2, timeout=30), [None, None], {}

    def own_number(self):
        return self.own[threading.get_ident()]

    def of_all(self, value):
        self.values[self.own_number()] = value
        self.barrier.wait()
        found = [*self.values]
        self.barrier.wait()
        return found

    def highest(self, level, *, stages):
        return max(self.of_all(level))


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_contain_what_one_of_them_has_read(contained, monkeypatch, overlap):
    """Each rank has its own caches, and all of them take the same decisions."""
    ranks = ThreadRanks()
    monkeypatch.setattr(watching.TensorRanks, "of", lambda scheduler: ranks)
    toys, failed, ready = {}, [], threading.Barrier(2, timeout=30)

    def runs(rank):
        try:
            ranks.own[threading.get_ident()] = rank
            toy = toys[rank]
            toy.retracts = 0
            planted = plants(toy, lost_write)
            plan = toy.fault
            toy.fault = plan if rank else None
            ready.wait()
            toy.serve(12)
            assert bool(planted) == bool(rank)
        except BaseException as error:
            failed.append(error)

    for rank in range(2):
        toys[rank] = contained(overlap=overlap, seed=4)
    for name, module in sglang_modules(lambda: toys[ranks.own_number()]).items():
        monkeypatch.setitem(sys.modules, name, module)
    threads = [threading.Thread(target=runs, args=(rank,)) for rank in toys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    first, second = toys.values()
    assert [r.tokens for r in first.done] == [r.tokens for r in second.done]
    assert first.events == second.events
    assert first.events["retracted"] == 1
    assert violations(second)
    for toy in toys.values():
        assert toy.clean_texts()
        toy.check()


def test_ranks_reach_each_other(tmp_path):
    """Over a group on the host, as SGLang has it."""
    script = (
        "import sys, torch.distributed as dist\n"
        "from types import SimpleNamespace\n"
        "from kvtxn.integrations.sglang_plugin.seam.ranks import TensorRanks\n"
        "rank = int(sys.argv[1])\n"
        "assert TensorRanks.of(SimpleNamespace(tp_cpu_group=1)).of_all(3) == [3]\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[2], rank=rank,"
        " world_size=2)\n"
        "ranks = TensorRanks.of(SimpleNamespace(tp_cpu_group=dist.group.WORLD))\n"
        "print(ranks.number, ranks.own_number() == rank, ranks.of_all({rank}),"
        " ranks.highest(rank, stages=True))\n"
    )
    command = [sys.executable, "-c", script]
    both = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "met")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    for each in both:
        assert each.communicate(timeout=60)[0].decode() == "2 True [{0}, {1}] 1\n"


@pytest.mark.parametrize("required", [True, False])
def test_a_release_that_cannot_contain_says_so(on_a_cpu, caplog, monkeypatch, required):
    """Wrong rows are logged; an engine that has to contain them does not start."""
    monkeypatch.setattr(hook_points, "folder", lambda: None)  # without SGLang
    hooks = starting.Hooks(evolve(SETTINGS, required=required))
    toy = ReadingToy(hooks.around(), seed=4)
    if required:
        with pytest.raises(starting.RequiredError, match="cannot be contained"):
            toy.serve(12)
        return
    plants(toy, lost_write)
    toy.serve(12)
    assert "kvtxn.audit_cannot_contain" in caplog.text
    assert "Scheduler.process_batch_result is gone" in caplog.text
    assert hooks.report()["violations"]
