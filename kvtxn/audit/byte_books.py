"""The memory of a scrub: which layers it watches, and the checksums of their rows and states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..cache_planes import Plane
from ..errors import ConfigError, LayerError
from ..layers import LayerRef
from .arguments import listed, mapped
from .books import Books
from .groups import WORD_BYTES, Group, Layout, Place, positive, whole

#: Number of steps between two comparisons of one slot that every step reads.
EVERY: Final = 256


@attrs.frozen
class Window:
    """A convolution's buffer, of which a step reads a part: the inputs before its first row.

    An engine that speculates keeps one longer buffer per request, and not one per draft: the inputs
    before the step, then those of all its rows but the last. The next step begins to read as many
    inputs further on as drafts were accepted. The buffer lies in the block of the step's last
    settled row.

    Attributes:
        state: the buffer's number among the states of its layer.
        length: the inputs that a step reads: the taps of the convolution, less one.
        dim: the dimension of the state along which the inputs lie, from 1.
    """

    state: int = attrs.field(validator=whole)
    length: int = attrs.field(validator=positive)
    dim: int = attrs.field(default=1, validator=positive)


@attrs.frozen(eq=False)
class Watched:
    """A layer of a scrub.

    Attributes:
        number: the layer's number among the scrub's layers.
        ref: the layer.
        sums: int64 ``[num_slots]``, the checksum of each slot's row; valid where it is sealed.
        planes: the planes that are summed, with their numbers.
        window: the convolution's buffer, which is not summed; None without one.
    """

    number: int
    ref: LayerRef
    sums: Tensor
    planes: tuple[tuple[int, Plane], ...]
    window: Window | None


@attrs.frozen(eq=False)
class ByteBooks:
    """The tensors that the byte passes read and write.

    Attributes:
        books: the ledger's books.
        layers: the watched layers of each group.
        seals: int64 ``[num_words]``: the word that a slot had when its checksums were taken; 0 if
            there are none. A slot with another word holds another row.
        nans: int64 ``[max_requests]``, one more than the serial number of the request whose NaN
            was reported last; 0 for none.
        compared: int64 ``[1]``, rows and states that were compared.
        every: one slot in this many is compared in each step.
        poisoned: names of the groups whose dead rows and states are filled with NaN.
    """

    books: Books
    layers: Mapping[Place, Sequence[Watched]]
    seals: Tensor
    nans: Tensor
    compared: Tensor
    every: int = attrs.field(validator=positive)
    poisoned: frozenset[str]

    @classmethod
    def new(
        cls,
        books: Books,
        layers: Sequence[LayerRef],
        every: int,
        poison: bool | Collection[str],
        windows: Mapping[str, Window] | None,
    ) -> ByteBooks:
        """Allocate checksums beside a ledger's books; no row has one yet.

        Args:
            books: the ledger's.
            layers: as for ``Scrub``.
            every: as for ``Scrub``.
            poison: as for ``Scrub``.
            windows: as for ``Scrub``.

        Raises:
            ConfigError: poison or windows are of another form.
            LayerError: layers or windows do not fit the books.
        """
        windows = mapped("Scrub", "windows", windows, "by name of the layer, a Window")
        _check_layers(layers, books.words.device)
        names = [ref.name for ref in layers]
        for name in windows:
            if name not in names:
                raise LayerError(
                    "Scrub", f"windows names {name!r}", expected=f"one of {names}", got=repr(name),
                    hint="name layers of the scrub",
                )  # fmt: skip
        poisoned = _poisoned(poison, {ref.group for ref in layers})

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=books.words.device)

        watched: dict[Place, list[Watched]] = {}
        with torch.inference_mode(False):
            for number, ref in enumerate(layers):
                place, window = place_of_layer(books.layout, ref), windows.get(ref.name)
                _check_window(ref, window)
                planes = tuple(
                    (part, plane)
                    for part, plane in enumerate(ref.planes)
                    if window is None or part != window.state
                )
                sums = zeros(place.num_slots)
                watched.setdefault(place, []).append(Watched(number, ref, sums, planes, window))
            nans, compared = zeros(books.sizes.max_requests), zeros(1)
            seals = zeros(books.layout.num_words)
        return cls(books, watched, seals, nans, compared, every, poisoned)

    def copy(self, place: Place, source: Tensor, target: Tensor) -> None:
        """Copy the seals of blocks, and their checksums in all watched groups of the pool.

        Args:
            place: the group of the blocks.
            source: int64 ``[n]``, the blocks that were copied, on the device.
            target: int64 ``[n]``, their copies, on the device, distinct.
        """
        pool = place.pool_of(self.seals)
        pool.index_copy_(0, target, pool.index_select(0, source))
        for other, layers in self.layers.items():
            if other.base == place.base:  # of one pool
                for layer in layers:
                    sums = layer.sums.view(-1, other.group.block_size)
                    sums.index_copy_(0, target, sums.index_select(0, source))


def num_bytes(groups: Sequence[Group], layers: Mapping[str, int], max_requests: int) -> int:
    """Return the bytes that a scrub takes; see ``Scrub.num_bytes``.

    Raises:
        ConfigError: a number is no int of 0 or more, or a name is no group's.
    """
    layout = Layout.of(listed("num_bytes", "groups", groups, "a list of groups"))
    numbers = mapped("num_bytes", "layers", layers, "by name of the group, its number of layers")
    counts = [*numbers.values(), max_requests]
    right = all(type(number) is int and number >= 0 for number in counts)
    if not right or not layout.places.keys() >= numbers.keys():
        raise ConfigError(
            "num_bytes", "layers or max_requests are not valid",
            expected=f"ints, layers by a name of {list(layout.places)}",
            got=f"{layers!r}, {max_requests!r}", hint="count the layers of each group",
        )  # fmt: skip
    sums: int = sum(layout.places[name].num_slots * count for name, count in numbers.items())
    return WORD_BYTES * (layout.num_words + sums + max_requests + 1)


def place_of_layer(layout: Layout, ref: LayerRef) -> Place:
    """Return the ``Place`` of a layer's group.

    Raises:
        LayerError: there is none, it reads another group's rows, or the layer's cache does not
            have its slots, its blocks or its kind.
    """
    place = layout.places.get(ref.group)
    slots = min(plane.num_slots for plane in ref.planes)
    size = ref.planes[0].block_size
    if place is None or place.group.reads is not None or slots < place.num_slots:
        raise LayerError(
            "Scrub",
            f"layer {ref.name!r} does not fit group {ref.group!r} of the ledger",
            expected="a group with rows of its own and no more slots than the cache",
            got=_unfit(layout, ref.group, slots),
            hint="set LayerRef.group to a group of the ledger, and RowGroup.num_blocks to the "
            "cache's number of blocks",
        )
    group = place.group
    # A kernel's blocks may be parts of the scheduler's, which may be parts of a ring: slots are
    # counted alike in all of them.
    fits = group.block_size % size == 0 or (ref.kind.reuse and size % group.block_size == 0)
    if group.is_state is not bool(ref.states) or not fits:
        raise LayerError(
            "Scrub",
            f"layer {ref.name!r} has other blocks than group {ref.group!r} of the ledger",
            expected="states" if group.is_state else f"blocks of {group.block_size} rows",
            got="states" if ref.states else f"blocks of {size} rows",
            hint="states belong to a StateGroup; else set RowGroup.block_size to the cache's",
        )
    return place


def _unfit(layout: Layout, group: str, slots: int) -> str:
    """Say why a layer with so many slots in its cache does not fit a group, for a message."""
    place = layout.places.get(group)
    if place is None:
        return f"no group {group!r} among {list(layout.places)}"
    if place.group.reads is not None:
        return f"a group that reads the rows of {place.group.reads!r}"
    return f"{slots} slots in the cache, {place.num_slots} in the group"


def _check_layers(layers: Sequence[Any], device: torch.device) -> None:
    """Raise a LayerError if there is no layer, or one is none, named twice or elsewhere."""
    names: set[str] = set()
    for ref in layers:
        if not isinstance(ref, LayerRef):
            raise LayerError(
                "Scrub", "this is not a layer", expected="a LayerRef", got=type(ref).__name__,
                hint="describe each layer's cache by a LayerRef",
            )  # fmt: skip
        if ref.name in names or ref.device != device:
            raise LayerError(
                "Scrub", f"layer {ref.name!r} is named twice or lies elsewhere",
                expected=f"each layer once, on {device}",
                got="a second one" if ref.name in names else f"a cache on {ref.device}",
                hint="make the ledger on the device of the caches",
            )  # fmt: skip
        names.add(ref.name)
    if not names:
        raise LayerError(
            "Scrub", "there is no layer", expected="at least one LayerRef", got="none",
            hint="without layers to watch, leave the scrub out",
        )  # fmt: skip


def _poisoned(poison: Any, groups: set[str]) -> frozenset[str]:
    """Return the names of the groups that ``Scrub(poison=)`` asks to fill; True asks for all.

    Raises:
        ConfigError: it is neither a bool nor a collection of names among ``groups``.
    """
    if isinstance(poison, bool):
        return frozenset(groups if poison else ())
    named = [*poison] if isinstance(poison, Collection) and not isinstance(poison, str) else None
    if named is None or not all(isinstance(name, str) and name in groups for name in named):
        wrong = "is neither a bool nor a list" if named is None else "names groups without layers"
        raise ConfigError(
            "Scrub", f"poison {wrong}", expected=f"a bool, or a list of some of {sorted(groups)}",
            got=repr(poison), hint="pass names of groups of the scrub's layers as a list",
        )  # fmt: skip
    return frozenset(named)


def _check_window(ref: LayerRef, window: Any) -> None:
    """Refuse, with a LayerError, a window that its layer's states do not have; None is fine."""
    if window is None:
        return
    fits = isinstance(window, Window) and 0 <= window.state < len(ref.states)
    shape = ref.states[window.state].shape if fits else ()
    if not fits or window.dim >= len(shape) or window.length > shape[window.dim]:
        raise LayerError(
            "Scrub",
            f"the window of {ref.name!r} does not fit its states",
            expected="a Window of one of the layer's states, no longer than its dimension",
            got=repr(window),
            hint=f"the states are {[list(state.shape) for state in ref.states]}",
        )
