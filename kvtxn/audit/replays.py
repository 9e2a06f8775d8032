"""Steps of a ledger that CUDA graphs write and check when they are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from weakref import WeakSet

from torch import Tensor

from ..errors import WindowStateError
from . import arguments, checks
from .arguments import listed
from .books import Books
from .exchange import Exchange
from .graph_steps import LinesInPlace, NewBlocks, Repeat
from .passes import Passes
from .roster import Roster
from .step import Step


class Replays(Exchange):
    """The calls of a ledger around a graph that does ``write`` and ``check``.

    Args:
        books: the ledger's books.
        passes: the device code.
        roster: the admitted requests.
    """

    def __init__(self, books: Books, passes: Passes, roster: Roster) -> None:
        super().__init__(books, passes, roster)
        self._unread = False  # the last step that was written was not given to ``check`` yet
        self._checked: Step | None = None
        self._buffers: WeakSet[Step] = WeakSet()  # steps whose tensors were checked
        self._on_gpu: Final = self.device.type != "cpu"

    def launch_step(self, step: Step) -> None:
        """Launch what ``write`` and ``check`` launch, so that a CUDA graph captures it.

        A replay writes and checks what the step's tensors hold by then; a step all of whose lines
        are -1 is a step of nobody's. Call this once before it is captured. The step has to be kept
        for as long as the graph is replayed. Nobody else's calls are in between, and the ledger is
        told of each replay by ``replayed``.

        Raises:
            ConfigError: as in ``write``.
        """
        self.require("launch_step", step)
        self.graphs.launch(step)

    def replayed(self, step: Step | None) -> None:
        """Begin a step whose ``write`` and ``check`` a replay of a CUDA graph does.

        Call it before the replay.

        Args:
            step: has the rows that the replay finds in the tensors that were captured, in tensors
                of its own or in the same ones. Requests that the captured step has beyond these are
                padding. None: the replay finds padding alone.

        Raises:
            ConfigError: as in ``write``.
        """
        if step is not None:
            self.require("replayed", step)
            self._open, self._unread = step, False
            self._later.clear()
        self.graphs.replayed(step)

    def can_wait(self, accepted: Tensor, sampled: Tensor) -> bool:
        """Tell whether the outcome of the last step can wait until the next one is known.

        It is told by the call of ``repeat`` then or, before anything else, by
        ``resolve_waiting``. Ask when the step's launches or replay were made.

        Args:
            accepted: as for ``resolve``.
            sampled: likewise.
        """
        step = self._waits(accepted, sampled)
        return step is not None and self.graphs.can_wait(step, accepted, sampled)

    def _waits(self, accepted: object, sampled: object) -> Step | None:
        """Return the step that these end, if nothing but the passes speaks against waiting."""
        if self._later or self._unread or self._bytes is not None:
            return None
        given = isinstance(accepted, Tensor) and isinstance(sampled, Tensor)
        return self._open if given else None

    def resolve_waiting(self, accepted: Tensor, sampled: Tensor, besides: int) -> None:
        """End the last step with an outcome that has waited, as ``resolve`` does.

        Raises:
            WindowStateError: ``can_wait`` did not say so, or something else came first. The step's
                tensors may be another step's by now, so that the outcome cannot be told any more.
        """
        besides = arguments.tokens_besides("resolve_waiting", besides)
        step, told = self._waits(accepted, sampled), False
        if step is not None:
            given = accepted.contiguous(), sampled.contiguous()
            told = self.graphs.resolve(step, *given, besides)
        if not told:
            got = f"{type(accepted).__name__} and {type(sampled).__name__}"
            if step is not None:
                got = f"{accepted.dtype} and {sampled.dtype}"
            raise WindowStateError(
                "resolve_waiting",
                "an outcome has waited that cannot be told later",
                expected="an outcome of the last step, told before anything else",
                got=f"{got}, or one of another step, or one that was told too late",
                hint="call resolve at once where can_wait says False",
            )
        self._open = None

    def repeat(
        self,
        step: Step,
        accepted: Tensor,
        sampled: Tensor,
        besides: int,
        groups: Sequence[str | None],
    ) -> Repeat | None:
        """Return a call that ends the last step and begins one of the same layout.

        Most steps of an engine have the requests and the numbers of drafts of the step before, and
        are written by the same graph. The call stands for ``resolve``, ``change`` and ``replayed``:
        three calls cost the host more than the work in them, as other code has run for milliseconds
        since the last one.

        Args:
            step: the last step, as it was given to ``replayed``; its outcome can wait.
            accepted: as for ``resolve``: the counts that the call is given first, or such ones.
            sampled: likewise, the ids.
            besides: as for ``resolve``.
            groups: names of the groups by which the call is given blocks; None for one that the
                ledger does not know.

        Returns:
            The call, ``Repeat.same``. It is given an outcome of that form, and, for each request
            that gets blocks, its new ones by group. Where it is False the three calls have to be
            made. After True the outcome of the step that begins can wait as well.
            None if there is no such call for this step.

        Raises:
            ConfigError: a group is unknown.
        """
        besides = arguments.tokens_besides("repeat", besides)
        groups = listed("repeat", "groups", groups, "a list of names")
        if step is not self._open or not self.can_wait(accepted, sampled):
            return None
        places = [
            None if name is None else checks.place_of("repeat", self.books, name) for name in groups
        ]
        return self.graphs.repeat(accepted, sampled, besides, places)

    def repeat_fewer(
        self,
        repeat: Repeat,
        step: Step,
        accepted: Tensor,
        sampled: Tensor,
        new_blocks: NewBlocks,
        lines: LinesInPlace,
    ) -> bool:
        """End the last step, and begin one that lacks some of its requests, in one call.

        Args:
            repeat: what ``repeat`` returned.
            step: the step that begins, in the buffers that the graph reads; it was given to
                ``replayed`` before.
            accepted: as for ``resolve``.
            sampled: likewise.
            new_blocks: for each request that gets blocks its new ones, by the groups of ``repeat``.
            lines: the tensor in which the graph finds its requests' lines, and these lines.

        Returns:
            As for the call of ``repeat``.

        Raises:
            ConfigError: the step does not fit the ledger.
        """
        self.require("repeat_fewer", step)
        if not repeat.fewer(step, accepted, sampled, new_blocks, lines):
            return False
        self._open = step
        return True

    def require(self, operation: str, step: Step, *, after: bool = False) -> None:
        """Check a step: its tensors when it is first given, and on a CPU their values each time.

        Args:
            operation: the call that was given the step, for the message.
            step: the step.
            after: its forward is done, so its requests may have been released.

        Raises:
            ConfigError: the step does not fit the ledger.
        """
        if step is self._checked is not None and (after or self._on_gpu):
            return
        known = isinstance(step, Step) and step in self._buffers
        if not known or not (self._on_gpu or self.input.takes(step, released=after)):
            checks.check_step(operation, self.books, step, released=after)
            self._buffers.add(step)
        self._checked = step
