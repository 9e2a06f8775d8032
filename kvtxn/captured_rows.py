"""``CapturedRows``: hold the rows that a forward makes while one CUDA graph is captured.

A graph's memory pool may reuse a tensor's memory inside the graph as soon as nothing holds
the tensor. ``CapturedRows`` holds every key and value until the capture ends; then they
stay intact through each replay, and a commit reads them where the forward left them. A
compiler that plans memory by itself does not ask who holds a tensor, so this is checked, not
assumed: the graph copies the rows as it produces them, and after a replay ``verify`` compares the
two. Where they differ, the copies are used instead.

The rows become windows by ``manager.captured_windows(slots, captured.rows, position)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compile_guard import outside_graphs
from .errors import ConfigError, LayerError, WindowStateError
from .formats import words
from .layers import LayerRef
from .row_io import LayerRows
from .stage_checks import check_dense, in_row_shape, stored_rows


class CapturedRows:
    """The rows of one captured forward.

    Args:
        check: True to capture a copy of every row as well, so that ``verify`` can compare the
            two; False to trust the references.

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
        self._held: dict[str, tuple[Tensor, ...]] = {}
        self._copies: dict[str, tuple[Tensor, ...]] = {}
        self._verified = not check

    def stage(self, ref: LayerRef, *parts: Tensor) -> tuple[Tensor, ...]:
        """Hold one layer's rows; call it inside the capture, where the rows are made.

        With ``check`` they are copied as well.

        Args:
            ref: the layer.
            parts: one tensor per plane, ``[num_rows, *row_shape]``, or, of a replayed layer, per
                part of ``LayerRef.given``. Tensors in the cache's own dtype are held as they are;
                others are quantised here, in the graph. Scales that lie beside the rows come last;
                leave them out if the rows are numbers, not codes.

        Returns:
            The tensors that are held, one per part of ``LayerRef.kept``, in its format.

        Raises:
            WindowStateError: the layer was staged before.
            LayerError: ``parts`` is not one dense tensor per part.
        """
        if torch.compiler.is_compiling():
            return outside_graphs(CapturedRows.stage)(self, ref, *parts)
        if not isinstance(ref, LayerRef):
            raise LayerError("stage", f"{ref!r} is not a LayerRef", got=type(ref).__name__)
        if ref.name in self._held:
            raise WindowStateError(
                "stage",
                f"layer {ref.name!r} is in this capture already",
                hint="make one CapturedRows for each captured graph",
            )
        scales = [None for part in ref.given[len(parts) :] if part.is_scale]
        if len(parts) + len(scales) != len(ref.given) or not all(
            isinstance(part, Tensor) for part in parts
        ):
            raise LayerError(
                "stage",
                f"layer {ref.name!r} is captured with one tensor per plane",
                expected=f"{len(ref.given)} tensors: {', '.join(p.part for p in ref.given)}",
                got=[type(part).__name__ for part in parts],
                hint="pass one tensor for each part listed, with every row of the forward",
            )
        shaped = []
        for given, part in zip(ref.given, parts, strict=False):
            check_dense(ref, given.part, part)
            shaped.append(in_row_shape(given, part))
        held = self._held[ref.name] = stored_rows(ref, (*shaped, *scales))
        if self._check:
            self._copies[ref.name] = tuple(part.clone() for part in held)
        return held

    def verify(self) -> list[str]:
        """Compare references and copies after a replay. Waits for the device; call it once.

        Call it after the capture and one replay on real inputs. Afterwards ``rows`` has the
        references if every one of them was intact, else the copies.

        Returns:
            Names of the layers whose rows another tensor had overwritten by the end of the graph.
        """
        overwritten = [
            name
            for name, copies in self._copies.items()
            if not all(
                torch.equal(words(held), words(copy))
                for held, copy in zip(self._held[name], copies, strict=True)
            )
        ]
        self.by_reference = not overwritten
        self._verified = True
        return overwritten

    @property
    def rows(self) -> LayerRows:
        """The rows that a commit reads after a replay, for ``captured_windows(slots, rows)``.

        Raises:
            WindowStateError: ``verify`` was not called yet.
        """
        if not self._verified:
            raise WindowStateError(
                "rows",
                "rows captured by reference have not been verified",
                hint="replay the graph once and call verify()",
            )
        return self._held if self.by_reference else self._copies
