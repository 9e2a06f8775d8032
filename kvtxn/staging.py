"""Taking a layer's rows in: checked, in the cache's own format, and sure to last.

By reference where that can be checked: a held tensor keeps its memory, and
torch's version counter tells whether somebody wrote into it before commit.
Tensors made in inference mode have no such counter, so ``"auto"`` copies them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from .config import TxnConfig
from .errors import LayerError, StagedTwiceError, WindowStateError
from .executor import StagedLayer
from .layers import LayerRef, Plane

#: Numbers of rows whose windows are remembered; beyond, all are forgotten.
_MAX_LOOKS: Final = 64

#: dtype, shape, stride (None if contiguous), device, and whether the negative bit could be set.
_Facts = tuple[torch.dtype, torch.Size, tuple[int, ...] | None, torch.device, bool]


@attrs.define(eq=False)
class _Looks:
    """What the rows of windows with one number of rows looked like, layer by layer.

    Attributes:
        layers: facts of each layer's key and value, of tensors that passed every check.
        pattern: replaced whenever ``layers`` changes.
    """

    layers: dict[LayerRef, tuple[_Facts, ...]] = attrs.Factory(dict)
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
        self._held: list[tuple[str, tuple[Tensor, ...], int | tuple[int, int]]] = []
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
        """For ``Txn.pattern``: what this window's rows, all taken, have in common with others."""
        return self._looks.pattern if self._known else None

    def again(
        self,
        ref: LayerRef,
        key: Tensor | Sequence[Tensor],
        value: Tensor | None,
        missing: Mapping[str, object],
    ) -> StagedLayer | None:
        """A layer's rows, where they look exactly as rows did that passed every check.

        A few comparisons, in place of the checks that explain; None means only that those are
        needed. A layer that is known here is one of the manager's.
        """
        try:
            facts = self._looks.layers.get(ref)
            if facts is None or ref.name not in missing or not isinstance(key, Tensor):
                return None
            if not _alike(key, facts[0]):
                return None
            if len(facts) == 1:
                if value is not None:
                    return None
                rows: tuple[Tensor, ...] = (key,)
            else:
                if value is None or len(facts) > 2 or not _alike(value, facts[1]):
                    return None
                rows = (key, value)
            if self._watched:
                version = key._version if value is None else (key._version, value._version)
                self._held.append((ref.name, rows, version))
        except (AttributeError, TypeError, RuntimeError):  # no tensor or layer; no version
            return None
        return StagedLayer(ref, rows)

    def take(self, ref: LayerRef, parts: tuple[Tensor, ...]) -> StagedLayer:
        """One layer's rows, encoded; ``parts`` come from ``check_parts``."""
        layer = self._take(ref, parts)
        if self._known and all(a is b for a, b in zip(layer.rows, parts, strict=True)):
            self._looks.layers[ref] = tuple(_facts(part) for part in parts)
            self._looks.pattern = object()
        else:
            self._known = False
        return layer

    def _take(self, ref: LayerRef, parts: tuple[Tensor, ...]) -> StagedLayer:
        rows = []
        for plane, part in zip(ref.planes, parts, strict=True):
            if part.dtype is not plane.format.dtype:
                part = plane.format.encode(part)  # a new tensor: nobody else can write to it
            elif self._holds and self._mode != "reference":
                part = self._keep(ref, plane, part)
            rows.append(part)
        return StagedLayer(ref, tuple(rows))

    def watch(self, slots: Mapping[str, Tensor]) -> None:
        """Notice if slots that commit is going to read are written to until then."""
        if self._watched:
            for group, tensor in slots.items():
                if not tensor.is_inference():
                    self._held.append((group, (tensor,), tensor._version))

    def check_unchanged(self, layers: Container[str] | None = None) -> None:
        """Refuse the commit if a tensor taken by reference was written to since.

        Args:
            layers: names of those whose rows still wait, and of their groups; all where None.

        Raises:
            WindowStateError: it was; nothing has been written.
        """
        for name, rows, versions in self._held:
            if _versions(rows) != versions and (layers is None or name in layers):
                raise WindowStateError(
                    "commit",
                    f"what was taken for {name!r} was modified in place before commit",
                    hint="abort; with TxnConfig(staging='copy') rows may share a buffer that is "
                    "written to, as slices of one tensor do",
                )

    def _keep(self, ref: LayerRef, plane: Plane, part: Tensor) -> Tensor:
        """The tensor itself where an in-place write would be noticed, else a copy."""
        if self._mode == "auto" and not part.is_inference():
            self._held.append((ref.name, (part,), part._version))
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


def _versions(rows: tuple[Tensor, ...]) -> int | tuple[int, int]:
    return rows[0]._version if len(rows) == 1 else (rows[0]._version, rows[1]._version)


def _facts(part: Tensor) -> _Facts:
    # A lazily negated view is the imaginary part of a conjugate: only these dtypes have any.
    negated = part.dtype in (torch.float16, torch.float32, torch.float64)
    stride = None if part.is_contiguous() else part.stride()
    return part.dtype, part.shape, stride, part.device, negated


