"""The parts of kvtxn that take part in an engine's steps, and the one list that orders them.

Each engine has an adapter that overrides every method of the engine's runner once, and tells the
list what happens. Windows, states and the ledger are parts: they hear it, each by itself, and none
of them knows another one. The list alone joins the ledger with the windows before it, see
``Part.follow_windows``.

A step goes ``step_begins``, ``requests_changed``, ``planned``, ``forward_begins``,
``forward_ended``, ``sampling_begins``, ``sampled``, ``step_ended``. A step without a forward, such
as one in which requests only end, leaves out what comes after ``requests_changed``, but for
``forward_ended`` where an engine has one call for both. ``forward_begins`` is not told where the
forward may be a replayed graph, which no call of the engine's begins. An adapter tells the other
events of a step where its engine has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Final, ParamSpec, TypeVar

from torch import Tensor

from ...errors import ConfigError
from ...manager import TransactionManager
from .step import Changes, Outputs, PlannedStep

_Arguments = ParamSpec("_Arguments")
_Output = TypeVar("_Output")


class Part:
    """Hears what an engine does. Every event does nothing here; a part overrides what it needs.

    What an adapter hands over with an event is of ``step``: it knows no engine.
    """

    # -- caches ------------------------------------------------------------------------------

    def memory_wanted(self) -> int:
        """Return the bytes of device memory that the part will take beside the caches; here 0."""
        return 0

    def caches_wanted(self) -> None:
        """Hear that the engine is about to say which caches it wants."""

    def wants_one_state(self) -> bool:
        """Tell whether caches shall have one state per request, written by commits; here False."""
        return False

    def caches_dropped(self) -> None:
        """Hear that the engine is about to replace its caches: let go of the present ones."""

    def caches_planned(self, config: object) -> object:
        """Return what the engine shall make, given the caches that it plans; here the same.

        Args:
            config: the engine's own; only a part that is made for this engine looks into it.
        """
        return config

    def caches_made(self) -> None:
        """Hear that new caches exist, which steps will use."""

    def profiling_caches_made(self) -> None:
        """Hear that caches exist for forwards that the engine runs to measure memory, no others."""

    # -- windows that a ledger follows -------------------------------------------------------

    def windows_manager(self) -> TransactionManager | None:
        """Return the manager of the windows that the part opens over the present caches.

        None if it opens none, or none that a ledger shall follow, as here.
        """
        return None

    def follow_windows(self, manager: Callable[[], TransactionManager | None]) -> None:
        """Take the function that returns the manager whose windows end the steps; here nothing.

        The list calls this when it is made, if a part of it may open windows.

        Args:
            manager: finds it, anew for each step: new caches have another one, or none.
        """

    def commit_nears(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Hear what was sampled, before a part commits it; the list tells it ahead of ``sampled``.

        Args:
            ids: as for ``sampled``.
            counts: as for ``sampled``.
        """

    # -- steps -------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Hear that a step begins, before it changes requests or blocks.

        The step before it may have been dropped half-way.
        """

    def requests_changed(self, changes: Callable[[], Changes]) -> None:
        """Hear which requests come and go, and which blocks are handed out.

        Args:
            changes: reads it.
        """

    def batch_ordered(self, lead_with_drafts: Callable[[], None]) -> None:
        """Hear that the requests of the batch are in their order.

        Args:
            lead_with_drafts: moves the requests with drafts to the front.
        """

    def planned(self, step: PlannedStep) -> None:
        """Hear which rows the step has, and which of them are drafts.

        Args:
            step: the step.
        """

    def graph_sought(self, arguments: MutableMapping[str, object]) -> None:
        """Hear by which arguments the engine looks for a graph that it may replay as the forward.

        Args:
            arguments: by name; a part may change them.
        """

    def graph_chosen(self, graph: object) -> None:
        """Hear which graph the engine will replay as the forward, if any."""

    def attention_described(self, metadata: Mapping[str, object]) -> None:
        """Hear what the layers are told of the batch, before their forward.

        Args:
            metadata: by the layer's name, the engine's own.
        """

    def forward_begins(self, step: PlannedStep | None, inputs: Mapping[str, object]) -> None:
        """Hear that the forward is about to run.

        Args:
            step: as for ``planned``; None for a forward without requests, such as a warm-up.
            inputs: the arguments of the forward, by name.
        """

    def forward_ended(self) -> None:
        """Hear that the forward has run."""

    def failed(self, error: BaseException) -> None:
        """Hear that the engine's forward or its sampling raised, or a part before them.

        Args:
            error: it is raised again afterwards.
        """

    def sampling_begins(self, outputs: Outputs) -> None:
        """Hear what the forward computed, before it is sampled.

        Args:
            outputs: returns it.
        """

    def sampled(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Hear what was sampled, before a drafter or a connector sees the cache.

        One of the two is None, for an engine that does not have it yet.

        Args:
            ids: int ``[num_requests, n]``, the accepted drafts and one more token of each request,
                -1 behind them.
            counts: int ``[num_requests]``, how many tokens these are.
        """

    def outcomes_arrive(self) -> None:
        """Hear that a pipeline stage is about to learn how an earlier step of it ended."""

    def outcome_known(self, counts: Tensor) -> None:
        """Hear how many tokens each request has sampled, before a drafter sees the cache.

        It comes from an engine that tells the counts later than ``sampled``, or without it.

        Args:
            counts: as for ``sampled``.
        """

    def outcome_kept(self, ids: Tensor, counts: Tensor) -> None:
        """Hear that the engine took over the tokens of ``outcome_known``.

        Args:
            ids: as for ``sampled``.
            counts: as for ``sampled``.
        """

    def outcomes_arrived(self) -> None:
        """Hear that the stage knows how the earlier step ended, but for requests that are gone."""

    def step_ended(self, output: object) -> None:
        """Hear the step's output on its way to the engine; drafters have written their rows.

        Args:
            output: the engine's own, to which a part may add what the engine's scheduler reads.
        """

    def step_failed(self) -> None:
        """Hear that the last call of a step raised; ``step_ended`` does not come.

        Tokens that ``sampled`` told stand. An engine that repeats such a step with others has to
        let the request arrive again.
        """

    def raised(self, error: Exception) -> None:
        """Hear of an error on its way out of the runner, whichever call of a step raised it."""

    # -- the end -----------------------------------------------------------------------------

    def released(self) -> None:
        """Hear that the engine goes on without kvtxn."""


