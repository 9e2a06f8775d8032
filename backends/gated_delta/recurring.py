"""``RecurringAdvance``: the commit of a model's steps, as a launch that recurs.

From step to step nothing of it changes but the number of requests, and where their counts and first
rows are. So Triton looks at the arguments once, and from then on the driver is given them packed.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from ..launching.repeated_launch import ALIGNED, RepeatedLaunch
from .launch import advance_call
from .layers import DeltaLayers


class RecurringAdvance:
    """Commits over layers and tables that stay where they are.

    Args:
        layers: the layers.
        sources: int32 ``[groups, most_requests]``, any strides, the slots; filled for each step.
        longest: the most rows of a request.
        boundary: int32 ``[most_requests]``, see ``advance_gated_delta``; filled for each step.
        snapshots: int32 ``[groups, most_requests]``, see ``advance_gated_delta``; filled for each
            step.

    Attributes:
        again: launches what was compiled; None before the first launch, and under Triton's
            interpreter.

    Raises:
        LayerError: a request may have too many rows.
    """

    def __init__(
        self,
        layers: DeltaLayers,
        sources: Tensor,
        longest: int,
        *,
        boundary: Tensor | None = None,
        snapshots: Tensor | None = None,
    ) -> None:
        none = torch.zeros(2, dtype=torch.int32, device=sources.device)
        given = layers, sources, none, none, boundary, snapshots
        self._call: Final = advance_call(*given, longest=longest, least=1)
        self._count, self._starts = self._call.at("count"), self._call.at("starts")
        self.again: RepeatedLaunch | None = None

    def run(self, count: Tensor, starts: Tensor, requests: int) -> None:
        """Update the states of all layers by the kept rows of each request.

        Args:
            count: int ``[requests]`` or longer, on the device: the rows that each request keeps,
                and 1 where it says less.
            starts: int32 ``[requests + 1]`` or longer, the first row of each request, and the end.
            requests: their number.
        """
        if count.dtype is not torch.int32 or count.stride(0) != 1:
            count = count.to(torch.int32).contiguous()
        again, places = self.again, (count.data_ptr(), starts.data_ptr())
        aligned = not (places[0] | places[1]) % ALIGNED
        if again is not None and aligned:
            again.words[self._count], again.words[self._starts] = places
            again.programs[1].value = requests
            again.run()
            return
        programs, _, layers = self._call.grid
        given = self._call.arguments | {"count": count, "starts": starts}
        call = attrs.evolve(self._call, grid=(programs, requests, layers), arguments=given)
        if aligned:
            self.again = call.run_to_repeat(count.device)
        else:
            call.run()
