"""Repeated launches of a window kernel that differ in addresses alone.

The layers of a forward attend alike: the same rows, shapes and strides, but other tensors. To find
the compiled kernel, Triton looks at each of some eighty arguments, which takes several times as
long as the launch, and would happen once per layer wherever the forward is not a graph. Here it
happens at the first layer; the others call the compiled kernel with their own addresses.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import attrs
from torch import Tensor

from ..executor import AttentionArgs
from ..layers import LayerRef
from ..layout import RowLayout
from .attention_shapes import Keep
from .jobs import Launch

#: Launches that are remembered; beyond, all are forgotten.
_MOST: Final = 64

#: Triton compiles for addresses that are multiples of this, or are not.
_ALIGNED: Final = 16

#: Tensors that differ: query, keys, values, the prefix's output and log-sum-exp, and the output
#: come first among a kernel's arguments. Later there are keys and values once more, in place of a
#: cache that is not written, and from there on the buffers that rows are copied to.
_PLACES: Final = 8
_BUFFERS: Final = 12


@attrs.frozen(eq=False)
class _Known:
    """A compiled kernel, ready to be launched.

    Attributes:
        run: launches it, given every argument and constant.
        between: what stands between the first six addresses and those of the cache.
        after: what comes after the buffers.
        held: what the addresses in there point to, and what the key's identities are of.
    """

    run: Any
    between: tuple[Any, ...]
    after: tuple[Any, ...]
    held: tuple[Any, ...]


class RecurringWindows:
    """The launches of one device's window kernels."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def likeness(
        self,
        layout: RowLayout,
        ref: LayerRef,
        places: tuple[Tensor, ...],
        args: AttentionArgs,
        keep: Keep | None,
    ) -> Hashable | None:
        """Everything a launch depends on except addresses; None where it cannot be repeated.

        Args:
            layout: the rows.
            ref: the layer.
            places: query, keys, values, the prefix's output and log-sum-exp, output, and the
                buffers that rows are copied to.
            args: scale, sliding window, soft cap.
            keep: what is written beside the output.
        """
        whole = keep is not None and keep.slots is None and len(places) == _PLACES
        if not whole or not places[0].is_cuda or layout.tree is not None or len(ref.planes) != 2:
            return None
        assert keep is not None
        if any(plane.format.scale is not None for plane in ref.planes):
            return None
        return (
            id(layout),
            id(keep.position),
            places[3].shape,
            *((place.dtype, place.stride()) for place in places),
            *((p.cells.dtype, p.cells.stride(), p.row_shape, p.block_size) for p in ref.planes),
            ref.num_slots,
            args.scale,
            args.soft_cap,
            args.sliding_window,
        )

    def again(self, like: Hashable | None, places: tuple[Tensor, ...]) -> bool:
        """Repeat an earlier launch with these addresses; False where there is none to repeat."""
        known = None if like is None else self._known.get(like)
        if known is None:
            return False
        first = tuple(place.data_ptr() for place in places)
        if any(address % _ALIGNED for address in first):
            return False
        known.run(*first[:6], *known.between, *first[1:3], *first[6:], *known.after)
        return True

    def remember(self, like: Hashable | None, launch: Launch, layout: RowLayout) -> None:
        """Make a launch, and remember how."""
        compiled = launch.run()
        tensors = [each for each in launch.arguments if isinstance(each, Tensor)]
        if like is None or compiled is None or any(t.data_ptr() % _ALIGNED for t in tensors):
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        addresses = [a.data_ptr() if isinstance(a, Tensor) else a for a in launch.arguments]
        names = launch.kernel.arg_names[len(addresses) :]
        after = [*addresses[_BUFFERS + 2 :], *(launch.constants[name] for name in names)]
        self._known[like] = _Known(
            compiled[launch.grid],
            tuple(addresses[6 : _BUFFERS - 2]),
            tuple(after),
            (launch.arguments[6 : _BUFFERS - 2], launch.arguments[_BUFFERS + 2 :], layout),
        )
