"""The rules for engines whose rows come back through connectors, without a GPU."""

from __future__ import annotations

import identity_faults
import pytest
import torch
from identity_jobs import ENGINES, wrong

RIGHT = {"active": True, "brought": 480, "rows": 900, "unverified": 0.0, "violations": []}
STRUCK = {"request": "2.0-a", "position": 32, "slot": 96, "step": 5}
FOUND = {"kind": "imported", "request": "2.0-a", "position": 32, "written_request": "1.0-b",
         "differs": "position"}  # fmt: skip


def report(**more):
    """The report of an engine in which one fault was planted and all is well."""
    fault = RIGHT | {"struck": STRUCK, "violations": [FOUND]}
    stale = RIGHT | {"violations": [FOUND | {"kind": "stale"}]}
    return {
        "partial": 0, "healthy": RIGHT, "again": RIGHT, "same_texts": True, "stale": stale,
        "found": {"swapped_blocks": fault}, **more,
    }  # fmt: skip


def test_nothing_is_wrong():
    assert [*wrong(ENGINES["example"], report())] == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"healthy": RIGHT | {"violations": [FOUND]}}, "healthy: false alarms"),
        ({"again": RIGHT | {"brought": 0}}, "again: the connector brought no rows"),
        ({"healthy": RIGHT | {"unverified": 32.0}}, "healthy: 32 of 480 rows"),
        ({"healthy": RIGHT | {"active": False}}, "healthy: the audit has ended"),
        ({"same_texts": False}, "texts differ"),
        ({"stale": RIGHT}, "stale: rows of earlier weights were not told"),
        ({"found": {"swapped_blocks": RIGHT | {"struck": STRUCK}}}, "fault swapped_blocks: {"),
        ({"found": {"swapped_blocks": RIGHT | {"struck": None}}}, "fault swapped_blocks has not"),
        ({"found": {"shifted_block": RIGHT | {"struck": STRUCK}}}, "fault shifted_block: neither"),
    ],
)
def test_each_rule_can_break(more, says):
    [told] = wrong(ENGINES["example"], report(**more))
    assert told.startswith(says)


def test_bytes_that_no_block_had_are_counted():
    found = {"shifted_block": RIGHT | {"struck": STRUCK, "unverified": 32.0}}
    assert [*wrong(ENGINES["example"], report(found=found))] == []


def test_another_rope_factor_has_to_be_told():
    told = report(healthy=RIGHT | {"violations": [FOUND | {"differs": "weights"}]})
    assert [*wrong(ENGINES["fs-rope"], told)] == []
    assert len([*wrong(ENGINES["fs-rope"], report())]) == 1


@pytest.mark.parametrize("name", identity_faults.BROUGHT)
def test_a_fault_changes_a_block_of_each_layer_or_of_two(name):
    """Blocks of others stay as they are."""
    layers = [torch.randn(6, 2, 32, 4) for _ in range(3)]
    before = [each.clone() for each in layers]
    change = identity_faults.BROUGHT[name]()
    while (position := change(layers, [3, 1, 5])) is None:
        pass
    assert position == 32
    changed = [
        (one != other).flatten(1).any(1).tolist() for one, other in zip(layers, before, strict=True)
    ]
    assert any(each[1] for each in changed)
    assert not any(each[block] for each in changed for block in (0, 2, 3, 4))


def test_files_change_places_in_pairs(tmp_path):
    for folder, content in (("a", b"1111"), ("b", b"2222"), ("c", b"33333")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "layer.safetensors").write_bytes(content)
    assert len(identity_faults.swap_files(tmp_path)) == 2
    assert (tmp_path / "a" / "layer.safetensors").read_bytes() == b"2222"
    assert (tmp_path / "c" / "layer.safetensors").read_bytes() == b"33333"
