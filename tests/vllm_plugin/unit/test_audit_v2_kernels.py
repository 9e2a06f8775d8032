"""The audit of the V2 runner with Triton's passes, interpreted, over the runner's own dtypes."""

from __future__ import annotations

import pytest
from kernels_here import ON_GPU, importing_kernels
from kvtxn.integrations.vllm_plugin.audit import watch_opening
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.seam import ranks
from v2_rig import Rig

import kvtxn.audit.ledger

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(ON_GPU, reason="the rig's tensors are on the host")

with importing_kernels():
    from kvtxn.backends.audit import TritonPasses


class FewPrograms(TritonPasses):
    """The same with fewer programs, which are interpreted one after the other."""

    splits = 1


@pytest.fixture
def made(monkeypatch):
    """A function that makes a rig whose ledger has the given passes."""
    facts = EngineFacts(device="cuda", runner="v2")
    monkeypatch.setattr(watch_opening.engine_config, "runner_facts", lambda runner: facts)
    monkeypatch.setattr(ranks, "number_of_ranks", lambda: 1)
    monkeypatch.setattr(ranks, "number_of_stages", lambda: 1)

    def make(passes, **options):
        monkeypatch.setattr(kvtxn.audit.ledger, "choose", lambda backend, device: passes)
        rig = Rig(**options)
        rig.start()
        return rig

    return make


@pytest.fixture
def rig(made, request):
    """A rig whose ledger has Triton's passes."""
    return made(FewPrograms, window=request.param)


@pytest.mark.parametrize("rig", [None, 3], indirect=True)
def test_a_healthy_engine(rig):
    """Chunks, drafts and a prefix hit; the passes warm up before, and forget that."""
    one = rig.add("one", list(range(1, 10)))
    for _ in range(3):
        rig.step(chunk=5)
    rig.add("two", [*one.tokens[:9], 48, 47], hit=one)
    for _ in range(2):
        rig.step()
    counters = rig.watch.counters()
    assert rig.watch.report() == []
    assert counters["kvtxn_audit_active"] == 1
    assert counters["kvtxn_audit_steps_total"] == 5
    assert counters["kvtxn_audit_rows_checked_total"] > 50
    assert counters["kvtxn_audit_unjudged_total"] == 0


@pytest.mark.parametrize("rig", [None], indirect=True)
def test_a_draft_that_was_not_sampled_is_rejected(rig):
    """However many the runner counts as accepted: the next step reads its row."""
    request = rig.add("high", list(range(1, 10)))
    for _ in range(8):
        rig.wrong_count = 1
        rig.step()
        rig.wrong_count = 0
        if request.drafts and request.tokens[-1] not in request.drafts:
            request.computed += 1  # what such a count makes of the next step
            request.tokens.append(5)
            rig.step()
            break
    found = rig.watch.report()
    assert found
    assert found[0]["request"] == "high"
