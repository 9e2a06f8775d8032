"""Whole engines on a GPU: stock's tokens, clean caches, faults that lose nothing.

The same that ``kvtxn bench exactness`` does, with fewer prompts.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kvtxn.benchmarks.exactness_engine import Task
from kvtxn.benchmarks.exactness_watch import STAGES
from kvtxn.benchmarks.vllm_exactness import compare, observed


@pytest.fixture(scope="module")
def engines():
    """What three engines report."""
    tasks = [
        Task(
            name=policy,
            policy=policy,
            attention="FLASH_ATTN",
            prompts=48,
            tokens=64,
            drafts=4,
            max_num_seqs=16,
            windows=0 if policy == "stock" else 100,
            faults=True,
        )
        for policy in ("stock", "undo", "deferred")
    ]
    found, _, failed = observed(tasks, 500)
    assert not failed, failed
    return found


@pytest.mark.parametrize("policy", ["undo", "deferred"])
def test_tokens(engines, policy):
    """All are stock's: so are the sums."""
    found = compare(engines["stock"]["tokens"], engines[policy]["tokens"])
    assert found["same"] == found["prompts"] == 48, found["gaps"]


@pytest.mark.parametrize("policy", ["undo", "deferred"])
def test_caches(engines, policy):
    """No rejected row is left, no accepted one lost, nothing else touched."""
    seen = engines[policy]["watched"]
    assert seen["windows"] >= 100
    assert seen["rejected"] > 100
    assert seen["leaks"] == seen["early"] == seen["lost"] == seen["strays"] == 0
    assert "kvtxn_fallbacks_total" not in engines[policy]["counters"]


@pytest.mark.parametrize("policy", ["undo", "deferred"])
def test_nothing_compiles_after_the_start(engines, policy):
    """No kernel of kvtxn's; vLLM's own are its own."""
    assert not [name for name in engines[policy]["compiled_after_start"] if "kvtxn" in name]


@pytest.mark.parametrize("policy", ["undo", "deferred"])
def test_faults(engines, policy):
    """Each stage fails once: counted once, tokens stock's, windows again afterwards."""
    faults = engines[policy]["faults"]
    assert [each["stage"] for each in faults] == [s for s in STAGES if policy in STAGES[s]]
    for each in faults:
        assert each["fallbacks"] == 1, each["stage"]
        assert each["windows_afterwards"] > 0, each["stage"]
        assert each["fallbacks_afterwards"] == 0, each["stage"]
        found = compare(engines["stock"]["few"], each["tokens"])
        assert found["same"] == found["prompts"], each["stage"]
