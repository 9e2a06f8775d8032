"""Promise 5: padding, order, single use; and every (state, event) pair of the table."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import CapacityError, KVTxnError, LayerError, SlotMappingError, WindowStateError
from ..window import Window
from ..window_transitions import WindowState
from .batches import Batch
from .caches import LayerSpec, build_cache
from .kit import Kit, KitBase
from .rig import SIMPLE, Rig

#: Three layers in two groups, for staging in every order.
ORDERED: Final = (LayerSpec(), LayerSpec("hnd", group="other", block_size=2, num_blocks=11))


_SAME_LENGTHS: Final[tuple[int | list[int], ...]] = (2, [2, 2])


class Discipline(KitBase):
    """Padding is never written, order does not matter, a window is used once."""

    def test_padding_anywhere(self, kit: Kit, policy: str) -> None:
        """Padding may be the first, last, a settled or a draft row, and is written nowhere.

        Neither to slot 0 nor to the last slot, which -1 might name.
        """
        rig = kit.rig(policy, [LayerSpec(), LayerSpec("latent"), LayerSpec("offsets")])
        last = rig.caches[0].num_slots - 1
        for pattern in itertools.product([True, False], repeat=4):
            batch = rig.batch(((1, 1), (1, 1)), padding=0.0, avoid=(0, last))
            _pad(batch, pattern)
            for counts in ([1, 1], [0, 1]):
                rig.commit(batch, counts, f"padding {pattern}, accepted {counts}")

    def test_padding_beside_the_edge_slots(self, kit: Kit, policy: str) -> None:
        """Slot 0 and the last slot have real rows: padding must not overwrite them."""
        rig = kit.rig(policy, SIMPLE)
        last = rig.caches[0].num_slots - 1
        for order in itertools.permutations([0, last, -1, -1]):
            batch = rig.batch(((0, 0), (2, 2)), padding=0.0)
            batch.slots["default"][:] = order
            for counts in ([2, 2], [0, 1], [0, 0]):
                rig.commit(batch, counts, f"slots {order}, accepted {counts}")

    def test_nothing_but_padding(self, rig: Rig) -> None:
        """A window of only padding runs to its end, and changes no byte and no counter of rows."""
        for accepted in ([0, 0], [3, 2]):
            rig.run(rig.batch(padding=1.0), accepted)
            rig.check("all padding")
        assert rig.rows() == (0, 0, 0)

    def test_any_order_of_layers(self, kit: Kit, policy: str) -> None:
        """Every permutation of three layers leaves the same bytes."""
        rig = kit.rig(policy, [*ORDERED, LayerSpec("latent", group="other", block_size=2)])
        for order in itertools.permutations(range(3)):
            batch = rig.batch()
            rig.commit(batch, [1, 2], f"order {order}", given=[1, 2], order=order)

    @pytest.mark.parametrize("kind", ["int64", "int32", "list"])
    def test_slots_given_late(self, kit: Kit, policy: str, kind: str) -> None:
        """Slots may come with the first layer of a group, in any order, and be repeated later.

        As a tensor of int64 or int32, or as a list.
        """
        rig = kit.rig(policy, [*ORDERED, *ORDERED])
        for order, draft_len in itertools.product([(0, 1, 2, 3), (3, 0, 1, 2)], _SAME_LENGTHS):
            batch = rig.batch(((1, 1), (2, 2)))
            slots = {group: _as(kind, rig, values) for group, values in batch.slots.items()}
            with rig.manager.window(draft_len, settled=1) as window:
                mapped: set[str] = set()
                for place, index in enumerate(order):
                    ref = rig.refs[index]
                    give = place % 2 == 1 or ref.group not in mapped
                    mapped.add(ref.group)
                    given = slots[ref.group] if give else None
                    rig.hand_in(window, batch, index, given)
                window.commit([1, 0])
            rig.expect_committed(batch, batch.kept([1, 0]))
            rig.check(f"order {order}")

    def test_the_slots_are_copied(self, kit: Kit, policy: str) -> None:
        """The caller may refill its slot buffer as soon as the window has begun."""
        rig = kit.rig(policy, SIMPLE)
        batch = rig.batch()
        slots = rig.slots(batch)["default"]
        with rig.manager.window(batch.draft_len, slots, batch.settled) as window:
            slots.fill_(-1)
            rig.stage(window, batch)
            window.commit([2, 2])
        rig.expect_committed(batch, batch.kept([2, 2]))
        rig.check("slots overwritten after begin")

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_a_window_is_single_use(self, kit: Kit, policy: str, end: str) -> None:
        """After its end every call raises WindowStateError and changes nothing.

        The next window starts clean.
        """
        rig = kit.rig(policy, SIMPLE)
        batch = rig.batch()
        window = rig.open(batch)
        rig.stage(window, batch)
        if end == "commit":
            window.commit(0)
        else:
            window.abort()
        before, rows = rig.truth_now(), rig.rows()
        query = torch.zeros(batch.num_rows, 2, 5, device=kit.device)
        table = torch.zeros(2, 1, dtype=torch.int64, device=kit.device)
        for call in (
            lambda: rig.stage(window, batch, [0]),
            lambda: window.commit(1),
            lambda: window.abort(),
            lambda: window.attend(rig.refs[0], query, table, rig.accepted([4, 3])),
        ):
            with pytest.raises(WindowStateError):
                call()
        assert not before.differences()
        assert rig.rows() == rows
        rig.truth = before
        rig.commit(batch, [1, 1], "the next window")

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_staged_tensors_are_let_go(self, kit: Kit, policy: str, end: str) -> None:
        """Once a window has ended, only the caller keeps its tensors in memory."""
        rig = kit.rig(policy, SIMPLE)
        for _ in range(2):  # a window like the one before may go another way
            batch = rig.batch()
            parts = itertools.chain.from_iterable(batch.tensors.values())
            memory = [StorageWeakRef(part.untyped_storage()) for part in parts]
            with rig.open(batch) as window:
                rig.stage(window, batch)
                window.commit(rig.accepted([1, 2])) if end == "commit" else window.abort()
            del batch, parts, window
            gc.collect()
            held = sum(not storage.expired() for storage in memory)
            assert held == 0, f"{held} of {len(memory)} staged tensors are held after {end}"

    def test_misuse_changes_nothing(self, kit: Kit, policy: str) -> None:
        """Each refused call raises the error of its cause, and the window goes on unchanged."""
        rig = kit.rig(policy, ORDERED)
        batch = rig.batch()
        with rig.open(batch) as window:
            rig.stage(window, batch, [0])
            rig.expect_staged(batch, [0])
            for name, (error, call) in _misuses(rig, window, batch).items():
                with pytest.raises(error):
                    call()
                rig.check(f"after misuse: {name}")
                assert window.state is WindowState.OPEN, name
                assert window.missing == (rig.refs[1].name,), name
            rig.stage(window, batch, [1])
            window.commit([3, 1])
        rig.expect_committed(batch, batch.kept([3, 1]))
        rig.check("after all misuse")

    def test_a_window_that_cannot_begin(self, kit: Kit, policy: str) -> None:
        """Slots or lengths that do not fit are refused, and nothing is written.

        The manager has no open window afterwards, and can begin another.
        """
        rig = kit.rig(policy, SIMPLE)
        limit = rig.caches[0].num_slots
        good = list(range(7))
        for error, draft_len, slots in (
            (SlotMappingError, [3, 2], [*range(6), limit]),
            (SlotMappingError, [3, 2], [*range(6), -2]),
            (SlotMappingError, [3, 2], [*range(6), 0]),
            (SlotMappingError, [3, 2], good[:-1]),
            (SlotMappingError, [3, -2], good),
            (SlotMappingError, 3, good),
            (SlotMappingError, [3, 2], torch.tensor(good, dtype=torch.float32)),
            (SlotMappingError, [3, 2], {"elsewhere": torch.tensor(good)}),
            (CapacityError, [64], [-1] * 65),
        ):
            with pytest.raises(error):
                rig.manager.window(draft_len, slots)
            assert rig.manager.current is None
        rig.check("nothing was begun")
        batch = rig.batch()
        rig.commit(batch, [1, 1], "the window after them")


def _pad(batch: Batch, pattern: tuple[bool, ...]) -> None:
    """Replace slots of a batch in place by -1, where ``pattern`` is True."""
    for slots in batch.slots.values():
        slots[:] = [-1 if pad else slot for pad, slot in zip(pattern, slots, strict=True)]


def _as(kind: str, rig: Rig, slots: list[int]) -> Any:
    """Return slots as a list, or as a tensor of the dtype named ``kind`` on the rig's device."""
    if kind == "list":
        return slots
    return torch.tensor(slots, dtype=getattr(torch, kind)).to(rig.device)


