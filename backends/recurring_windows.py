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
from .attention_shapes import Keep, Tail
from .jobs import Launch
from .row_scales import typed

#: Launches that are remembered; beyond, all are forgotten.
_MOST: Final = 64

#: Triton compiles for addresses that are multiples of this, or are not.
_ALIGNED: Final = 16

#: What differs among a kernel's arguments: query, keys, values, the prefix's output and
#: log-sum-exp, and the output come first. Later there are the cache (keys and values once more,
#: where it is not read), the buffers that rows are copied to, and what says where a prefix ends.
#: Then, where a batch goes on after the window's rows, how far apart the heads' log-sum-exps are.
_FIRST: Final = 6
_CACHE: Final = 10
_REST: Final = 16
_L_HEAD: Final = 35


@attrs.frozen(eq=False)
class _Layer:
    """What does not change from step to step.

    Attributes:
        keep: what is written beside the output.
        args: how it attends.
        kind: a number, the same for layers that are launched alike but for addresses; None where
            a launch cannot be repeated.
        cache: the addresses of keys and values.
        buffers: those of ``keep.buffers``.
    """

    keep: Keep
    args: AttentionArgs
    kind: int | None
    cache: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()


@attrs.frozen(eq=False)
class _Known:
    """A compiled kernel, ready to be launched.

    Attributes:
        run: launches it, given every argument and constant.
        between: what stands between the first six addresses and those of the cache.
        prefix: what stands where a prefix's end would.
        rest: what comes after all that differs, up to the heads' distance.
        last: what comes after that.
        held: what the addresses in there point to, and what the key's identities are of.
    """

    run: Any
    between: tuple[Any, ...]
    prefix: tuple[int, int]
    rest: tuple[Any, ...]
    last: tuple[Any, ...]
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
        tail: Tail | None,
    ) -> Hashable | None:
        """Everything a launch depends on except what differs; None where it cannot be repeated.

        Args:
            layout: the rows.
            ref: the layer.
            places: query, keys, values, output and log-sum-exp; the rows lead, more may follow.
            args: scale, sliding window, soft cap.
            keep: what is written beside the output.
            tail: where the prefix's last rows are, if its attention was causal.
        """
        query, key, value, output, lse = places
        layer = self._layers.get(ref)
        if layer is None or layer.keep is not keep or layer.args is not args:
            layer = self._layers[ref] = self._look(ref, args, keep)
        if layer.kind is None or layout.tree is not None:
            return None
        return (
            layer.kind,
            id(layout),
            None if tail is None else tail.blocks.stride(0),
            query.shape[1:],
            *(query.dtype, key.dtype, value.dtype, output.dtype, lse.dtype),
            *(query.stride(), key.stride(), value.stride(), output.stride(), lse.stride(1)),
        )

    def _look(self, ref: LayerRef, args: AttentionArgs, keep: Keep) -> _Layer:
        """Compare a layer with those seen so far."""
        plain = len(ref.planes) == 2 and all(plane.format.scale is None for plane in ref.planes)
        if keep.slots is not None or keep.buffers is None or not plain:
            return _Layer(keep, args, None)
        buffers = tuple(each.data_ptr() for each in keep.buffers)
        cache = tuple(typed(plane).data_ptr() for plane in ref.planes)
        if any(address % _ALIGNED for address in (*cache, *buffers)):
            return _Layer(keep, args, None)
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
        return _Layer(keep, args, self._kinds[facts], cache, buffers)

    def again(
        self,
        like: Hashable | None,
        ref: LayerRef,
        places: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        tail: Tail | None,
    ) -> bool:
        """Repeat an earlier launch with these addresses; False where there is none to repeat."""
        known = None if like is None else self._known.get(like)
        if known is None:
            return False
        query, key, value, output, lse = map(Tensor.data_ptr, places)
        layer, prefix = self._layers[ref], known.prefix
        cache: tuple[int, ...] = (key, value)
        if tail is not None:
            cache, prefix = layer.cache, (tail.seq_lens.data_ptr(), tail.blocks.data_ptr())
        if (query | key | value | output | lse | prefix[0] | prefix[1]) % _ALIGNED:
            return False
        first = (query, key, value, output, lse, output, *known.between)
        differing = (*cache, *layer.buffers, *prefix)
        known.run(*first, *differing, *known.rest, places[-1].stride(0), *known.last)
        return True

    def remember(self, like: Hashable | None, launch: Launch, layout: RowLayout) -> None:
        """Make a launch, and remember how."""
        compiled = launch.run()
        tensors = [each for each in launch.arguments if isinstance(each, Tensor)]
        if like is None or compiled is None or any(t.data_ptr() % _ALIGNED for t in tensors):
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        facts = [a.data_ptr() if isinstance(a, Tensor) else a for a in launch.arguments]
        names = launch.kernel.arg_names[len(facts) :]
        constants = (launch.constants[name] for name in names)
        self._known[like] = _Known(
            compiled[launch.grid],
            tuple(facts[_FIRST:_CACHE]),
            (facts[_REST - 2], facts[_REST - 1]),
            tuple(facts[_REST:_L_HEAD]),
            (*facts[_L_HEAD + 1 :], *constants),
            (launch.arguments[_FIRST:_CACHE], launch.arguments[_REST:], layout),
        )
