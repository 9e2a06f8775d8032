"""The layers of one manager: their names, their groups, and the checks that they fit together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor

from .errors import LayerError
from .layers import LayerRef, Plane, SlotKind
from .memory_overlap import begin, near_pairs, overlap


def by_name(layers: Iterable[LayerRef]) -> dict[str, LayerRef]:
    """Return the layers by name, in order.

    Raises:
        LayerError: ``layers`` has none, or other objects; or two layers have the same name,
            different devices, or one group and caches that overlap.
    """
    by_name: dict[str, LayerRef] = {}
    if not isinstance(layers, Iterable) or isinstance(layers, Tensor):
        raise LayerError(
            "TransactionManager", "layers is not an iterable", got=type(layers).__name__
        )
    for ref in layers:
        if not isinstance(ref, LayerRef):
            raise LayerError(
                "TransactionManager", "layers must be LayerRef objects", got=type(ref).__name__
            )
        if ref.name in by_name:
            raise LayerError(
                "TransactionManager",
                f"two layers are named {ref.name!r}",
                expected="a name of its own for each layer",
                got=f"{ref.name!r} twice",
                hint="give each layer its own name",
            )
        by_name[ref.name] = ref
    _check_apart(by_name.values())
    if not by_name:
        raise LayerError("TransactionManager", "no layers", expected="at least one", got=0)
    devices = {ref.device for ref in by_name.values()}
    if len(devices) > 1:
        raise LayerError(
            "TransactionManager",
            "layers are on several devices",
            expected="one device",
            got=sorted(map(str, devices)),
            hint="make one manager per device",
        )
    return by_name


def _check_apart(refs: Iterable[LayerRef]) -> None:
    """Refuse, with a LayerError, layers of one group whose caches overlap.

    Groups may share memory: an engine's allocator gives each block to one of them. Caches with
    tables of offsets overlap, as far as is looked, where equal parts begin at one address.
    """
    places = [(plane.cells, (ref, plane)) for ref in refs for plane in ref.planes]
    for (theirs, (other, one)), (own, (ref, plane)) in near_pairs(places):
        if other is not ref and other.group == ref.group and _share(one, plane):
            raise LayerError(
                "TransactionManager",
                f"layers {other.name!r} and {ref.name!r} share one cache, or overlap",
                expected="distinct memory for every layer of a group",
                got=f"{begin(own) - begin(theirs)} bytes from one to the other",
                hint="list a shared cache once, under the layer that writes it",
            )


def _share(one: Plane, other: Plane) -> bool:
    """Return whether two layers' planes share memory; with offset tables, only equal parts do."""
    if one.offsets is None and other.offsets is None:
        return overlap(one.cells, other.cells)
    return one.part == other.part and begin(one.cells) == begin(other.cells)


_NEXT_STEP: Final = (
    "nothing was written; make new LayerRef objects over the caches as they are now, and a new "
    "TransactionManager"
)


class CacheMemory:
    """The memory of a manager's caches, which must stay where and as large as it was.

    Views of a cache keep its old memory alive when the caller's tensor gets another one, by
    ``set_``, ``.data =`` or ``resize_``: rows would be written to the old memory, which is never
    read, without an error. Addresses and sizes are compared; strides and dtypes, which would take
    as long again, are not.

    Args:
        refs: the layers.
    """

    def __init__(self, refs: Iterable[LayerRef]) -> None:
        places = [(ref.name, *place) for ref in refs for place in ref.memory]
        self._names = [name for name, _, _ in places]
        self._tensors = [tensor for _, tensor, _ in places]
        self._addresses = [address for _, _, address in places]
        self._sizes = list(map(Tensor.numel, self._tensors))

    def check(self, operation: str) -> None:
        """Refuse caches that moved or were resized; 10 to 20 microseconds for 32 layers.

        Raises:
            LayerError: a cache is at another address, or has another number of elements.
        """
        addresses = list(map(Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:
            name, before, after = self._changed(self._addresses, addresses)
            what = f"a cache of layer {name!r} moved since the layer was described"
            expected, got = f"its memory at {before:#x}", f"{after:#x}"
            raise LayerError(operation, what, expected=expected, got=got, hint=_NEXT_STEP)
        sizes = list(map(Tensor.numel, self._tensors))
        if sizes != self._sizes:
            name, before, after = self._changed(self._sizes, sizes)
            what = f"a cache of layer {name!r} was resized since the manager was made"
            expected = f"{before} elements"
            raise LayerError(operation, what, expected=expected, got=after, hint=_NEXT_STEP)

    def _changed(self, before: list[int], now: list[int]) -> tuple[str, int, int]:
        """Return the first layer whose number changed, and both numbers."""
        pairs = zip(self._names, before, now, strict=True)
        return next(pair for pair in pairs if pair[1] != pair[2])


def limits_of(refs: Sequence[LayerRef]) -> dict[str, int]:
    """Return, by group, the number of slots of its smallest cache.

    Raises:
        LayerError: layers of one group differ in kind or block size.
    """
    limits: dict[str, int] = {}
    block_sizes: dict[str, int] = {}
    kinds: dict[str, SlotKind] = {}
    for ref in refs:
        limits[ref.group] = min(ref.num_slots, limits.get(ref.group, ref.num_slots))
        kind = kinds.setdefault(ref.group, ref.kind)
        if kind != ref.kind:
            raise LayerError(
                "TransactionManager",
                f"kinds of layers differ within group {ref.group!r}",
                expected=kind,
                got=f"{ref.kind} in {ref.name!r}",
                hint="rings of one size, states, and paged rows belong in groups of their own",
            )
        size = ref.planes[0].block_size
        if block_sizes.setdefault(ref.group, size) != size:
            raise LayerError(
                "TransactionManager",
                f"block sizes differ within group {ref.group!r}",
                expected=block_sizes[ref.group],
                got=f"{size} in {ref.name!r}",
                hint="a slot number means block x block_size + offset: use one group per size",
            )
    return limits
