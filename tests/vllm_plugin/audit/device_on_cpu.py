"""Engines on a CPU, watched in the way of GPUs: but for kernels and waiting, all is the same."""

from __future__ import annotations

from kvtxn.integrations.vllm_plugin.audit import ledger_v1
from kvtxn.integrations.vllm_plugin.audit.watch import Watch


class GpuWaySteps(ledger_v1.DeviceSteps):
    """The steps of GPUs, of a CPU's runner."""

    def open(self) -> Watch | None:
        """Open the watch, and begin at once: a CPU's runner does not say when it has warmed up."""
        watch = super().open()
        if watch is not None:
            watch.begin()
        return watch


def watch_as_on_a_gpu() -> None:
    """Let engines of this process that are built from now on be watched as on a GPU."""
    ledger_v1.CpuSteps = GpuWaySteps  # type: ignore[assignment, misc]
