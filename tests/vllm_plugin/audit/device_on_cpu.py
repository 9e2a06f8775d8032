"""Engines on a CPU, watched in the way of GPUs: but for kernels and waiting, all is the same."""

from __future__ import annotations

from typing import Any

from kvtxn.integrations.serving.parts import Part
from kvtxn.integrations.vllm_plugin.audit import gpu_runners
from kvtxn.integrations.vllm_plugin.cpu import parts
from kvtxn.integrations.vllm_plugin.seam.runner_cpu_v1 import CpuRunnerV1


class GpuWayRunnerV1(gpu_runners.AuditedGpuRunnerV1, CpuRunnerV1):
    """The ledger's mixin of GPUs before the adapter of a CPU's runner."""

    def kvtxn_open_watch(self) -> Any:
        """Open the watch, and begin at once: a CPU's runner does not say when it has warmed up."""
        watch = super().kvtxn_open_watch()
        if watch is not None:
            watch.begin()
        return watch


def watch_as_on_a_gpu() -> None:
    """Let engines of this process that are built from now on be watched as on a GPU."""
    parts.CpuRunnerV1 = GpuWayRunnerV1
    parts.CpuLedger = lambda runner: Part()
