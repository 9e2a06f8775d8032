"""The forms of ``Window.commit(accepted)``, and how each is checked.

Four forms say which draft rows are accepted: counts, one per request; a mask, one bool per row;
a path, for draft trees; and ``SampledIds``, the token ids that a sampler returned.

Host values (ints, sequences, CPU tensors) are checked in full and refused when out of range.
Device tensors are checked only by shape and dtype, because reading them would wait for the device;
the executors clamp counts and cut paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

import attrs
import torch
from torch import Tensor

from .errors import AcceptanceError
from .host_values import described, in_python, is_plain, to_device
from .layout import RowLayout

#: dtypes of accepted counts, paths and token ids.
SIGNED: Final = (torch.int64, torch.int32, torch.int16, torch.int8)


@attrs.frozen(eq=False)
class SampledIds:
    """The token ids that a sampler returned, in place of counts: ``commit(SampledIds(ids))``.

    Attributes:
        ids: int ``[num_requests, num_columns]``: each request's accepted drafts, one token that the
            target chose, then placeholders. Any number of columns. On the host, a request with more
            ids than that is refused; on a device its count clamps.
        placeholder: the id that stands for "no token".
        vocab_size: ids at or above it count as "no token", too.
    """

    ids: Tensor
    placeholder: int = -1
    vocab_size: int | None = None

    def counts(self) -> Tensor:
        """Return the real ids of each request less one, int64 ``[num_requests]``; never waits.

        It is not clamped: -1 for a request without any id.
        """
        real = self.ids != self.placeholder
        if self.vocab_size is not None:
            real &= self.ids < self.vocab_size
        return real.sum(1) - 1


#: The types that ``Window.commit`` takes; see there.
Accepted = int | Sequence[int] | Sequence[bool] | Sequence[Sequence[int]] | Tensor | SampledIds


def as_counts(accepted: Tensor | SampledIds) -> Tensor:
    """Return the counts of ``SampledIds``; return counts, a mask or a path unchanged."""
    return accepted.counts() if isinstance(accepted, SampledIds) else accepted


def as_accepted(accepted: object, layout: RowLayout, device: torch.device) -> Tensor | SampledIds:
    """Turn the argument of ``commit`` into one of the four forms that executors take.

    ``Window.commit`` calls it first, so that a wrong argument changes nothing. A window without a
    tree, or whose trees do not branch, takes every form; a window with branches takes only paths. A
    tensor on the device is returned as it is.

    Returns:
        int64 ``[num_requests]`` counts, bool ``[num_rows]``, int ``[num_requests, columns]`` paths,
        or ``SampledIds``.

    Raises:
        AcceptanceError: wrong shape, dtype, device or, on the host, range.
    """
    tree = layout.tree
    branches = tree is not None and not tree.is_chain
    if type(accepted) is int and 0 <= accepted <= layout.shortest and not branches:
        return torch.full((layout.num_requests,), accepted, dtype=torch.int64, device=device)
    if isinstance(accepted, SampledIds) and not branches:
        return _checked_ids(accepted, layout, device)
    if branches or (tree is not None and _is_nested(accepted)):
        return _as_path(accepted, layout, device)
    if isinstance(accepted, Tensor) and not accepted.is_cpu:
        counts = accepted.dtype in SIGNED and accepted.shape == (layout.num_requests,)
        if not (counts and accepted.device == device):
            _check_on_device(accepted, layout, device)
        return accepted
    host = _host_counts(accepted, layout)
    return to_device(host, device, host.dtype)


# -- counts and masks -------------------------------------------------------------


def _host_counts(accepted: object, layout: RowLayout) -> Tensor:
    """Return counts, int64, or a mask on the host, in range; an int counts for every request.

    Raises:
        AcceptanceError: they are neither, or a count is above the request's drafts or below 0.
    """
    tensor = isinstance(accepted, Tensor)
    if not tensor and hasattr(accepted, "tolist") and hasattr(accepted, "__array__"):
        accepted = accepted.tolist()  # torch does not take every array of another library
    if hasattr(accepted, "__index__") and not (tensor or isinstance(accepted, bool)):
        accepted = [accepted.__index__()] * layout.num_requests
    try:
        host = torch.as_tensor(accepted, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        host = None
    if host is None or isinstance(accepted, (bool, str)) or (tensor and not is_plain(host)):
        raise AcceptanceError(
            "commit",
            "accepted is not valid",
            expected="an int, one int per request, or bool [num_rows]",
            got=repr(accepted),
        )
    if host.numel() == 0 and host.is_floating_point():  # torch's guess for an empty list
        host = host.to(torch.int64)
    if host.ndim == 0 and tensor and host.dtype is not torch.bool:
        host = host.expand(layout.num_requests)
    _check_shape(host, layout)
    if host.dtype is torch.bool:
        return host
    counts = host.tolist()
    for request, (count, drafts) in enumerate(zip(counts, layout.draft_len, strict=True)):
        if not 0 <= count <= drafts:
            raise AcceptanceError(
                "commit",
                f"accepted count of request {request} is out of range",
                expected=f"0 to {drafts}",
                got=count,
                hint="count accepted draft rows only, without the bonus token",
            )
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def _check_shape(accepted: Tensor, layout: RowLayout) -> None:
    """Refuse, with an AcceptanceError, what is neither one int per request nor one bool per row."""
    mask = accepted.dtype is torch.bool
    expected = (layout.num_rows if mask else layout.num_requests,)
    if accepted.is_floating_point() or accepted.is_complex() or accepted.shape != expected:
        raise AcceptanceError(
            "commit",
            "accepted has the wrong shape or dtype",
            expected=f"int [{layout.num_requests}] or bool [{layout.num_rows}]",
            got=f"{accepted.dtype} {list(accepted.shape)}",
            hint="one count of accepted draft rows per request, or one bool per row",
        )


def _check_on_device(accepted: Tensor, layout: RowLayout, device: torch.device) -> None:
    """Refuse counts or a mask on a device that do not fit, or that torch cannot compare there.

    Raises:
        AcceptanceError: another layout, dtype, shape or device.
    """
    plain = is_plain(accepted)
    if not plain or accepted.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise AcceptanceError(
            "commit",
            "accepted has the wrong dtype or layout",
            expected=f"a dense tensor: int [{layout.num_requests}] or bool [{layout.num_rows}]",
            got=f"{accepted.dtype}, {accepted.layout}",
            hint="convert unsigned counts to int32 or int64",
        )
    _check_shape(accepted, layout)
    _check_device(accepted, device)


def _check_device(accepted: Tensor, device: torch.device) -> None:
    """Refuse, with an AcceptanceError, a tensor on another device."""
    if accepted.device != device:
        raise AcceptanceError(
            "commit", "accepted is on another device", expected=device, got=accepted.device
        )


# -- paths of draft trees ---------------------------------------------------------


def _is_nested(accepted: object) -> bool:
    """Return whether ``accepted`` has the form of a path: two dimensions, or a sequence in it.

    Scalars of numpy and torch, which have no dimension, are counts or a mask, as Python numbers
    are.
    """
    if hasattr(accepted, "ndim"):
        return bool(accepted.ndim == 2)
    if not isinstance(accepted, Sequence) or isinstance(accepted, str):
        return False
    return any(isinstance(item, Sequence) or getattr(item, "ndim", 0) for item in accepted)


def _as_path(accepted: object, layout: RowLayout, device: torch.device) -> Tensor:
    """Return paths, int ``[num_requests, columns]``; host values have -1 only at their ends.

    A tensor on the device is returned as it is, its values unseen.

    Raises:
        AcceptanceError: they are no paths, or on the host one leaves its tree.
    """
    if isinstance(accepted, SampledIds):
        _refuse_path(layout, "SampledIds")
    if isinstance(accepted, Tensor):
        plain = is_plain(accepted)
        fits = plain and accepted.ndim == 2 and accepted.shape[0] == layout.num_requests
        if not fits or accepted.dtype not in SIGNED:
            _refuse_path(layout, f"{accepted.dtype} {list(accepted.shape) if plain else ''}")
        if not accepted.is_cpu:
            _check_device(accepted, device)
            return accepted
    accepted = in_python(accepted)
    if not isinstance(accepted, Sequence) or len(accepted) != layout.num_requests:
        _refuse_path(layout, repr(accepted))
    paths = []
    for request, path in enumerate(accepted):
        if not isinstance(path, Sequence) or any(type(node) is not int for node in path):
            _refuse_path(layout, repr(accepted))
        paths.append(_checked_path(layout, request, list(path)))
    columns = max(map(len, paths), default=0)
    padded = torch.tensor([path + [-1] * (columns - len(path)) for path in paths], device="cpu")
    return to_device(padded.view(len(paths), columns), device, torch.int64)


def _checked_path(layout: RowLayout, request: int, path: list[int]) -> list[int]:
    """Return one request's path without the -1 at its end; ``path`` loses them, too.

    Raises:
        AcceptanceError: a draft row is not the child of the one before.
    """
    assert layout.tree is not None
    parents = layout.tree.parents[request]
    while path and path[-1] == -1:
        path.pop()
    before = -1
    for node in path:
        if not 0 <= node < len(parents) or parents[node] != before:
            start = "a root" if before == -1 else f"a child of draft row {before}"
            raise AcceptanceError(
                "commit",
                f"the accepted path of request {request} leaves its tree",
                expected=f"{start}, or -1 to end it",
                got=node,
                hint="name draft rows from the root on, each the child of the one before",
            )
        before = node
    return path


def _refuse_path(layout: RowLayout, got: object) -> NoReturn:
    """Raise the AcceptanceError of an argument that is no path of a tree window."""
    raise AcceptanceError(
        "commit",
        "accepted is not a path of a tree window",
        expected=f"int [{layout.num_requests}, depth]",
        got=got,
        hint="pass the accepted draft rows of each request from the root on, padded with -1; "
        "counts and masks do not name a branch",
    )


# -- sampled ids ------------------------------------------------------------------


def _checked_ids(sampled: SampledIds, layout: RowLayout, device: torch.device) -> SampledIds:
    """Return the ids on ``device``; ids of the host are copied there without a wait.

    Raises:
        AcceptanceError: the ids or a setting are malformed, or on the host accept too many drafts.
    """
    ids = sampled.ids
    check_ids(ids, layout.num_requests)
    _check_settings(sampled.placeholder, sampled.vocab_size)
    if ids.is_cpu:
        _check_sampled(sampled, layout)
    else:
        _check_device(ids, device)
    if ids.device == device:
        return sampled
    return attrs.evolve(sampled, ids=to_device(ids, device, ids.dtype))


def _check_sampled(sampled: SampledIds, layout: RowLayout) -> None:
    """Refuse, with an AcceptanceError, ids of the host that accept more drafts than there are."""
    counts = sampled.counts().tolist()
    for request, (count, drafts) in enumerate(zip(counts, layout.draft_len, strict=True)):
        if count > drafts:
            raise AcceptanceError(
                "commit",
                f"request {request} has more sampled ids than drafts can have brought",
                expected=f"at most {drafts + 1}: its {drafts} drafts, and one more token",
                got=count + 1,
                hint="pass the ids of this window's drafts; say which id stands for no token, and "
                "the vocabulary's size, in SampledIds",
            )


def check_ids(ids: Tensor, num_requests: int) -> None:
    """Refuse, with an AcceptanceError, token ids that are not a line of signed ints per request."""
    shaped = isinstance(ids, Tensor) and is_plain(ids) and ids.ndim == 2
    if not shaped or ids.dtype not in SIGNED or ids.shape[0] != num_requests:
        raise AcceptanceError(
            "commit",
            "token ids are malformed",
            expected=f"signed int [{num_requests}, num_columns]",
            got=described(ids),
            hint="add the request dimension, or pass counts to commit() directly",
        )


def _check_settings(placeholder: object, vocab_size: object) -> None:
    """Refuse, with an AcceptanceError, a placeholder or vocabulary size that is not an int."""
    for name, value in (("placeholder", placeholder), ("vocab_size", vocab_size)):
        optional = name == "vocab_size" and value is None
        if not optional and (not isinstance(value, int) or isinstance(value, bool)):
            raise AcceptanceError(
                "commit",
                f"{name} is not valid",
                expected="an int" if name == "placeholder" else "an int, or None",
                got=repr(value),
                hint="pass the sampler's own: its id for 'no token', and its number of ids",
            )