#: Events that parts hear one after the other. Where one part alone overrides such an event, the
#: list's own method is that part's, so that a step makes no call in between.
_PLAIN_EVENTS: Final = (
    "caches_wanted",
    "caches_made",
    "profiling_caches_made",
    "step_begins",
    "requests_changed",
    "batch_ordered",
    "planned",
    "graph_sought",
    "graph_chosen",
    "attention_described",
    "forward_begins",
    "forward_ended",
    "sampling_begins",
    "commit_nears",
    "sampled",
    "outcomes_arrive",
    "outcome_known",
    "outcome_kept",
    "step_ended",
    "raised",
)
#: Likewise, but every part hears them, whichever part raises.
_EVENTS_FOR_ALL: Final = ("outcomes_arrived", "step_failed")


class Parts(Part):
    """A list of parts that hears every event for them, in its order.

    Windows come before the ledger, which hears of an outcome once it is committed. Its steps end
    with the windows of a part that has a ``windows_manager``. Caches are let go of in reverse, and
    so are the parts at the end.

    If a part raises, the parts behind it do not hear the event. Only ``failed``, ``step_failed``,
    ``outcomes_arrived`` and ``released`` reach all of them, whichever part raises; but for
    ``failed``, the first error is raised then. Parts of the list that may open windows make
    ``sampled`` tell ``commit_nears`` first.

    Args:
        parts: the parts, the first one first.

    Raises:
        ConfigError: a part that follows windows comes before one that opens them.
    """

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._parts: Final = tuple(parts)
        for events, together in ((_PLAIN_EVENTS, _each), (_EVENTS_FOR_ALL, _every)):
            for event in events:
                self._bind(event, self._heard(event), together)
        if self._has_windows():
            self.follow_windows(self.windows_manager)
            self._bind("sampled", self._heard("commit_nears") + self._heard("sampled"), _each)

    def _heard(self, event: str) -> list[Callable[..., None]]:
        """Return the methods of the parts that override an event, in the list's order."""
        return [getattr(part, event) for part in self._parts if _overrides(part, event)]

    def _bind(
        self, event: str, heard: list[Callable[..., None]], together: Callable[..., None]
    ) -> None:
        """Replace the list's own method for an event with methods of parts; without any, it stays.

        Args:
            event: the name of the method.
            heard: the methods; a single one takes the list's place itself.
            together: calls several of them, given these and the event's arguments.
        """
        if heard:
            setattr(self, event, heard[0] if len(heard) == 1 else partial(together, heard))

    def _has_windows(self) -> bool:
        """Tell whether a part may open windows, those of lists among the parts included.

        Raises:
            ConfigError: a part that follows windows comes before one that opens them.
        """
        parts = [*_each_part(self._parts)]
        opens = [part for part in parts if _overrides(part, "windows_manager")]
        follows = [part for part in parts if _overrides(part, "follow_windows")]
        if opens and follows and parts.index(follows[0]) < parts.index(opens[-1]):
            raise ConfigError(
                "Parts", "a part that follows windows comes before a part that opens them",
                expected=f"{type(opens[-1]).__name__} before {type(follows[0]).__name__}",
                got=", ".join(type(part).__name__ for part in parts),
                hint="put the ledger behind the windows: it hears of an outcome once it is "
                "committed",
            )  # fmt: skip
        return bool(opens)

    def windows_manager(self) -> TransactionManager | None:
        """Return the one manager that a part of the list has; None without any.

        Raises:
            ConfigError: there are several: a ledger follows one.
        """
        found = [each for part in self._parts if (each := part.windows_manager()) is not None]
        if len(found) > 1:
            raise ConfigError(
                "Parts", "several parts have windows for a ledger to follow",
                expected="one manager", got=f"{len(found)}",
                hint="let one manager have the layers of all groups, or return None from the "
                "method windows_manager of the other parts",
            )  # fmt: skip
        return found[0] if found else None

    def follow_windows(self, manager: Callable[[], TransactionManager | None]) -> None:
        """Hand the function that returns the manager to every part."""
        for part in self._parts:
            part.follow_windows(manager)

    def memory_wanted(self) -> int:
        """Return the sum of the bytes that the parts will take beside the caches."""
        return sum(part.memory_wanted() for part in self._parts)

    def wants_one_state(self) -> bool:
        """Tell whether a part wants the caches to have one state per request."""
        return any(part.wants_one_state() for part in self._parts)

    def caches_dropped(self) -> None:
        """Let every part let go of the present caches, the last part first."""
        for part in reversed(self._parts):
            part.caches_dropped()

    def caches_planned(self, config: object) -> object:
        """Hand the plan from part to part; returns what the last one returns."""
        for part in self._parts:
            config = part.caches_planned(config)
        return config

    def failed(self, error: BaseException) -> None:
        """Let every part hear of the failure; what a part raises becomes a note of ``error``."""
        for part in self._parts:
            try:
                part.failed(error)
            except Exception as failure:
                error.add_note(f"kvtxn: aborting the step failed as well: {failure!r}")

    def released(self) -> None:
        """Release every part, the last one first, then raise the first error that one raised."""
        _every(part.released for part in reversed(self._parts))

    # -- calls -------------------------------------------------------------------------------

    def run_call(
        self, run: Callable[_Arguments, _Output], ends: bool, *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Output:  # fmt: skip
        """Run one of the calls of which an engine's step consists, and tell the parts how it ended.

        Parts hear ``step_ended`` or ``step_failed`` if the step ends with the call, and ``raised``
        of an error, unless it is a BaseException alone, such as an interrupt. That a step begins,
        and that its forward ``failed``, the adapter tells itself.

        Args:
            run: the engine's own method, whose errors are raised again.
            ends: the step ends with this call.
            *args: arguments of the method.
            **kwargs: arguments of the method.

        Returns:
            What the method returned.
        """
        try:
            output = run(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, Exception):
                self.raised(error)
            if ends:
                self.step_failed()
            raise
        if ends:
            self.step_ended(output)
        return output


def _each_part(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts in order, and in the place of a list among them its parts."""
    for part in parts:
        if isinstance(part, Parts):
            yield from _each_part(part._parts)
        else:
            yield part


def _overrides(part: Part, method: str) -> bool:
    """Tell whether a part has a method of its own in the place of ``Part``'s."""
    return getattr(getattr(part, method), "__func__", None) is not getattr(Part, method)


def _each(heard: Iterable[Callable[..., None]], *arguments: object) -> None:
    """Make every call with the same arguments; the first that raises ends it."""
    for hear in heard:
        hear(*arguments)


def _every(events: Iterable[Callable[[], None]]) -> None:
    """Make every call, then raise the first error that one of them raised, if any did."""
    first: Exception | None = None
    for event in events:
        try:
            event()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
