"""Executors that are wrong about rings and states, and right about everything else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from unittest.mock import patch

import attrs
import torch
from kvtxn.backends.torch_executor import TorchExecutor
from torch import Tensor

from kvtxn.executor import AttentionArgs, Capabilities, StagedLayer, Txn
from kvtxn.lifecycle import Lifecycle
from kvtxn.row_io import last_writers, write_layers
from kvtxn.window_transitions import Event


class _WritesKept(TorchExecutor):
    """A deferred commit of the rows that ``chosen`` names; the rest is sound."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if txn.policy != "deferred":
            super().commit(txn, accepted)
            return
        rows = {name: layer.rows for name, layer in txn.staged.items()}
        for ref in self.layers:
            slots = {ref.group: txn.slots[ref.group]}
            kept = txn.kept(accepted)
            if ref.kind.overwrites:
                kept = self.chosen(txn, slots[ref.group], kept)
            write_layers([ref], rows, slots, kept)
        txn.count(txn.kept(accepted))

    def chosen(self, txn: Txn, slots: Tensor, kept: Tensor) -> Tensor:
        raise NotImplementedError


class LetsTheFirstRowWin(_WritesKept):
    def chosen(self, txn, slots, kept):
        return last_writers(slots.flip(0), kept.flip(0)).flip(0)


class LetsRejectedRowsEvict(_WritesKept):
    """Decides which row is the last of its slot before it looks at what was kept."""

    def chosen(self, txn, slots, kept):
        return kept & last_writers(slots, txn.layout.is_draft)


class LooksOneLapAhead(_WritesKept):
    """Asks the next row of a slot alone whether it is kept, and writes the last rows first."""

    def chosen(self, txn, slots, kept):
        for row, slot in enumerate(slots.tolist()):
            later = [r for r in range(row + 1, len(slots)) if slots[r] == slot]
            ahead = kept[later[:1]].any()
            if kept[row] and not ahead and kept[later].any():
                return kept & ~(slots == slot) | (torch.arange(len(slots)) == row)
        return last_writers(slots, kept)


class SelectsOneStateTooFar(_WritesKept):
    def chosen(self, txn, slots, kept):
        more = kept.clone()
        more[1:] |= kept[:-1] & txn.layout.is_draft[1:]
        return more


class WritesDraftsOfStates(TorchExecutor):
    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        everything = torch.ones_like(txn.layout.is_draft)
        chosen = everything if layer.ref.states else ~txn.layout.is_draft
        if txn.policy != "deferred":
            chosen = everything
        slots = {layer.ref.group: txn.slots[layer.ref.group]}
        write_layers([layer.ref], {layer.ref.name: layer.rows}, slots, txn.permit(chosen))


class SettlesStatesEarly(TorchExecutor):
    """Writes the settled rows of states with the next layer that is staged: they are known good."""

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        for each in (layer, *(each for each in txn.staged.values() if each.ref.states)):
            super().stage(txn, each)


class CountsEveryState(TorchExecutor):
    """Counts the rows of a state, although one of them is written."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        before = txn.counters.clone()
        super().commit(txn, accepted)
        for line, slots in enumerate(txn.slots.values(), start=1):
            drafts = (slots >= 0) & txn.layout.is_draft
            kept = int((drafts & txn.kept(accepted)).sum())
            staged = int(drafts.sum())
            numbers = torch.tensor([staged, kept, staged - kept, 0])
            txn.counters[line] = before[line] + numbers


class TakesRingsForPages(TorchExecutor):
    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention_args: AttentionArgs
    ) -> Tensor:
        return super().attend(txn, layer, query, attrs.evolve(attention_args, ring_size=None))


class DeniesRings(TorchExecutor):
    capabilities: ClassVar[Capabilities] = attrs.evolve(
        TorchExecutor.capabilities, kinds=frozenset({"paged", "recurrent"})
    )


class DeniesStates(TorchExecutor):
    capabilities: ClassVar[Capabilities] = attrs.evolve(
        TorchExecutor.capabilities, kinds=frozenset({"paged", "ring"})
    )


#: The defect, and the test of the kit that must go red for it.
CAUGHT: dict[type[TorchExecutor], str] = {
    LetsTheFirstRowWin: "test_every_shape",
    LetsRejectedRowsEvict: "test_wrap_around",
    LooksOneLapAhead: "test_wrap_around",
    SelectsOneStateTooFar: "test_every_shape",
    WritesDraftsOfStates: "test_every_shape",
    SettlesStatesEarly: "test_abort_at_any_point",
    CountsEveryState: "test_bytes_follow_from_rows",
    TakesRingsForPages: "test_attention_to_a_ring",
    DeniesRings: "test_denied_kinds",
    DeniesStates: "test_denied_kinds",
}


@contextmanager
def settles_states_at_an_abort() -> Iterator[None]:
    """An abort writes the settled rows of the states that were staged, and of no other."""
    finish = Lifecycle.finish

    def settling(self: Lifecycle, event: Event, accepted=None) -> None:
        if event is Event.ABORT and self.txn is not None:
            staged = [layer for layer in self.txn.staged.values() if layer.ref.states]
            rows = {layer.ref.name: layer.rows for layer in staged}
            settled = self.txn.permit(~self.txn.layout.is_draft)
            write_layers([layer.ref for layer in staged], rows, self.txn.slots, settled)
        finish(self, event, accepted)

    with patch.object(Lifecycle, "finish", settling):
        yield


#: Defects of the library, whose executor is sound, and the test that must go red.
CORE_CAUGHT_BY = {settles_states_at_an_abort: "test_abort_at_any_point"}

#: Defects that random histories have to find by themselves.
BY_CHANCE = (LetsTheFirstRowWin, LetsRejectedRowsEvict, WritesDraftsOfStates)
