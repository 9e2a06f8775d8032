"""``WatchedOutputs``: looks for a NaN in what a step computed, on a CPU."""

from __future__ import annotations

from torch import Tensor

from ....audit import Scrub, Step


class WatchedOutputs:
    """A base of watches that compare bytes; the attributes are those of ``Watch``."""

    scrub: Scrub | None
    on_violation: str
    stopped: bool
    _unsealed: tuple[Step, Tensor | None, int] | None

    def came_out(self, logits: Tensor, rows: Tensor) -> None:
        """Look for a NaN in a step's outputs before they are sampled, and for where it came from.

        Where wrong rows are contained, rows with a NaN are filled with zeros: the attention of a
        CPU would hand the NaN to whoever gets the block next.

        Args:
            logits: float ``[n, vocabulary]``.
            rows: int ``[n]``, the row of the step that each output belongs to.
        """
        if self.stopped or self.scrub is None or self._unsealed is None:
            return
        most = float(logits.amax()) if logits.numel() else 0.0
        if most != most:  # a NaN is the largest, and not equal to itself
            clear = self.on_violation == "contain"
            self.scrub.locate(self._unsealed[0], logits.amax(1, keepdim=True), rows, clear=clear)
            self._say()

    def _say(self) -> None:
        """Log the violations that were found since the last call."""
        raise NotImplementedError
