"""Prepared launches that recur, bounded in bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

from torch import Tensor

Launch = TypeVar("Launch")

#: Bytes of the host that one prepared launch takes, about: its arguments, and their packed copy.
LAUNCH_BYTES: Final = 8 << 10

#: Bytes that the launches of one executor may take: some thousand layouts of up to 256 rows.
MOST_BYTES: Final = 16 << 20


class LaunchCache(Generic[Launch]):
    """Prepared launches by key. The one that was added first goes first, and is prepared anew.

    Args:
        most_bytes: the bound.

    Attributes:
        most_bytes: as given.
        nbytes: bytes of the launches that are kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._kept: dict[Hashable, tuple[Launch, int]] = {}

    def __len__(self) -> int:
        """Count the launches that are kept."""
        return len(self._kept)

    def get(self, key: Hashable) -> Launch | None:
        """Return the launch of a key, or None."""
        found = self._kept.get(key)
        return None if found is None else found[0]

    def add(self, key: Hashable, launch: Launch, tensors: Iterable[Tensor]) -> None:
        """Keep a launch whose key has none, and drop others if there are too many bytes.

        Args:
            key: names the launch.
            launch: is kept whatever its size.
            tensors: kept until the launch is dropped; their bytes count as well.
        """
        nbytes = LAUNCH_BYTES + sum(tensor.nbytes for tensor in tensors)
        while self._kept and self.nbytes + nbytes > self.most_bytes:
            _, dropped = self._kept.pop(next(iter(self._kept)))
            self.nbytes -= dropped
        self._kept[key] = launch, nbytes
        self.nbytes += nbytes
