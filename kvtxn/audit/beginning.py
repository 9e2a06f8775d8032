"""``Beginning``: requests that begin together, as the passes take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

#: What ``Beginning.packed`` has of each request behind the tokens, in this order.
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
class Beginning:
    """Requests that begin together, as ``Passes.begin`` takes them.

    Attributes:
        packed: int64, the tokens of one request after another, then the fields of each request.
            One tensor, so that one copy brings it to a device.
        num_tokens: tokens of all requests.
        num_requests: requests.
    """

    packed: Tensor
    num_tokens: int
    num_requests: int

    @classmethod
    def of(
        cls,
        entries: Sequence[tuple[int, int]],
        owns: Sequence[tuple[Tensor, int]],
        again: Sequence[bool],
    ) -> Beginning:
        """Describe requests, on the host.

        Args:
            entries: line and serial number of each request, no line twice.
            owns: its tokens, int64 on the host, and its seed, see ``own_words``.
            again: whether it was admitted before.
        """
        fields, begin = [], 0
        for (line, serial), (own, seed), known in zip(entries, owns, again, strict=True):
            fields += [line, serial, begin, len(own), seed, int(known)]
            begin += len(own)
        every = [own for own, _ in owns]
        return cls(torch.cat([*every, torch.tensor(fields)]), begin, len(every))

    @property
    def tokens(self) -> Tensor:
        """The tokens of one request after another, int64 ``[num_tokens]``."""
        return self.packed[: self.num_tokens]

    @property
    def fields(self) -> Tensor:
        """The fields of each request, int64 ``[num_requests, NUM_FIELDS]``."""
        return self.packed[self.num_tokens :].view(self.num_requests, NUM_FIELDS)
