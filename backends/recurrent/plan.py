"""The facts of every state that the kernel reads, as tables on the device.

A plan depends on the states alone, so it is built once. The addresses and strides of a window's
rows travel apart, in an ``AddressBook``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import torch
import triton.language as tl
from torch import Tensor

from ...executor import StagedLayer
from ...layers import LayerRef
from ...layout import to_device

#: Columns of a plan, one line per state. Strides are in bytes.
FIELDS: Final = (
    "state",  # address of the first element
    "slot_stride",  # from the state in one slot to the state in the next slot
    "head_stride",  # from one head of a state to the next
    "value_stride",  # from one value of a head to the next, or from one channel of a convolution
    "key_stride",  # from one key of a value to the next, or from one tap of a convolution
    "values",  # number of values of a head, or of channels of a convolution
    "keys",  # number of keys of a value, or of taps of a convolution
    "group",  # number of the group whose slots the state has
    "part",  # the first of the state's lines in the table of parts
    "tiles_per_head",
    "heads_per_key",  # heads of the state that share one head of the staged keys
    "shifts",  # 1 for the past of a convolution, else 0
)

#: Columns per line, and where each stands, for kernels: ``tl.load(line + AT_GROUP)``.
NUM_FIELDS = tl.constexpr(len(FIELDS))
(
    AT_STATE,
    AT_SLOT_STRIDE,
    AT_HEAD_STRIDE,
    AT_VALUE_STRIDE,
    AT_KEY_STRIDE,
    AT_VALUES,
    AT_KEYS,
    AT_GROUP,
    AT_PART,
    AT_TILES_PER_HEAD,
    AT_HEADS_PER_KEY,
    AT_SHIFTS,
) = (tl.constexpr(column) for column in range(len(FIELDS)))

#: Columns of the table of parts, one line per part of the staged rows. Strides are in bytes.
PART: Final = ("address", "row_stride", "head_stride", "element_stride")

#: Columns per line of the table of parts, and where each stands, for kernels.
NUM_PART_FIELDS = tl.constexpr(len(PART))
PART_ADDRESS, PART_ROW_STRIDE, PART_HEAD_STRIDE, PART_ELEMENT_STRIDE = (
    tl.constexpr(column) for column in range(len(PART))
)

#: Columns behind the parts, one line per group: addresses of int64 ``[num_requests]``, 0 where no
#: request of the group may cross a boundary.
CROSSING: Final = ("rows_until", "slot_beyond")
NUM_CROSSING_FIELDS = tl.constexpr(len(CROSSING))
ROWS_UNTIL, SLOT_BEYOND = (tl.constexpr(column) for column in range(len(CROSSING)))

#: Bytes of a tile of a state with heads, and elements of a tile of a convolution's past.
_TILE_BYTES: Final = 8192
_PAST_TILE: Final = 1024

_TYPES: Final = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_WORDS: Final = {2: tl.int16, 4: tl.int32}


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


@attrs.frozen
class _StateAt:
    """A state, and the place of its rows in the table of parts."""

    state: Tensor
    shifts: bool
    group: int
    part: int
    key_heads: int
    key: torch.dtype

    @property
    def numbers(self) -> tuple[object, ...]:
        """Dtypes of the state and of its keys, and the keys' width: equal within one launch."""
        if self.shifts:
            return (self.state.dtype.itemsize, _power(self.state.shape[1]))
        return (self.state.dtype, self.key, _power(self.state.shape[3]))


@attrs.frozen(eq=False)
class StatePlan:
    """The states of one launch.

    Attributes:
        table: int64 ``[num_states, len(FIELDS)]`` on the device.
        tiles: int32 ``[num_tiles, 2]`` on the device.
        constants: the kernel's constants that follow from the states.
    """

    table: Tensor
    tiles: Tensor
    constants: dict[str, Any]


def build_plans(layers: Sequence[LayerRef], groups: Sequence[int]) -> list[StatePlan]:
    """Plan the launches over the states of these layers: one launch if all layers are alike.

    States with another dtype, another dtype of keys or another size of keys need another compiled
    kernel, so they are in another launch.

    Args:
        layers: layers whose states are advanced by replay, in the order of the table of parts.
        groups: the number of each layer's group.
    """
    kinds: tuple[dict[object, list[_StateAt]], ...] = ({}, {})
    for state in _states(layers, groups):
        kinds[state.shifts].setdefault(state.numbers, []).append(state)
    heads, pasts = (list(kind.values()) for kind in kinds)
    launches = max(len(heads), len(pasts))
    empty: list[_StateAt] = []
    return [
        _plan(heads[i] if i < len(heads) else empty, pasts[i] if i < len(pasts) else empty)
        for i in range(launches)
    ]


