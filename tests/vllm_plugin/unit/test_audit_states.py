"""The audit's reading of tables of states, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch
from kvtxn.integrations.serving.ledger.step_forms import fresh_blocks
from kvtxn.integrations.serving.step import Arrival, Changes, Rows
from kvtxn.integrations.vllm_plugin.seam import audited_states


def test_columns_of_a_gated_delta_net():
    """A request with drafts continues the column of its last accepted one."""
    metadata = SimpleNamespace(
        spec_sequence_masks=torch.tensor([True, False]),
        spec_state_indices_tensor=torch.tensor([[7, 8, 9]]),
        num_accepted_tokens=torch.tensor([2]),
        non_spec_state_indices_tensor=torch.tensor([4]),
    )
    columns, accepted = audited_states._columns(metadata, 2)
    assert columns.tolist() == [[7, 8, 9], [4, 0, 0]]
    assert accepted.tolist() == [2, 0]
    kept = audited_states._kept(columns, accepted > 0, torch.tensor([0, 3, 5]), 5)
    assert kept.tolist() == [7, 8, 9, -1, 4]


def metadata_of_two():
    """A prompt's last three rows, and a request with two drafts, of a gated delta net."""
    return SimpleNamespace(
        spec_sequence_masks=torch.tensor([False, True]),
        spec_state_indices_tensor=torch.tensor([[7, 8, 9]]),
        num_accepted_tokens=torch.tensor([2]),
        non_spec_state_indices_tensor=torch.tensor([4]),
    )


def device_reader(mode="none"):
    group = SimpleNamespace(layer_names=["layer"])
    config = SimpleNamespace(kv_cache_groups=[group])
    cache = SimpleNamespace(mamba_cache_mode=mode)
    runner = SimpleNamespace(
        kv_cache_config=config, cache_config=cache, max_num_reqs=4, max_num_tokens=16,
        vllm_config=SimpleNamespace(cache_config=cache),
    )  # fmt: skip
    return audited_states.DeviceStateReader(runner, ["group.0"], torch.device("cpu"))


def rows_of(starts, positions):
    starts, positions = torch.tensor(starts), torch.tensor(positions)
    names = [str(number) for number in range(len(starts) - 1)]
    return Rows(names, starts, None, None, None, {}, {}, positions)


def test_states_of_a_device_are_read_into_the_same_buffers():
    """So a step of the same form is the same ``Step``; the numbers are those of a CPU's reader."""
    reader = device_reader()
    rows = rows_of([0, 3, 6], [0, 1, 2, 40, 41, 42])
    found = reader.read({"layer": metadata_of_two()}, rows, 6)
    assert found.sources["group.0"].tolist() == [-1, 8]
    assert found.slots["group.0"][:6].tolist() == [-1, -1, 4, 7, 8, 9]
    assert found.told.tolist() == [-1, 1]
    other = metadata_of_two()
    other.spec_state_indices_tensor += 1
    again = reader.read({"layer": other}, rows_of([0, 2, 5], [3, 4, 41, 42, 43]), 5)
    assert again is found
    assert found.sources["group.0"].tolist() == [4, 9]
    assert found.slots["group.0"][:5].tolist() == [-1, 4, 8, 9, 10]


def test_single_states_of_windows():
    """The state of a request with drafts is written once it is known which of them stay."""
    table = SimpleNamespace(
        get_cpu_tensor=lambda: torch.tensor([[5, 0], [6, 0], [7, 0], [9, 9]], dtype=torch.int32)
    )
    batch = SimpleNamespace(block_table=[None, table], num_reqs=3)
    rows = Rows(
        ["a", "b", "c"], torch.tensor([0, 3, 4, 7]), torch.tensor([10, 4, 0]), torch.arange(7),
        torch.tensor([2, 0, 0]), {}, {},
    )  # fmt: skip
    runner = SimpleNamespace(input_batch=batch)
    found = audited_states.single_states(runner, ["group.1"], rows)
    assert found.sources["group.1"].tolist() == [5, 6, -1]
    assert found.slots["group.1"].tolist() == [-1, -1, -1, 6, -1, -1, 7]
    assert found.leaves["group.1"].tolist() == [5, -1, -1]
    plain = audited_states.single_states(runner, ["group.1"], attrs.evolve(rows, drafts=None))
    assert plain.slots["group.1"].tolist() == [-1, -1, 5, 6, -1, -1, 7]
    assert plain.leaves == {}


