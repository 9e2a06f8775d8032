"""The staged rows of a gated delta net, and the layers of one commit as a launch finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ...errors import LayerError
from ...host_values import to_device

#: dtypes that states may have.
STATES: Final = (torch.float32, torch.bfloat16, torch.float16)

#: Columns of the table, one line per layer; addresses, and a stride in elements.
COLUMNS: Final = ("state", "slot_stride", "key", "corrected", "decay", "group")


@attrs.frozen(eq=False)
class DeltaRows:
    """The staged rows of one layer, float32 and contiguous.

    With them a commit needs no sum over keys: ``state = state * decay + corrected (x) key``.

    Attributes:
        key: ``[num_rows, key_heads, key_size]``, normalised as the layer normalises its keys.
        corrected: ``[num_rows, heads, value_size]``, ``beta * (value - state @ key)`` with the
            decayed state before the row.
        decay: ``[num_rows, heads]``, the factor ``exp(g)``.
    """

    key: Tensor
    corrected: Tensor
    decay: Tensor

    @classmethod
    def build(
        cls,
        rows: int,
        key_heads: int,
        heads: int,
        key_size: int,
        value_size: int,
        device: torch.device,
    ) -> DeltaRows:
        """Make room for the most rows of a step, filled with zeros."""
        sizes = (key_heads, key_size), (heads, value_size), (heads,)
        return cls(*(torch.zeros(rows, *size, device=device) for size in sizes))

    @staticmethod
    def row_bytes(key_heads: int, heads: int, key_size: int, value_size: int) -> int:
        """Return the bytes of one row of one layer."""
        return torch.float32.itemsize * (key_heads * key_size + heads * (value_size + 1))

    @property
    def num_rows(self) -> int:
        """Rows for which there is room."""
        return self.key.shape[0]


@attrs.frozen(eq=False)
class DeltaLayers:
    """The layers whose states one commit advances; all of them have the same sizes and dtype.

    Attributes:
        states: ``[slots, heads, value_size, key_size]`` each, of a dtype of ``STATES``; one slot is
            contiguous, the distance between slots is any.
        rows: the staged rows of each layer.
        groups: the line of ``sources`` that each layer has.
        table: int64 ``[layers, len(COLUMNS)]`` on the device: addresses, and strides in elements.
    """

    states: tuple[Tensor, ...]
    rows: tuple[DeltaRows, ...]
    groups: tuple[int, ...]
    table: Tensor

    @classmethod
    def build(
        cls,
        states: Sequence[Tensor],
        rows: Sequence[DeltaRows],
        groups: Sequence[int] | None = None,
    ) -> DeltaLayers:
        """Check the layers and upload where they are; their memory may not move afterwards.

        Args:
            states: one per layer, at least one.
            rows: one per layer.
            groups: the line of ``sources`` for each layer; None is line 0 for all.

        Raises:
            LayerError: a state has another shape, dtype or order of elements than it may have, or
                the layers differ in sizes or dtype.
        """
        numbers = tuple(groups) if groups is not None else (0,) * len(states)
        first = states[0]
        lines = []
        for state, kept, group in zip(states, rows, numbers, strict=True):
            check_state("DeltaLayers", state, kept)
            if (state.dtype, state.shape[1:]) != (first.dtype, first.shape[1:]):
                raise LayerError(
                    "DeltaLayers",
                    "the states of one commit are alike",
                    expected=f"{first.dtype} {list(first.shape[1:])}",
                    got=f"{state.dtype} {list(state.shape[1:])}",
                    hint="build one DeltaLayers for each kind of state",
                )
            places = (each.data_ptr() for each in (kept.key, kept.corrected, kept.decay))
            lines.append([state.data_ptr(), state.stride(0), *places, group])
        table = to_device(torch.tensor(lines, device="cpu"), first.device, torch.int64)
        return cls(tuple(states), tuple(rows), numbers, table)


def check_state(operation: str, state: Tensor, rows: DeltaRows) -> None:
    """Refuse a state that the kernels cannot take, or staged rows that do not fit the state.

    Raises:
        LayerError: the state or the rows are refused.
    """
    sizes = state.shape[1:]
    dense = state.ndim == 4 and state[:1].is_contiguous() and state.dtype in STATES
    dense = dense and state.data_ptr() % 16 == state.stride(0) * state.dtype.itemsize % 16 == 0
    if not dense:
        raise LayerError(
            operation,
            "a state does not fit",
            expected="[slots, heads, value_size, key_size], float32, bfloat16 or float16, each"
            " slot dense and on 16 bytes",
            got=f"{state.dtype} {list(state.shape)} with strides {list(state.stride())}",
        )
    heads, value_size, key_size = sizes
    key_heads = rows.key.shape[1]
    wanted = (key_heads, key_size), (heads, value_size), (heads,)
    parts = rows.key, rows.corrected, rows.decay
    found = tuple(tuple(part.shape[1:]) for part in parts)
    dense = all(
        part.dtype == torch.float32 and part.is_contiguous() and part.data_ptr() % 16 == 0
        for part in parts
    )
    if found != wanted or heads % key_heads or not dense:
        raise LayerError(
            operation,
            "staged rows do not fit the state",
            expected=f"contiguous float32 of {wanted} per row, key heads dividing the heads",
            got=found,
        )


def check_rows(
    operation: str, heads: int, parts: Mapping[str, tuple[Tensor, tuple[int, ...]]]
) -> None:
    """Refuse rows of other sizes than the state's, or whose elements are not neighbours.

    Args:
        operation: for the message.
        heads: of the state.
        parts: by name, tensors and the sizes of their rows; of no size are those with one number
            per head. A tensor may have more rows than the requests, as in captured graphs.

    Raises:
        LayerError: they are such rows.
    """
    for name, (part, size) in parts.items():
        fits = part.shape[1:] == size and part[:1].is_contiguous()
        if not size:
            fits = part.shape == (heads,) and part.is_contiguous()
        if not fits:
            raise LayerError(
                operation,
                f"{name} does not fit the state",
                expected=f"{['rows', *size] if size else [heads]}, elements side by side in a row",
                got=f"{list(part.shape)} with strides {list(part.stride())}",
            )
