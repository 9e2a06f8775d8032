"""The parts that hear vLLM's V1 model runner on a CPU, in their order."""

from __future__ import annotations

from ...serving.parts import Part, Parts
from ..attach import hook_runner, is_hooked
from ..audit.cpu_ledger import CpuLedger
from ..internals import Foreign, audited, batches, state_layers
from ..seam.runner_cpu_v1 import CpuRunnerV1
from ..settings import PluginSettings
from .states import RowAndStateCaches, States
from .windows import RowCaches, Windows


def attach(
    runner: Foreign, settings: PluginSettings, rank: int, *, windows: bool, states: bool
) -> None:
    """Give a runner the parts that the user asked for, once, before its KV cache exists.

    Args:
        runner: vLLM's V1 model runner on a CPU.
        settings: the user's settings.
        rank: the worker's.
        windows: the engine gets windows.
        states: they hold the states of recurrent layers.

    Raises:
        RequiredError: the runner is unknown, and the user wants no engine without kvtxn.
    """
    if is_hooked(runner):
        return
    audit = settings.audit != "off"
    methods = {
        **(batches.V1_METHODS if windows else {}),
        **(state_layers.METHODS if states else {}),
        **(audited.AUDITED_METHODS if audit else {}),
    }
    hook_runner(runner, settings, rank, methods, CpuRunnerV1)
    if not is_hooked(runner):
        return
    # A window is committed before the ledger hears what was sampled.
    parts: list[Part] = []
    if windows and states:
        held = States(runner)
        parts += [Windows(runner, RowAndStateCaches(runner, held)), held]
    elif windows:
        parts.append(Windows(runner, RowCaches(runner)))
    if audit:
        runner.kvtxn_samples = audited.samples(runner)
        parts.append(CpuLedger(runner))
    runner.kvtxn_parts = Parts(parts)
