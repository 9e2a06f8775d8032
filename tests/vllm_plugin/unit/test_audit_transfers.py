"""The audit's reading of connectors' metadata and of requests, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.serving.step import Arrival, Rows
from kvtxn.integrations.vllm_plugin.audit import watched_connectors
from kvtxn.integrations.vllm_plugin.seam import audited_requests, connectors
from transfer_rig import (
    GROUP,
    ROWS,
    TOKENS,
    Loaded,
    come,
    follow,
    kinds,
    load,
    rig,
    scheduled,
    slots,
    state_of,
    stored,
    write,
)

from kvtxn.audit import Key, Ledger, StateGroup, Step

__all__ = ["rig"]


def test_rows_leave_and_return(rig):
    """A block that comes back with its bytes is right for the same tokens."""
    rig.watch.begin(stored(rig, 1, 2))
    rig.watch.end()
    come(rig, "b", [5, 6], TOKENS[:9], load(rig, 5, 6))
    rig.cache[5], rig.cache[6] = rig.cache[1], rig.cache[2]
    rig.watch.forward(ROWS)
    assert kinds(rig) == []


def test_rows_that_were_never_computed_leave(rig):
    rig.watch.begin(stored(rig, 1, 2, 3, tokens=TOKENS))
    rig.watch.end()
    found = rig.ledger.violations()
    assert [(v.kind, v.found, v.position) for v in found] == [("exported", "unwritten", 8)]
    assert rig.stopped == []


def test_rows_stored_under_tokens_that_the_runner_does_not_have_yet(rig):
    """The scheduler's half knows them first. They are right if they are those of the rows."""
    rig.runner.kvtxn_requests.hear(scheduled(new=[("a", state_of([1, 2, 3], TOKENS[:6]))]))
    rig.watch.begin(stored(rig, 1, 2))
    rig.watch.end()
    assert kinds(rig) == []
    come(rig, "b", [5, 6], TOKENS[:9], load(rig, 5, 6))
    rig.cache[5], rig.cache[6] = rig.cache[1], rig.cache[2]
    rig.watch.forward(ROWS)
    assert kinds(rig) == []


def test_rows_stored_under_other_tokens(rig):
    """Each row from the first other token on is of another prefix; a report for each block."""
    rig.watch.begin(stored(rig, 1, 2, tokens=[*TOKENS[:2], 99, *TOKENS[3:8]]))
    rig.watch.end()
    found = rig.ledger.violations()
    assert [(v.kind, v.found, v.position) for v in found] == [
        ("exported", "foreign", 2),
        ("exported", "foreign", 4),
    ]
    assert rig.stopped == []


@pytest.mark.parametrize("right", [True, False])
def test_rows_of_a_request_with_an_adapter_and_an_image(rig, right):
    """What its rows depend on beside tokens counts for the tokens of the store, too."""
    feature = SimpleNamespace(
        mm_position=SimpleNamespace(offset=6, length=4, is_embed=None), identifier="a picture"
    )
    rig.runner.lora_manager = Loaded()
    lora = SimpleNamespace(lora_name="poet", lora_int_id=3, lora_path="/poet")
    state = state_of([7, 8], TOKENS[:10], lora_request=lora, mm_features=[feature])
    rig.runner.kvtxn_requests.hear(scheduled(new=[("c", state)]))
    arrival = audited_requests.arrival_of(rig.runner, state, "c", TOKENS[:10], 0, [[7, 8]])
    extras = arrival.extras if right else []
    rig.ledger.admit("c", TOKENS[:10], extras=extras, embedded=arrival.embedded)
    write(rig.ledger, "c", [7, 8])
    state.prompt_token_ids = TOKENS[:6]
    rig.watch.begin(stored(rig, 7, 8))
    rig.watch.end()
    assert kinds(rig) == ([] if right else ["exported", "exported"])


def test_blocks_that_could_not_be_loaded(rig):
    """They are told once, with the requests that began with them in this step."""
    assert not rig.watch.unsettled
    come(rig, "b", [5, 6], TOKENS[:9], load(rig, 5, 6))
    rig.watch.forward(ROWS)
    assert rig.watch.unsettled
    rig.watch.failed({6, 9})
    assert rig.watch.take_failed() == (["b"], [6, 9])
    assert not rig.watch.unsettled
    assert rig.watch.take_failed() == ([], [])
    come(rig, "c", [7], TOKENS[:5], load(rig, 7))
    rig.watch.forward(ROWS)
    rig.watch.failed({6})
    assert rig.watch.take_failed() == ([], [6])  # "b" came in an earlier step


