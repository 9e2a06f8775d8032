"""``Glance``: a copy of a ledger's counters that goes to the host while the device works on."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from . import books as book
from .books import Books


@attrs.frozen(eq=False)
class Glance:
    """A ledger's counters and fingerprints, as they are when all that was launched so far is done.

    A copy from before ``Ledger.restart`` says nothing of the ledger any more: it has no violations
    to be taken, and no fingerprints.

    Attributes:
        counters: int64 ``[NUM_COUNTERS]`` on the host; valid once ``ready``.
        fingerprints: int64 ``[FINGERPRINTS, num_groups]`` on the host; valid once ``ready``.
        copied: on a GPU, the event after the copies; None elsewhere.
        restarts: the number of restarts of the ledger before the copy.
    """

    counters: Tensor
    fingerprints: Tensor
    copied: torch.cuda.Event | None
    restarts: int

    @classmethod
    def of(cls, books: Books, restarts: int) -> Glance:
        """Begin to copy a ledger's counters; on a GPU this does not wait for it.

        Args:
            books: the ledger's books.
            restarts: the number of restarts of the ledger so far.
        """
        if not books.counters.is_cuda:
            return cls(books.counters.clone(), books.fingerprints.clone(), None, restarts)
        counters = books.counters.to("cpu", non_blocking=True)  # torch pins the copies' memory
        prints = books.fingerprints.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(counters, prints, copied, restarts)

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
