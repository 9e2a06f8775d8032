"""Reading the V1 runner's steps on a CPU, without an engine: two groups, each with its metadata."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvtxn.backends.audit_numba.engine_input import copy_step
from kvtxn.integrations.vllm_plugin.seam import audited_steps_cpu

from kvtxn import ConfigError
from kvtxn.audit import Ledger, RowGroup

GROUPS = {"group.0", "group.1"}


def held(tensor):
    """A buffer as vLLM keeps it, for the host and for the device."""
    return SimpleNamespace(gpu=tensor, np=tensor.numpy())


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.fixture
def rig(monkeypatch, request):
    """A runner with a step of two requests, of three rows and one, and the reader of its steps.

    It has two groups, or as many as a test asks for.
    """
    number_of_groups = getattr(request, "param", 2)
    names = [f"group.{number}" for number in range(number_of_groups)]
    groups = {name: RowGroup(name, 4, 12) for name in names}
    tables = [
        SimpleNamespace(
            slot_mapping=held(torch.arange(16)),
            block_table=held(torch.arange(12, dtype=torch.int32).view(4, 3)),
            block_size=4,
        )
        for _ in groups
    ]
    layers = [
        SimpleNamespace(layer_names=[f"layer.{number}", f"other.{number}"])
        for number in range(len(groups))
    ]
    runner = SimpleNamespace(
        max_num_reqs=4,
        query_start_loc=held(ints(0, 3, 4, 4, 4)),
        positions=torch.tensor([5, 6, 7, 9, *[0] * 12]),
        input_ids=held(torch.arange(16, dtype=torch.int32)),
        seq_lens=ints(8, 10, 0, 0),
        input_batch=SimpleNamespace(req_ids=["a", "b"], block_table=tables),
        kv_cache_config=SimpleNamespace(kv_cache_groups=layers),
    )
    metadata = [
        SimpleNamespace(
            query_start_loc=runner.query_start_loc.gpu,
            block_table=table.block_table.gpu[:2],
            seq_lens=runner.seq_lens[:2],
        )
        for table in tables
    ]
    given = {f"layer.{number}": each for number, each in enumerate(metadata)}
    context = SimpleNamespace(slot_mapping={}, attn_metadata=given)
    monkeypatch.setattr(audited_steps_cpu, "forward_context", lambda: context)
    ledger = Ledger(list(groups.values()), max_requests=4, max_length=32)
    reader = audited_steps_cpu.StepReader(runner, groups, ledger.input)
    return SimpleNamespace(runner=runner, metadata=metadata, reader=reader, context=context)


def wrong_lengths(rig):
    """By group, the lengths that are reported."""
    found = rig.reader.rows((None, None)).lengths
    return {} if found is None else {name: each.tolist() for name, each in found.items()}


def test_right_lengths_are_not_reported(rig):
    assert wrong_lengths(rig) == {}
    rig.metadata[0].seq_lens = rig.metadata[0].seq_lens.clone()
    assert wrong_lengths(rig) == {}


@pytest.mark.parametrize("copied", [(), (0,), (1,)])
def test_a_wrong_length_of_the_runners_own_is_reported(rig, copied):
    """A group with a right copy hides no group that reads the runner's own."""
    for number in copied:
        rig.metadata[number].seq_lens = rig.metadata[number].seq_lens.clone()
    rig.runner.seq_lens[0] = 6
    right = {f"group.{number}" for number in copied}
    assert wrong_lengths(rig) == {name: [6, 10] for name in GROUPS - right}


@pytest.mark.parametrize("number", [0, 1])
def test_a_wrong_length_of_a_groups_own_is_reported(rig, number):
    rig.metadata[number].seq_lens = ints(8, 12)
    assert wrong_lengths(rig) == {f"group.{number}": [8, 12]}


def test_what_the_model_is_called_with_is_read(rig):
    """Other tokens or positions than the runner's; a copy of the runner's is the same."""
    tokens, positions = rig.runner.input_ids.gpu, rig.runner.positions
    for given in ((tokens, positions), (tokens[:4], positions[:4]), (tokens.clone(), None)):
        rows = rig.reader.rows((None, None), *given)
        assert (rows.tokens[:4].tolist(), rows.positions[:4].tolist()) == (
            [0, 1, 2, 3],
            [5, 6, 7, 9],
        )
    other, moved = tokens.clone(), positions.clone()
    other[1], moved[2] = 77, 70
    rows = rig.reader.rows((None, None), other, moved)
    assert (rows.tokens[:4].tolist(), rows.positions[:4].tolist()) == ([0, 77, 2, 3], [5, 6, 70, 9])
    # Positions in three dimensions are no positions of rows, and a model may take no ids.
    rows = rig.reader.rows((None, None), None, moved.expand(3, -1))
    assert (rows.tokens[:4].tolist(), rows.positions[:4].tolist()) == ([0, 1, 2, 3], [5, 6, 7, 9])


def slots(rig):
    """The slots that are read of the first group, of its four rows."""
    return rig.reader.rows((None, None)).slots["group.0"][:4].tolist()


def test_slots_of_any_layer_are_read(rig):
    """A copy of the runner's hides no other layer's, and rows beyond a mapping are not written."""
    own = rig.runner.input_batch.block_table[0].slot_mapping.gpu
    lost = own.clone()
    lost[2] = -1
    for given, found in (
        ({"layer.0": own.clone()}, [0, 1, 2, 3]),
        ({"layer.0": own.clone(), "other.0": lost}, [0, 1, -1, 3]),
        ({"layer.0": own[:2]}, [0, 1, -1, -1]),
        ({"layer.0": own, "other.0": own[:3].clone()}, [0, 1, 2, -1]),
    ):
        rig.context.slot_mapping = given
        assert slots(rig) == found


def test_tables_of_any_layer_are_read(rig):
    """Also where its metadata are copies that say the same of the requests' rows."""
    right = rig.metadata[0]
    wrong = SimpleNamespace(**vars(right))
    wrong.query_start_loc = right.query_start_loc.clone()
    wrong.block_table = right.block_table.clone()
    wrong.block_table[1, 0] = 9
    right.block_table = right.block_table.clone()
    rig.context.attn_metadata["other.0"] = wrong
    tables = rig.reader.rows((None, None)).tables
    assert (tables["group.0"][1, 0], tables["group.1"][1, 0]) == (9, 3)


def test_rows_that_a_layer_gives_to_a_neighbour_are_reported(rig):
    """Its metadata have the batch's rows, and another request begins a row earlier."""
    given = ints(0, 2, 4)
    rig.metadata[1].query_start_loc = given
    assert wrong_lengths(rig) == {"group.1": [7, 11]}
    rig.metadata[1].query_start_loc = ints(0, 1, 2)  # of those that sample
    assert wrong_lengths(rig) == {}


def test_a_table_with_fewer_requests_than_the_step_is_refused(rig):
    rig.metadata[1].block_table = rig.metadata[1].block_table[:1].clone()
    with pytest.raises(ConfigError, match="fewer requests than the step; expected at most 1"):
        rig.reader.rows((None, None))


@pytest.mark.parametrize("rig", [5], indirect=True)
def test_nothing_is_compiled_in_a_requests_step(rig):
    """It is when the reader is made; no other test has five groups, for which the copy is made."""
    before = len(copy_step.signatures)
    for draft_counts in (None, [1, 0]):
        drafts = draft_counts and SimpleNamespace(num_draft_tokens=draft_counts)
        rig.reader.rows((None, drafts))
    assert len(copy_step.signatures) == before