def test_another_block_comes_back(rig):
    """Its bytes are known: they are of other rows."""
    rig.watch.begin(stored(rig, 1, 2))
    rig.watch.end()
    come(rig, "b", [5, 6], TOKENS[:9], load(rig, 5, 6))
    rig.cache[5], rig.cache[6] = rig.cache[2], rig.cache[1]
    rig.watch.forward(ROWS)
    assert kinds(rig) == ["imported", "imported"]


def unverified(rig):
    return rig.ledger.counters()["kvtxn_audit_rows_unverified_total"]


def job(rig, name, *blocks, loads=False):
    """Metadata in ``OffloadingConnector``'s manner: places 7 and 8 of its memory are meant."""
    cache = SimpleNamespace(
        block_ids=list(blocks), group_sizes=[len(blocks), 0], block_indices=[0, 0]
    )
    memory = SimpleNamespace(block_ids=[7, 8][: len(blocks)])
    ends = (memory, cache) if loads else (cache, memory)
    found = SimpleNamespace(req_id=name, src_spec=ends[0], dst_spec=ends[1])
    jobs = {"load_jobs": {1: found}, "store_jobs": {}}
    return SimpleNamespace(**(jobs if loads else {"store_jobs": {1: found}, "load_jobs": {}}))


def test_other_bytes_come_back(rig):
    """Nobody stored these bytes where they come from, and nobody else can."""
    rig.watch.begin(job(rig, "a", 1, 2))
    rig.watch.end()
    come(rig, "b", [5, 6], TOKENS[:9], job(rig, "b", 5, 6, loads=True))
    rig.cache[5], rig.cache[6] = rig.cache[1], b"torn"
    rig.watch.forward(ROWS)
    assert kinds(rig) == ["imported"]
    assert unverified(rig) == 0


def test_bytes_that_were_pushed_out_of_the_table_come_back(rig):
    """They are as unknown as any from elsewhere, although they come from where they were stored."""
    rig.watch.begin(job(rig, "a", 1, 2))
    rig.watch.end()
    rig.watch.settle()
    table = rig.watch._blocks._table
    table._entries.zero_()  # as many blocks do that steps fill and no connector stores
    table.forgotten += 2
    come(rig, "b", [5, 6], TOKENS[:9], job(rig, "b", 5, 6, loads=True))
    rig.cache[5], rig.cache[6] = rig.cache[1], rig.cache[2]
    rig.watch.forward(ROWS)
    assert kinds(rig) == []
    assert unverified(rig) == 8


@pytest.mark.parametrize("nested", [False, True])
def test_other_bytes_come_from_a_tier_behind_the_memory(rig, nested):
    """A file of another engine may have been read into the place."""
    settings = {"secondary_tiers": [{"type": "fs"}]}
    several = {"connectors": [{"kv_connector_extra_config": settings}]}
    transfer = rig.runner.vllm_config.kv_transfer_config
    transfer.kv_connector_extra_config = several if nested else settings
    rig.watch.begin(job(rig, "a", 1, 2))
    rig.watch.end()
    come(rig, "b", [5, 6], TOKENS[:9], job(rig, "b", 5, 6, loads=True))
    rig.cache[5], rig.cache[6] = rig.cache[1], b"another engine's"
    rig.watch.forward(ROWS)
    assert kinds(rig) == []
    assert unverified(rig) == 4


def test_other_bytes_come_from_a_store_that_engines_share(rig):
    """Another engine has stored the same tokens' rows in the same place: they may well be right."""
    rig.watch.begin(stored(rig, 1, 2))
    rig.watch.end()
    come(rig, "b", [5, 6], TOKENS[:9], load(rig, 5, 6))
    rig.cache[5], rig.cache[6] = rig.cache[1], b"another engine's"
    rig.watch.forward(ROWS)
    assert kinds(rig) == []
    assert unverified(rig) == 4


def test_rows_from_elsewhere_are_taken_for_the_requests_own(rig):
    come(rig, "b", [5], TOKENS[:5], load(rig, 5))
    rig.cache[5] = b"elsewhere"
    rig.watch.forward(ROWS)
    assert kinds(rig) == []
    assert unverified(rig) == 4