def test_states_of_an_unknown_layer_are_not_read():
    found = device_reader().read({"layer": SimpleNamespace()}, rows_of([0, 1], [5]), 1)
    assert (found.slots, found.sources, found.told) == ({}, {}, None)


def test_columns_of_mamba():
    """Decodes come first; a prompt keeps the state after its last row."""
    metadata = SimpleNamespace(
        num_decodes=1,
        state_indices_tensor_d=torch.tensor([[3, 5]]),
        state_indices_tensor_p=torch.tensor([6]),
        num_accepted_tokens=torch.tensor([1]),
    )
    columns, accepted = audited_states._columns(metadata, 2)
    assert columns.tolist() == [[3, 5], [6, 0]]
    assert accepted.tolist() == [1, 0]
    assert audited_states._columns(SimpleNamespace(), 2) is None


#: What vLLM says of requests that are there to fill a captured graph.
PADDING_BLOCK, PADDING_ACCEPTED = 0, 1


def padded_selective(decodes, padding):
    """Requests of Mamba and padding, as vLLM 0.32.0 has them for a whole captured graph."""
    tables = [[3, 5, 7], [4, 6, 8]][:decodes] + [[PADDING_BLOCK] * 3] * padding
    return SimpleNamespace(
        num_decodes=decodes + padding,
        state_indices_tensor_d=torch.tensor(tables),
        state_indices_tensor_p=torch.empty(0, dtype=torch.int64),
        num_accepted_tokens=torch.tensor([2, 1][:decodes] + [PADDING_ACCEPTED] * padding),
    )


def padded_prompts(padding):
    """One request that decodes, a prompt, and padding behind it."""
    return SimpleNamespace(
        num_decodes=1,
        state_indices_tensor_d=torch.tensor([[3, 5, 7]]),
        state_indices_tensor_p=torch.tensor([4] + [PADDING_BLOCK] * padding),
        num_accepted_tokens=torch.tensor([2]),
    )


def padded_drafts(padding):
    """Requests of a gated delta net that all have drafts, and padding."""
    return SimpleNamespace(
        spec_sequence_masks=torch.tensor([True] * 2 + [False] * padding),
        spec_state_indices_tensor=torch.tensor(
            [[3, 5, 7], [4, 6, 8]] + [[PADDING_BLOCK] * 3] * padding
        ),
        num_accepted_tokens=torch.tensor([2, 1] + [PADDING_ACCEPTED] * padding),
        non_spec_state_indices_tensor=None,
    )


def padded_without_drafts(padding):
    """Requests of a gated delta net of which none has drafts, and padding."""
    return SimpleNamespace(
        spec_sequence_masks=None,
        non_spec_state_indices_tensor=torch.tensor([3, 4] + [PADDING_BLOCK] * padding),
    )


def padded_mixed(padding):
    """A request of a gated delta net with drafts, a prompt, and padding."""
    return SimpleNamespace(
        spec_sequence_masks=torch.tensor([True, False] + [False] * padding),
        spec_state_indices_tensor=torch.tensor([[3, 5, 7]]),
        num_accepted_tokens=torch.tensor([2]),
        non_spec_state_indices_tensor=torch.tensor([4] + [PADDING_BLOCK] * padding),
    )


@pytest.mark.parametrize(
    ("metadata", "sources", "slots"),
    [
        (padded_selective(2, 3), [5, 4], [3, 5, 7, 4, 6, 8]),
        (padded_selective(2, 0), [5, 4], [3, 5, 7, 4, 6, 8]),
        (padded_prompts(3), [5, 4], [3, 5, 7, -1, -1, 4]),
        (padded_drafts(3), [5, 4], [3, 5, 7, 4, 6, 8]),
        (padded_without_drafts(3), [3, 4], [-1, -1, 3, -1, -1, 4]),
        (padded_mixed(3), [5, 4], [3, 5, 7, -1, -1, 4]),
    ],
    ids=["decodes", "whole", "prompts", "drafts", "no-drafts", "mixed"],
)
def test_what_pads_a_captured_graph_is_not_read(metadata, sources, slots):
    """vLLM counts padding among the requests; the step has two, of three rows each."""
    found = device_reader().read(
        {"layer": metadata}, rows_of([0, 3, 6], [40, 41, 42, 30, 31, 32]), 6
    )
    assert found.sources["group.0"].tolist() == sources
    assert found.slots["group.0"][:6].tolist() == slots
    assert found.told is None or len(found.told) == 2


