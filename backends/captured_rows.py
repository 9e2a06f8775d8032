"""Staging by reference while a CUDA graph of the forward is captured, with a self-check.

A graph's memory pool may reuse a tensor's memory inside the graph as soon as nothing holds
the tensor. ``CapturedRows`` holds every key and value until the capture ends; then they
stay intact through each replay, and the commit reads them where the forward left them. A
compiler that plans memory by itself does not ask who holds a tensor, so this is checked, not
assumed: the graph copies the rows as it produces them, and after a replay both must agree.
Where they do not, the copies take over; they are kept then, and are dropped otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import WindowStateError
from ..executor import StagedLayer
from ..formats import words
from ..layers import LayerRef


class CapturedRows:
    """The staged rows of one captured forward.

    Args:
        check: capture copies beside the references, so that ``verify`` has something to
            compare; without them the references are trusted.

    Attributes:
        by_reference: False once a check has failed and the copies are in use.
    """

    def __init__(self, *, check: bool = True) -> None:
        self.by_reference = True
        self._check = check
        self._held: dict[str, StagedLayer] = {}
        self._copies: dict[str, StagedLayer] = {}
        self._verified = not check

    def stage(self, ref: LayerRef, *parts: Tensor) -> StagedLayer:
        """Hold one layer's rows; call it inside the capture, where the rows are made.

        Args:
            ref: the layer.
            parts: one tensor per plane, ``[num_rows, *row_shape]``, in the cache's own dtype
                (``RowFormat.encode`` them in the graph if they are not).

        Raises:
            WindowStateError: the layer was staged before.
        """
        if ref.name in self._held:
            raise WindowStateError(
                "stage",
                f"layer {ref.name!r} is in this capture already",
                hint="make one CapturedRows for each captured graph",
            )
        held = tuple(
            part if part.dtype is plane.format.dtype else plane.format.encode(part)
            for plane, part in zip(ref.planes, parts, strict=True)
        )
        self._held[ref.name] = StagedLayer(ref, held)
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
