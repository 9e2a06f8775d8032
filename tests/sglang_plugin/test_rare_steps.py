"""Steps that SGLang runs rarely, and legally: no false alarm, and the audit goes on."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import starting
from toy_sglang import ToySglang, counters_of_clean_steps


class TakesInFirst(ToySglang):
    """Takes in the last result between planning a step and running it.

    SGLang does so under overlap for drafts with a grammar, and for prompts where the user wants it.
    The step may have requests that are done by then, and have given back their rows.
    """

    def plan(self):
        batch = super().plan()
        while batch is not None and self.results:
            self.take_in(*self.results.popleft())
        return batch


@pytest.mark.parametrize(("drafts", "trees"), [(0, False), (3, False), (5, True)])
def test_a_request_that_is_done_before_its_last_forward(hooks, drafts, trees):
    toy = TakesInFirst(hooks.around(), drafts=drafts, trees=trees, seed=4)
    released, late = deque(), []
    own, run = toy.release, toy.model_worker.forward_batch_generation
    toy.release = lambda req, **more: (released.append(req), own(req, **more))[1]

    def runs(batch, **more):
        late.extend(req for req in batch.reqs if req in released and req.finished())
        return run(batch, **more)

    toy.model_worker.forward_batch_generation = runs
    toy.serve(24)
    report = hooks.report()
    assert late
    assert report["violations"] == []
    assert report["counters"]["kvtxn_audit_active"] == 1


def test_experts_that_change_places_are_no_other_weights(on_a_cpu):
    """SGLang moves them between GPUs while it serves; only an update makes rows stale."""
    hooks = starting.Hooks(AuditSettings(audit="ledger", stale="alarm", weights_every=1))
    toy = ToySglang(hooks.around(), seed=1)
    toy.server_args.enable_eplb = True
    weight = toy.tp_worker.model_runner.model.weight

    def moves(toy, batch):
        with torch.no_grad():
            weight.copy_(weight.flip(0))

    toy.fault = moves
    toy.offer([*range(1, 20)], 4)
    toy.serve(12)
    assert hooks.report()["violations"] == []
    hooks.weights_updated(lambda updater: None, None)
    toy.offer([*range(1, 20)], 4)
    toy.serve(0)
    assert {each["kind"] for each in hooks.report()["violations"]} == {"stale"}


class SearchesBeams(ToySglang):
    """Decodes three beams of a request: two lines behind the batch's, which no request stands for.

    The beams share the prompt's rows, are given other tokens than the sampled ones, and change
    their lines. None of their rows gets into the tree.
    """

    def decode(self):
        batch = super().decode()
        forward = batch.forward_batch
        for number, req in enumerate(batch.reqs):
            if req.beam_group is None:
                continue
            rows = slice(len(batch.reqs), None)
            slots = self.token_to_kv_pool_allocator.alloc(2)
            self.beams += [slots]
            for name, more in (
                ("out_cache_loc", slots),
                ("input_ids", [1, 2]),
                *((name, [int(getattr(forward, name)[number])] * 2) for name in PER_REQUEST),
            ):
                own = getattr(forward, name)
                setattr(forward, name, torch.cat([own, torch.tensor(more)]))
            assert len(forward.out_cache_loc[rows]) % 2 == 0
            if len(self.beams) % 3 == 0:  # a beam goes on behind another one's last row
                self.row(req)[batch.before[number] - 1] = self.beams[-2][0]
        return batch

    def ran(self, batch) -> None:
        super().ran(batch)
        for number, req in enumerate(batch.reqs):
            if req.beam_group is not None and batch.ends[number] == len(self.device[req.rid]) - 1:
                batch.sampled[number] = self.device[req.rid][-1] = 7

    def release(self, req, insert=True) -> None:
        super().release(req, insert=insert and req.beam_group is None)


PER_REQUEST = ("positions", "req_pool_indices", "seq_lens")


def test_a_search_of_beams_does_not_end_the_audit(hooks):
    """Its rows are left out while they decode; those of all others are compared."""
    toy = SearchesBeams(hooks.around(), seed=1)
    toy.beams, toy.retracts, toy.aborts = [], 0, 0
    prompt = [*range(1, 15)]
    for number in range(12):
        toy.offer(prompt[: 4 + number], 9, beam_group=object() if number % 4 == 1 else None)
    toy.serve(0)
    assert len(toy.done) == 12
    assert toy.beams
    counters_of_clean_steps(hooks)
