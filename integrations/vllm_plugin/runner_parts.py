"""The adapter and the parts of a model runner: which ones it gets, and in which order they hear.

A window is committed before the ledger hears of the outcome. Parts never know each other, but for
the one that makes windows: it is given an object that adds recurrent states to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..serving.parts import Part, Parts
from .policy.engine_facts import EngineFacts
from .policy.settings import PluginSettings
from .runners.hooked_runner import hook_runner, is_hooked
from .runners.runner_v1 import AdapterV1
from .runners.runner_v2 import AdapterV2
from .seam import Foreign, audited_requests, batches, state_layers


def attach(
    runner: Foreign, settings: PluginSettings, rank: int, facts: EngineFacts, *, windows: bool
) -> None:
    """Give a runner its adapter and the parts that the user asked for, before its caches exist.

    Nothing changes if it is hooked already, or if it is unknown, which is logged.

    Args:
        runner: a worker's runner.
        settings: the user's.
        rank: the worker's.
        facts: of the engine.
        windows: the user asked for windows, and the policy rules allow them.

    Raises:
        RequiredError: the runner is unknown, and the user wants no engine without kvtxn.
    """
    if is_hooked(runner):
        return
    states = windows and facts.recurrent is not None
    audit = settings.audit != "off"
    methods = _methods(facts, windows=windows, states=states, audit=audit)
    adapter = AdapterV2 if facts.runner == "v2" else AdapterV1
    hook_runner(runner, settings, rank, methods, adapter)
    if not is_hooked(runner):
        return
    parts: list[Part] = []
    if windows and facts.device == "cpu":
        parts += _on_cpu(runner, states=states)
    elif windows:
        parts += _on_gpu(runner, facts.runner, states=states)
    if audit:
        runner.kvtxn_samples = audited_requests.samples(runner)
        parts.append(_ledger(runner, facts))
    runner.kvtxn_parts = Parts(parts)


def _methods(
    facts: EngineFacts, *, windows: bool, states: bool, audit: bool
) -> Mapping[str, Sequence[str]]:
    """Return the methods that a runner must have for its parts, with their parameters.

    Args:
        facts: the device and the kind of the runner.
        windows: there are windows.
        states: the windows hold states.
        audit: there is a ledger.
    """
    rows, watched = batches.V1_METHODS, audited_requests.AUDITED_METHODS
    if facts.runner == "v2":
        rows, watched = batches.V2_METHODS, audited_requests.AUDITED_V2_METHODS
    elif facts.device != "cpu":
        rows = batches.V1_GPU_METHODS
    found = {**(rows if windows else {}), **(watched if audit else {})}
    if states:
        found |= state_layers.METHODS
    if states and facts.runner == "v1" and facts.device != "cpu":
        found |= batches.V1_STATE_METHODS
    return found


def _on_cpu(runner: Foreign, *, states: bool) -> list[Part]:
    """Make the parts for windows of a runner on a CPU, which hold its states if ``states``."""
    from .cpu.states import RowAndStateCaches, States
    from .cpu.windows import RowCaches, windows_of

    if not states:
        return windows_of(runner, RowCaches(runner))
    held = States(runner)
    return [*windows_of(runner, RowAndStateCaches(runner, held)), held]


def _on_gpu(runner: Foreign, kind: str, *, states: bool) -> list[Part]:
    """Make the parts for windows of a runner on a GPU; with ``states`` they hold its states, too.

    Parts that make caches and steps come first: the others hear of caches once steps exist.
    """
    from .gpu.windows import WindowsV1, WindowsV2

    if not states:
        windows = WindowsV2(runner) if kind == "v2" else WindowsV1(runner)
        return [windows.caches, windows]
    from .gpu.states import StatesV1, StatesV2

    if kind == "v2":
        held = StatesV2(runner)
        rows = WindowsV2(runner, held.caches)
        return [rows.caches, held.caches, held, rows]
    ours = StatesV1(runner)
    windows = WindowsV1(runner, ours.caches)
    return [windows.caches, ours.caches, windows, ours]


def _ledger(runner: Foreign, facts: EngineFacts) -> Part:
    """Make the part that audits a runner, by the kind of the runner and the device."""
    from ..serving.ledger.part import LedgerPart
    from .audit.runner_steps import CpuSteps, DeviceSteps, StepsV2

    if facts.runner == "v2":
        return LedgerPart(StepsV2(runner))
    steps = CpuSteps if facts.device == "cpu" else DeviceSteps
    return LedgerPart(steps(runner))
