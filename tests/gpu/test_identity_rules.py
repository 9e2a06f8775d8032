"""The rules for engines whose rows come back through connectors, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import identity_faults
import pytest
import torch
from identity_jobs import ENGINES, wrong
from identity_oracle import Computed

RIGHT = {"active": True, "brought": 480, "rows": 900, "unverified": 0.0, "violations": [],
         "told": 0, "blocks": 15, "misplaced": 0}  # fmt: skip
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
        ({"healthy": RIGHT | {"misplaced": 15}}, "healthy: the connector brought 15 of 15 blocks"),
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


def test_alarms_are_right_if_the_connector_is_known_to_bring_wrong_rows():
    seen = RIGHT | {"violations": [FOUND], "misplaced": 15, "told": 12, "unverified": 96.0}
    told = report(healthy=seen, again=seen, same_texts=False, stale=RIGHT)
    assert [*wrong(ENGINES["lmcache"], told)] == []
    assert [*wrong(ENGINES["example"], told)] != []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"told": 11}, "healthy: of 15 wrong blocks 11 were told"),
        ({"active": False}, "healthy: the audit has ended"),
        ({"misplaced": 0}, "healthy: false alarms"),
    ],
)
def test_a_known_fault_of_a_connector_excuses_no_silence(more, says):
    seen = RIGHT | {"violations": [FOUND], "misplaced": 15, "told": 12, "unverified": 96.0}
    assert any(
        each.startswith(says) for each in wrong(ENGINES["lmcache"], report(healthy=seen | more))
    )


class Engine:
    """An engine whose requests come with rows, or compute them, as a test says."""

    def __init__(self):
        self.cache = torch.randn(8, 32, 2, 4, dtype=torch.bfloat16)
        self.tables = {}
        self.engine = self.scheduler = self.manager = self.watch = self.transfers = self
        self.requests, self.runner = {}, self
        self.kv_cache_config = self.compilation_config = self
        self.num_blocks, self.kv_cache, self.layer_names = 8, self.cache, ["layer"]
        self.kv_cache_groups, self.static_forward_context = [self], {"layer": self}

    def get_block_ids(self, name):
        return [self.tables[name]]

    def change(self, arrivals):
        """Requests come, see ``TransferWatch``."""

    def step(self):
        """Run a step of vLLM's engine."""

    def serve(self, name, prompt, table, computed):
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=prompt, num_computed_tokens=len(prompt)
        )
        self.tables[name] = table
        self.change([SimpleNamespace(name=name, computed=computed)])
        self.step()


def test_blocks_that_come_are_held_against_those_that_were_computed(tmp_path):
    engine, prompt = Engine(), [*range(65)]
    first = Computed(engine, 64)
    with first.watching() as came:
        engine.serve("first", prompt, [1, 2, 3], 0)
        engine.serve("other", [5, *prompt], [3, 2, 1], 64)  # nobody knows it
    assert (came.blocks, came.misplaced) == (0, 0)
    first.save(tmp_path / "computed.pt")
    engine.cache[4], engine.cache[5] = engine.cache[1], engine.cache[2]
    second = Computed(engine, 64, tmp_path / "computed.pt")
    with second.watching() as came:
        engine.serve("right", prompt, [4, 5, 6], 64)
        assert (came.blocks, came.misplaced) == (2, 0)
        engine.cache[5, 31, 1, 3] += 1
        engine.serve("wrong", prompt, [4, 5, 6], 64)
        engine.serve("half", prompt, [4, 5, 6], 32)
    assert (came.blocks, came.misplaced) == (5, 1)


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
