"""The V2 runner's captured forwards save rows before they are overwritten; graphs are stand-ins."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from kernels_here import importing_kernels
from kvtxn.integrations.serving.parts import Parts
from step_rig import DEVICE, Rig, anywhere  # noqa: F401  # a fixture

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu.windows import WindowsV2
    from kvtxn.integrations.vllm_plugin.runners.runner_v2 import AdapterV2
    from kvtxn.integrations.vllm_plugin.seam import whole_graphs
    from kvtxn.integrations.vllm_plugin.seam.hooks import is_swapped, swap_class


pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode

SIZES = (4, 8, 16)
WHOLE = SimpleNamespace(cg_mode=CUDAGraphMode.FULL)
PARTS = SimpleNamespace(cg_mode=CUDAGraphMode.PIECEWISE)


class Capture:
    """Launches that are made now, and those that a graph has recorded: functions called again."""

    def __init__(self, monkeypatch):
        self.recorded, self._monkeypatch = None, monkeypatch
        self.context = SimpleNamespace(slot_mapping={})
        monkeypatch.setattr(whole_graphs, "capturing", lambda: self.recorded is not None)
        monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: self.context)

    def records(self, owner, name):
        """Let the launches that a method returns be recorded in a capture, and not made."""
        make = getattr(owner, name)

        def recording(*given):
            launch = make(*given)

            def launched():
                (launch if self.recorded is None else partial(self.recorded.append, launch))()

            return None if launch is None else launched

        self._monkeypatch.setattr(owner, name, recording)

    def forward(self, model, rows, *, into=None, mode=CUDAGraphMode.NONE):
        """Call the model on so many rows, captured or not."""
        self.recorded = into
        self.context = SimpleNamespace(
            slot_mapping={"layer": torch.empty(rows)} if rows else {}, cudagraph_runtime_mode=mode
        )
        try:
            model(None)
        finally:
            self.recorded = None


class Manager:
    """Stands for vLLM's graph manager."""

    def __init__(self, capture):
        self.graphs, self._capture, self.replayed = {}, capture, []

    def capture(self, model, sizes=SIZES):
        for rows in sizes:
            self._capture.forward(model, rows)
            self._capture.forward(model, rows, into=[], mode=CUDAGraphMode.PIECEWISE)
            self.graphs[rows] = []
            self._capture.forward(model, rows, into=self.graphs[rows])

    def run_fullgraph(self, desc):
        for launch in self.graphs[desc]:
            launch()
        self.replayed.append(desc)
        return "output"


class Silent(torch.nn.Identity):
    """A model that is compiled as a whole: nobody is told that its forward begins."""

    def __call__(self, given):
        return given


class Own:
    """Stands for vLLM's runner."""

    pp_handler, decode_query_len = None, 4

    def prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, num_active_loras):
        return "inputs"

    def prepare_attn(self, input_batch):
        return "prepared"

    def postprocess_sampled(self, *given):
        pass


class Engine:
    """A runner with windows under ``undo``, before its graphs are captured."""

    def __init__(self, monkeypatch, model=torch.nn.Identity, on_error="fallback"):
        self.rig = Rig("undo", on_error)
        self.capture = Capture(monkeypatch)
        self.capture.records(self.rig.steps.windows, "save_in_forward")
        self.model = model()
        self.runner = Own()
        self.runner.cudagraph_manager = self.manager = Manager(self.capture)
        swap_class(self.runner, AdapterV2)
        self.runner.kvtxn_undo, self.runner.kvtxn = ExitStack(), self.rig.steps
        self.windows = WindowsV2(self.runner)
        self.runner.kvtxn_parts = Parts([self.windows])
        self.windows.let_graphs_save(self.rig.steps)

    def begin(self, drafts, lengths, how=WHOLE):
        """The part of a step before the forward."""
        rows = [r * 4 + i for r, length in enumerate(lengths) for i in range(length)]
        self.rig.slots.fill_(-1)
        self.rig.slots[0, : len(rows)] = torch.tensor(rows)
        self.runner.prepare_inputs("scheduled", "state", how, 0)
        batch = SimpleNamespace(
            num_reqs=len(lengths),
            num_tokens=sum(lengths),
            has_prefill=False,
            num_draft_tokens=sum(drafts),
            num_draft_tokens_per_req=numpy.array(drafts),
            num_scheduled_tokens=numpy.array(lengths),
            is_prefilling_np=numpy.array([False] * len(lengths)),
        )
        assert self.runner.prepare_attn(batch) == "prepared"

    def forward(self, how=WHOLE):
        """The forward."""
        if how is WHOLE:
            rows = int((self.rig.slots[0] >= 0).sum())
            size = min(size for size in SIZES if size >= rows)
            assert self.manager.run_fullgraph(size) == "output"
        else:
            self.capture.forward(self.model, 0)
        return self.rig.forward()

    def sampled(self, counts):
        self.runner.postprocess_sampled(
            "idx", "ids", torch.tensor(counts, dtype=torch.int32, device=DEVICE), None
        )

    def step(self, drafts, lengths, counts, how=WHOLE):
        """A whole step; every byte is compared."""
        before = [cache.clone() for cache in self.rig.caches]
        self.begin(drafts, lengths, how)
        made = self.forward(how)
        self.sampled(counts)
        self.rig.expect(before, made, drafts, lengths, counts)


