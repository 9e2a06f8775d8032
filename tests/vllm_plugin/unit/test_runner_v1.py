"""The V1 runner on a GPU: what the hooked class does, with stand-ins for runner and steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch
from kernels_here import importing_kernels

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu.windows import WindowsV1
    from kvtxn.integrations.vllm_plugin.runners.runner_v1 import AdapterV1
    from kvtxn.integrations.vllm_plugin.seam import batches
    from kvtxn.integrations.vllm_plugin.seam.hooks import swap_class

from kvtxn.integrations.serving.parts import Part, Parts


class Batch:
    """A persistent batch: requests keep their places."""

    def __init__(self, names, computed, prompts) -> None:
        self.req_ids = list(names)
        self.num_computed_tokens_cpu = numpy.array(computed)
        self.num_prompt_tokens = numpy.array(prompts)
        self.swaps: list[tuple[int, int]] = []

    def swap_states(self, one: int, other: int) -> None:
        """Two requests change places."""
        self.swaps.append((one, other))
        names = self.req_ids
        names[one], names[other] = names[other], names[one]


@pytest.mark.parametrize(
    ("drafts", "order"),
    [
        ({"b": [1], "d": [1, 2]}, {"b", "d"}),
        ({"a": [1], "b": [2]}, {"a", "b"}),
        ({"c": [1], "d": []}, {"c"}),
        ({}, set()),
    ],
)
def test_requests_with_drafts_lead(drafts, order):
    """Requests that lead already stay there; an empty list is no draft."""
    batch = Batch("abcd", [9] * 4, [5] * 4)
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    batches.lead_with_drafts(SimpleNamespace(input_batch=batch), scheduled)
    assert set(batch.req_ids[: len(order)]) == order
    assert sorted(batch.req_ids) == list("abcd")
    assert len(batch.swaps) <= len(order)
    if order == {"a", "b"}:
        assert not batch.swaps


def test_what_prepare_inputs_says():
    """Drafts per request, rows per request, and whose prompt is not done."""
    runner = SimpleNamespace(input_batch=Batch("abc", [9, 3, 5], [5, 5, 5]))
    lengths = numpy.array([3, 2, 1], dtype=numpy.int32)
    metadata = SimpleNamespace(num_draft_tokens=[2, 0, 0])
    drafts, rows, prefilling = batches.prepared_rows(runner, (None, metadata, 3), lengths)
    assert drafts.tolist() == [2, 0, 0]
    assert rows.tolist() == [3, 2, 1]
    assert prefilling.tolist() == [False, True, False]
    for without in (None, SimpleNamespace(num_draft_tokens=[0, 0, 0])):
        assert batches.prepared_rows(runner, (None, without, 1), lengths)[0] is None


class Own:
    """Stands for vLLM's runner: says what it was asked."""

    def __init__(self, names="ab", drafts=(2, 0), deferred=True) -> None:
        self.input_batch = Batch(names, [9] * len(names), [5] * len(names))
        tables = [SimpleNamespace(slot_mapping=SimpleNamespace(gpu=torch.arange(8) + 10 * i))
                  for i in range(2)]  # fmt: skip
        self.input_batch.block_table = tables
        self.drafts, self.asked = list(drafts), []
        self.kvtxn = Steps(deferred)

    def _update_states(self, scheduler_output):
        self.asked.append("update")

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        return None, SimpleNamespace(num_draft_tokens=self.drafts), 3

    def _sample(self, logits, spec_decode_metadata):
        return SimpleNamespace(sampled_token_ids=torch.tensor([[1, 2, -1], [3, -1, -1]]))

    def _may_reorder_batch(self, scheduler_output):
        self.asked.append("reorder")


class Steps:
    """Stands for the runner's steps."""

    def __init__(self, deferred) -> None:
        self.deferred = deferred
        self.manager = SimpleNamespace(groups={"group.1": (), "group.0": ()})
        self.calls = []

    def abandon(self):
        self.calls.append("abandon")

    def begin_among(self, drafts, lengths, prefilling, slots):
        self.calls.append(("begin", drafts, [int(each[0]) for each in slots]))

    def commit_ids(self, ids):
        self.calls.append(("commit", ids.tolist()))


def hooked(**options):
    """A runner that became one of ours."""
    runner = Own(**options)
    swap_class(runner, AdapterV1)
    runner.windows = WindowsV1(runner)
    runner.kvtxn_parts = Parts([runner.windows])
    return runner


def test_a_step_is_planned_and_committed():
    """In this order, with the slots of each group in the order of the layers' groups."""
    runner = hooked()
    runner._update_states(None)
    runner._prepare_inputs(None, numpy.array([3, 1]))
    runner._sample(None, None)
    abandoned, begun, committed = runner.kvtxn.calls
    assert abandoned == "abandon"
    assert begun[1].tolist() == [2, 0]
    assert begun[2] == [10, 0]
    assert committed == ("commit", [[1, 2, -1], [3, -1, -1]])


@pytest.mark.parametrize(("deferred", "keeps"), [(True, False), (False, False), (True, True)])
def test_the_batch_is_reordered_where_rows_wait(deferred, keeps):
    """Under undo the rows may lie anywhere, and the batch stays vLLM's; or sums would change."""
    runner = hooked(deferred=deferred)
    runner.windows.keeps_order = keeps
    runner._may_reorder_batch(SimpleNamespace(scheduled_spec_decode_tokens={"b": [1]}))
    assert runner.asked == ["reorder"]
    assert runner.input_batch.req_ids == (["b", "a"] if deferred and not keeps else ["a", "b"])


def test_without_steps_it_is_vllms():
    runner = hooked()
    runner.kvtxn = None
    runner._update_states(None)
    runner._may_reorder_batch(None)
    runner._prepare_inputs(None, numpy.array([3, 1]))
    assert runner._sample(None, None).sampled_token_ids.shape == (2, 3)


class Stepping:
    """Stands for vLLM's runner, whose step fails between its inputs and its forward."""

    def execute_model(self, scheduled):
        self._prepare_inputs(scheduled, None)
        raise RuntimeError("planted")

    def _prepare_inputs(self, scheduled, counts):
        return scheduled

    def _model_forward(self, **inputs):
        return "output"


class Hears(Part):
    """Notes the forwards that it is told of."""

    def __init__(self) -> None:
        self.forwards: list[object] = []

    def forward_begins(self, step, inputs):
        self.forwards.append(step)


def test_a_step_that_fails_before_its_forward_is_told_with_no_other_one():
    """The next forward may be a warm-up's, or that of a rank that has nothing to do."""
    runner, part = Stepping(), Hears()
    swap_class(runner, AdapterV1)
    runner.kvtxn_parts = Parts([part])
    with pytest.raises(RuntimeError, match="planted"):
        runner.execute_model("inputs")
    assert runner._model_forward() == "output"
    assert part.forwards == [None]
