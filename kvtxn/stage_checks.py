"""The arguments of ``stage``: check one layer's rows, and encode them as the cache stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .errors import LayerError, StagedTwiceError
from .host_values import described, is_dense
from .layers import LayerRef, Plane
from .recurrence import RowPart


def check_ref(
    ref: LayerRef,
    layers: Mapping[str, LayerRef],
    missing: Mapping[str, object],
    written_by: str = "window",
) -> None:
    """Refuse a layer that the manager does not know, or that is in the window already.

    Args:
        ref: what the caller gave; anything.
        layers: the manager's, by name.
        missing: names of the layers that are not in the window yet.
        written_by: the window's; a hint of the error depends on it.

    Raises:
        LayerError: it is not the manager's own object.
        StagedTwiceError: it is in the window.
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
        raise StagedTwiceError(
            "stage",
            f"layer {name!r} is in this window already",
            expected="each layer once",
            got=f"{name!r} again",
            hint="in this window the caller writes the rows" if written_by == "caller" else "",
        )


def check_parts(
    ref: LayerRef,
    num_rows: int | None,
    key: Tensor | Sequence[Tensor],
    value: Tensor | Sequence[Tensor] | None,
) -> tuple[Tensor | None, ...]:
    """Check the tensors given to ``stage``, and return one per part of ``ref.given``.

    Args:
        ref: the layer. A latent may come whole, or as the two halves that MLA code has. The
            states of a recurrent layer come as a sequence, or, if there are two, as key and value.
            If scales lie beside the rows, codes come with their scales, as a pair; scales that
            the library is to compute are None in the result.
        num_rows: rows of the window; None if no slot mapping was given yet. Any number of rows then
            passes here, and the window refuses the call for the missing mapping.
        key: see ``Window.stage``.
        value: see ``Window.stage``.

    Raises:
        LayerError: a tensor is missing or does not fit.
    """
    if ref.states:
        several = isinstance(key, Sequence) and not isinstance(key, str)
        given: tuple[object, ...] = tuple(key) if several else (key,)
        given = given if value is None else (*given, value)
        states = [state for state in given if isinstance(state, Tensor)]
        if len(given) != len(ref.given) or len(states) < len(given):
            each = "part of a row" if ref.replay else "state"
            raise LayerError(
                "stage",
                f"recurrent layer {ref.name!r} is staged with one tensor per {each}",
                expected=f"{len(ref.given)} tensors: "
                + ", ".join(f"{part.part} [num_rows, *{part.staged_shape}]" for part in ref.given),
                got=[type(state).__name__ for state in given],
            )
        pairs = zip(ref.given, states, strict=True)
        return tuple(_checked(ref, part, num_rows, tensor) for part, tensor in pairs)
    first, first_scales = _codes_and_scales(ref, 0, key)
    second, second_scales = _codes_and_scales(ref, 1, value)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor | None):
        part, wrong = ("value", second) if isinstance(first, Tensor) else ("key", first)
        raise LayerError(
            "stage", f"{part} of {ref.name!r} must be a tensor", got=type(wrong).__name__
        )
    if second is None and not ref.is_latent:
        raise LayerError(
            "stage",
            f"layer {ref.name!r} needs a value tensor",
            expected=f"[num_rows, {', '.join(map(str, ref.planes[1].row_shape))}]",
            got=None,
            hint="only latent layers are staged with one tensor",
        )
    if ref.is_latent and second is not None:
        for half in (first, second):
            check_dense(ref, "a half", half)
        if first.shape[:-1] != second.shape[:-1] or first.device != second.device:
            raise LayerError(
                "stage",
                f"the two halves of latent {ref.name!r} do not fit together",
                expected=list(first.shape[:-1]),
                got=list(second.shape[:-1]),
            )
        first, second = torch.cat([first, second], dim=-1), None
    parts: list[Tensor | None] = [first] if second is None else [first, second]
    for plane, scales in zip(ref.planes, (first_scales, second_scales), strict=False):
        if plane.format.scales_in is not None:
            parts.append(scales)
    return tuple(
        None if part is None else _checked(ref, plane, num_rows, part)
        for plane, part in zip(ref.planes, parts, strict=True)
    )


