"""``Change``: what a step changes of a ledger before its forward, as the passes take it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from .groups import Place
from .new_requests import NewRequests


@attrs.frozen(eq=False)
class Change:
    """Requests that end, blocks that are handed out, and requests that begin, all on the host.

    Attributes:
        released: lines of requests that ended, and that nobody was given since.
        given: blocks whose rows nobody has written from now on: a group of their pool, and ints.
        new: the requests that begin; None if there is none.
        seals: int64 ``[num_words]``, what a scrub has sealed of each slot; None without a scrub.
    """

    released: Sequence[int]
    given: Sequence[tuple[Place, Sequence[int]]]
    new: NewRequests | None
    seals: Tensor | None
