"""``LayerRef``: the description of one layer's cache.

A layer is made of *planes* (K and V, one latent, or the tensors of a state). A plane maps a slot
to the memory of its row. All code that moves bytes works on planes, so a new kind of cache is a
new way to build planes. Rings and states differ from paged rows in one respect, their
``SlotKind``: rows of one window may have the same slot, and commit leaves the last kept one in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from .cache_planes import Plane as Plane
from .cache_planes import PlaneSpec, check_cache, check_offsets, paged_planes, state_plane
from .errors import LayerError
from .memory_overlap import overlap
from .recurrence import Recurrence, RowPart, check_replay


@attrs.frozen
class SlotKind:
    """The kind of a layer's slots.

    Attributes:
        name: ``"paged"``, ``"ring"`` or ``"recurrent"``.
        reuse: two rows of a request may have one slot if they lie a multiple of this many
            rows apart: the size of the ring, 1 for a state; 0 if no two rows may share a slot.
        overwrites: True if a write evicts a live row, so that counters cannot take it back.
        per_request: True for states, which have one slot per request, not one per row.
    """

    name: str
    reuse: int = 0
    overwrites: bool = attrs.field(init=False, repr=False, eq=False)
    per_request: bool = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "overwrites", self.reuse > 0)
        object.__setattr__(self, "per_request", self.name == "recurrent")


#: The names that ``LayerRef.needs`` may hold, and so an executor's ``kinds``.
KINDS: Final = ("paged", "ring", "recurrent", "replayed")

PAGED: Final = SlotKind("paged")
RECURRENT: Final = SlotKind("recurrent", 1)


def _shape(cache: Tensor | None) -> str:
    """Return dtype and shape of a cache, for a repr or a message."""
    return "None" if cache is None else f"{cache.dtype}{list(cache.shape)}"


@attrs.frozen(eq=False)
class LayerRef:
    """A layer: immutable, compared by identity, known to its manager by ``name``.

    Args:
        name: unique among the manager's layers.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides,
            fp16, bf16, fp32, fp64 or an 8-bit format. Written in place, never copied.
        value_cache: like ``key_cache``; its head size may differ. None for latent rows.
        group: layers of one group share one slot mapping.
        k_scale: for 8-bit caches, stored = value / scale: a number, or a tensor of one
            or ``num_kv_heads`` elements. Or, if each row has scales of its own that lie
            beside it, float32 ``[num_blocks, block_size, num_kv_heads]``, any strides; these are
            computed when rows are staged, and written with the rows.
        v_scale: the same for V.
        kv_dtype: ``"auto"``, ``"fp8"`` (= ``"fp8_e4m3"``), ``"fp8_e5m2"``, ``"int8"``, or the
            cache's own floating dtype by name.
        key_offsets: for a cache whose rows are not strided views, such as a CPU kernel's
            packing: int ``[block_size, num_kv_heads, head_size]``, the element of a block
            that holds each part of the row at each block offset. Both caches are then
            ``[num_blocks, block_numel]``, and may be the same tensor.
        value_offsets: the same for V; give both tables or none.
        ring_size: slots in each request's ring, for ``LayerRef.ring``; None for paged rows.
        window: tokens a query of a ring layer sees, itself included.
        states: the tensors of a recurrent layer, for ``LayerRef.recurrent``.
        replay: the recurrence by which each state takes rows in, for ``LayerRef.recurrent``; empty
            if commit selects a state.

    Attributes:
        planes: K and V, or one latent, then the scales that lie beside them; or one plane per
            state.
        kind: the rules of the layer's slots: ``"paged"`` (one row per slot), ``"ring"`` (rows a
            whole ring apart share a slot) or ``"recurrent"`` (one slot per request); see
            ``SlotKind``.
        given: the parts of a row that ``stage`` takes: the ones that planes store, or, for a
            replayed layer, the inputs of its recurrences.
        kept: the parts of a row that wait for the commit.
        memory: the caller's tensors that a window writes, each with its address when the layer was
            described; see ``kvtxn.layer_set.CacheMemory``.

    Raises:
        LayerError: shapes, dtypes, devices, scales, offsets, sizes or recurrences do not fit
            together.
    """

    name: str
    key_cache: Tensor = attrs.field(repr=_shape)
    value_cache: Tensor | None = attrs.field(repr=_shape)
    group: str = attrs.field(default="default", kw_only=True)
    k_scale: float | Tensor | None = attrs.field(default=None, kw_only=True, repr=False)
    v_scale: float | Tensor | None = attrs.field(default=None, kw_only=True, repr=False)
    kv_dtype: str = attrs.field(default="auto", kw_only=True)
    key_offsets: Tensor | None = attrs.field(default=None, kw_only=True, repr=False)
    value_offsets: Tensor | None = attrs.field(default=None, kw_only=True, repr=False)
    ring_size: int | None = attrs.field(default=None, kw_only=True)
    window: int | None = attrs.field(default=None, kw_only=True)
    states: tuple[Tensor, ...] = attrs.field(default=(), kw_only=True, repr=False)
    replay: tuple[Recurrence, ...] = attrs.field(default=(), kw_only=True)
    kind: SlotKind = attrs.field(init=False)
    planes: tuple[Plane, ...] = attrs.field(init=False, repr=False)
    given: tuple[Plane | RowPart, ...] = attrs.field(init=False, repr=False)
    kept: tuple[Plane | RowPart, ...] = attrs.field(init=False, repr=False)
    memory: tuple[tuple[Tensor, int], ...] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for what, value in (("name", self.name), ("group", self.group)):
            if not isinstance(value, str) or not value:
                raise LayerError("LayerRef", f"{what} must be a non-empty str", got=repr(value))
        if not isinstance(self.states, (tuple, list)):
            raise LayerError(
                "LayerRef",
                f"states of {self.name!r} must be a tuple of tensors",
                got=type(self.states).__name__,
                hint="use LayerRef.recurrent(name, *states)",
            )
        planes = _state_planes(self) if self.states else _build_planes(self)
        object.__setattr__(self, "kind", _kind(self, planes[0].num_slots))
        object.__setattr__(self, "planes", planes)
        check_replay(self.name, self.replay, self.states)
        pairs = tuple(zip(self.replay, self.states, strict=False))
        given = [part for recurrence, state in pairs for part in recurrence.given(state)]
        kept = [part for recurrence, state in pairs for part in recurrence.kept(state)]
        object.__setattr__(self, "given", tuple(given) or planes)
        object.__setattr__(self, "kept", tuple(kept) or planes)
        if not self.states:
            _check_together(self, planes)
        memory = tuple((tensor, tensor.data_ptr()) for tensor in _written(self))
        object.__setattr__(self, "memory", memory)

    def __reduce__(self) -> tuple[object, ...]:
        # Planes are views of the caches: pickled by themselves, they would be copies.
        fields = {f.name: getattr(self, f.name) for f in attrs.fields(LayerRef) if f.init}
        return (_rebuild, (fields,))

    @classmethod
    def latent(
        cls,
        name: str,
        cache: Tensor,
        *,
        group: str = "default",
        scale: float | Tensor | None = None,
        kv_dtype: str = "auto",
    ) -> LayerRef:
        """Describe a multi-head-latent-attention layer: one latent per token.

        Args:
            name: unique among the manager's layers.
            cache: ``[num_blocks, block_size, latent_size]``, any strides.
            group: layers of one group share one slot mapping.
            scale: for 8-bit caches, one number, or one number per row: float32 ``[num_blocks,
                block_size]``, any strides.
            kv_dtype: as for ``LayerRef``.
        """
        return cls(name, cache, None, group=group, k_scale=scale, kv_dtype=kv_dtype)

    @classmethod
    def ring(
        cls,
        name: str,
        key_cache: Tensor,
        value_cache: Tensor | None,
        *,
        window: int,
        ring_size: int | None = None,
        group: str = "default",
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        kv_dtype: str = "auto",
    ) -> LayerRef:
        """Describe a sliding-window layer whose cache is a ring.

        Position p of a request lies at ring position ``p % ring_size``, and its slot is the slot of
        that ring position. Rows of one request that lie a whole ring apart share a slot; the last
        kept row is in it after commit. To *attend* through the window, a ring must hold all
        positions that the first query sees, beside the rows of the window that are written before
        the query runs: ``ring_size >= window + settled - 1`` under ``deferred``; if drafts are
        written through, all rows of a request count in place of ``settled``; in a draft tree, those
        up to the last one that has a slot.

        Args:
            name: unique among the manager's layers.
            key_cache: as for ``LayerRef``; the rings are made of its slots.
            value_cache: as for ``LayerRef``; None for latent rows.
            window: tokens a query sees, itself included.
            ring_size: slots in each request's ring, at least ``window``; None is ``window``.
            group: layers of one group share one slot mapping, and have equal rings.
            k_scale: as for ``LayerRef``.
            v_scale: as for ``LayerRef``.
            kv_dtype: as for ``LayerRef``.
        """
        size = window if ring_size is None else ring_size
        return cls(
            name,
            key_cache,
            value_cache,
            group=group,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_dtype=kv_dtype,
            ring_size=size,
            window=window,
        )

    @classmethod
    def recurrent(
        cls,
        name: str,
        *states: Tensor,
        replay: Recurrence | Sequence[Recurrence] | None = None,
        group: str = "default",
    ) -> LayerRef:
        """Describe a layer that keeps one state per request, such as Mamba or gated delta net.

        The slots of its group are one per request, not per row: int ``[num_requests]``, -1 is
        padding. Commit *selects* a state, or *replays* rows:

        - Selected (no ``replay``): ``stage`` takes the state after each row, settled rows
          included. Commit writes the state after the last accepted draft; without an accepted
          draft, the one after the last settled row.
        - Replayed: ``stage`` takes the inputs of each state's recurrence, for each row, as
          one sequence of tensors in the order of ``given``. Commit reads each state, takes the
          request's settled and accepted rows in, in float32, and writes it once, rounded once to
          its dtype.

        No state is written before the commit, and none by an abort: settled rows are taken in with
        the accepted drafts, in all layers, or not at all. Only ``direct``, the control, holds
        nothing back: it writes selected states when they are staged, and an abort leaves them.

        Args:
            name: unique among the manager's layers.
            states: ``[num_states, *state_shape]`` each, any strides, any dtype of at most 8
                bytes per element, such as the states of a convolution and of a scan.
            replay: one recurrence per state, see ``kvtxn.recurrent``; None selects states.
            group: layers of one group share one slot mapping.

        Raises:
            LayerError: no state, or recurrences that do not fit the states.
        """
        if not states:
            raise LayerError("LayerRef", f"{name!r} needs at least one state", got=0)
        recurrences = replay if isinstance(replay, Sequence) else [replay] if replay else []
        return cls(name, states[0], None, group=group, states=states, replay=tuple(recurrences))

    @property
    def device(self) -> torch.device:
        """The device of the caches."""
        return self.key_cache.device

    @property
    def is_latent(self) -> bool:
        """True for a layer with one latent per token, as in multi-head latent attention (MLA)."""
        return self.value_cache is None and not self.states

    @property
    def needs(self) -> frozenset[str]:
        """Names that an executor's ``kinds`` must have for it to hold this layer."""
        return frozenset({self.kind.name, "replayed"} if self.replay else {self.kind.name})

    @property
    def num_slots(self) -> int:
        """Slots in this layer's cache."""
        return self.planes[0].num_slots

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in this layer, K and V together; or of one request's states."""
        return sum(plane.row_bytes for plane in self.planes)