def _states(layers: Sequence[LayerRef], groups: Sequence[int]) -> Iterator[_StateAt]:
    part = 0
    for ref, group in zip(layers, groups, strict=True):
        for recurrence, state in zip(ref.replay, ref.states, strict=True):
            kept = recurrence.kept(state)
            first = kept[0]
            yield _StateAt(
                state,
                recurrence.moves_bytes,
                group,
                part,
                first.row_shape[0],
                first.format.dtype,
            )
            part += len(kept)


def _plan(heads: Sequence[_StateAt], pasts: Sequence[_StateAt]) -> StatePlan:
    """Plan one launch.

    Args:
        heads: states with heads, all with the same ``numbers``; may be empty.
        pasts: pasts of convolutions, all with the same ``numbers``; may be empty.
    """
    constants: dict[str, Any] = {
        "RANK_ONE": bool(heads),
        **dict.fromkeys(("STATE", "KEY"), tl.float32),
        **dict.fromkeys(("VALUES", "KEYS", "VECTOR"), 1),
        "SHIFTS": bool(pasts),
        "WORD": tl.int16,
        **dict.fromkeys(("TAPS", "CHANNELS"), 1),
    }
    if heads:
        keys = _power(heads[0].state.shape[3])
        most = max(_power(each.state.shape[2]) for each in heads)
        constants |= {
            "STATE": _TYPES[heads[0].state.dtype],
            "KEY": _TYPES[heads[0].key],
            "VALUES": max(1, min(most, _TILE_BYTES // heads[0].state.dtype.itemsize // keys)),
            "KEYS": keys,
            "VECTOR": _vector([each.state for each in heads]),
        }
    if pasts:
        taps = _power(pasts[0].state.shape[1])
        most = max(_power(each.state.shape[2]) for each in pasts)
        constants |= {
            "WORD": _WORDS[pasts[0].state.dtype.itemsize],
            "TAPS": taps,
            "CHANNELS": max(1, min(most, _PAST_TILE // taps)),
        }
    lines, tiles = [], []
    for number, each in enumerate((*heads, *pasts)):
        line = _line(each, constants["CHANNELS" if each.shifts else "VALUES"])
        lines.append([line[name] for name in FIELDS])
        count = line["tiles_per_head"] * (1 if each.shifts else each.state.shape[1])
        tiles += [[number, tile] for tile in range(count)]
    device = (*heads, *pasts)[0].state.device
    table = to_device(torch.tensor(lines, device="cpu"), device, torch.int64)
    pieces = to_device(torch.tensor(tiles, device="cpu"), device, torch.int32)
    return StatePlan(table, pieces, constants)


def _line(each: _StateAt, tile: int) -> dict[str, int]:
    """Return one state's line of the plan, by column.

    Args:
        each: the state.
        tile: values of a head that one tile holds; for a convolution's past, channels.
    """
    state, size = each.state, each.state.dtype.itemsize
    strides = [stride * size for stride in state.stride()]
    line = {
        "state": state.data_ptr(),
        "slot_stride": strides[0],
        "group": each.group,
        "part": each.part,
        "shifts": int(each.shifts),
    }
    if each.shifts:
        return line | {
            "head_stride": 0,
            "value_stride": strides[2],
            "key_stride": strides[1],
            "values": state.shape[2],
            "keys": state.shape[1],
            "tiles_per_head": -(-state.shape[2] // tile),
            "heads_per_key": 1,
        }
    return line | {
        "head_stride": strides[1],
        "value_stride": strides[2],
        "key_stride": strides[3],
        "values": state.shape[2],
        "keys": state.shape[3],
        "tiles_per_head": -(-state.shape[2] // tile),
        "heads_per_key": state.shape[1] // each.key_heads,
    }


def _vector(states: Sequence[Tensor]) -> int:
    """Return how many elements 16 bytes hold if every run of keys allows 16-byte moves; else 1."""
    size = states[0].dtype.itemsize
    for state in states:
        runs = [stride * size for stride in state.stride()[:3]]
        places = (state.data_ptr(), *runs, state.shape[3] * size)
        if state.stride(3) != 1 or any(place % 16 for place in places):
            return 1
    return 16 // size


def places_of(layer: StagedLayer) -> list[int]:
    """List the lines of the table of parts for one layer's rows, one after another.

    Args:
        layer: the staged rows of a layer. Each part is ``[num_rows, heads, size]``; the inputs of
            a convolution are ``[num_rows, channels]``, decays with one number per head are
            ``[num_rows, heads]``. Any strides.
    """
    found: list[int] = []
    rows = iter(layer.rows)
    for recurrence, state in zip(layer.ref.replay, layer.ref.states, strict=True):
        for _, row in zip(recurrence.kept(state), rows, strict=False):
            size = row.dtype.itemsize
            places = [row.data_ptr(), *(stride * size for stride in row.stride())]
            if recurrence.moves_bytes:
                places.insert(2, 0)
            found += places if len(places) == len(PART) else [*places, 0]
    return found
