"""``Stager``: take in a layer's rows, in the cache's own format, so that they last until commit.

Rows are held by reference if a later write to them can be noticed: a held tensor keeps its
memory, and torch's version counter shows in-place writes. Tensors made in inference mode have no
version counter, and compiled graphs reuse memory without counting, so ``staging="auto"`` copies
the rows in both cases.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Final

import attrs
import torch
from cachetools import LRUCache
from torch import Tensor

from .compile_guard import within_graph
from .config import TxnConfig
from .errors import WindowStateError
from .executor import StagedLayer
from .layers import LayerRef, Plane
from .memory_overlap import begin, end
from .recurrence import RowPart
from .stage_checks import stored_rows

#: Window sizes for which layouts of staged rows are remembered.
_MAX_SEEN: Final = 64

#: dtype, shape, stride (None if contiguous), device, and whether the negative bit could be set.
_Facts = tuple[torch.dtype, torch.Size, tuple[int, ...] | None, torch.device, bool]


@attrs.define(eq=False)
class _SeenLayouts:
    """The memory layouts of staged rows, layer by layer, in earlier windows with as many rows.

    Attributes:
        layers: facts of each layer's key and value tensors that passed every check.
        token: an object that is replaced whenever ``layers`` changes.
    """

    layers: dict[LayerRef, tuple[str, _Facts, _Facts | None]] = attrs.Factory(dict)
    token: object = attrs.Factory(object)


class Stager:
    """Turns key and value tensors into staged rows, for one manager.

    Args:
        config: ``staging`` chooses between references and copies, ``max_rows`` sizes the copies.
        refs: the manager's layers, whose caches staged rows must not lie in.
        deferred: True if rows have to last until commit; if False, they are not kept.

    Attributes:
        layout_token: an object shared by windows whose staged rows have the same memory layouts,
            for ``Txn.pattern``; None if rows were copied or encoded. It covers the layers staged
            so far, so read it once every layer is staged.
    """

    def __init__(self, config: TxnConfig, refs: Sequence[LayerRef], *, deferred: bool) -> None:
        self._refs = refs
        self._mode = config.staging
        self._max_rows = config.max_rows
        self._holds = deferred
        #: Buffers that became too small stay: a captured graph may still read them.
        self._buffers: dict[Plane | RowPart, list[Tensor]] = {}
        self._held: list[tuple[Tensor, int, str]] = []
        self._by_rows: LRUCache[int, _SeenLayouts] = LRUCache(_MAX_SEEN)
        self._seen = _SeenLayouts()
        self.layout_token: object | None = None
        self._watched = config.staging == "auto"

    def begin(self, num_rows: int, *, holds: bool) -> None:
        """Prepare for a window of ``num_rows`` rows; with ``holds`` the rows last until commit.

        The tensors of the window before are forgotten.
        """
        self.reset()  # an interrupt may have kept the last window from it
        seen = self._by_rows.get(num_rows)
        if seen is None:
            seen = self._by_rows[num_rows] = _SeenLayouts()
        self._seen = seen
        self._holds = holds
        self.layout_token = seen.token if holds and self._mode != "copy" else None

    def reset(self) -> None:
        """Let go of the tensors of the last window that are watched for writes."""
        self._held.clear()

    def take_if_unchanged(
        self,
        ref: LayerRef,
        key: Any,
        value: Any,
        missing: dict[str, None],
        staged: dict[str, StagedLayer],
    ) -> bool:
        """Take a layer's rows if dtype, shape, strides and device are those of checked rows.

        The fast path: it runs once per layer and window, so it compares a few facts
        inline, instead of calling ``check_parts``, which validates and explains. If it
        returns False, it took no row, and the caller must make the full checks.

        Args:
            ref: the layer.
            key: see ``Window.stage``; may be any object.
            value: see ``Window.stage``; may be any object.
            missing: names of the layers that are not staged yet; the layer's name is removed.
            staged: the staged layers by name; the layer's rows are added.
        """
        try:
            name, (dtype, shape, stride, device, negated), second = self._seen.layers[ref]
            if (
                name not in missing
                or (self._watched and within_graph())
                or key.dtype is not dtype
                or key.shape != shape
                or not (key.is_contiguous() if stride is None else key.stride() == stride)
                or key.device != device
                or (negated and key.is_neg())
            ):
                return False
            if second is None:
                if value is not None:
                    return False
                if self._watched:
                    self._held.append((key, key._version, name))
                staged[name] = StagedLayer(ref, (key,))
            else:
                dtype, shape, stride, device, negated = second
                if (
                    value.dtype is not dtype
                    or value.shape != shape
                    or not (value.is_contiguous() if stride is None else value.stride() == stride)
                    or value.device != device
                    or (negated and value.is_neg())
                ):
                    return False
                if self._watched:
                    version = value._version
                    self._held.append((key, key._version, name))
                    self._held.append((value, version, name))
                staged[name] = StagedLayer(ref, (key, value))
        except (AttributeError, KeyError, TypeError, RuntimeError):  # unknown layer, or no version
            return False
        del missing[name]
        return True

    def take(self, ref: LayerRef, parts: tuple[Tensor | None, ...]) -> StagedLayer:
        """Take and encode one layer's rows; ``parts`` come from ``check_parts``.

        If they are held as they are, their layout is remembered for ``take_if_unchanged``;
        ``layout_token`` becomes another object, or None where they were copied or encoded.
        """
        layer = self._take(ref, parts)
        if ref.replay:  # no executor moves these rows, so their layout does not matter
            return layer
        alike = all(a is b for a, b in zip(layer.rows, parts, strict=True))
        if self.layout_token is not None and alike and not ref.planes[-1].is_scale:
            if len(layer.rows) <= 2:
                facts = [_facts(part) for part in layer.rows]
                self._seen.layers[ref] = (ref.name, facts[0], facts[1] if facts[1:] else None)
            self.layout_token = self._seen.token = object()
        else:
            self.layout_token = None
        return layer

    def take_alone(self, ref: LayerRef, parts: tuple[Tensor | None, ...]) -> StagedLayer:
        """Take one layer's rows after ``take`` failed: copies of these rows, in no fixed buffer.

        ``layout_token`` is None then.
        """
        self.layout_token = None
        return StagedLayer(ref, tuple(row.detach().clone() for row in stored_rows(ref, parts)))

    def _take(self, ref: LayerRef, parts: tuple[Tensor | None, ...]) -> StagedLayer:
        """Encode one layer's rows; if rows have to last, keep or copy the caller's own tensors."""
        rows = stored_rows(ref, parts)
        if self._holds and self._mode != "reference":
            # Encoded rows are new tensors, which no one else can write to.
            given = {id(part) for part in parts}
            rows = tuple(
                self._keep(ref, plane, row) if id(row) in given else row
                for plane, row in zip(ref.kept, rows, strict=True)
            )
        return StagedLayer(ref, rows)

    def check_unchanged(self, layers: Container[str] | None = None) -> None:
        """Refuse, with a WindowStateError, a commit if a tensor held was written to since.

        ``layers`` have rows that still wait; None: all.
        """
        for tensor, version, name in self._held:
            if tensor._version != version and (layers is None or name in layers):
                self._check_apart("commit", tensor, name)
                raise WindowStateError(
                    "commit",
                    f"a tensor staged for {name!r} was modified in place before commit",
                    expected=f"version {version}, as it was staged",
                    got=f"version {tensor._version}",
                    hint="abort; with TxnConfig(staging='copy') staged tensors may be modified, "
                    "or share a buffer that is",
                )

    def _check_apart(self, operation: str, part: Tensor, name: str) -> None:
        """Refuse, with a WindowStateError, a staged tensor in a cache: windows write there."""
        for ref in self._refs:
            for plane in ref.planes:
                if begin(part) < end(plane.cells) and begin(plane.cells) < end(part):
                    raise WindowStateError(
                        operation,
                        f"a tensor staged for {name!r} lies in a cache that the window writes, "
                        f"that of {ref.name!r}",
                        expected="rows in memory of their own",
                        got=f"a view of the cache, {list(part.shape)}",
                        hint="abort, and stage a clone of the rows",
                    )

    def _keep(self, ref: LayerRef, plane: Plane | RowPart, part: Tensor) -> Tensor:
        """Return the tensor itself if an in-place write would be noticed, else a copy in a buffer.

        A later window writes over the buffer.

        Raises:
            WindowStateError: states that a commit selects lie in a cache.
        """
        if ref.states and not ref.replay:  # the commit writes settled states before it reads drafts
            self._check_apart("stage", part, ref.name)
        if self._mode == "auto" and not part.is_inference() and not within_graph():
            self._held.append((part, part._version, ref.name))
            return part
        buffers = self._buffers.setdefault(plane, [])
        if not buffers or buffers[-1].shape[0] < part.shape[0]:
            rows = self._max_rows
            if ref.states and not ref.replay:  # large: size for this window, not for max_rows
                rows = min(rows, 1 << max(0, part.shape[0] - 1).bit_length())
            with torch.inference_mode(False):  # buffers outlive the mode they are made in
                shape = (rows, *plane.row_shape)
                buffers.append(torch.empty(shape, dtype=part.dtype, device=part.device))
        return buffers[-1][: part.shape[0]].copy_(part.detach())


def _facts(part: Tensor) -> _Facts:
    """Return the facts by which ``take_if_unchanged`` knows a tensor of the same layout."""
    # A lazily negated view is the imaginary part of a conjugate: only these dtypes have any.
    negated = part.dtype in (torch.float16, torch.float32, torch.float64)
    stride = None if part.is_contiguous() else part.stride()
    return part.dtype, part.shape, stride, part.device, negated
