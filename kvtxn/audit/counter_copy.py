"""``CounterCopy``: a copy of a ledger's counters, made while the device works on."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from ..host_values import host_memory
from . import books as book
from .books import Books


@attrs.define(eq=False)
class CounterCopy:
    """A ledger's counters and fingerprints, as they are when all that was launched so far is done.

    A copy from before ``Ledger.restart`` says nothing of the ledger any more: it has no violations
    to be taken, and no fingerprints.

    Attributes:
        counters: int64 ``[NUM_COUNTERS]`` on the host; valid once ``ready``.
        fingerprints: int64 ``[FINGERPRINTS, num_groups]`` on the host; valid once ``ready``. None
            if they were not asked for.
        copied: on a GPU, the event after the copies; None elsewhere.
        restarts: the number of restarts of the ledger before the copy.
    """

    counters: Tensor
    fingerprints: Tensor | None
    copied: torch.cuda.Event | None
    restarts: int

    @classmethod
    def of(cls, books: Books, restarts: int, *, prints: bool = True) -> CounterCopy:
        """Begin to copy a ledger's counters to new host memory; on a GPU this does not wait for it.

        Args:
            books: the ledger's books.
            restarts: the number of restarts of the ledger so far.
            prints: copy the fingerprints, too.
        """
        on_gpu = books.counters.is_cuda
        own = host_memory(books.fingerprints) if prints else None
        event = torch.cuda.Event() if on_gpu else None
        copy = cls(host_memory(books.counters), own, event, restarts)
        copy.renew(books, restarts)
        return copy

    def renew(self, books: Books, restarts: int) -> None:
        """Begin to copy the same anew, into the same memory; the copy before must have arrived.

        Args:
            books: as for ``of``.
            restarts: as for ``of``.
        """
        self.restarts = restarts
        self.counters.copy_(books.counters, non_blocking=True)
        if self.fingerprints is not None:
            self.fingerprints.copy_(books.fingerprints, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    @property
    def ready(self) -> bool:
        """True once the copies have arrived."""
        return self.copied is None or bool(self.copied.query())

    def wait(self) -> None:
        """Wait until the copies have arrived."""
        if self.copied is not None:
            self.copied.synchronize()

    @property
    def found(self) -> int:
        """Number of violations found until then; read it once ``ready``."""
        return int(self.counters[book.FOUND])
