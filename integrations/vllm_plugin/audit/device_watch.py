"""``DeviceWatch``: a watch whose tensors are on a GPU; no call in a step waits for the device.

A KV connector is the exception: a step in which it stores or loads blocks waits for their hashes.

The device knows how many drafts were accepted, and so where each request stands, before the host
does. So positions and counts stay there, and the host looks at a copy of the counters that arrived
from an earlier step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ....audit import Key, RowGroup, StateGroup, Step
from ....audit.glance import Glance
from ..internals.audited import Arrival, Room, Rows
from ..internals.audited_states import States
from .published_blocks import PublishedBlocks
from .warming_up import launch_all
from .watch import Copies, Watch

#: Steps between two looks at the counters, which cost the host more than a step does; and where
#: an error is raised for what they say.
_LOOK_EVERY: Final = 32
_LOOK_SOON: Final = 8
#: Steps between two meetings of the ranks; see ``Watch``.
_MEET: Final = {"contain": 1, "raise": _LOOK_SOON}


class DeviceWatch(Watch):
    """A worker's ledger on a GPU, told by the runner's hooks.

    Args:
        groups: the watched KV-cache groups, by name, in vLLM's order.
        room: the runner's sizes, by which the ledger is sized.
        rank: the worker's rank, for the log.
        on_violation: as for ``Watch``.
        device: the runner's.
        drafts: the most drafts of a request in one step.
        states: as for ``Watch``.
        lines: as for ``Watch``.
        record: as for ``Watch``; it makes each step wait.
        key: as for ``Watch``.
    """

    begun = False
    meets: Mapping[str, int] = _MEET

    def __init__(
        self,
        groups: Mapping[str, RowGroup],
        room: Room,
        rank: int,
        on_violation: str,
        *,
        device: torch.device,
        drafts: int,
        states: Mapping[str, StateGroup] | None = None,
        lines: int | None = None,
        record: bool = False,
        key: Key | None = None,
    ) -> None:
        super().__init__(
            *(groups, room, rank, on_violation),
            states=states,
            record=record,
            key=key,
            device=device,
            lines=lines,
        )
        self._awaits = False  # a step was told whose samples are not known yet
        self._copies: dict[tuple[int, int], Tensor] = {}
        self._glance: Glance | None = None
        self._spare: Glance | None = None
        self._published: Final = PublishedBlocks(self.ledger, groups.values(), drafts)

    # -- the beginning -----------------------------------------------------------------------

    def begin(self) -> None:
        """Watch from now on: the engine has warmed up."""
        self.begun = True
        self._glance = None
        self.steps = self._ended = 0
        if self.peers is not None:
            self.peers.restart()
        self.found.take_report()  # of the warm-up
        self._try(self._begin)

    def _begin(self) -> None:
        """Forget the warm-up, and launch every pass once."""
        self.forget()
        self.warm_up()

    def pause(self) -> None:
        """Watch no longer, until ``begin``; wrong rows are not contained any more."""
        self.begun = False

    def forget(self) -> None:
        """Forget every row and request, as the caches' content is lost; keep what was counted."""
        self._known.clear()
        self._batch = self._unsealed = self.under_way = None
        self._awaits = False
        self.ledger.reset()
        if self.transfers is not None:
            self.transfers.restart()

    def warm_up(self) -> None:
        """Compile the kernels: launch every pass once, over a step of padding, and forget that.

        Call it before vLLM says that the engine has warmed up; a first request must not wait.
        """
        with torch.inference_mode():
            launch_all(self.ledger, self.groups, self.states, self.scrub, self._published)
        self.ledger.restart()

    # -- requests and blocks -----------------------------------------------------------------

    def _have_begun(self, lines: Sequence[int], arrivals: Sequence[Arrival]) -> None:
        """Note what is known of requests that came, given their lines."""
        self._published.begin(lines, arrivals)

    # -- a forward ---------------------------------------------------------------------------

    def step(
        self, read: Callable[[], tuple[Rows, States | None]], returning: Callable[[str], Arrival]
    ) -> None:
        """Note what a forward writes, and compare what it reads.

        Args:
            read: returns the batch's rows, and its states if any are watched. It is called here, so
                that all ranks count this step even if it raises on one of them.
            returning: describes a request, given its name, that the ledger has forgotten.
        """
        self.steps += 1
        if not self.stopped:
            try:
                rows, states = read()
                self._forward(rows, returning, states)
            except Exception as error:
                self.stop(error)
            self._try(self._look)

    def _forward(
        self, rows: Rows, returning: Callable[[str], Arrival], states: States | None
    ) -> None:
        step = self._step_of(rows, self._lines(rows.names, returning), states)
        if self.transfers is not None:
            self.transfers.forward()
        if self.scrub is not None:
            self.scrub.compare(step)
            self._unsealed = step, None, 0
        self.under_way, self._awaits = step, True
        self.ledger.write_and_check(step)
        if self._caches_prefixes:
            self._published.publish(step)

    def _form(self, rows: Rows, lines: Tensor, states: States | None) -> tuple[Step, Copies]:
        if not self.drafts_late:
            return Watch._form(self, rows, lines, states)
        # The drafter writes into the runner's buffers in the step.
        copies = {theirs: self._copy_of(theirs) for theirs in (rows.starts, *rows.slots.values())}
        slots = {name: copies[each] for name, each in rows.slots.items()}
        own = attrs.evolve(rows, starts=copies[rows.starts], slots=slots)
        return Watch._form(self, own, lines, states)[0], tuple(copies.items())

    def _copy_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor for copies of a runner's buffer; the same one for the same buffer."""
        key = tensor.data_ptr(), len(tensor)
        if key not in self._copies:
            with torch.inference_mode(False):
                self._copies[key] = torch.empty_like(tensor)
        return self._copies[key]

    def take_back(self) -> None:
        """Do what ``Watch.take_back`` says."""
        self._awaits = False
        Watch.take_back(self)

    def sampled_on_device(self, number: Tensor, ids: Tensor) -> None:
        """Tell the ledger which drafts were accepted, and which tokens come next.

        Args:
            number: int ``[num_requests]``, sampled tokens: the accepted drafts and the next token;
                0 for a request that has none.
            ids: int ``[num_requests, n]``, the accepted drafts, then the next token.
        """
        if self.stopped or not self._awaits:  # the step came before the first that is watched
            return
        self._awaits = False
        self.ledger.resolve(number, ids, besides=1)
        if self._unsealed is not None:
            self._unsealed = self._unsealed[0], number, 1
            if not self.drafts_late:
                self._seal()

    def came_out(self, logits: Tensor, rows: Tensor) -> None:
        """Look for a NaN on the device; of poisoned rows a report names one, else no slot."""
        if self._unsealed is not None and self.scrub is not None:
            self.scrub.trace(self._unsealed[0], logits.float(), rows)

    # -- what came of it ---------------------------------------------------------------------

    def _look(self) -> None:
        """Log what an earlier look saw, and look again now and then."""
        waits = self.transfers is not None and self.transfers.unsettled
        if self._glance is not None and self._glance.ready and not waits:
            glance, self._glance = self._glance, None
            self._spare = glance
            if self.ledger.findings.has_more(glance):
                self._say()
        every = _LOOK_EVERY if self.on_violation == "log" else _LOOK_SOON
        if self._glance is None and self.steps % every == 0:
            self._glance = self.ledger.glance(self._spare, prints=False)

    def _find(self) -> None:
        """Look for violations of the step that ends if they are contained: waits for the device."""
        if self.on_violation == "contain" and not self.stopped:
            self._take()

    def _take(self) -> None:
        """Take the violations of the step that ends."""
        self._settle_loads()
        self.found.take(self.on_violation)
