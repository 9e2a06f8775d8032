"""``Change``: what a step changes before its forward, requests that begin together among it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ..host_values import to_device
from .groups import Place

#: What ``PackedRequests.packed`` has of each request behind the tokens, in this order.
LINE: Final = 0
SERIAL: Final = 1
#: The index of its first token, and the number of its tokens.
BEGIN: Final = 2
COUNT: Final = 3
#: The digest of no tokens.
SEED: Final = 4
#: 1 if the request was admitted before, and its tokens are given anew; else 0.
AGAIN: Final = 5
NUM_FIELDS: Final = 6


@attrs.frozen(eq=False)
class PackedRequests:
    """Requests that begin together, as ``TorchPasses.begin`` takes them.

    Attributes:
        packed: int64, the tokens of one request after another, then the fields of each request.
            One tensor, so that one copy brings it to a device.
        num_tokens: tokens of all requests.
        num_requests: requests.
    """

    packed: Tensor
    num_tokens: int
    num_requests: int

    @property
    def tokens(self) -> Tensor:
        """The tokens of one request after another, int64 ``[num_tokens]``."""
        return self.packed[: self.num_tokens]

    @property
    def fields(self) -> Tensor:
        """The fields of each request, int64 ``[num_requests, NUM_FIELDS]``."""
        return self.packed[self.num_tokens :].view(self.num_requests, NUM_FIELDS)


@attrs.frozen(eq=False)
class NewRequests:
    """Requests that begin together, as the host has them: in pieces.

    Attributes:
        owns: the tokens of each request, int64 or uint32 ``[n]`` on the host.
        fields: the fields of one request after another, see ``PackedRequests``.
        num_tokens: tokens of all requests.
    """

    owns: Sequence[Tensor]
    fields: Sequence[int]
    num_tokens: int

    @classmethod
    def of(
        cls,
        entries: Sequence[tuple[int, int]],
        owns: Sequence[tuple[Tensor, int]],
        again: Sequence[bool],
    ) -> NewRequests:
        """Describe requests, whose tokens will lie one after another in this order.

        Args:
            entries: line and serial number of each request, no line twice.
            owns: its tokens on the host, and its seed, see ``own_words``.
            again: whether it was admitted before.
        """
        fields: list[int] = []
        begin = 0
        for (line, serial), (own, seed), known in zip(entries, owns, again, strict=True):
            count = own.shape[0]
            fields += (line, serial, begin, count, seed, int(known))
            begin += count
        return cls([own for own, _ in owns], fields, begin)

    def packed(self, device: torch.device) -> PackedRequests:
        """Return the requests on a device, brought there in one copy, without waiting for it."""
        tokens = [each.long() for each in self.owns]
        packed = to_device(torch.cat([*tokens, torch.tensor(self.fields)]), device, torch.int64)
        return PackedRequests(packed, self.num_tokens, len(self.owns))


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
