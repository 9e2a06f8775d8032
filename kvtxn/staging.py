"""Taking a layer's rows in: in the cache's own format, and sure to last.

By reference where that can be checked: a held tensor keeps its memory, and
torch's version counter tells whether somebody wrote into it before commit.
Tensors made in inference mode have no such counter, and compiled graphs reuse
memory without counting, so ``"auto"`` copies the rows of both.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from .config import TxnConfig
from .eager import within_graph
from .errors import WindowStateError
from .executor import StagedLayer
from .layers import LayerRef, Plane
from .parts import stored_rows

#: Window sizes whose rows are remembered; when there are more, all are forgotten.
_MAX_LOOKS: Final = 64

#: dtype, shape, stride (None if contiguous), device, and whether the negative bit could be set.
_Facts = tuple[torch.dtype, torch.Size, tuple[int, ...] | None, torch.device, bool]


@attrs.define(eq=False)
class _Looks:
    """What staged rows looked like, layer by layer, in earlier windows with as many rows.

    Attributes:
        layers: facts of each layer's key and value, of tensors that passed every check.
        pattern: replaced whenever ``layers`` changes.
    """

    layers: dict[LayerRef, tuple[str, _Facts, _Facts | None]] = attrs.Factory(dict)
    pattern: object = attrs.Factory(object)


class Stager:
    """Turns key and value tensors into staged rows, for one manager.

    Args:
        config: ``staging`` says how, ``max_rows`` sizes the buffers of copies.
        deferred: whether rows have to last until commit; if not, nothing is kept.
    """

    def __init__(self, config: TxnConfig, *, deferred: bool) -> None:
        self._mode = config.staging
        self._max_rows = config.max_rows
        self._holds = deferred
        #: Outgrown ones stay: a graph that somebody captured may read them.
        self._buffers: dict[Plane, list[Tensor]] = {}
        self._held: list[tuple[Tensor, int, str]] = []
        self._by_rows: dict[int, _Looks] = {}
        self._looks = _Looks()
        self._known = deferred and config.staging != "copy"
        self._watched = config.staging == "auto"

    def begin(self, num_rows: int, *, holds: bool) -> None:
        """A window of ``num_rows`` rows begins; ``holds`` says whether they last until commit."""
        looks = self._by_rows.get(num_rows)
        if looks is None:
            if len(self._by_rows) >= _MAX_LOOKS:
                self._by_rows.clear()
            looks = self._by_rows[num_rows] = _Looks()
        self._looks = looks
        self._holds = holds
        self._known = holds and self._mode != "copy"

    def reset(self) -> None:
        """Forget the tensors of the last window."""
        self._held.clear()

    @property
    def pattern(self) -> object | None:
        """For ``Txn.pattern``, once every layer is taken."""
        return self._looks.pattern if self._known else None

    def again(
        self,
        ref: LayerRef,
        key: Any,
        value: Any,
        missing: dict[str, None],
        staged: dict[str, StagedLayer],
    ) -> bool:
        """Take a layer's rows, if they look exactly like rows that passed every check before.

        This is the fast path: it runs once per layer and window, so it compares a few facts,
        inline, where ``check_parts`` validates and explains. False means that those checks are
        needed; nothing was taken then.

        Args:
            ref: the layer.
            key: see ``Window.stage``; may be anything at all.
            value: likewise.
            missing: names of the layers that are not staged yet; the layer's is taken out.
            staged: where its rows go.
        """
        try:
            name, (dtype, shape, stride, device, negated), second = self._looks.layers[ref]
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
        except (AttributeError, KeyError, TypeError, RuntimeError):  # nothing known; no version
            return False
        del missing[name]
        return True

    def take(self, ref: LayerRef, parts: tuple[Tensor | None, ...]) -> StagedLayer:
        """One layer's rows, encoded; ``parts`` come from ``check_parts``."""
        layer = self._take(ref, parts)
        alike = all(a is b for a, b in zip(layer.rows, parts, strict=True))
        if self._known and alike and not ref.planes[-1].is_scale:
            if len(layer.rows) <= 2:
                facts = [_facts(part) for part in layer.rows]
                self._looks.layers[ref] = (ref.name, facts[0], facts[1] if facts[1:] else None)
            self._looks.pattern = object()
        else:
            self._known = False
        return layer

    def _take(self, ref: LayerRef, parts: tuple[Tensor | None, ...]) -> StagedLayer:
        rows = stored_rows(ref, parts)
        if self._holds and self._mode != "reference":
            # What was encoded is a new tensor: nobody else can write to it.
            rows = tuple(
                self._keep(ref, plane, row) if row is part else row
                for plane, row, part in zip(ref.planes, rows, parts, strict=True)
            )
        return StagedLayer(ref, rows)

    def watch(self, slots: Mapping[str, Tensor]) -> None:
        """Notice if slots that commit is going to read are written to until then."""
        if self._watched:
            for group, tensor in slots.items():
                if not tensor.is_inference():
                    self._held.append((tensor, tensor._version, group))

    def check_unchanged(self, layers: Container[str] | None = None) -> None:
        """Refuse the commit if a tensor taken by reference was written to since.

        Args:
            layers: names of those whose rows still wait, and of their groups; all where None.

        Raises:
            WindowStateError: it was; nothing has been written.
        """
        for tensor, version, name in self._held:
            if tensor._version != version and (layers is None or name in layers):
                raise WindowStateError(
                    "commit",
                    f"what was taken for {name!r} was modified in place before commit",
                    hint="abort; with TxnConfig(staging='copy') rows may share a buffer that is "
                    "written to, as slices of one tensor do",
                )

    def _keep(self, ref: LayerRef, plane: Plane, part: Tensor) -> Tensor:
        """The tensor itself where an in-place write would be noticed, else a copy."""
        if self._mode == "auto" and not part.is_inference() and not within_graph():
            self._held.append((part, part._version, ref.name))
            return part
        buffers = self._buffers.setdefault(plane, [])
        if not buffers or buffers[-1].shape[0] < part.shape[0]:
            rows = self._max_rows
            if ref.states:  # one may take megabytes: room for what comes, not for what could
                rows = min(rows, 1 << max(0, part.shape[0] - 1).bit_length())
            with torch.inference_mode(False):  # it outlives the mode it is made in
                shape = (rows, *plane.row_shape)
                buffers.append(torch.empty(shape, dtype=part.dtype, device=part.device))
        return buffers[-1][: part.shape[0]].copy_(part.detach())


def _facts(part: Tensor) -> _Facts:
    # A lazily negated view is the imaginary part of a conjugate: only these dtypes have any.
    negated = part.dtype in (torch.float16, torch.float32, torch.float64)
    stride = None if part.is_contiguous() else part.stride()
    return part.dtype, part.shape, stride, part.device, negated