STEPS = (
    ([3, 3], [4, 4], [1, 4]),
    ([3], [4], [2]),
    ([2, 1], [3, 2], [1, 1]),
    ([3] * 3, [4] * 3, [2] * 3),
)


@pytest.fixture
def saves(monkeypatch):
    """The windows that saved their rows by a launch of their own."""
    from kvtxn.captured_window import CapturedWindow

    found, real = [], CapturedWindow.save

    def save(window):
        found.append(window.number)
        real(window)

    monkeypatch.setattr(CapturedWindow, "save", save)
    return found


def test_graphs_save_for_their_windows(monkeypatch, saves):
    """A step over a graph launches nothing before its commit; other steps save when they begin."""
    engine = Engine(monkeypatch)
    engine.manager.capture(engine.model)
    assert all(len(graph) == 1 for graph in engine.manager.graphs.values())
    for number, step in enumerate(STEPS):
        engine.step(*step, how=PARTS if number == 1 else WHOLE)
    assert saves == [1]
    assert engine.rig.count("windows_total_committed") == len(STEPS)
    assert engine.rig.count("fallbacks_total") == 0


@pytest.mark.parametrize("how", ["compiled whole", "one graph too many", "captured again"])
def test_graphs_that_may_not_save(monkeypatch, saves, how):
    """Rows are saved by a launch before the replay, unless every graph saves them."""
    engine = Engine(monkeypatch, Silent if how == "compiled whole" else torch.nn.Identity)
    engine.manager.capture(engine.model)
    if how == "one graph too many":
        engine.manager.graphs["of somebody else"] = []
    elif how == "captured again":
        engine.manager.graphs.clear()
        engine.manager.capture(engine.model)
    for step in STEPS:
        engine.step(*step)
    assert saves == ([] if how == "captured again" else [0, 1, 2, 3])


@pytest.mark.parametrize("replayed", [False, True])
def test_a_step_that_is_abandoned(monkeypatch, replayed):
    """Before its replay nothing is put back, though graphs saved rows of an earlier step."""
    engine = Engine(monkeypatch)
    engine.manager.capture(engine.model)
    engine.step(*STEPS[0])
    before = [cache.clone() for cache in engine.rig.caches]
    engine.begin([3, 3], [4, 4])
    if replayed:
        made = engine.forward()
    engine.rig.steps.abandon()
    if replayed:
        engine.rig.expect(before, made, [3, 3], [4, 4], [1, 1])
    assert replayed or all(map(torch.equal, before, engine.rig.caches))
    assert engine.rig.count("windows_total_aborted") == 1
    engine.step(*STEPS[1])


def test_a_forward_that_was_neither_replayed_nor_saved_for(monkeypatch):
    """An engine that runs its model in a third way gets stock's rows, and is told so."""
    engine = Engine(monkeypatch)
    engine.manager.capture(engine.model)
    engine.begin([3], [4])
    made = engine.rig.forward()
    engine.sampled([2])
    for ref, (key, value) in zip(engine.rig.steps.layers, made, strict=True):
        assert torch.equal(ref.key_cache[0, :4], key)
        assert torch.equal(ref.value_cache[0, :4], value)
    assert engine.rig.count("fallbacks_total_begin") == 1


def test_a_save_that_cannot_be_prepared(monkeypatch, saves):
    """The graphs are captured without it, and rows are saved before each replay."""
    engine = Engine(monkeypatch)
    prepare = engine.rig.steps.windows.save_in_forward
    monkeypatch.setattr(engine.rig.steps.windows, "save_in_forward", lambda rows: 1 / 0)
    engine.manager.capture(engine.model)
    monkeypatch.setattr(engine.rig.steps.windows, "save_in_forward", prepare)
    engine.rig.steps._rest = 0
    engine.step(*STEPS[0])
    assert saves == [0]


def test_what_is_hooked_is_unhooked(monkeypatch, saves):
    """The graph manager is vLLM's again; graphs that were captured save for nobody."""
    engine = Engine(monkeypatch)
    engine.manager.capture(engine.model)
    assert is_swapped(engine.manager)
    engine.runner.kvtxn_undo.close()
    assert not is_swapped(engine.manager)
    assert not [name for name in vars(engine.manager) if name.startswith("kvtxn")]
    engine.step(*STEPS[0])
    assert saves == [0]


def test_graph_managers_that_stay_as_they_are(monkeypatch):
    """One of an unknown kind, or with graphs already, and runners without any."""
    engine = Engine(monkeypatch)
    late, other = Manager(engine.capture), Manager(engine.capture)
    late.capture(engine.model)
    other.run_fullgraph = lambda graph: None
    for manager in (late, other, None):
        engine.runner.cudagraph_manager, engine.windows.whole = manager, None
        engine.windows.let_graphs_save(engine.rig.steps)
        assert engine.windows.whole is None
        assert manager is None or not is_swapped(manager)


def test_vllms_own_manager_is_of_the_known_kind():
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    assert not whole_graphs.differs(object.__new__(ModelCudaGraphManager))