def _codes_and_scales(
    ref: LayerRef, number: int, given: Tensor | Sequence[Tensor] | None
) -> tuple[Tensor | Sequence[Tensor] | None, Tensor | None]:
    """Split the argument for K (number 0) or V (1) into rows and the scales given with them.

    The scales are None where none were given.

    Raises:
        LayerError: where scales lie beside the rows, codes come alone, or something else.
    """
    plane = ref.planes[min(number, len(ref.planes) - 1)]
    if plane.format.scales_in is None or given is None:
        return given, None
    if isinstance(given, (tuple, list)) and len(given) == 2:
        rows, scales = given
        if isinstance(rows, Tensor) and isinstance(scales, Tensor) and _is_code(plane, rows):
            return rows, scales
    elif isinstance(given, Tensor) and not _is_code(plane, given):
        return given, None
    raise LayerError(
        "stage",
        f"{plane.part} of {ref.name!r} comes as numbers, or as codes with their scales",
        expected=f"a floating tensor, or a pair: {plane.format.dtype} and float32 "
        f"[num_rows, {', '.join(map(str, ref.planes[plane.format.scales_in].row_shape))}]",
        got=_describe(given),
        hint="in this cache scales lie beside the rows: pass codes together with their scales",
    )


def _is_code(plane: Plane, rows: Tensor) -> bool:
    """Tell whether rows have the stored dtype of a plane, or are bytes."""
    return rows.dtype is plane.format.dtype or rows.dtype is torch.uint8


def _describe(given: object) -> str:
    """Describe an argument of ``stage`` by its dtypes, for a message."""
    if isinstance(given, Tensor):
        return f"{given.dtype} alone"
    if isinstance(given, (tuple, list)):
        return str([getattr(part, "dtype", type(part).__name__) for part in given])
    return type(given).__name__


def _checked(ref: LayerRef, plane: Plane | RowPart, num_rows: int | None, part: Tensor) -> Tensor:
    """Check a tensor, and return it in the shape of the rows.

    Bytes, uint8, of an 8-bit format become its dtype.

    Raises:
        LayerError: its shape, device, dtype or layout does not fit.
    """
    check_dense(ref, plane.part, part)
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
    if part.device != ref.device:
        raise LayerError(
            "stage",
            f"{plane.part} of {ref.name!r} is on the wrong device",
            expected=ref.device,
            got=part.device,
        )
    if part.dtype is number.dtype:
        pass
    elif number.quantised and part.dtype is torch.uint8:
        part = part.view(number.dtype)  # stored codes, as engines keep them
    elif plane.is_scale or not (
        part.is_floating_point() and (number.dtype.is_floating_point or number.quantised)
    ):
        raise LayerError(
            "stage",
            f"{plane.part} of {ref.name!r} has a dtype that cannot be stored",
            expected=f"{'' if plane.is_scale else 'a floating dtype or '}{number.dtype}",
            got=part.dtype,
        )
    return in_row_shape(plane, part)


def check_dense(ref: LayerRef, what: str, part: Tensor) -> None:
    """Refuse, with a LayerError, a tensor whose numbers do not lie in memory."""
    if not is_dense(part):
        raise LayerError(
            "stage",
            f"{what} of {ref.name!r} is sparse, nested, quantised by torch or a lazy view",
            expected="a strided tensor with memory of its own",
            got=described(part),
            hint="materialise it first: tensor.to_dense(), dequantize() or resolve_neg()",
        )


def in_row_shape(plane: Plane | RowPart, part: Tensor) -> Tensor:
    """Return a staged tensor in the shape of the plane's rows, in which they wait."""
    return part if plane.given_shape is None else part.reshape(-1, *plane.row_shape)


def stored_rows(ref: LayerRef, parts: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return a layer's rows in the form that waits for the commit; they are quantised only here.

    Args:
        ref: the layer.
        parts: one tensor per part of ``ref.given``, from ``check_parts``; tensors in the part's
            own dtype are taken as they are. None for scales that are computed here.

    Raises:
        LayerError: codes come without their scales.
    """
    rows: list[Tensor | None] = list(parts)
    for number, (plane, part) in enumerate(zip(ref.given, parts, strict=True)):
        if part is not None and part.dtype is not plane.format.dtype:
            scales_in = plane.format.scales_in
            if scales_in is None:
                rows[number] = plane.format.encode(part)
            else:
                rows[number], rows[scales_in] = plane.format.quantise(part)
    found = tuple(row for row in rows if row is not None)
    if len(found) < len(rows):
        raise LayerError("stage", f"codes of {ref.name!r} come without their scales")
    return prepared(ref, found) if ref.replay else found


def prepared(ref: LayerRef, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the parts of a replayed layer that wait for the commit, for all its recurrences."""
    rows: list[Tensor] = []
    for recurrence, state in zip(ref.replay, ref.states, strict=True):
        count = len(recurrence.given(state))
        rows += recurrence.prepare(parts[:count])
        parts = parts[count:]
    return tuple(rows)
