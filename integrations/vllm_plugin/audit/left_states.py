"""States that the windows of a runner on a GPU have committed, told to its watch."""

from __future__ import annotations

from typing import Any

from ..internals import audited_states
from ..internals.protocols.runners import Runner
from .device_watch import DeviceWatch


def new_state_reader(runner: Runner, watch: DeviceWatch) -> audited_states.DeviceStateReader:
    """Make a reader of the states that a watch compares."""
    return audited_states.DeviceStateReader(runner, watch.states, watch.ledger.device)


def leave(runner: Any, watch: DeviceWatch) -> None:
    """Tell a watch which states windows have committed."""
    last = runner.kvtxn_state_reader.take_last() if watch.states else None
    if last is None or not last.leaves or watch.under_way is None:
        return
    lines = watch.under_way.lines
    watch.ledger.leave(lines, last.leaves)
    if last.ends:
        watch.ledger.leave(lines, last.ends, last.end_at)