def test_metadata_that_nobody_knows(rig):
    """Blocks whose bytes change before the forward were loaded; the others were not."""
    come(rig, "b", [5, 6], TOKENS[:9], SimpleNamespace(secret=1))
    rig.cache[5] = b"loaded"
    rig.watch.forward(ROWS)
    line = rig.ledger.line("b")
    step = Step(
        lines=torch.tensor([line]), starts=torch.tensor([0, 1]), first=torch.tensor([8]),
        tokens=torch.tensor(TOKENS[8:9]), slots={"group.0": torch.tensor([28])},
        tables={"group.0": torch.tensor([[5, 6, 7]])},
    )  # fmt: skip
    rig.ledger.write(step)
    rig.ledger.check(step)
    assert [(v.kind, v.position) for v in rig.ledger.violations()] == [("unwritten", 4)]


def compute(rig, name, tokens, begin, end):
    """Compute rows of a prompt on a device that alone knows their positions; blocks 8 to 10."""
    rig.runner.kvtxn_requests.hear(scheduled(new=[(name, state_of([8, 9, 10], tokens))]))
    rig.watch.begin(SimpleNamespace(secret=1))
    rig.watch.scheduled({name: end - begin})
    step = Step(
        lines=torch.tensor([rig.ledger.line(name)]), starts=torch.tensor([0, end - begin]),
        first=torch.tensor([begin]), tokens=torch.tensor(tokens[begin:end]),
        slots={"group.0": slots([8, 9, 10])[begin:end]},
        tables={"group.0": torch.tensor([[8, 9, 10]])},
    )  # fmt: skip
    rows = Rows([name], step.starts, None, step.tokens, None, step.slots, step.tables)
    rig.watch.forward(rows)
    rig.ledger.write(step)
    rig.watch.end_step()


@pytest.fixture
def computed(rig):
    """A prompt of 10 tokens and one that was sampled, computed in two pieces, and then gone on."""
    tokens = [*range(60, 71)]
    rig.ledger.admit("p", tokens[:10])
    rig.ledger.hand_out("group.0", [8, 9, 10])
    rig.watch.change([Arrival("p", tokens[:10], [], {}, 0, [[8, 9, 10]])], [])
    compute(rig, "p", tokens, 0, 5)
    rig.watch.change([], [])
    compute(rig, "p", tokens, 5, 10)
    return tokens


def load_unseen(rig, name, blocks, tokens, contents):
    """Let blocks that are handed out get these bytes from a connector that nobody knows."""
    arrival = Arrival(name, list(tokens), [], {}, 4 * len(blocks), [blocks])
    rig.ledger.admit(name, tokens)
    rig.ledger.hand_out("group.0", blocks)
    rig.watch.change([arrival], [("group.0", block) for block in blocks])
    rig.watch.begin(SimpleNamespace(secret=1))
    rig.cache.update(zip(blocks, contents, strict=True))
    rig.watch.forward(ROWS)


def test_prompts_are_known_wherever_an_unknown_connector_takes_them(rig, computed):
    """The host knows the positions of tokens that were given, though not those of drafts."""
    load_unseen(rig, "b", [5, 6], computed, [rig.cache[8], rig.cache[9]])
    assert kinds(rig) == []
    assert unverified(rig) == 0


def test_swapped_blocks_of_a_prompt_are_found_behind_an_unknown_connector(rig, computed):
    load_unseen(rig, "b", [5, 6], computed, [rig.cache[9], rig.cache[8]])
    found = [(v.kind, v.request, v.position, v.written_request) for v in rig.ledger.violations()]
    assert found == [("imported", "b", 0, "p"), ("imported", "b", 4, "p")]


def test_a_block_may_be_filled_with_the_bytes_that_it_had(rig, computed):
    """Known ones, and ones that were believed before."""
    load_unseen(rig, "b", [8, 9], computed, [rig.cache[8], rig.cache[9]])
    assert (kinds(rig), unverified(rig)) == ([], 0)
    load_unseen(rig, "c", [7], TOKENS[:5], [b"elsewhere"])
    rig.ledger.release("b")
    load_unseen(rig, "d", [7], TOKENS[:5], [b"elsewhere"])
    assert (kinds(rig), unverified(rig)) == ([], 8)


