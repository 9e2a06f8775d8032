"""The torch executor, which is the specification: every other executor leaves the same bytes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .. import attention, state_replay
from ..executor import AttentionArgs, Capabilities, Executor, StagedLayer, Txn
from ..row_io import LayerRows, read_layers, write_layers


class TorchExecutor(Executor):
    """Eager torch on any device; several small operations per layer."""

    name: ClassVar[str] = "torch"
    capabilities: ClassVar[Capabilities] = Capabilities(
        attention=True,
        capturable=True,
        kinds=frozenset({"paged", "ring", "recurrent", "replayed"}),
        trees=True,
    )

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return None: torch runs anywhere."""
        return None

    def save(self, txn: Txn, group: str) -> LayerRows:
        """Copy the group's rows in the slots of all rows.

        For padding those of slot 0, never put back.
        """
        return read_layers((ref for ref in self.layers if ref.group == group), txn.slots)

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        """Write the settled rows under ``deferred``, else all rows.

        None if a slot is out of range.
        """
        draft = txn.layout.is_draft
        now = ~draft if txn.waits else torch.ones_like(draft)
        slots = {layer.ref.group: txn.slots[layer.ref.group]}
        write_layers([layer.ref], {layer.ref.name: layer.rows}, slots, txn.permit(now))

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        """Put back the bytes under rejected rows, write kept rows that wait or move, and count.

        In this order, since a kept row and a rejected one may share a slot of a ring. Nothing is
        written if a slot is out of range.
        """
        kept = txn.layout.kept(accepted)
        if txn.policy == "undo":
            rejected = txn.permit(txn.layout.is_draft & ~kept)
            write_layers(self.layers, txn.saved, txn.slots, rejected)
        kept = txn.permit(kept)
        if txn.holds_rows:
            rows = {name: layer.rows for name, layer in txn.staged.items()}
            sources = None if txn.layout.tree is None else txn.sources(accepted)
            write_layers(self.moved, rows, txn.slots, kept, sources)
        txn.count(kept)

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        """Let the replayed layers' states take in settled and kept rows, by the reference."""
        state_replay.advance(txn, accepted)

    def restore(self, txn: Txn) -> None:
        """Put back the old bytes of every draft row whose group was saved.

        None if a slot is out of range.
        """
        saved = [ref for ref in self.layers if ref.name in txn.saved]
        write_layers(saved, txn.saved, txn.slots, txn.permit(txn.layout.is_draft))

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention_args: AttentionArgs
    ) -> Tensor:
        """Call the reference attention.

        It takes the window's own rows from ``layer`` where rows wait or may move, else from the
        cache.
        """
        fresh = layer.rows if txn.holds_rows else None
        return attention.attend(txn.layout, layer.ref.planes, fresh, query, attention_args)
