"""The watch on the V2 runner, over a stand-in: it sees all that is wrong, and only that."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch
from gpu_oracle import Watch

ROWS, LATENT = 16, 4
#: Two requests; one has three drafts behind its settled row, the other is at its prompt.
DRAFTS, LENGTHS, SLOTS = [3, 0], [4, 2], [5, 6, 7, 8, 12, 13]


class Tables:
    """Computes slots, into one buffer for ever."""

    def __init__(self):
        self.slot_mappings = torch.full((1, 8), -1)

    def compute_slot_mappings(self):
        self.slot_mappings[0, : len(SLOTS)] = torch.tensor(SLOTS)


class Runner:
    """Stands for vLLM's: one layer of latent rows."""

    is_last_pp_rank = True

    def __init__(self):
        self.block_tables = Tables()
        layer = SimpleNamespace(kv_cache=torch.randn(5, ROWS // 4, LATENT))  # the last is spare
        self.compilation_config = SimpleNamespace(static_forward_context={"layer": layer})
        group = SimpleNamespace(layer_names=["layer"])
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=5)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=4))
        self.cudagraph_manager = SimpleNamespace(run_fullgraph=lambda: None)
        self.rows = layer.kv_cache[:4].view(ROWS, LATENT)
        self.spare = layer.kv_cache[4]
        self.model = SimpleNamespace(modules=lambda: [layer])

    def get_model(self):
        return self.model

    def prepare_attn(self, batch):
        self.block_tables.compute_slot_mappings()

    def postprocess_sampled(
        self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=None
    ):
        pass


class Undoing(Runner):
    """A policy by hand: rows are saved once slots are known, and put back when told."""

    def prepare_attn(self, batch):
        super().prepare_attn(batch)
        self.saved = self.rows.clone()

    def postprocess_sampled(
        self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=None
    ):
        kept = int(num_sampled[0])  # the settled row is one of them
        self.rows[SLOTS[kept:4]] = self.saved[SLOTS[kept:4]]


def seen(runner, accepted, *, forward=None):
    """Count around a step that writes the batch's rows, unless told otherwise."""
    watch = Watch()
    watch.model_runner = runner
    watch.oracle_install()
    batch = SimpleNamespace(
        num_draft_tokens=sum(DRAFTS),
        num_draft_tokens_per_req=numpy.array(DRAFTS),
        query_start_loc_np=numpy.array([0, 4, 6]),
        num_scheduled_tokens=numpy.array(LENGTHS),
    )
    others = dict.fromkeys(("idx_mapping", "sampled_tokens", "num_rejected"))
    written = torch.arange(len(SLOTS) * LATENT).view(-1, LATENT) + 2.5
    for _ in range(2):  # the same rows in the same places once more
        runner.prepare_attn(batch)
        runner.rows[SLOTS] = written
        if forward is not None:
            forward(runner.rows)
        sampled = {"num_sampled": torch.tensor([1 + accepted, 0])}  # by name, as between stages
        runner.postprocess_sampled(**others, **sampled)
    return watch.oracle_take()


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_stock_leaves_every_rejected_row(accepted):
    """Stock leaves every rejected row, and the oracle takes no accepted row for lost."""
    found = seen(Runner(), accepted)
    assert (found["windows"], found["mixed"], found["early"]) == (2, 2, 6)
    assert found["kept"] == 2 * accepted
    assert found["rejected"] == found["rejected_written"] == 2 * (3 - accepted)
    assert (found["lost"], found["strays"]) == (0, 2 * (accepted < 3))


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_undo_leaves_none(accepted):
    """undo saves the rows that the oracle put there before it."""
    found = seen(Undoing(), accepted)
    assert (found["rejected_written"], found["lost"], found["strays"]) == (0, 0, 0)


def test_an_accepted_row_that_is_not_written_is_lost():
    """A missing accepted row counts as lost, though its slot holds the last step's equal row."""
    runner = Undoing()

    def losing(rows):
        rows[SLOTS[1]] = runner.saved[SLOTS[1]]

    assert seen(runner, 2, forward=losing)["lost"] == 2


def test_a_stray_is_seen():
    def straying(rows):
        rows[0] += 1

    assert seen(Undoing(), 1, forward=straying)["strays"] == 2


def test_what_waits_behind_vllms_blocks_is_no_stray():
    """A change behind vLLM's blocks is no stray, since the scheduler never hands those out."""
    runner = Undoing()

    def waiting(rows):
        runner.spare += 1

    assert seen(runner, 1, forward=waiting)["strays"] == 0


def test_without_drafts_nothing_is_marked():
    """Without drafts the oracle marks no slot."""
    runner, watch = Runner(), Watch()
    watch.model_runner = runner
    watch.oracle_install()
    before = runner.rows.clone()
    runner.prepare_attn(SimpleNamespace(num_draft_tokens=0))
    runner.block_tables.compute_slot_mappings()  # a drafter's
    assert torch.equal(runner.rows, before)
    assert watch.oracle_take() == {"steps": 1}


def test_steps_are_switched():
    """Off they are none, and on they are those of before; what is drawn by lot stays the same."""
    abandoned, drawn = [], set()
    steps = SimpleNamespace(abandon=lambda: abandoned.append(True))
    worker = Watch()
    worker.model_runner = SimpleNamespace(kvtxn=steps)
    for count, on in enumerate((False, False, True, False, True), start=1):
        worker.switch(on)
        assert worker.model_runner.kvtxn is (steps if on else None)
        assert len(abandoned) == count  # a step that was dropped leaves no window open
        drawn.add((numpy.random.randint(2**31), torch.rand(()).item()))
    assert len(drawn) == 1
