"""``kvtxn bench recurrent`` over tiny states, by interpreted kernels; the clock alone pretends."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from kernels_here import ON_GPU, importing_kernels
from kvtxn.benchmarks.common.model_shapes import STATES, StateCase
from kvtxn.benchmarks.kernels import recurrent

with importing_kernels():
    from kvtxn.backends.move_rows import stage_rows  # noqa: F401 - vLLM's rows import it later
    from kvtxn.benchmarks.kernels import fast_states, state_workload, vllm_state_ops

TINY = [name for name in STATES if name.startswith("tiny")]
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def clock(candidates):
    """Runs each step once; times say which candidate comes how late."""
    for steps in candidates.values():
        for step in steps:
            step()
    return {name: [10.0 * number] * 6 for name, number in zip(candidates, count(1), strict=False)}


@pytest.fixture(autouse=True)
def few_host_calls(monkeypatch):
    """Fifteen calls of interpreted kernels take longer than all else."""
    monkeypatch.setattr(recurrent, "_HOST_CALLS", 2)


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    """vLLM's own kernels; interpreted where there is no GPU."""
    pytest.importorskip("vllm")
    if not ON_GPU:
        import interpreted
        from vllm.model_executor.layers.mamba import mamba_mixer2
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as qwen

        kernel = interpreted.gated_delta()
        monkeypatch.setattr(qwen, "fused_sigmoid_gating_delta_rule_update", kernel)
        monkeypatch.setattr(mamba_mixer2, "selective_state_update", interpreted.mamba2())


@pytest.mark.parametrize(("model", "dtype"), zip(TINY, ("float32", "bfloat16"), strict=True))
def test_a_case_is_checked_and_timed(model, dtype):
    """Every candidate runs; shares are taken of the right ones."""
    case = StateCase(model, dtype, requests=3, drafts=2)
    row = recurrent.measure(case, DEVICE, clock, turns=1)
    [(name, kernel)] = [each for each in row["kernels"].items() if "fused" not in each[0]]
    assert name.startswith("vLLM's")
    assert row["floor"] == 10.0
    parts = (
        ["verify", "norm", "commit"] if case.shape.kind == "gated_delta" else ["verify", "commit"]
    )
    late = 10.0 * len(parts)  # of candidates before these
    us = kernel["us"]
    assert us == {
        **{"stock": 20.0 + late, "stage": 30.0 + late, "read": 40.0 + late},
        **{"commit": 50.0 + late, "together": 60.0 + late},
        **{"added": 90.0 + 2 * late, "exact": 130.0 + 3 * late},
    }
    layer_by_layer = (120.0 + 3 * late) / (20.0 + late)
    assert kernel["of_stock_layer_by_layer"]["median"] == pytest.approx(layer_by_layer, abs=1e-4)
    assert kernel["of_stock"]["median"] == pytest.approx(us["exact"] / us["stock"], abs=1e-4)
    assert kernel["of_stock"]["rounds"] == 6
    times = dict(zip(parts, (20.0, 30.0, 40.0), strict=False))
    both = times["verify"] + times["commit"]
    assert row["fast"]["us"] == {**times, "fast": both}
    assert row["fast"]["of_stock"][name]["median"] == pytest.approx(both / us["stock"], abs=1e-4)
    assert row["fast"]["of_floor"]["median"] == times["commit"] / 10
    assert row["fast"]["buffer_bytes"] == 9 * 2 * 4 * (2 * 16 + 4 * (16 + 1))
    shape = case.shape
    size = {"float32": 4, "bfloat16": 2}[dtype]
    state = shape.heads * shape.value_size * shape.key_size * size
    assert row["state_bytes"] == 3 * shape.layers * state
    assert row["freed_bytes"] == 2 * row["state_bytes"]
    assert kernel["formula_bytes"] > 0
    text = recurrent.report(
        {"rows": [row], "machine": {"torch": "2", "commit": "0", "command": "c", "gpu": "g"}}
    )
    shown = text.count(f"{model}, {dtype}, {name}")
    assert shown == 3
    assert len(recurrent.lines(row)) == 3


def test_a_kernel_that_no_window_verifies_by_is_stocks_alone(monkeypatch):
    """The fast kernels are compared with it, and nothing else is."""
    monkeypatch.setattr(vllm_state_ops.VllmOps, "exact", False)
    row = recurrent.measure(StateCase(TINY[0], "float32", 2, 2), DEVICE, clock, turns=1)
    [(name, kernel)] = row["kernels"].items()
    assert kernel == {"us": {"stock": 50.0}}
    fast = row["fast"]["us"]["fast"] / kernel["us"]["stock"]
    assert row["fast"]["of_stock"][name]["median"] == pytest.approx(fast, abs=1e-4)
    assert f"{name}: stock 50.0" in recurrent.lines(row)[0]
    text = recurrent.report(
        {"rows": [row], "machine": {"torch": "2", "commit": "0", "command": "c", "gpu": "g"}}
    )
    assert text.count(f"{TINY[0]}, float32, {name}") == 1


@pytest.mark.parametrize("spoiled", ["stock", "commit", "another"])
def test_wrong_states_are_found(spoiled):
    """Nothing is timed after a commit that is not stock's."""
    load = state_workload.StateWorkload(StateCase(TINY[0], "float32", 2, 2), DEVICE, 1)
    [ops] = vllm_state_ops.operators(load)
    parts = ("stage", "read", "commit")
    recurrent.check_exact(load, ops, parts)
    right = getattr(ops, "commit" if spoiled == "another" else spoiled)

    def wrong(turn):
        right(turn)
        column = turn.sampled.long()[0] - 1 if spoiled == "stock" else int(spoiled == "another")
        load.states[-1][turn.table[0, column].long(), 0, 0, 0] += 1

    setattr(ops, "stock" if spoiled == "stock" else "commit", wrong)
    with pytest.raises(AssertionError, match="differs from stock"):
        recurrent.check_exact(load, ops, parts)


@pytest.mark.parametrize("spoiled", ["verify", "commit", "another"])
@pytest.mark.parametrize("model", TINY)
def test_a_wrong_fast_kernel_is_found(monkeypatch, model, spoiled):
    """By the reference: wrong staged rows, a wrong state, and a state that nobody asked for."""
    load = state_workload.StateWorkload(StateCase(model, "float32", 2, 2), DEVICE, 1)
    mamba2 = load.case.shape.kind == "mamba2"
    fast = (fast_states.FastMamba2 if mamba2 else fast_states.FastStates)(load)
    fast.check()
    right = getattr(fast, "verify" if spoiled == "verify" else "commit")

    def wrong(turn):
        right(turn)
        if spoiled == "verify":
            fast.kept[-1].corrected[0, 0, 0] += 1
        else:
            load.states[-1][turn.table[0, int(spoiled == "another")].long(), 0, 0, 0] += 1

    monkeypatch.setattr(fast, "verify" if spoiled == "verify" else "commit", wrong)
    with pytest.raises(AssertionError, match="differs from the reference"):
        fast.check()


def test_copies_are_of_the_states_bytes():
    """Each step has its own, from one half to the other."""
    load = state_workload.StateWorkload(StateCase(TINY[0], "float32", 2, 1), DEVICE, 2)
    flat = load.states.view(-1).view(torch.uint8)
    size = load.step_bytes
    before = flat.clone()
    for step in load.copies():
        step()
    assert torch.equal(flat[size : 2 * size], before[:size])
    assert torch.equal(flat[3 * size : 4 * size], before[2 * size : 3 * size])
    assert torch.equal(flat[4 * size :], before[4 * size :])
