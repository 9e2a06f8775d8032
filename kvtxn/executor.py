"""``Executor``: the one interface between a transaction and the bytes of the caches.

The window decides which rows have to be written, and when; an executor writes them. It never
validates user input (the window has done so), never changes a state label, and never waits for
the device.

The contract, which ``kvtxn.testing.ExecutorConformance`` tests:

- ``stage`` writes the settled rows under ``deferred`` and all rows under
  ``undo`` and ``direct``. No method ever writes padding (slot -1). Under ``deferred`` a window
  calls it for layers with states right before ``commit``, so that an abort finds the states as
  they were.
- ``commit`` writes exactly the kept draft rows (``deferred``) or restores
  exactly the rejected ones (``undo``), in every layer, then counts. In a tree
  window it also writes the kept rows to their new row positions, under every policy.
- ``restore`` puts every draft row back (``undo``).
- In layers whose ``kind.overwrites`` (rings, states), several rows of a request may have one
  slot. If a call writes several rows to one slot, after its mask, the last one in row order ends up
  in it: executors that move rows in parallel leave the other rows out. Rows that a call *puts back*
  have distinct slots, except that under ``undo`` saved copies of one slot are equal.
- An executor lets go of staged rows when their window ends, so that the caller may reuse the
  memory.
- Tensors given to ``attend`` have any strides, and their sizes no bound.
- Layers with ``replay`` have states that take rows in: only ``advance`` changes these states, and
  the layers' staged rows are never written to slots. A window calls ``advance`` once, before
  ``commit``; at an abort it calls nothing for them.
- If ``txn.in_range`` is given and is False on the device, no row is written.
- After a method has raised, any other may be called; the window repairs the caches
  with the reference in ``kvtxn.row_io``. An executor with the ``atomic`` capability
  promises that a method which raises has written nothing; ``advance`` is the exception, since the
  window copies the states before it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, Final

import attrs
import torch
from torch import Tensor

from .accepted_forms import SampledIds as SampledIds
from .accepted_forms import as_counts as as_counts
from .captured_launches import CapturedLaunches, CapturedPlaces
from .config import POLICIES, TxnConfig
from .cuda_graphs import GraphCache
from .errors import ConfigError, meant
from .layers import KINDS, LayerRef
from .layout import RowLayout
from .row_io import LayerRows, last_writers
from .state_slots import Crossings

#: The names that each set of ``Capabilities`` may hold; executors never see the policy "auto".
_KNOWN: Final = {
    "policies": tuple(policy for policy in POLICIES if policy != "auto"),
    "kinds": KINDS,
}


def _known_names(_: object, attribute: attrs.Attribute[frozenset[str]], value: object) -> None:
    """Refuse, with a ConfigError, a name that does not exist, or what is no frozenset.

    The kit would skip the tests of such a name without a word.
    """
    known = _KNOWN[attribute.name]
    unknown = [value]
    if isinstance(value, frozenset):
        unknown = sorted(value.difference(known), key=repr)
    if unknown:
        raise ConfigError(
            "Capabilities",
            f"{attribute.name} is not valid",
            expected=f"a frozenset of names among {', '.join(map(repr, known))}",
            got=repr(unknown[0]),
            hint=meant(unknown[0], known) or "name only those that it can do",
        )


@attrs.frozen(kw_only=True)
class Capabilities:
    """The abilities of an executor; the kit fails one that can do more than it declares.

    Attributes:
        policies: policies that it can carry out.
        attention: ``attend`` works, so ``deferred`` windows can read their own writes.
        atomic: a method other than ``advance`` that raises has written nothing (one launch writes
            all layers and counts: no step that could fail comes after the write).
        checks_range: the executor checks on the device that slots lie inside their caches before
            any write; if False, the window checks with a few small operations.
        no_host_sync: the host never waits for the device from begin to the end of commit.
        capturable: ``commit`` may be captured in a CUDA graph.
        takes_ids: ``commit`` takes ``SampledIds`` as well as counts and masks.
        kinds: names of the ``kvtxn.layers.SlotKind`` of layers that it can hold; ``"replayed"`` is
            among the names if it can ``advance`` states.
        trees: ``commit`` takes paths of draft trees, ``attend`` applies the tree mask; see ``Txn``.

    Raises:
        ConfigError: ``policies`` or ``kinds`` is not a frozenset of known names.
    """

    policies: frozenset[str] = attrs.field(
        default=frozenset({"deferred", "undo", "direct"}), validator=_known_names
    )
    attention: bool = False
    atomic: bool = False
    checks_range: bool = False
    no_host_sync: bool = True
    capturable: bool = False
    takes_ids: bool = False
    kinds: frozenset[str] = attrs.field(default=frozenset({"paged"}), validator=_known_names)
    trees: bool = False


@attrs.define(eq=False, on_setattr=attrs.setters.frozen)  # frozen, and cheaper to make
class StagedLayer:
    """The rows of one layer in the cache's own format.

    Attributes:
        ref: the layer.
        rows: ``[num_rows, *row_shape]`` per plane, any strides, in the plane's dtype;
            the caller's own tensors if they had that dtype already.
    """

    ref: LayerRef
    rows: tuple[Tensor, ...]


@attrs.define(eq=False)
class Txn:
    """A window as its executor sees it.

    A simple executor may ignore ``pattern``, ``counters``, ``number``, ``states_before``,
    ``advanced``, ``crossings``, ``states_in`` and ``drafts_alone``.

    In a window with ``layout.tree``, ``accepted`` is a path, and rows move: row position ``t`` gets
    the row ``sources(accepted)[t]``. The rows come from ``staged`` under every policy, so that no
    write can destroy a row that is still to be moved; attention reads them there, too.

    Attributes:
        policy: ``"deferred"``, ``"undo"`` or ``"direct"``.
        layers: every layer of the manager.
        layout: the request of each row, and whether it is a draft.
        slots: int64 ``[num_rows]`` by group; the window's own copies. One per row for states as
            well: every row of a request has the slot of the request's state.
        staged: the layers staged so far, by name, in staging order.
        saved: under ``undo``, the rows the caches held before, by layer name.
        in_range: bool scalar on the device, False if a slot lies outside its cache, so that
            no row may be written; None if the host checked the slots.
        pattern: an object that this window shares with others whose staged rows have the same
            strides, layer by layer; None if the strides are not known to be the same.
        counters: int64 ``[num_counts, 4]`` on the device; see ``count``.
        number: the window's number, for messages; None if it has none.
        states_before: copies of the states of replayed layers, for a failure; see
            ``kvtxn.state_replay``.
        advanced: True once the states of replayed layers took their rows in.
        crossings: by group of replayed layers, the boundaries that requests may cross.
        states_in: True once the states of a ``StateSupplier`` took their rows in. They cannot be
            taken back, so from then on the commit is finished, whatever fails.
        drafts_alone: True if the captured forward has written the settled rows to the caches by
            itself, so that only the draft rows in ``staged`` mean anything, except in layers with
            states, where all rows are there. Only a repair that writes settled rows reads this;
            commit moves draft rows in any case.
        waits: True under ``deferred``: draft rows wait for commit.
        holds_rows: True if ``staged`` has the rows: they wait for commit, or a tree moves them.
    """

    policy: str
    layers: tuple[LayerRef, ...]
    layout: RowLayout
    counters: Tensor
    slots: dict[str, Tensor] = attrs.Factory(dict)
    staged: dict[str, StagedLayer] = attrs.Factory(dict)
    saved: dict[str, tuple[Tensor, ...]] = attrs.Factory(dict)
    in_range: Tensor | None = None
    pattern: object | None = None
    number: int | None = None
    states_before: dict[str, tuple[Tensor, ...]] = attrs.Factory(dict)
    advanced: bool = False
    crossings: dict[str, Crossings] = attrs.Factory(dict)
    states_in: bool = False
    drafts_alone: bool = False
    waits: bool = attrs.field(init=False)
    holds_rows: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.waits = self.policy == "deferred"
        self.holds_rows = self.waits or self.layout.tree is not None

    def go_direct(self, counters: Tensor) -> None:
        """Write rows straight through from here on, and count in ``counters``.

        Staged rows are held from here on for a tree alone.
        """
        self.policy, self.counters = "direct", counters
        self.waits, self.holds_rows = False, self.layout.tree is not None

    def check_range(self) -> None:
        """Set ``in_range`` if the executor was to check it, but failed and is not called again.

        Nothing is done where it is set, on the host, and without slots.
        """
        if self.in_range is None and self.layout.is_draft.device.type != "cpu" and self.slots:
            inside = []
            for group, slots in self.slots.items():
                limit = min(ref.num_slots for ref in self.layers if ref.group == group)
                inside.append(((slots >= -1) & (slots < limit)).all())
            self.in_range = torch.stack(inside).all()

    def permit(self, mask: Tensor) -> Tensor:
        """Return ``mask``, with every element False if a slot is out of range.

        Unlike ``kept``, which does so by itself, other masks need this before a write.
        """
        return mask if self.in_range is None else mask & self.in_range

    def kept(self, accepted: Tensor) -> Tensor:
        """Return the row positions of drafts that a commit fills, bool ``[num_rows]``.

        All are False if a slot is out of range.
        """
        kept = self.layout.kept(accepted)
        return kept if self.in_range is None else kept & self.in_range

    def sources(self, accepted: Tensor) -> Tensor | None:
        """Return the row that a commit moves to each row position, or -1; None if no row moves."""
        return self.layout.sources(accepted)

    def count(self, kept: Tensor, *, aborted: bool = False) -> None:
        """Add this window to the counters: drafts staged, committed, rejected, and refusals.

        ``counters`` has one line per group, and before them one for the window itself, in which
        a row counts if any group has a slot for it; with one group the two are one line. In
        groups whose rows may share a slot, the group's line counts slots, because each slot is
        written once. A commit that the device refused, for a slot outside its cache, counts 1 in
        every line.
        """
        groups = {ref.group: ref.kind for ref in self.layers}
        nowhere = torch.zeros_like(self.layout.is_draft)
        real = [
            (self.slots[group] >= 0) & self.layout.is_draft if group in self.slots else nowhere
            for group in groups
        ]
        staged = torch.stack(real)
        written = staged & kept
        for line, (group, kind) in enumerate(groups.items()):
            if kind.overwrites and group in self.slots:
                # Requests may begin from one state: each has a state of its own afterwards.
                places = self.layout.request if kind.per_request else self.slots[group]
                written[line] = last_writers(places, real[line] & kept)
                staged[line] = last_writers(places, real[line])
        if self.counters.shape[0] > len(groups):
            window = torch.stack(real).any(0).unsqueeze(0)
            staged, written = torch.cat([window, staged]), torch.cat([window & kept, written])
        committed, totals = written.sum(1), staged.sum(1)
        refused = torch.zeros_like(totals)
        if self.in_range is not None and not aborted:
            refused += ~self.in_range
        self.counters += torch.stack([totals, committed, totals - committed, refused], dim=1)


class Executor(abc.ABC):
    """Moves the bytes of one manager's windows; one window at a time.

    Args:
        layers: every layer of the manager, in its order.
        config: the manager's settings; ``max_rows`` sizes fixed buffers.

    Attributes:
        graphs: the captured commits of all windows of this executor, and of what an integration
            commits with them.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self, layers: Sequence[LayerRef], config: TxnConfig) -> None:
        self.layers = tuple(layers)
        #: Layers whose rows are written to slots: all but the replayed ones.
        self.moved = tuple(ref for ref in self.layers if not ref.replay)
        self.config = config
        self.graphs = GraphCache()

    @classmethod
    @abc.abstractmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return the reason why this executor cannot run on ``device``; None if it can."""

    def own_slots(self, group: str, slots: Tensor) -> Tensor:
        """Return the window's own int64 copy of a group's slots; it may be a fixed buffer."""
        return slots.to(torch.int64, copy=True)

    @abc.abstractmethod
    def save(self, txn: Txn, group: str) -> LayerRows:
        """Under ``undo``, return the present rows of ``txn.slots[group]`` in the group's layers.

        Only draft rows are ever put back; the rows returned for settled rows are never read, nor
        are those for padding and for slots outside the cache.

        Returns:
            By layer name copies ``[num_rows, *row_shape]``, one torch tensor per plane, in the
            plane's dtype or as integers of its size.
        """

    @abc.abstractmethod
    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        """Write one layer's settled rows under ``deferred``, all its rows under other policies."""

    @abc.abstractmethod
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        """Make the accepted draft rows durable in all layers, then ``count``.

        Args:
            txn: the window; every layer is staged (or, under ``undo``, written by the caller).
            accepted: int ``[num_requests]``, possibly out of range, or bool ``[num_rows]``. For
                executors that declare ``takes_ids``, also ``SampledIds``; for executors that
                declare ``trees``, in a tree window, int ``[num_requests, columns]``, possibly no
                path.
        """

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        """Update the states of the staged replayed layers by their settled and kept rows.

        Nothing is counted. If it raises, some states may have advanced: the window puts them back
        from ``txn.states_before``, also where the executor is ``atomic``.

        Args:
            txn: the window.
            accepted: as for ``commit``.

        Raises:
            NotImplementedError: the executor replays no states, as here.
        """
        raise NotImplementedError(f"the {self.name} executor replays no states")

    def captured_launches(self, places: CapturedPlaces) -> CapturedLaunches | None:
        """Prepare launches for windows over a captured forward; return None, as here, for none.

        Without prepared launches every window calls ``save`` and ``commit``.

        Args:
            places: the tensors that these windows share. An executor may be asked more than once:
                each time for other windows, with slots of their own. It is not asked where a layer
                has states.
        """
        return None

    @abc.abstractmethod
    def restore(self, txn: Txn) -> None:
        """Under ``undo``: put every draft row of ``txn.saved`` back."""

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention: AttentionArgs
    ) -> Tensor:
        """Compute attention of the window's rows over the cache and the window itself.

        Args:
            txn: the window.
            layer: the layer, staged.
            query: ``[num_rows, num_q_heads, head_size]``.
            attention: block table, lengths, scale and the rest of the call.

        Returns:
            ``[num_rows, num_q_heads, value_head_size]`` in the query's dtype.

        Raises:
            NotImplementedError: the executor declares no attention, as here.
        """
        raise NotImplementedError(f"the {self.name} executor has no attention")


@attrs.frozen(eq=False, kw_only=True)
class AttentionArgs:
    """Arguments of ``Window.attend``; see there.

    With ``ring_size`` sequence position p lies at ring position ``p % ring_size`` of its request's
    blocks, and ``sliding_window`` is set and hides every position that has been evicted.
    """

    block_table: Tensor
    seq_lens: Tensor
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    ring_size: int | None = None
