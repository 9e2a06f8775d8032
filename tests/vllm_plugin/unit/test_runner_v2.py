"""The V2 runner on a GPU: what the hooked class does, with stand-ins for runner and steps."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from kernels_here import importing_kernels
from step_rig import DEVICE, Rig, anywhere  # noqa: F401  # a fixture

from kvtxn.testing.supplied_states import ToyStates

with importing_kernels():
    from kvtxn.integrations.serving.graph_steps import GraphSteps
    from kvtxn.integrations.serving.pipeline_steps import PipelineSteps
    from kvtxn.integrations.vllm_plugin.gpu.windows import WindowsV2
    from kvtxn.integrations.vllm_plugin.runners.runner_v2 import AdapterV2
    from kvtxn.integrations.vllm_plugin.seam.hooks import swap_class

from kvtxn.integrations.serving.parts import Parts

from kvtxn import KVTxnError


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

    def update_pp_decode_requests(self):
        """As vLLM's own."""
        self.calls.append("update")
        outputs = self.pp_handler.get_prev_sampled_outputs()
        if outputs is not None:
            self.postprocess_sampled(**outputs)


class Steps:
    """Stands for the runner's steps."""

    query_len = 3

    def __init__(self, calls) -> None:
        self.calls, self.alike = calls, None

    def begin(self, drafts, lengths, prefilling, replayed, alike):
        assert not replayed
        self.alike = alike
        self.calls.append(("begin", drafts, lengths.tolist(), prefilling.tolist()))

    def commit(self, sampled):
        self.calls.append(("commit", sampled.tolist()))


def with_windows(runner):
    """A runner that became one of ours."""
    swap_class(runner, AdapterV2)
    runner.windows = WindowsV2(runner)
    runner.kvtxn_parts = Parts([runner.windows])
    return runner


def hooked():
    """A runner that became one of ours, with stand-ins for its steps."""
    runner = with_windows(Own())
    runner.kvtxn = Steps(runner.calls)
    return runner


def batch(drafts):
    """vLLM's batch of three requests."""
    return SimpleNamespace(
        num_reqs=3,
        num_tokens=12,
        has_prefill=True,
        num_draft_tokens=sum(drafts),
        num_draft_tokens_per_req=numpy.array(drafts),
        num_scheduled_tokens=numpy.array([3, 2, 7]),
        is_prefilling_np=numpy.array([False, False, True]),
        idx_mapping_np=numpy.array([5, 0, 3]),
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
    runner.windows.connected = connected
    output = runner.sample("hidden", "batch", None)
    assert (output[0], output[2]) == ("output", "rejected")
    assert runner.calls == ["sample", *([("commit", [2, 1, 1])] if connected else [])]


def test_what_other_stages_are_told_goes_through():
    """vLLM tells an earlier pipeline stage by name, drafts of the last one among it."""
    runner = hooked()
    runner.kvtxn = None  # such a stage may have no windows
    told = dict.fromkeys(("idx_mapping", "sampled_tokens", "num_sampled", "num_rejected"), 1)
    runner.postprocess_sampled(**told, draft_tokens="drafts")
    [(own, given, named)] = runner.calls
    assert (own, given, named) == ("postprocess", (1, 1, 1, 1), {"draft_tokens": "drafts"})


def test_a_step_without_drafts_is_planned_as_such():
    """A step without drafts is planned without vLLM's draft counts, which are stale then."""
    runner = hooked()
    runner.prepare_attn(batch([0, 0, 0]))
    assert runner.calls[1][:2] == ("begin", None)


def whole(**other):
    """vLLM's batch of three requests with two drafts each, but for ``other``."""
    given = batch([2, 2, 2]).__dict__ | {"num_tokens": 9, "has_prefill": False}
    return SimpleNamespace(**given | other)


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        ({}, 3),
        ({"has_prefill": True}, 0),
        ({"num_draft_tokens": 5}, 0),
        ({"num_tokens": 8}, 0),
        ({"num_reqs": 2}, 0),
        ({"num_draft_tokens": 0, "num_tokens": 3}, 0),
    ],
)
def test_requests_with_all_drafts_are_alike(other, alike):
    """A prompt that goes on may have drafts, too; such a batch is looked at request by request."""
    runner = hooked()
    runner.prepare_attn(whole(**other))
    assert runner.kvtxn.alike == alike


def test_without_steps_it_is_vllms():
    runner = hooked()
    runner.kvtxn = None
    runner.prepare_attn(batch([2, 1, 0]))
    runner.postprocess_sampled("idx", "tokens", None, None)
    assert [call[0] for call in runner.calls[1:]] == ["postprocess"]


# -- pipeline stages before the last one -------------------------------------------------


