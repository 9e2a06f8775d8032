"""HiCache: rows and states of the radix tree in the host's memory, and their copies both ways.

A slot of the host's is one more of its group, behind those of the device. What is copied keeps its
identity. SGLang hands the slots of each copy to one engine of transfers; the ledger hears of the
copies there. SGLang runs a copy to the host after the forwards that are launched already, and a
copy to the device before the next forward; the ledger hears of both in this order.

Of what a storage brings into a slot of the host's nobody knows the identity. Once it is copied to
the device, it is taken for what the request that comes with it should have there, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ....audit import Ledger
from .pools import ROWS, is_of
from .protocols import HiCacheController, L2Transfer
from .steps import ForwardStep

#: Hears which slots were copied; takes what ``Ledger.carry`` does.
Carried = Callable[[Mapping[str, tuple[Tensor, Tensor]]], None]


@attrs.frozen(eq=False)
class _Pool:
    """The slots of one group in the host's memory.

    Attributes:
        group: the group's name.
        first: the number of the host's slot 0 in the group.
        known: bool ``[slots]``; False for one that a storage may have filled.
    """

    group: str
    first: int
    known: Tensor


class HostSlots:
    """Hears which rows and states HiCache copies: it wraps the controller's calls for copies.

    Attributes of the pools and of the transfer engine are replaced; they call SGLang's own.

    Args:
        controller: SGLang's.
        groups: by name of the group, the pool of its slots on the device, and their number.
        carried: hears of each copy.
        tell: calls a function; an error of it ends the audit, not the engine.
    """

    def __init__(
        self,
        controller: HiCacheController,
        groups: Mapping[str, tuple[object, int]],
        carried: Carried,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        self._tell: Final = tell
        self._controller: Final = controller
        self._carried: Final = carried
        self._pools: Final[list[tuple[object, _Pool]]] = []
        for entry in controller.mem_pool_host.entries:
            for name, (pool, number) in groups.items():
                if is_of(entry.device_pool, pool):
                    known = torch.ones(int(entry.host_pool.size), dtype=torch.bool)
                    own = _Pool(name, number, known)
                    self._pools.append((entry.host_pool, own))
                    entry.host_pool.alloc = partial(self._allocates, entry.host_pool.alloc, own)
        #: Slots of the device with rows of unknown identity, which no request came with yet.
        self._unknown: Final[set[int]] = set()
        engine = controller.l2_transfer_engine
        engine.submit_device_to_host = partial(self._writes, engine.submit_device_to_host)
        engine.submit_host_to_device = partial(self._loads, engine.submit_host_to_device)

    def forget(self) -> None:
        """Hear that all caches were emptied: no slot has rows of unknown identity."""
        self._unknown.clear()
        for _, pool in self._pools:
            pool.known.fill_(True)

    def _allocates(
        self, allocate: Callable[..., Tensor | None], pool: _Pool, *args: Any, **named: Any
    ) -> Tensor | None:
        """Let a pool of the host's give slots away, and return them, or None if there are too few.

        With a storage their next rows may be the storage's, so their identity is not known.
        """
        found = allocate(*args, **named)
        if found is not None and self._controller.enable_storage:
            pool.known[found] = False
        return found

    def _writes(self, submit: Callable[..., object], transfers: Sequence[L2Transfer]) -> object:
        """Let slots be copied to the host, then note it; return what SGLang does."""
        done = submit(transfers)
        self._tell(lambda: self._note_writes(transfers))
        return done

    def _note_writes(self, transfers: Sequence[L2Transfer]) -> None:
        """Tell of each watched copy to the host; the identity of its rows there is known now."""
        for transfer, pool in self._watched(transfers):
            if self._controller.enable_storage:
                pool.known[transfer.host_indices.cpu()] = True
            device, host = self._slots(transfer, pool)
            self._carried({pool.group: (device, host)})

    def _loads(
        self, submit: Callable[..., object], transfers: Sequence[L2Transfer], **named: Any
    ) -> object:
        """Note that slots are copied to the device, then let them be; return what SGLang does."""
        self._tell(lambda: self._note_loads(transfers))
        return submit(transfers, **named)

    def _note_loads(self, transfers: Sequence[L2Transfer]) -> None:
        """Tell of each watched copy to the device, and note rows whose identity is not known."""
        for transfer, pool in self._watched(transfers):
            device, host = self._slots(transfer, pool)
            self._carried({pool.group: (host, device)})
            if self._controller.enable_storage and pool.group == ROWS:
                unknown = ~pool.known[transfer.host_indices.cpu()]
                self._unknown.difference_update(device.tolist())
                self._unknown.update(device.cpu()[unknown].tolist())

    def _watched(self, transfers: Sequence[L2Transfer]) -> list[tuple[L2Transfer, _Pool]]:
        """Return each transfer of a watched group with its pool; none of a drafter's rows."""
        return [
            (transfer, pool)
            for transfer in transfers
            for host, pool in self._pools
            if host is transfer.host_pool and not transfer.is_draft
        ]

    @staticmethod
    def _slots(transfer: L2Transfer, pool: _Pool) -> tuple[Tensor, Tensor]:
        """Return the slots of a transfer in the group, on the device and of the host."""
        return transfer.device_indices.long(), transfer.host_indices.long() + pool.first

    def arrived(self, ledger: Ledger, step: ForwardStep, table: Tensor) -> None:
        """Import rows of unknown identity as those of the requests that come with them, once.

        Nothing is done for a step without prompts.

        Args:
            ledger: knows the requests.
            step: the forward that comes next.
            table: ``req_to_token``.
        """
        before = step.batch.extend_prefix_lens_cpu
        if not self._unknown or before is None:
            return
        for req, end in zip(step.requests, before, strict=True):
            line = table[req.kv.req_pool_idx, :end].tolist()
            here = [at for at, slot in enumerate(line) if slot in self._unknown]
            breaks = [at for at, (one, other) in enumerate(pairwise(here), 1) if other > one + 1]
            for first, last in pairwise([0, *breaks, len(here)] if here else ()):
                ledger.import_rows(req.rid, ROWS, line, here[first], here[last - 1] + 1)
            self._unknown.difference_update(line[at] for at in here)