class ToldInOne:
    """A connector that says what has come in one call, as NIXL's does; it has no other."""

    def get_transfer_results(self, finished_req_ids):
        return SimpleNamespace(finished_recving={"b"})


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_rows_that_have_come_are_heard_of_in_either_runner(rig, runner):
    mixin = getattr(watched_connectors, f"WatchedConnector{runner}")
    connector = type("Watched", (mixin, ToldInOne), {"kvtxn_transfers": rig.watch})()
    connector.get_transfer_results(set())
    come(rig, "b", [5], TOKENS[:5], None)
    rig.watch.forward(ROWS)
    assert (kinds(rig), unverified(rig)) == ([], 4)


def test_an_answer_that_cannot_be_read_ends_the_audit_alone(rig):
    """The engine gets the connector's answer as it is."""
    answer = SimpleNamespace()
    own = type("Odd", (), {"get_transfer_results": lambda *_: answer})
    mixin = watched_connectors.WatchedConnectorV1
    connector = type("Watched", (mixin, own), {"kvtxn_transfers": rig.watch})()
    assert connector.get_transfer_results(set()) is answer
    assert [type(error) for error in rig.stopped] == [AttributeError]


@pytest.fixture(params=["none", "align"])
def kept(request):
    """How the prefix cache keeps states: not at all, or at the ends of blocks."""
    return request.param


@pytest.fixture
def hybrid(rig, kept):
    """A watch of a hybrid, whose request "a" left its states in blocks 9 and 10."""
    ledger = Ledger(
        [GROUP, StateGroup("group.1", 12, pool="blocks")], max_requests=4, max_length=32
    )
    sizes = {"group.1": 4} if kept == "align" else {}
    rig.ledger, rig.watch = ledger, follow(ledger, rig.runner, rig.cache, print, sizes)
    ledger.admit("a", TOKENS[:10])
    rig.row = lambda name, first, source, **more: go_on(ledger, name, first, source, **more)
    rig.row("a", 0, -1, block=9)
    rig.row("a", 1, 9, block=10)
    ledger.violations()  # its rows are not all there
    rig.table = [9, 10] if sizes else [10]  # of the request that comes
    return rig


def go_on(ledger, name, first, source, block=9):
    """Compute one row, from the state in one block to the state in another."""
    ledger.write(
        Step(
            lines=torch.tensor([ledger.line(name)]), starts=torch.tensor([0, 1]),
            first=torch.tensor([first]), tokens=torch.tensor(TOKENS[first : first + 1]),
            slots={"group.1": torch.tensor([block])}, sources={"group.1": torch.tensor([source])},
        )
    )  # fmt: skip


def come_with_states(rig, metadata):
    arrival = Arrival("b", TOKENS[:9], [], {}, 8, [[5, 6], rig.table])
    rig.ledger.admit("b", TOKENS[:9])
    rig.watch.change([arrival], [])
    rig.watch.begin(metadata)


@pytest.mark.parametrize("way", ["metadata nobody knows", "while it waits", "a job"])
def test_a_state_that_a_connector_brings_is_believed(hybrid, way):
    """As rows are, and counted with them."""
    metadata = SimpleNamespace(secret=1)
    if way == "while it waits":
        hybrid.watch.received(["b"])
    elif way == "a job":
        metadata = job(hybrid, "b", 5, 6, 10, loads=True)
        metadata.load_jobs[1].dst_spec.group_sizes = [2, 1]
        metadata.load_jobs[1].dst_spec.block_indices = [0, len(hybrid.table) - 1]
    come_with_states(hybrid, metadata)
    if way != "while it waits":
        hybrid.cache |= {5: b"rows", 6: b"more", 10: b"a state"}
    hybrid.watch.forward(ROWS)
    hybrid.row("b", 8, 10)
    assert hybrid.ledger.violations() == []
    assert unverified(hybrid) == 9


def test_a_state_that_nobody_brings_is_not(hybrid):
    """The connector fills the rows' blocks, and the state's has what its last owner left."""
    come_with_states(hybrid, SimpleNamespace(secret=1))
    hybrid.cache |= {5: b"rows", 6: b"more"}
    hybrid.watch.forward(ROWS)
    hybrid.row("b", 8, 10)
    (found,) = hybrid.ledger.violations()
    assert (found.kind, found.found, found.written_request) == ("state", "foreign", "a")
    assert unverified(hybrid) == 8


