"""Repeated launches of a window kernel that differ in addresses alone.

The layers of a forward attend alike: the same rows, shapes and strides, but other tensors. To find
the compiled kernel, Triton looks at each of some eighty arguments, which takes several times as
long as the launch, and would happen once per layer wherever the forward is not a graph. Here it
happens at the first layer; the others call the compiled kernel with their own addresses.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
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
_FIRST: Final = 6
_BUFFERS: Final = 12


@attrs.frozen(eq=False)
class _Layer:
    """What does not change from step to step.

    Attributes:
        keep: what is written beside the output.
        args: how it attends.
        kind: a number, the same for layers that are launched alike but for addresses; None where
            a launch cannot be repeated.
        buffers: the addresses of ``keep.buffers``.
    """

    keep: Keep
    args: AttentionArgs
    kind: int | None
    buffers: tuple[int, ...]


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
    """The launches of one device's window kernels, over FlashAttention's prefix."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self._layers: dict[LayerRef, _Layer] = {}
        self._kinds: dict[Hashable, int] = {}
        self._numbers = count()

    def likeness(
        self,
        layout: RowLayout,
        ref: LayerRef,
        places: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        args: AttentionArgs,
        keep: Keep,
    ) -> Hashable | None:
        """Everything a launch depends on except addresses; None where it cannot be repeated.

        Args:
            layout: the rows.
            ref: the layer.
            places: query, keys, values, output and log-sum-exp; the rows lead, more may follow.
            args: scale, sliding window, soft cap.
            keep: what is written beside the output.
        """
        query, key, value, output, lse = places
        layer = self._layers.get(ref)
        if layer is None or layer.keep is not keep or layer.args is not args:
            layer = self._layers[ref] = self._look(ref, args, keep)
        if layer.kind is None or layout.tree is not None or not query.is_cuda:
            return None
        return (
            layer.kind,
            id(layout),
            query.shape[1:],
            *(query.dtype, key.dtype, value.dtype, output.dtype, lse.dtype),
            *(query.stride(), key.stride(), value.stride(), output.stride(), lse.stride()),
        )

    def _look(self, ref: LayerRef, args: AttentionArgs, keep: Keep) -> _Layer:
        """Compare a layer with those seen so far."""
        plain = len(ref.planes) == 2 and all(plane.format.scale is None for plane in ref.planes)
        if keep.slots is not None or keep.buffers is None or not plain:
            return _Layer(keep, args, None, ())
        buffers = tuple(each.data_ptr() for each in keep.buffers)
        if any(address % _ALIGNED for address in buffers):
            return _Layer(keep, args, None, ())
        facts = (
            id(keep.position),
            *((each.dtype, each.stride()) for each in keep.buffers),
            *((p.cells.dtype, p.cells.stride(), p.row_shape, p.block_size) for p in ref.planes),
            *(ref.num_slots, args.scale, args.soft_cap, args.sliding_window),
        )
        if facts not in self._kinds:
            if len(self._kinds) >= _MOST:
                self._kinds.clear()  # numbers never come twice
            self._kinds[facts] = next(self._numbers)
        return _Layer(keep, args, self._kinds[facts], buffers)

    def again(
        self,
        like: Hashable | None,
        ref: LayerRef,
        places: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    ) -> bool:
        """Repeat an earlier launch with these addresses; False where there is none to repeat."""
        known = None if like is None else self._known.get(like)
        if known is None:
            return False
        query, key, value, output, lse = map(Tensor.data_ptr, places)
        if (query | key | value | output | lse) % _ALIGNED:
            return False
        first = (query, key, value, output, lse, output)
        known.run(*first, *known.between, key, value, *self._layers[ref].buffers, *known.after)
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
            tuple(addresses[_FIRST : _BUFFERS - 2]),
            tuple(after),
            (launch.arguments[_FIRST : _BUFFERS - 2], launch.arguments[_BUFFERS + 2 :], layout),
        )
