"""``Transfers``: the blocks that a connector moves in a step, as its metadata name them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs

from ..step import Arrival


@attrs.frozen(eq=False)
class Handed:
    """Neighbouring blocks of one request that a connector stores or loads.

    Attributes:
        group: the name of the KV-cache group.
        blocks: the blocks.
        begin: the number of blocks of the request before them.
        request: the engine's name of the request.
        other: the request as the store has it, where the store's tokens for these rows are others
            than the runner's; None where they are the same.
        keys: the place of each block in the connector's store; None if the metadata do not say, or
            if other engines may store there, whose rows of the same tokens have other bytes.
    """

    group: str
    blocks: list[int]
    begin: int
    request: str
    other: Arrival | None = None
    keys: Sequence[Hashable] | None = None


@attrs.frozen(eq=False)
class Transfers:
    """The transfers of one step, as a connector's metadata name them.

    Attributes:
        stores: blocks that are read, once the step's forward is over.
        loads: blocks that are filled, now or later.
        nameless: blocks that are filled for requests that the metadata do not name.
        opaque: the metadata are of an unknown kind: any block may be filled.
    """

    stores: list[Handed]
    loads: list[Handed]
    nameless: list[int]
    opaque: bool