def test_states_in_the_middle_of_prompts_are_kept_for_the_prefix_cache():
    """Mamba-2 writes them in the forward; the second prompt has none."""
    metadata = SimpleNamespace(
        num_decodes=1,
        state_indices_tensor_d=torch.tensor([[3]]),
        state_indices_tensor_p=torch.tensor([6, 8]),
        num_accepted_tokens=None,
        checkpoint_meta=SimpleNamespace(
            checkpoint_offsets=torch.tensor([2, 0], dtype=torch.int32),
            state_indices=torch.tensor([5, 0], dtype=torch.int32),
        ),
    )
    rows = rows_of([0, 1, 5, 7], [9, 0, 1, 2, 3, 0, 1])
    found = device_reader().read({"layer": metadata}, rows, 7)
    assert found.slots["group.0"][:7].tolist() == [3, -1, 5, -1, 6, -1, 8]


@pytest.mark.parametrize(("kept", "fresh"), [(None, [8]), ({"group.0": 4}, [8, 6, 7])])
def test_blocks_of_states_behind_a_hit_are_handed_out(kept, fresh):
    """Without a prefix cache of states nobody hits one, and a session goes on in its block."""
    arrival = Arrival("a", [1] * 9, [], {}, 8, [[0, 5, 6, 7]])
    changes = Changes((), [arrival], [[8]], ())
    assert fresh_blocks(changes, {}, kept) == {"group.0": fresh}


@pytest.mark.parametrize(
    ("accepted", "mode", "told"), [([2], "none", [1]), ([2], "align", [1]), ([1], "none", [0]),
                                   ([1], "align", [-1])],
)  # fmt: skip
def test_counts_that_a_copy_may_have_reset_are_not_compared(accepted, mode, told):
    metadata = SimpleNamespace(
        spec_sequence_masks=torch.tensor([True]),
        spec_state_indices_tensor=torch.tensor([[7, 8, 9]]),
        num_accepted_tokens=torch.tensor(accepted),
        non_spec_state_indices_tensor=None,
    )
    reader = device_reader(mode)
    assert reader.read({"layer": metadata}, rows_of([0, 3], [4, 5, 6]), 3).told.tolist() == told


def test_states_that_windows_hold_are_left_when_drafts_are_decided(monkeypatch):
    """The prompt's is written by its last row; the verify step's in the one block there is."""
    monkeypatch.setattr(audited_states, "holds_states", lambda runner: True)
    metadata = metadata_of_two()
    metadata.spec_state_indices_tensor = torch.tensor([[7]]).expand(1, 3)
    reader = device_reader()
    found = reader.read({"layer": metadata}, rows_of([0, 3, 6], [0, 1, 2, 40, 41, 42]), 6)
    assert found.sources["group.0"].tolist() == [-1, 7]
    assert found.slots["group.0"][:6].tolist() == [-1, -1, 4, -1, -1, -1]
    assert found.told.tolist() == [-1, 1]
    assert found.leaves["group.0"].tolist() == [-1, 7]


def test_counts_of_which_groups_disagree_are_nobodys():
    """Each group's kernels are told the number of accepted drafts by metadata of their own."""
    groups = [SimpleNamespace(layer_names=[name]) for name in "ab"]
    cache = SimpleNamespace(mamba_cache_mode="none")
    config = SimpleNamespace(kv_cache_groups=groups)
    runner = SimpleNamespace(
        kv_cache_config=config, cache_config=cache, max_num_reqs=4, max_num_tokens=16
    )
    reader = audited_states.DeviceStateReader(runner, ["group.0", "group.1"], torch.device("cpu"))
    one, other = metadata_of_two(), metadata_of_two()
    rows = rows_of([0, 3, 6], [0, 1, 2, 40, 41, 42])
    assert reader.read({"a": one, "b": other}, rows, 6).told.tolist() == [-1, 1]
    one.num_accepted_tokens = torch.tensor([1])
    first, second = reader.read({"a": one, "b": other}, rows, 6).told.tolist()
    assert first == -1
    assert second > 1000