def _alike(part: Tensor, facts: _Facts) -> bool:
    dtype, shape, stride, device, negated = facts
    return (
        part.dtype is dtype
        and part.shape == shape
        and (part.is_contiguous() if stride is None else part.stride() == stride)
        and part.device == device
        and not (negated and part.is_neg())
    )


def check_ref(ref: LayerRef, layers: Mapping[str, LayerRef], missing: Mapping[str, object]) -> None:
    """Refuse a layer the manager does not know, or one that is in the window already.

    Args:
        ref: what was passed to ``stage``.
        layers: the manager's layers by name.
        missing: names of the layers that are not staged yet.
    """
    name = getattr(ref, "name", None)
    if not isinstance(ref, LayerRef) or layers.get(ref.name) is not ref:
        raise LayerError(
            "stage",
            f"{name or ref!r} is not a layer of this manager",
            expected=f"one of its {len(layers)} LayerRef objects",
            got=type(ref).__name__ if name is None else f"another object named {name!r}",
            hint="pass the LayerRef that the TransactionManager was built with",
        )
    if name not in missing:
        raise StagedTwiceError("stage", f"layer {name!r} is in this window already")


def check_parts(
    ref: LayerRef,
    num_rows: int | None,
    key: Tensor | Sequence[Tensor],
    value: Tensor | None,
) -> tuple[Tensor, ...]:
    """One tensor per plane, known to fit it; nothing has been taken yet.

    Args:
        ref: the layer. A latent may come whole, or as the two halves MLA code has; the states
            of a recurrent layer as a sequence, or as key and value where there are no more.
        num_rows: rows of the window; None where the slots do not say, to be refused with them.
        key: see ``Window.stage``.
        value: likewise.

    Raises:
        LayerError: a tensor is missing or does not fit.
    """
    if ref.states:
        states = (key,) if isinstance(key, Tensor) else tuple(key)
        states = states if value is None else (*states, value)
        if len(states) != len(ref.planes) or not all(isinstance(s, Tensor) for s in states):
            raise LayerError(
                "stage",
                f"recurrent layer {ref.name!r} is staged with one tensor per state",
                expected=f"{len(ref.planes)} tensors [num_rows, *state_shape]",
                got=[type(state).__name__ for state in states],
            )
        return tuple(
            _checked(ref, plane, num_rows, part)
            for plane, part in zip(ref.planes, states, strict=True)
        )
    for part, tensor in (("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) and not (tensor is None and part == "value"):
            raise LayerError(
                "stage", f"{part} of {ref.name!r} must be a tensor", got=type(tensor).__name__
            )
    if value is None and not ref.is_latent:
        raise LayerError(
            "stage",
            f"layer {ref.name!r} needs a value tensor",
            expected=f"[num_rows, {', '.join(map(str, ref.planes[1].row_shape))}]",
            got=None,
            hint="only latent layers are staged with one tensor",
        )
    assert isinstance(key, Tensor)
    if ref.is_latent and value is not None:
        if key.shape[:-1] != value.shape[:-1] or key.device != value.device:
            raise LayerError(
                "stage",
                f"the two halves of latent {ref.name!r} do not fit together",
                expected=list(key.shape[:-1]),
                got=list(value.shape[:-1]),
            )
        key, value = torch.cat([key, value], dim=-1), None
    parts = (key,) if value is None else (key, value)
    return tuple(
        _checked(ref, plane, num_rows, part) for plane, part in zip(ref.planes, parts, strict=True)
    )


def _checked(ref: LayerRef, plane: Plane, num_rows: int | None, part: Tensor) -> Tensor:
    """The tensor, known to fit the plane; bytes of an 8-bit format come in its own dtype."""
    number = plane.format
    shape = plane.staged_shape
    if part.ndim == 0 or part.shape != (part.shape[0] if num_rows is None else num_rows, *shape):
        raise LayerError(
            "stage",
            f"{plane.part} of {ref.name!r} has the wrong shape",
            expected=["num_rows" if num_rows is None else num_rows, *shape],
            got=list(part.shape),
            hint="stage every row of the window, request by request, in one call",
        )
    if part.device != plane.cells.device:
        raise LayerError(
            "stage",
            f"{plane.part} of {ref.name!r} is on the wrong device",
            expected=plane.cells.device,
            got=part.device,
        )
    if part.dtype is number.dtype:
        pass
    elif number.quantised and part.dtype is torch.uint8:
        part = part.view(number.dtype)  # stored codes, as engines keep them
    elif not (part.is_floating_point() and (number.dtype.is_floating_point or number.quantised)):
        raise LayerError(
            "stage",
            f"{plane.part} of {ref.name!r} has a dtype that cannot be stored",
            expected=f"a floating dtype or {number.dtype}",
            got=part.dtype,
        )
    if part.layout is not torch.strided or part.is_neg():
        raise LayerError(
            "stage",
            f"{plane.part} of {ref.name!r} is sparse or a lazy view",
            expected="a strided tensor",
            got=part.layout,
            hint="materialise it first: tensor.to_dense() or tensor.resolve_neg()",
        )
    return part if plane.given_shape is None else part.reshape(-1, *plane.row_shape)
