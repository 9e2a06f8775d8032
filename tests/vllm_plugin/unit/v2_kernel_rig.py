"""A stand-in for vLLM's V2 runner whose ledger has Triton's passes, interpreted."""

from __future__ import annotations

from kernels_here import importing_kernels

with importing_kernels():
    from kvtxn.backends.audit import TritonPasses

from kvtxn.integrations.vllm_plugin.audit import runner_watch
from kvtxn.integrations.vllm_plugin.internals import ranks
from kvtxn.integrations.vllm_plugin.policy.engine import EngineFacts
from v2_rig import Rig

import kvtxn.audit.ledger


class FewPrograms(TritonPasses):
    """The same with fewer programs, which are interpreted one after the other."""

    splits = 1


def rig_maker(monkeypatch):
    """Return a function that makes a rig whose ledger has the given passes."""
    facts = EngineFacts(device="cuda", runner="v2")
    monkeypatch.setattr(runner_watch.config, "runner_facts", lambda runner: facts)
    monkeypatch.setattr(ranks, "number_of_ranks", lambda: 1)
    monkeypatch.setattr(ranks, "number_of_stages", lambda: 1)

    def make(passes, **options):
        monkeypatch.setattr(kvtxn.audit.ledger, "choose", lambda backend, device: passes)
        rig = Rig(**options)
        rig.start()
        return rig

    return make
