"""The age of what an encoder has computed: engines keep its outputs, and weights may change since.

An image that is sent again may be taken from an engine's cache of encoder outputs. Rows that are
computed of such an output are as old as the weights that computed the output, so they are counted
with the rows of those weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import torch

from ....audit.digest import TARGET_AGE
from ..step import EncoderStep, Rows, States
from .watch import Watch

#: Items whose epoch is remembered; the ones that were encoded first are forgotten.
_REMEMBERED: Final = 1 << 16

#: Reads the rows and states of a step.
Read = Callable[[], tuple[Rows, States | None]]


@attrs.frozen
class _Late:
    """Rows of a step that an earlier epoch's encoder output goes into.

    Attributes:
        request: the engine's name of the request.
        first: the first of its rows in the step, counted within the request.
        end: one past the last.
        age: epochs since the output was computed.
    """

    request: str
    first: int
    end: int
    age: int


class EncodedItems:
    """The epochs in which the kept outputs of an engine's encoder were computed.

    Attributes:
        late: rows of the next forward that are older than it.
    """

    def __init__(self) -> None:
        self._epochs: Final[OrderedDict[str, int]] = OrderedDict()
        self._rows: Rows | None = None
        self.late: Sequence[_Late] = ()

    def change(self, watch: Watch, step: EncoderStep | None) -> None:
        """Note the epoch of the outputs that a step encodes; find ``late`` for its forward.

        Outputs that the engine drops are forgotten, and an output of unknown epoch counts as new.
        Without a step ``late`` is empty.

        Args:
            watch: the watch, which has begun the step's epoch.
            step: as in ``Changes``.
        """
        self.late, self._rows = (), None
        if step is None:
            return
        now = watch.ledger.epoch & TARGET_AGE
        for item in step.dropped:
            self._epochs.pop(item, None)
        for item in step.encoded:
            self._epochs[item] = now
            self._epochs.move_to_end(item)
        while len(self._epochs) > _REMEMBERED:
            self._epochs.popitem(last=False)
        if now:
            ages = ((part, now - self._epochs.get(part.item, now)) for part in step.parts())
            self.late = [_Late(each.request, each.first, each.end, n) for each, n in ages if n]

    def keeping(self, read: Read) -> Read:
        """Return a function that returns what ``read`` does, and keeps the rows for ``note``."""

        def keep() -> tuple[Rows, States | None]:
            rows, states = read()
            self._rows = rows
            return rows, states

        return keep

    def note(self, watch: Watch) -> None:
        """Tell the ledger how old those rows of the forward are that earlier weights have encoded.

        Rows of drafters' groups and of requests that are not in the forward are left out, and
        ``late`` is empty afterwards. Call it once per forward, after the ledger has recorded the
        rows.
        """
        rows, late, self.late, self._rows = self._rows, self.late, (), None
        names = [name for name, group in watch.groups.items() if not group.drafter]
        for each in late:
            if rows is None or each.request not in rows.names:
                continue
            number = rows.names.index(each.request)
            row = torch.arange(each.first, each.end, device=rows.starts.device)
            row += rows.starts[number]
            watch.ledger.age({name: rows.slots[name][row] for name in names}, each.age)
