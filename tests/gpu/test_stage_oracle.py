"""The oracle of early pipeline stages sees what it is for: on a CPU, with a policy by hand."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace

import numpy
import pytest
import stage_oracle
import torch
from test_gpu_oracle import DRAFTS, LATENT, LENGTHS, SLOTS, Undoing


class Stage(Undoing):
    """A stage that hears two steps later; ``Undoing`` puts the first request's rows back."""

    def __init__(self):
        super().__init__()
        queue = deque([None, None])
        self.pp_handler = SimpleNamespace(queue=queue, req_idx_gen_np=numpy.zeros(4, dtype=int))

    def prepare_attn(self, batch):
        super().prepare_attn(batch)
        self.block_tables.slot_mappings = self.block_tables.slot_mappings.clone()

    def update_pp_decode_requests(self):
        entry = self.pp_handler.queue.popleft()
        self.pp_handler.queue.append(None)
        if entry is not None:
            gone = self.pp_handler.req_idx_gen_np[entry.idx_mapping_np] != entry.gen_at_receive_np
            if not gone[0]:
                self.postprocess_sampled(None, None, entry.num_sampled, None)


def seen(stage, accepted, between=None, freed=()):
    """Count around a step that is heard of two steps later."""
    counts = Counter()
    stage_oracle.watch(stage, counts)
    batch = SimpleNamespace(
        num_draft_tokens=sum(DRAFTS),
        num_draft_tokens_per_req=numpy.array(DRAFTS),
        query_start_loc_np=numpy.array([0, 4, 6]),
        num_scheduled_tokens=numpy.array(LENGTHS),
        idx_mapping_np=numpy.array([2, 0]),
    )
    stage.update_pp_decode_requests()
    stage.prepare_attn(batch)
    stage.rows[SLOTS] = torch.arange(len(SLOTS) * LATENT).view(-1, LATENT) + 2.5
    stage.pp_handler.queue[-1] = SimpleNamespace(
        idx_mapping_np=batch.idx_mapping_np,
        gen_at_receive_np=stage.pp_handler.req_idx_gen_np[batch.idx_mapping_np],
        num_sampled=torch.tensor([1 + accepted, 0]),
    )
    stage.update_pp_decode_requests()
    if between is not None:
        between(stage)
    stage.pp_handler.req_idx_gen_np[list(freed)] += 1
    assert "heard" not in counts
    stage.update_pp_decode_requests()
    return counts


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_step_is_judged_when_it_is_heard_of(accepted):
    found = seen(Stage(), accepted)
    assert (found["heard"], found["windows"], found["early"]) == (1, 1, 3)
    assert (found["kept"], found["rejected"]) == (accepted, 3 - accepted)
    assert (found["lost"], found["rejected_written"], found["strays"]) == (0, 0, 0)


def test_stock_leaves_rejected_rows():
    stage = Stage()
    stage.postprocess_sampled = lambda *given: None
    assert seen(stage, 1)["rejected_written"] == 2


def test_rows_that_are_lost_meanwhile():
    def losing(stage):
        stage.rows[SLOTS[1]] = stage.saved[SLOTS[1]]

    assert seen(Stage(), 2, losing)["lost"] == 1


def test_rows_of_others_that_a_commit_writes():
    stage = Stage()
    own = stage.postprocess_sampled

    def straying(*given):
        own(*given)
        stage.rows[0] += 1

    stage.postprocess_sampled = straying
    assert seen(stage, 1)["strays"] == 1


def test_a_freed_request_is_not_judged():
    """But a commit that writes its rows is a stray."""
    found = seen(Stage(), 1, freed=(2,))
    assert (found["gone"], found["windows"], found["rejected"], found["strays"]) == (1, 0, 0, 0)
    stage = Stage()
    update = stage.update_pp_decode_requests

    def careless():
        entry = stage.pp_handler.queue[0]
        update()
        if entry is not None:
            stage.postprocess_sampled(None, None, entry.num_sampled, None)

    stage.update_pp_decode_requests = careless
    assert seen(stage, 1, freed=(2,))["strays"] == 1
