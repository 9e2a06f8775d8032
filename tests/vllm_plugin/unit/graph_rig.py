"""Stands for vLLM's graphs of whole forwards: a graph is a list of launches that are made again."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from kernels_here import importing_kernels

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.internals import whole_graphs

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
