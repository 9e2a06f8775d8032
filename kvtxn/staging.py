"""Taking a layer's rows in: checked, in the cache's own format, and sure to last.

By reference where that can be checked: a held tensor keeps its memory, and
torch's version counter tells whether somebody wrote into it before commit.
Tensors made in inference mode have no such counter, so ``"auto"`` copies them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .config import TxnConfig
from .errors import LayerError, WindowStateError
from .executor import StagedLayer
from .layers import LayerRef, Plane


class Stager:
    """Turns key and value tensors into staged rows, for one manager.

    Args:
        config: ``staging`` says how, ``max_rows`` sizes the buffers of copies.
        deferred: whether rows have to last until commit; if not, nothing is kept.
    """

    def __init__(self, config: TxnConfig, *, deferred: bool) -> None:
        self._mode = config.staging
        self._max_rows = config.max_rows
        self._deferred = deferred
        self._buffers: dict[Plane, Tensor] = {}
        self._held: list[tuple[str, Tensor, int]] = []

    def reset(self) -> None:
        """Forget the tensors of the last window."""
        self._held.clear()

    def take(self, ref: LayerRef, num_rows: int, key: Tensor, value: Tensor | None) -> StagedLayer:
        """One layer's rows, encoded. Raises LayerError where they do not fit the cache."""
        rows = []
        for plane, part in zip(ref.planes, _parts(ref, key, value), strict=True):
            number = plane.format
            check_rows(ref, plane, num_rows, part)
            if part.dtype is not number.dtype:
                part = number.encode(part)  # a new tensor: nobody else can write to it
            elif self._deferred and self._mode != "reference":
                part = self._keep(ref, plane, part)
            rows.append(part)
        return StagedLayer(ref, tuple(rows))

    def check_unchanged(self) -> None:
        """Refuse the commit if a tensor staged by reference was written to since.

        Raises:
            WindowStateError: it was; nothing has been written.
        """
        for name, tensor, version in self._held:
            if tensor._version != version:
                raise WindowStateError(
                    "commit",
                    f"the rows staged for {name!r} were modified in place after stage()",
                    hint="abort, and set TxnConfig(staging='copy') if the buffer must be reused",
                )

    def _keep(self, ref: LayerRef, plane: Plane, part: Tensor) -> Tensor:
        """The tensor itself where an in-place write would be noticed, else a copy."""
        if self._mode == "auto" and not part.is_inference():
            self._held.append((ref.name, part, part._version))
            return part
        buffer = self._buffers.get(plane)
        if buffer is None:
            shape = (self._max_rows, *plane.row_shape)
            buffer = torch.empty(shape, dtype=part.dtype, device=part.device)
            self._buffers[plane] = buffer
        return buffer[: part.shape[0]].copy_(part.detach())


def check_ref(ref: LayerRef, layers: Mapping[str, LayerRef], missing: Mapping[str, object]) -> None:
    """Refuse a layer the manager does not know, or one that is in the window already.

    Args:
        ref: what was passed to ``stage``.
        layers: the manager's layers by name.
        missing: names of the layers that are not staged yet.
    """
    name = getattr(ref, "name", None)
    if layers.get(name or "") is not ref:
        raise LayerError(
            "stage",
            f"{name or ref!r} is not a layer of this manager",
            expected=f"one of its {len(layers)} LayerRef objects",
            got=type(ref).__name__ if name is None else f"another object named {name!r}",
            hint="pass the LayerRef that the TransactionManager was built with",
        )
    if name not in missing:
        raise LayerError(
            "stage", f"layer {name!r} is in this window already", hint="stage each layer once"
        )


def _parts(ref: LayerRef, key: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:
    """One tensor per plane. A latent may come whole, or as the two halves MLA code has."""
    if not ref.is_latent:
        if value is None:
            raise LayerError(
                "stage",
                f"layer {ref.name!r} needs a value tensor",
                expected=f"[num_rows, {', '.join(map(str, ref.planes[1].row_shape))}]",
                got=None,
                hint="only latent layers are staged with one tensor",
            )
        return key, value
    return (key if value is None else torch.cat([key, value], dim=-1),)


def check_rows(ref: LayerRef, plane: Plane, num_rows: int, part: Tensor) -> None:
    """Refuse, with a LayerError, a tensor that does not fit the plane."""
    if not isinstance(part, Tensor):
        raise LayerError(
            "stage", f"{plane.part} of {ref.name!r} must be a tensor", got=type(part).__name__
        )
    if part.shape != (num_rows, *plane.row_shape):
        raise LayerError(
            "stage",
            f"{plane.part} of {ref.name!r} has the wrong shape",
            expected=[num_rows, *plane.row_shape],
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
    if part.dtype is not plane.format.dtype and not part.is_floating_point():
        raise LayerError(
            "stage",
            f"{plane.part} of {ref.name!r} has a dtype that cannot be stored",
            expected=f"a floating dtype or {plane.format.dtype}",
            got=part.dtype,
        )