def _written(ref: LayerRef) -> list[Tensor]:
    """Return the caller's tensors that rows or states are written to."""
    if ref.states:
        return list(ref.states)
    caches = (ref.key_cache, ref.value_cache)
    beside = [
        scale
        for plane, scale in zip(ref.planes, (ref.k_scale, ref.v_scale), strict=False)
        if plane.format.scales_in is not None
    ]
    return [tensor for tensor in (*caches, *beside) if isinstance(tensor, Tensor)]


def _rebuild(fields: dict[str, Any]) -> LayerRef:
    """Describe the layer again, when it is unpickled, over the caches as they came."""
    return LayerRef(**fields)


def _kind(ref: LayerRef, num_slots: int) -> SlotKind:
    """Return the kind of a layer's slots: paged rows, a ring, or recurrent states.

    Raises:
        LayerError: window, ring size and number of slots do not go together.
    """
    if ref.states:
        return RECURRENT
    if ref.ring_size is None and ref.window is None:
        return PAGED
    sizes = (ref.window, ref.ring_size)
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if not whole or not 1 <= ref.window <= ref.ring_size <= num_slots:  # type: ignore[operator]
        raise LayerError(
            "LayerRef",
            f"window and ring_size of {ref.name!r} do not fit",
            expected="1 <= window <= ring_size <= slots of the cache",
            got=f"window {ref.window!r}, ring_size {ref.ring_size!r}",
        )
    return SlotKind("ring", ref.ring_size)  # type: ignore[arg-type]  # an int, as checked


