"""The V2 runner on a GPU: what the hooked class does, with stand-ins for runner and steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch
from kernels_here import importing_kernels

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.attach import swap_class
    from kvtxn.integrations.vllm_plugin.gpu.runner_v2 import GpuRunnerV2


class Own:
    """Stands for vLLM's runner: what it was asked goes into the same list as the steps' calls."""

    def __init__(self) -> None:
        self.calls = []

    def prepare_attn(self, input_batch):
        self.calls.append("prepare")
        return "prepared"

    def sample(self, hidden_states, input_batch, grammar_output):
        self.calls.append("sample")
        return "output", torch.tensor([2, 1, 1], dtype=torch.int32), "rejected"

    def postprocess_sampled(self, *given, **named):
        self.calls.append(("postprocess", given, named))


class Steps:
    """Stands for the runner's steps."""

    def __init__(self, calls) -> None:
        self.calls = calls

    def begin(self, drafts, lengths, prefilling):
        self.calls.append(("begin", drafts, lengths.tolist(), prefilling.tolist()))

    def commit(self, sampled):
        self.calls.append(("commit", sampled.tolist()))


def hooked():
    """A runner that became one of ours."""
    runner = Own()
    swap_class(runner, GpuRunnerV2)
    runner.kvtxn = Steps(runner.calls)
    return runner


def batch(drafts):
    """vLLM's batch of three requests."""
    return SimpleNamespace(
        num_draft_tokens=sum(drafts),
        num_draft_tokens_per_req=numpy.array(drafts),
        num_scheduled_tokens=numpy.array([3, 2, 7]),
        is_prefilling_np=numpy.array([False, False, True]),
    )


def test_a_step_is_planned_and_committed():
    """Planned once slots are in place; committed before vLLM goes on, which drafts next."""
    runner, sampled = hooked(), torch.tensor([2, 1, 1], dtype=torch.int32)
    assert runner.prepare_attn(batch([2, 1, 0])) == "prepared"
    runner.postprocess_sampled("idx", "tokens", sampled, "rejected", "starts")
    prepared, (begun, drafts, *rows), committed, own = runner.calls
    assert (prepared, begun, drafts.tolist()) == ("prepare", "begin", [2, 1, 0])
    assert rows == [[3, 2, 7], [False, False, True]]
    assert committed == ("commit", [2, 1, 1])
    assert own == ("postprocess", ("idx", "tokens", sampled, "rejected", "starts"), {})


@pytest.mark.parametrize("connected", [False, True])
def test_with_a_connector_the_commit_comes_before_anybody_is_told(connected):
    """vLLM asks connectors for their results between sampling and ``postprocess_sampled``."""
    runner = hooked()
    runner.kvtxn_connected = connected
    output = runner.sample("hidden", "batch", None)
    assert (output[0], output[2]) == ("output", "rejected")
    assert runner.calls == ["sample", *([("commit", [2, 1, 1])] if connected else [])]


def test_what_other_stages_are_told_goes_through():
    """vLLM tells an earlier pipeline stage by name, drafts of the last one among it."""
    runner = hooked()
    runner.kvtxn = None  # such a stage has no windows
    told = dict.fromkeys(("idx_mapping", "sampled_tokens", "num_sampled", "num_rejected"), 1)
    runner.postprocess_sampled(**told, draft_tokens="drafts")
    [(own, given, named)] = runner.calls
    assert (own, given, named) == ("postprocess", (1, 1, 1, 1), {"draft_tokens": "drafts"})


def test_a_step_without_drafts_is_planned_as_such():
    """A step without drafts is planned without vLLM's draft counts, which are stale then."""
    runner = hooked()
    runner.prepare_attn(batch([0, 0, 0]))
    assert runner.calls[1][:2] == ("begin", None)


def test_without_steps_it_is_vllms():
    runner = hooked()
    runner.kvtxn = None
    runner.prepare_attn(batch([2, 1, 0]))
    runner.postprocess_sampled("idx", "tokens", None, None)
    assert [call[0] for call in runner.calls[1:]] == ["postprocess"]
