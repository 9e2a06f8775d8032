"""Engines under test take the first configuration of each autotuned Triton kernel that runs.

Triton times all configurations of a kernel, and vLLM's gated delta nets have many such kernels.
Engines that share a GPU would time them for minutes, in each other's noise, and two engines that
are compared could choose differently. vLLM's own VLLM_TRITON_FORCE_FIRST_CONFIG does not prune, and
takes one choice for all sizes that are positional arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

#: What the tuner takes for the times of a configuration that cannot run.
_NEVER: Final = [float("inf")] * 3


def take_first_configs(tuner: type[Any] | None = None) -> None:
    """Let autotuned kernels take the first configuration that compiles and fits the GPU.

    The tuner prunes, tries and keeps configurations as before. Only the first one that runs is run,
    once, and none is compiled after it. Results of real timings on disk are neither read nor
    written. Call this in each process that builds an engine, before it does.

    Args:
        tuner: the class of tuners; None for Triton's.
    """
    if tuner is None:
        from triton.runtime.autotuner import Autotuner as tuner  # how kernels run is chosen here
    if getattr(tuner, "takes_first", False):
        return
    real = tuner._bench

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if vars(self).get("settled") is self.nargs:  # Triton makes new ones for each choice
            return _NEVER
        vars(self)["do_bench"] = _once
        times: list[float] = real(self, *args, config=config, **meta)
        if times != _NEVER:
            self.settled = self.nargs
        return times

    def check_disk_cache(self: Any, key: Any, configs: Any, choose: Callable[[], None]) -> bool:
        choose()
        return False

    tuner._bench, tuner.check_disk_cache, tuner.takes_first = bench, check_disk_cache, True


def _once(launch: Callable[[], None], quantiles: Any = None) -> list[float]:
    """Run a kernel once instead of timing it."""
    launch()
    return [0.0] * 3