@pytest.fixture
def stored_states(hybrid):
    """The states of "a" after 4 and 8 tokens, in blocks 7 and 8, were stored in places 7 and 8."""
    source = 10
    for first in range(2, 8):
        block = {3: 7, 7: 8}.get(first, 11)
        hybrid.row("a", first, source, block=block)
        source = block
    hybrid.watch.begin(state_job("a", 7, 8))
    hybrid.watch.end()
    given = [("group.1", block) for block in (3, 4)]
    hybrid.watch.before_change(False, given)
    hybrid.watch.change([], given)
    assert unverified(hybrid) == 0
    return hybrid


def state_job(name, *blocks, column=0, loads=False):
    """Metadata as those of ``job`` that move states alone, from a column on."""
    found = job(None, name, *blocks, loads=loads)
    [each] = (found.load_jobs if loads else found.store_jobs).values()
    cache = each.dst_spec if loads else each.src_spec
    cache.group_sizes, cache.block_indices = [0, len(blocks)], [0, column]
    return found


def bring_state(rig, content, waits=False, place=8):
    """Let "b" come with 8 rows computed, whose state is loaded from a place into block 4."""
    metadata = state_job("b", 4, column=1, loads=True)
    metadata.load_jobs[1].src_spec.block_ids = [place]
    arrival = Arrival("b", TOKENS[:9], [], {}, 8, [[0, 0], [3, 4]])
    rig.ledger.admit("b", TOKENS[:9])
    if waits:
        rig.watch.begin(metadata)
        rig.cache[4] = content
        rig.watch.received(["b"])
        metadata = None
    rig.watch.change([arrival], [])
    if metadata is not None:
        rig.watch.begin(metadata)
        rig.cache[4] = content
    rig.watch.forward(ROWS)
    return [(v.kind, v.found, v.request, v.slot) for v in rig.ledger.violations()]


@pytest.mark.parametrize("kept", ["align"], indirect=True)
@pytest.mark.parametrize("waits", [False, True])
def test_a_state_that_comes_back_is_known_by_its_bytes(stored_states, waits):
    assert bring_state(stored_states, stored_states.cache[8], waits=waits) == []
    stored_states.row("b", 8, 4, block=5)
    assert stored_states.ledger.violations() == []
    assert unverified(stored_states) == 0


@pytest.mark.parametrize("kept", ["align"], indirect=True)
@pytest.mark.parametrize("waits", [False, True])
def test_a_state_of_fewer_tokens_comes_back(stored_states, waits):
    found = bring_state(stored_states, stored_states.cache[7], waits=waits)
    assert found == [("imported", "foreign", "b", 4)]
    assert unverified(stored_states) == 0


@pytest.mark.parametrize("kept", ["align"], indirect=True)
def test_a_state_of_other_tokens_names_who_stored_it(stored_states):
    rig = stored_states
    metadata = state_job("b", 4, column=1, loads=True)
    metadata.load_jobs[1].src_spec.block_ids = [8]
    rig.ledger.admit("b", TOKENS[1:10])
    rig.watch.change([Arrival("b", TOKENS[1:10], [], {}, 8, [[0, 0], [3, 4]])], [])
    rig.watch.begin(metadata)
    rig.cache[4] = rig.cache[8]
    rig.watch.forward(ROWS)
    [found] = rig.ledger.violations()
    assert (found.kind, found.found, found.written_request) == ("imported", "foreign", "a")
    assert found.written_position == 7


@pytest.mark.parametrize("kept", ["align"], indirect=True)
def test_a_state_of_earlier_weights_comes_back(stored_states):
    """It is as old as when it was stored, and not believed to be new."""
    rig = stored_states
    rig.watch.before_change(True, [])
    rig.ledger.new_epoch()
    assert bring_state(rig, rig.cache[8]) == []
    rig.row("b", 8, 4, block=5)
    assert rig.ledger.violations() == []
    [read] = rig.ledger.read_ages()
    assert (read.request, read.states) == ("b", {1: 1})


@pytest.mark.parametrize("kept", ["align"], indirect=True)
def test_other_bytes_come_back_as_a_state(stored_states):
    """Nobody stored these bytes where they come from, and nobody else can."""
    assert bring_state(stored_states, b"torn") == [("imported", "unwritten", "b", 4)]


@pytest.mark.parametrize("kept", ["align"], indirect=True)
def test_a_state_of_unknown_bytes_from_elsewhere_is_believed(stored_states):
    transfer = stored_states.runner.vllm_config.kv_transfer_config
    transfer.kv_connector_extra_config = {"secondary_tiers": [{"type": "fs"}]}
    assert bring_state(stored_states, b"torn") == []
    assert unverified(stored_states) == 1