def test_a_runner_that_does_not_sample_has_steps_of_its_own():
    """As many windows are open at one time as vLLM's queue has entries."""
    rig = Rig("undo")
    tables = SimpleNamespace(slot_mappings=rig.slots)
    handler = SimpleNamespace(queue=deque([None] * 3), is_last_rank=False)
    runner = Own()
    runner.block_tables, runner.decode_query_len, runner.pp_handler = tables, 4, handler
    make = with_windows(runner).windows.make
    named = SimpleNamespace(groups={"group.0": 1})

    class Manager:
        """The rig's, with groups named as vLLM's."""

        def __getattr__(self, name):
            return getattr(named, name, None) or getattr(rig.manager, name)

    steps = make(Manager(), None, [], None)
    assert isinstance(steps, PipelineSteps)
    assert len(steps.lanes) == 3
    with pytest.raises(KVTxnError, match="states cannot wait on an earlier pipeline stage"):
        make(Manager(), None, [], ToyStates())
    handler.is_last_rank = True
    assert isinstance(make(Manager(), None, [], None), GraphSteps)
    runner.pp_handler = None
    assert isinstance(make(Manager(), None, [], None), GraphSteps)


def queue_of(stages):
    """vLLM's own queue of an early stage, without the streams of a GPU."""
    utils = pytest.importorskip("vllm.v1.worker.gpu.pp_utils")
    handler = object.__new__(utils.PPHandler)
    handler.is_last_rank, handler.device = False, torch.device(DEVICE)
    handler.queue = deque([None] * stages)
    handler.req_idx_gen_np = numpy.zeros(8, dtype=numpy.int32)
    handler.main_stream = SimpleNamespace(wait_event=lambda event: None)
    return handler


def early_stage():
    """A hooked runner on the first of two stages, over the rig of steps."""
    runner, rig = with_windows(Own()), Rig("undo")
    runner.kvtxn = PipelineSteps(rig.manager, rig.slots, 4, 2)
    runner.pp_handler = queue_of(2)
    return runner, rig


def run(runner, rig):
    """One step of three requests; what the last stage sends of it enters the queue."""
    rig.slots.fill_(-1)
    rig.slots[0, :5] = torch.tensor([0, 1, 2, 4, 5])
    step = batch([2, 1, 0])
    runner.prepare_attn(step)
    rig.forward()
    which = step.idx_mapping_np
    sampled = torch.tensor([2, 1, 1], dtype=torch.int32, device=DEVICE)
    from vllm.v1.worker.gpu.pp_utils import PendingRecv

    runner.pp_handler.queue[-1] = PendingRecv(
        event=None,
        sampled_tokens="tokens",
        num_sampled=sampled,
        num_rejected="rejected",
        idx_mapping="idx",
        idx_mapping_np=which,
        need_sampled_mask=numpy.ones(3, dtype=bool),
        gen_at_receive_np=runner.pp_handler.req_idx_gen_np[which],
    )


@pytest.mark.parametrize(
    ("gone", "counts"), [((), (1, 3, 2)), ((5,), (1, 1, 1)), ((5, 0, 3), (0, 0, 0))]
)
def test_an_early_stage_commits_when_it_hears_what_was_accepted(gone, counts):
    """Two steps later, before vLLM's own code; rows of freed requests stay and do not count."""
    runner, rig = early_stage()
    runner.update_pp_decode_requests()
    run(runner, rig)
    runner.update_pp_decode_requests()
    assert rig.count("windows_total") == 0
    for index in gone:
        runner.pp_handler.on_req_idx_freed(index)
    written = [cache.clone() for cache in rig.caches]
    runner.update_pp_decode_requests()
    names = ("windows_total_committed", "rows_staged_total", "rows_rejected_total")
    assert tuple(map(rig.count, names)) == counts
    assert all(map(torch.equal, written, rig.caches)) == (len(gone) == 3)
    told = [call[0] for call in runner.calls if call[0] == "postprocess"]
    assert len(told) == (len(gone) < 3)
    assert all(lane.window is None for lane in runner.kvtxn.lanes)


def test_an_early_stage_whose_own_code_fails_keeps_no_window():
    """The exception goes out, and the step's rows stay as stock leaves them."""
    runner, rig = early_stage()
    runner.update_pp_decode_requests()
    run(runner, rig)
    runner.update_pp_decode_requests()
    runner.pp_handler.queue[0].num_sampled = None  # vLLM's own method stumbles over it
    with pytest.raises(Exception, match="sampled"):
        runner.update_pp_decode_requests()
    runner.update_pp_decode_requests()
    run(runner, rig)
    assert rig.count("windows_total_committed") == 0


def test_stages_that_sample_take_their_queue_as_vllm_does():
    """The last stage's steps know nothing of a queue, and a runner without steps is vLLM's."""
    for steps in (None, Steps([])):
        runner = hooked()
        runner.kvtxn = steps
        runner.pp_handler = queue_of(0)  # as on the last stage
        runner.update_pp_decode_requests()
        assert runner.calls == ["update"]
