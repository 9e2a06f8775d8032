"""The states of an engine on a CPU whose windows hold one state per request, for the ledger.

Each request has one block. A request without drafts continues its state there and leaves the state
after its last row; with drafts, the state is written once it is known which of them stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import state_layers
from .audited import Rows
from .audited_states import States
from .runner_protocols import RunnerV1


def states(runner: RunnerV1, groups: Sequence[str], rows: Rows) -> States:
    """Read the states of the forward that is about to run.

    Args:
        runner: a V1 runner on a CPU, for which ``audited_states.has_single_states`` is true.
        groups: names of the groups to read.
        rows: the rows of the forward.
    """
    count = len(rows.names)
    assert rows.first is not None  # on a CPU the host knows it
    starts, first = rows.starts[: count + 1].long(), rows.first[:count]
    speculates = torch.zeros(count, dtype=torch.bool)
    if rows.drafts is not None:
        speculates = rows.drafts[:count] > 0
    found = States({}, {}, None)
    for name, block in state_layers.state_slots(runner, groups).items():
        found.sources[name] = torch.where(first > 0, block, -1)
        found.leaves[name] = torch.where(speculates, block, -1)
        slots = torch.full((int(starts[-1]),), -1)
        slots[starts[1:] - 1] = torch.where(speculates, -1, block)
        found.slots[name] = slots
    return found