@pytest.mark.parametrize("kept", ["align"], indirect=True)
def test_a_state_that_is_not_at_the_end_of_its_block_is_not_remembered(stored_states):
    """The scheduler may store a block whose state has gone on."""
    rig = stored_states
    rig.row("a", 8, 8, block=9)
    rig.watch.begin(state_job("a", 9, column=1))
    rig.watch.end()
    assert bring_state(rig, rig.cache[9], place=7) == []
    assert unverified(rig) == 1


def test_several_connectors_and_loose_blocks(rig):
    """Blocks without a request are those of the request whose table has them."""
    loose = SimpleNamespace(store_gpu_blocks=[2], load_gpu_blocks=[])
    found = connectors.transfers(
        rig.runner, rig.runner.kvtxn_requests, SimpleNamespace(metadata=(stored(rig, 1), loose))
    )
    assert [(each.blocks, each.begin, each.request) for each in found.stores] == [
        ([1], 0, "a"),
        ([2], 1, "a"),
    ]
    assert not found.opaque


def test_blocks_are_told_apart_by_all_their_bytes():
    """Each layer counts, whichever dimension its blocks lie in."""
    first = torch.arange(4 * 2 * 3, dtype=torch.float32).view(4, 2, 3)
    second = torch.arange(2 * 4 * 6, dtype=torch.float16).view(2, 4, 6)
    layers = {"x": SimpleNamespace(kv_cache=first), "y": SimpleNamespace(kv_cache=second)}
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            num_blocks=4, kv_cache_groups=[SimpleNamespace(layer_names=["x", "y"])]
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    hashes = connectors.BlockBytes(runner, Key.new()).checksums("group.0", [0, 1, 2, 3])
    assert hashes.shape == (4, 2)
    assert len({*hashes.flatten().tolist()}) == 8
    checksums = connectors.BlockBytes(runner, Key.new()).checksums
    before = checksums("group.0", [2, 1])
    second[1, 1, 5] += 1
    after = checksums("group.0", [2, 1])
    assert (after == before).tolist() == [[True] * 2, [False] * 2]
    assert checksums("group.0", []).shape == (0, 2)
    layers["y"].kv_cache = second + 1  # the engine has made new caches
    assert (checksums("group.0", [2, 1]) != after).all()


def test_rows_that_come_back_wrong_name_who_stored_them(rig):
    """And for which tokens; the request that gets them is told once, and compared from there on."""
    rig.watch.begin(stored(rig, 1, 2))
    rig.watch.end()
    other = [*TOKENS[:6], 99, *TOKENS[7:9]]
    come(rig, "b", [5, 6], other, load(rig, 5, 6))
    rig.cache[5], rig.cache[6] = rig.cache[1], rig.cache[2]
    rig.watch.forward(ROWS)
    step = Step(
        lines=torch.tensor([rig.ledger.line("b")]), starts=torch.tensor([0, 1]),
        first=torch.tensor([8]), tokens=torch.tensor(TOKENS[8:9]),
        slots={"group.0": torch.tensor([28])}, tables={"group.0": torch.tensor([[5, 6, 7]])},
    )  # fmt: skip
    rig.ledger.write_and_check(step)
    (found,) = rig.ledger.violations()
    assert (found.kind, found.request, found.position) == ("imported", "b", 6)
    assert (found.written_request, found.written_step, found.written_position) == ("a", 1, 6)
    assert found.written_for == tuple(TOKENS[4:7])
    assert found.expected == (*TOKENS[4:6], 99)
    assert found.brought


def test_rows_stored_for_the_scheduler_name_the_request_that_stored_them(rig):
    rig.runner.kvtxn_requests.hear(scheduled(new=[("a", state_of([1, 2, 3], TOKENS[:6]))]))
    rig.watch.begin(stored(rig, 1, 2))
    rig.watch.end()
    come(rig, "b", [5, 6], [99, *TOKENS[1:9]], load(rig, 5, 6))
    rig.cache[5], rig.cache[6] = rig.cache[1], rig.cache[2]
    rig.watch.forward(ROWS)
    found = rig.ledger.violations()
    assert [v.written_request for v in found] == ["a", "a"]
    assert [v.written_for for v in found] == [tuple(TOKENS[:1]), tuple(TOKENS[2:5])]
