"""Steps that SGLang runs rarely, and legally: no false alarm, and the audit goes on."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from kvtxn.integrations.sglang_plugin import starting
from kvtxn.integrations.sglang_plugin.settings import Settings
from toy_sglang import ToySglang


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
    hooks = starting.Hooks(Settings("ledger", stale="alarm", weights_every=1))
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