def _misuses(
    rig: Rig, window: Window, batch: Batch
) -> dict[str, tuple[type[KVTxnError], Callable[[], object]]]:
    """List calls that a window with one of two layers staged must refuse, with their errors."""
    second = rig.refs[1]
    key, value = batch.tensors[second.name]
    other = torch.flip(rig.slots(batch)[second.group], [0]) * 0 - 1
    stranger = build_cache(second.name, rig.caches[1].spec, rig.device, rig.rng).ref
    return {
        "staged twice": (LayerError, lambda: rig.stage(window, batch, [0])),
        "a stranger of the same name": (LayerError, lambda: window.stage(stranger, key, value)),
        "a row too few": (LayerError, lambda: window.stage(second, key[1:], value[1:])),
        "a head too many": (LayerError, lambda: window.stage(second, key.repeat(1, 2, 1), value)),
        "a wrong head size": (LayerError, lambda: window.stage(second, key, value[..., 1:])),
        "no value": (LayerError, lambda: window.stage(second, key)),
        "whole numbers": (LayerError, lambda: window.stage(second, key.long(), value.long())),
        "another mapping": (
            SlotMappingError,
            lambda: window.stage(second, key, value, slots=other),
        ),
        "commit too early": (WindowStateError, lambda: window.commit(0)),
        "a second window": (WindowStateError, lambda: rig.open(batch)),
        "attention before staging": (
            LayerError,
            lambda: window.attend(second, key.float(), other.view(1, -1), other[:1]),
        ),
    }