def _state_planes(ref: LayerRef) -> tuple[Plane, ...]:
    """Build one plane per state; they must have equally many slots, one device, own memory.

    Raises:
        LayerError: a state is misshapen, or they differ or overlap.
    """
    planes = tuple(
        state_plane(f"state {number}", ref.name, state) for number, state in enumerate(ref.states)
    )
    first = planes[0]
    for plane in planes[1:]:
        if (plane.num_slots, plane.cells.device) != (first.num_slots, first.cells.device):
            raise LayerError(
                "LayerRef",
                f"the states of {ref.name!r} differ in number or device",
                expected=_shape(ref.states[0]),
                got=[_shape(state) for state in ref.states[1:]],
            )
    _check_apart(ref, "states", planes)
    return planes


def _build_planes(ref: LayerRef) -> tuple[Plane, ...]:
    """Build the planes of a paged layer; raise LayerError if its tensors do not fit together."""
    if (ref.key_offsets is None) != (ref.value_offsets is None):
        raise LayerError(
            "LayerRef", f"{ref.name!r} needs both offset tables or none", expected="both", got="one"
        )
    if ref.value_cache is None:
        if ref.v_scale is not None or ref.key_offsets is not None:
            raise LayerError(
                "LayerRef", f"{ref.name!r} is latent: it has one plane, one scale",
                expected="neither v_scale nor key_offsets", got="one of them",
            )  # fmt: skip
        check_cache(ref.name, ref.key_cache, 3, "[num_blocks, block_size, latent_size]")
        return paged_planes(
            ref.name, [PlaneSpec("latent", ref.key_cache, ref.k_scale)], ref.kv_dtype
        )
    if ref.key_offsets is not None and ref.value_offsets is not None:
        caches = [ref.key_cache, ref.value_cache]
        tables = check_offsets(ref.name, caches, ref.key_offsets, ref.value_offsets)
        sides = [
            PlaneSpec("key", ref.key_cache, ref.k_scale, tables[0]),
            PlaneSpec("value", ref.value_cache, ref.v_scale, tables[1]),
        ]
        return paged_planes(ref.name, sides, ref.kv_dtype)
    for cache in (ref.key_cache, ref.value_cache):
        shape = "[num_blocks, block_size, num_kv_heads, head_size]"
        check_cache(ref.name, cache, 4, shape)
    if ref.key_cache.shape[:3] != ref.value_cache.shape[:3]:
        raise LayerError(
            "LayerRef",
            f"key_cache and value_cache of {ref.name!r} differ in blocks, block size or heads",
            expected=list(ref.key_cache.shape[:3]),
            got=list(ref.value_cache.shape[:3]),
        )
    sides = [
        PlaneSpec("key", ref.key_cache, ref.k_scale),
        PlaneSpec("value", ref.value_cache, ref.v_scale),
    ]
    return paged_planes(ref.name, sides, ref.kv_dtype)


def _check_together(ref: LayerRef, planes: tuple[Plane, ...]) -> None:
    """Refuse planes of one row that differ in dtype or device, or share their memory.

    Scales may have another dtype; planes with offsets may share memory.

    Raises:
        LayerError: they are refused.
    """
    first = planes[0].cells
    for plane in planes[1:]:
        same = plane.is_scale or plane.cells.dtype == first.dtype
        if not same or plane.cells.device != first.device:
            raise LayerError(
                "LayerRef",
                f"the caches of {ref.name!r} differ in dtype or device",
                expected=f"{_shape(ref.key_cache)} on {first.device}",
                got=f"{plane.part}: {plane.format.dtype} on {plane.cells.device}",
            )
    _check_apart(ref, "caches", [plane for plane in planes if plane.offsets is None])


def _check_apart(ref: LayerRef, what: str, planes: Iterable[Plane]) -> None:
    """Refuse, with a LayerError, planes that overlap."""
    for one, other in combinations(planes, 2):
        if overlap(one.cells, other.cells):
            raise LayerError(
                "LayerRef",
                f"two {what} of {ref.name!r} are, in part or whole, the same memory",
                expected="distinct memory for each",
                got=f"{one.part} and {other.part} that overlap",
            )
