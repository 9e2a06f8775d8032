"""The arguments of the kernel ``move_rows`` about the acceptance that ``commit`` was given."""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from ...executor import SampledIds
from ...layout import RowLayout
from .selection import Accept

#: A vocabulary that every id lies within.
_NO_LIMIT: Final = 2**63 - 1


@attrs.define(eq=False, on_setattr=attrs.setters.frozen)  # frozen, and cheaper to make
class AcceptanceArg:
    """The acceptance of one launch.

    Attributes:
        kind: the form of ``tensor``, a number of ``Accept``.
        tensor: on the device, contiguous; see ``Accept`` for shapes and dtypes.
        columns: ids or nodes per request, for ``IDS`` and ``PATH``.
        placeholder: the id that means "no token", for ``IDS``.
        vocabulary: ids from here on mean "no token", for ``IDS``.
    """

    kind: int
    tensor: Tensor
    columns: int = 0
    placeholder: int = 0
    vocabulary: int = 0


def acceptance_arg(accepted: Tensor | SampledIds | None, layout: RowLayout) -> AcceptanceArg:
    """Turn an acceptance into the arguments of the kernel that reads it.

    Args:
        accepted: counts, mask, ids or, for ``layout.tree``, paths; None if there is none.
        layout: the rows.

    Returns:
        The form by the kind of ``accepted``, and a contiguous tensor: a copy where ``accepted`` is
        not contiguous, bytes for a mask. For None the form is ``NOTHING``, and the tensor is not
        read.
    """
    if accepted is None:
        return AcceptanceArg(Accept.NOTHING, layout.position)
    if isinstance(accepted, SampledIds):
        limit = _NO_LIMIT if accepted.vocab_size is None else accepted.vocab_size
        ids = accepted.ids
        return AcceptanceArg(
            Accept.IDS, ids.contiguous(), ids.shape[1], accepted.placeholder, limit
        )
    if accepted.ndim == 2:
        assert layout.tree is not None  # a path is committed to a tree window only
        return AcceptanceArg(Accept.PATH, accepted.contiguous(), accepted.shape[1])
    if accepted.dtype is torch.bool:
        return AcceptanceArg(Accept.MASK, accepted.view(torch.uint8).contiguous())
    return AcceptanceArg(Accept.COUNTS, accepted.contiguous())
