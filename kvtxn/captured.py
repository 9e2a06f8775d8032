"""Rows that a captured forward leaves at the same places at every replay.

A graph's memory pool may reuse a tensor's memory inside the graph as soon as nothing holds
the tensor. ``CapturedRows`` holds every key and value until the capture ends; then they
stay intact through each replay, and the commit reads them where the forward left them. A
compiler that plans memory by itself does not ask who holds a tensor, so this is checked, not
assumed: the graph copies the rows as it produces them, and after a replay ``verify`` compares the
two. Where they differ, the copies are used instead.

A window over them, ``manager.window(..., captured=rows)``, is STAGED when it begins. What
such windows have in common is validated once and looked up afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from .eager import outside_graphs
from .errors import ConfigError, LayerError, WindowStateError
from .executor import StagedLayer, Standing
from .formats import words
from .layers import LayerRef
from .layout import Lengths
from .parts import check_stored, stored_rows
from .slots import SlotMappings, Slots

if TYPE_CHECKING:
    from .manager import TransactionManager

#: Windows that are remembered; when there are more, all are forgotten and validated anew.
_MAX_STANDING: Final = 64


class CapturedRows:
    """The staged rows of one captured forward.

    Args:
        check: capture copies beside the references, so that ``verify`` has something to
            compare; without them the references are trusted.

    Attributes:
        by_reference: False once a check has failed and the copies are in use.

    Raises:
        ConfigError: ``check`` is not a bool.
    """

    def __init__(self, *, check: bool = True) -> None:
        if not isinstance(check, bool):
            raise ConfigError(
                "CapturedRows",
                "check is not valid",
                expected="a bool",
                got=repr(check),
                hint="leave it out, or pass False where references may be trusted",
            )
        self.by_reference = True
        self._check = check
        self._held: dict[str, StagedLayer] = {}
        self._copies: dict[str, StagedLayer] = {}
        self._verified = not check
        self._standing: dict[tuple[object, ...], tuple[Standing, SlotMappings]] = {}

    def stage(self, ref: LayerRef, *parts: Tensor) -> StagedLayer:
        """Hold one layer's rows; call it inside the capture, where the rows are made.

        Args:
            ref: the layer.
            parts: one tensor per plane, ``[num_rows, *row_shape]``, in the cache's own dtype;
                others are quantised here, in the graph. Scales that lie beside the rows come
                last, or not at all where the rows are numbers.

        Raises:
            WindowStateError: the layer was staged before.
            LayerError: not one tensor per plane.
        """
        if torch.compiler.is_compiling():
            return outside_graphs(CapturedRows.stage)(self, ref, *parts)
        if not isinstance(ref, LayerRef):
            raise LayerError("stage", f"{ref!r} is no LayerRef", got=type(ref).__name__)
        if ref.name in self._held:
            raise WindowStateError(
                "stage",
                f"layer {ref.name!r} is in this capture already",
                hint="make one CapturedRows for each captured graph",
            )
        scales = [None for plane in ref.planes[len(parts) :] if plane.is_scale]
        if len(parts) + len(scales) != len(ref.planes) or not all(
            isinstance(part, Tensor) for part in parts
        ):
            raise LayerError(
                "stage",
                f"layer {ref.name!r} is captured with one tensor per plane",
                expected=f"{len(ref.planes)} tensors: {', '.join(p.part for p in ref.planes)}",
                got=[type(part).__name__ for part in parts],
                hint="pass what each plane stores, all rows of the forward",
            )
        held = stored_rows(ref, (*parts, *scales))
        self._held[ref.name] = StagedLayer(ref, held)
        self._standing.clear()
        if self._check:
            copies = tuple(part.clone() for part in held)
            self._copies[ref.name] = StagedLayer(ref, copies)
        return self._held[ref.name]

    def verify(self) -> list[str]:
        """Compare references and copies after a replay; waits for the device, so do it once.

        Run it after capture and one replay on real inputs. Afterwards ``layers`` are the
        references if all were intact, else the copies.

        Returns:
            Layers whose rows had been overwritten by the end of the graph.
        """
        overwritten = [
            name
            for name, copy in self._copies.items()
            if not all(
                torch.equal(words(a), words(b))
                for a, b in zip(self._held[name].rows, copy.rows, strict=True)
            )
        ]
        self.by_reference = not overwritten
        self._verified = True
        self._standing.clear()
        return overwritten

    @property
    def layers(self) -> Mapping[str, StagedLayer]:
        """What a commit after a replay reads.

        Raises:
            WindowStateError: nothing was verified yet.
        """
        if not self._verified:
            raise WindowStateError(
                "commit",
                "rows captured by reference have not been verified",
                hint="replay the graph once and call verify()",
            )
        return self._held if self.by_reference else self._copies

    # -- windows over them -----------------------------------------------------------

    def standing(
        self, manager: TransactionManager, draft_len: Lengths, slots: Slots, settled: Lengths
    ) -> tuple[Standing, SlotMappings]:
        """What windows of this shape over these rows and slots share; validated the first time.

        Slots on the device are read where they are, and so must not be written to before commit;
        others are copied, as in any window.

        Raises:
            ConfigError: the manager's policy is not "deferred".
            LayerError: the rows do not fit the manager's layers or the window.
            SlotMappingError: see ``TransactionManager.window``.
        """
        key = _key(manager, draft_len, slots, settled)
        found = self._standing.get(key)
        if found is not None:
            return found
        if manager.policy != "deferred":
            raise ConfigError(
                "window",
                f"captured rows do not go with policy {manager.policy!r}",
                expected="policy 'deferred'",
                got=repr(manager.policy),
                hint="under undo a captured forward writes by itself: written_by='caller'",
            )
        in_place: set[str] = set()

        def keep(group: str, tensor: Tensor) -> Tensor:
            spread = manager.kinds[group].name == "recurrent"  # made from one slot per request
            fixed = tensor.dtype is torch.int64 and tensor.is_contiguous() and not spread
            if not key or not fixed:
                return manager.executor.own_slots(group, tensor)
            in_place.add(group)
            return tensor

        mappings = manager.mappings(draft_len, settled, keep)
        own = {group: mappings.add(group, s) for group, s in mappings.by_group(slots).items()}
        unmapped = [group for group in manager.groups if group not in own]
        if unmapped:
            raise mappings.missing(unmapped[0])
        rows = mappings.layout.num_rows
        staged = {ref.name: self._fitting(ref, rows) for ref in manager.layers.values()}
        recurs = bool(key) and in_place == set(own)
        made = Standing(mappings.layout, own, staged, recurs), mappings
        if recurs:
            if len(self._standing) >= _MAX_STANDING:
                self._standing.clear()
            self._standing[key] = made
        return made

    def _fitting(self, ref: LayerRef, num_rows: int) -> StagedLayer:
        """The first ``num_rows`` rows of a layer; a graph may have room for more."""
        layer = self.layers.get(ref.name)
        if layer is None or layer.ref is not ref:
            raise LayerError(
                "window",
                f"layer {ref.name!r} is not among the captured rows",
                expected=f"each of the manager's {ref.group!r} layers, and others of its groups",
                got=f"{len(self.layers)} layers",
                hint="stage every layer of the manager while the forward is captured",
            )
        rows = [part[:num_rows] for part in layer.rows]
        return StagedLayer(ref, check_stored(ref, num_rows, rows))


def _key(
    manager: TransactionManager, draft_len: Lengths, slots: Slots, settled: Lengths
) -> tuple[object, ...]:
    """What identifies a window that can recur; empty where it cannot.

    It cannot where slots come from the host, or are checked or copied before the launch: those
    may differ every time.
    """
    if not manager.executor.capabilities.checks_range:
        return ()
    if isinstance(slots, Tensor):
        places: tuple[object, ...] = _place(slots)
    elif isinstance(slots, Mapping):
        tensors = {group: s for group, s in slots.items() if isinstance(s, Tensor)}
        if len(tensors) < len(slots):
            return ()
        places = tuple(fact for group, each in tensors.items() for fact in (group, *_place(each)))
    else:
        return ()
    lengths = _hashable(draft_len), _hashable(settled)
    return () if None in lengths or None in places else (manager, *lengths, *places)


def _place(slots: Tensor) -> tuple[object, ...]:
    address = None if slots.is_cpu else slots.data_ptr()
    return address, slots.dtype, slots.shape, slots.is_contiguous()


def _hashable(lengths: Lengths) -> int | tuple[int, ...] | None:
    if isinstance(lengths, (int, tuple)):
        return lengths
    return tuple(lengths) if isinstance(lengths, list) else None
