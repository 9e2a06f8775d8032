"""Broken executors that save, restore or settle wrongly; see ``mutants``."""

import torch
from kvtxn.backends.torch_executor import TorchExecutor
from torch import Tensor

from kvtxn.executor import StagedLayer, Txn
from kvtxn.row_io import LayerRows, write_layers


class RestoresTooMuch(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, accepted)
        if txn.policy == "undo":
            write_layers(self.layers, txn.saved, txn.slots, ~txn.kept(accepted))


class RestoresNothing(TorchExecutor):
    def restore(self, txn: Txn) -> None:
        pass


class RestoresWhatWasStaged(TorchExecutor):
    def restore(self, txn: Txn) -> None:
        saved = [ref for ref in self.layers if ref.name in {*txn.saved} & {*txn.staged}]
        write_layers(saved, txn.saved, txn.slots, txn.permit(txn.layout.is_draft))


class RestoresSettledRows(TorchExecutor):
    def restore(self, txn: Txn) -> None:
        saved = [ref for ref in self.layers if ref.name in txn.saved]
        write_layers(saved, txn.saved, txn.slots, torch.ones_like(txn.layout.is_draft))


class RestoresOutOfRange(TorchExecutor):
    """Puts rows back though a slot has no place."""

    def restore(self, txn: Txn) -> None:
        saved = [ref for ref in self.layers if ref.name in txn.saved]
        write_layers(saved, txn.saved, txn.slots, txn.layout.is_draft)


class StagesOutOfRange(TorchExecutor):
    """Writes the rows that have a place though another one has none."""

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        draft = txn.layout.is_draft
        now = ~draft if txn.waits else torch.ones_like(draft)
        write_layers([layer.ref], {layer.ref.name: layer.rows}, txn.slots, now)


class SettlesOutOfRange(TorchExecutor):
    """The same, for rows that are written at staging under ``deferred`` alone."""

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        if txn.waits:
            rows = {layer.ref.name: layer.rows}
            write_layers([layer.ref], rows, txn.slots, ~txn.layout.is_draft)
        else:
            super().stage(txn, layer)


class SavesNothing(TorchExecutor):
    def save(self, txn: Txn, group: str) -> LayerRows:
        saved = super().save(txn, group)
        return {name: tuple(torch.zeros_like(p) for p in parts) for name, parts in saved.items()}


class SavesAView(TorchExecutor):
    """Takes a slice for a copy where a window is one row."""

    def save(self, txn: Txn, group: str) -> LayerRows:
        saved, slots = dict(super().save(txn, group)), txn.slots[group]
        if slots.numel() == 1:
            for ref in self.layers:
                if ref.group == group:
                    places = [plane.index(slots.clamp(0)) for plane in ref.planes]
                    saved[ref.name] = tuple(
                        plane.cells[int(block), int(offset)].unsqueeze(0)
                        for plane, (block, offset) in zip(ref.planes, places, strict=True)
                    )
        return saved


class SavesNoNegativeZero(TorchExecutor):
    """Saved rows pass through arithmetic, after which a zero has lost its sign."""

    def save(self, txn: Txn, group: str) -> LayerRows:
        saved = super().save(txn, group)
        signs = {torch.int16: -(2**15), torch.int32: -(2**31)}
        return {
            name: tuple(p.masked_fill(p == signs.get(p.dtype, 256), 0) for p in parts)
            for name, parts in saved.items()
        }


class SavesSlotsOnce(TorchExecutor):
    """Saves the rows of the same slots once; a later window gets the first copies."""

    def save(self, txn: Txn, group: str) -> LayerRows:
        known = self.__dict__.setdefault("known", {})
        key = (group, *txn.slots[group].tolist())
        return known.setdefault(key, super().save(txn, group))


class SavesKnownSlotsAlone(TorchExecutor):
    """Raises where a slot lies outside its cache, which only a device knows."""

    def save(self, txn: Txn, group: str) -> LayerRows:
        slots = txn.slots[group].clamp(min=0)
        for ref in self.layers:
            if ref.group == group:
                ref.planes[0].cells[ref.planes[0].index(slots)]
        return super().save(txn, group)


class SettlesTwice(TorchExecutor):
    """Writes the settled rows again at commit, over whatever is there by then."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if txn.policy == "deferred":
            rows = {name: layer.rows for name, layer in txn.staged.items()}
            write_layers(self.layers, rows, txn.slots, txn.permit(~txn.layout.is_draft))
        super().commit(txn, accepted)


SAVING_CAUGHT_BY: dict[type[TorchExecutor], str] = {
    RestoresTooMuch: "test_every_shape",
    RestoresNothing: "test_abort_at_any_point",
    RestoresWhatWasStaged: "test_rows_written_by_the_caller",
    RestoresSettledRows: "test_abort_at_any_point",
    RestoresOutOfRange: "test_an_abort_that_the_device_refuses",
    StagesOutOfRange: "test_staging_that_the_device_refuses",
    SettlesOutOfRange: "test_staging_that_the_device_refuses",
    SavesNothing: "test_every_shape",
    SavesAView: "test_rows_side_by_side",
    SavesNoNegativeZero: "test_every_layout_and_format",
    SavesSlotsOnce: "test_rows_side_by_side",
    SavesKnownSlotsAlone: "test_an_abort_that_the_device_refuses",
    SettlesTwice: "test_settled_rows_are_outside_commit",
}
