"""``FollowedWindows``: lets a ledger follow the windows of its steps, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from ....audit import Ledger
from ....audit.following import Following
from ....manager import TransactionManager


def no_manager() -> TransactionManager | None:
    """Return None: no windows end the steps."""
    return None


class FollowedWindows:
    """The windows that may end a ledger's steps.

    The ledger follows them from the beginning of a step that it is told of until the step's
    outcome. So windows of other steps, such as those of a warm-up, are left alone.

    Args:
        ledger: the ledger.

    Attributes:
        find: returns the manager of the windows over the present caches; None: no window ends a
            step.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.find: Callable[[], TransactionManager | None] = no_manager
        self._ledger: Final = ledger
        self._following: Following | None = None

    def __bool__(self) -> bool:
        """Tell whether a window may end the step under way."""
        return self._following is not None

    def begin(self) -> None:
        """Follow the windows of the manager that ``find`` returns, for the ledger's next step.

        Windows that were followed before are left. Without a manager none are followed.

        Raises:
            ConfigError: the manager's groups are not the ledger's; see ``Ledger.follow``.
        """
        self.remove()
        manager = self.find()
        if manager is not None:
            self._following = self._ledger.follow(manager)

    def commit_nears(self, number: Tensor, ids: Tensor) -> None:
        """Tell the ledger the tokens of the step, before a window ends it; nothing if none may.

        Args:
            number: as for ``Watch.sampled``.
            ids: as for ``Watch.sampled``.
        """
        if self._following is not None:
            column = torch.arange(ids.shape[1], device=ids.device)
            self._following.sampled(ids.masked_fill(column >= number[:, None], -1))

    def end(self) -> Mapping[str, Tensor] | None:
        """Follow no more windows, and tell whether one has ended the step.

        Returns:
            By group, bool ``[num_requests]``, the requests whose states the window has written;
            None if no window has ended the step.

        Raises:
            KVTxnError: a window has ended that was not the step's; see ``Following.ended``.
        """
        left = None if self._following is None else self._following.ended()
        self.remove()
        return left

    def remove(self) -> None:
        """Follow no more windows; nothing if none are followed."""
        following, self._following = self._following, None
        if following is not None:
            following.remove()
