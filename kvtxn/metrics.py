"""Counters: rows on the device, everything else on the host, read lazily.

A row here is a draft row of a window, counted once and not once per layer;
settled rows and padding are not counted. ``kvtxn_stage_operations_total``
counts rows x layers. Reading a snapshot waits for the device; nothing else does.

Bytes are computed from row counts when a snapshot is read. ``kvtxn_bytes_written_total`` is the
bytes that reached memory for draft rows: a row's own write, the write that restores its slot, and,
where drafts wait in spare slots of the cache or in other tensors of the caller, the write there.
``kvtxn_bytes_avoided_total`` is the bytes of rejected rows that never reached memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from .layers import LayerRef
from .window_transitions import FINAL, WindowState

#: The operations that a failure can interrupt; each is the reason of a fallback.
OPERATIONS: Final = ("begin", "stage", "attend", "states", "commit", "abort")


@attrs.frozen
class Family:
    """A metric, as a Prometheus metric family.

    Attributes:
        name: a counter ends in ``_total``; others are gauges.
        help: one sentence.
        label: the name of the label that tells values apart; None if there is one value.
        known: label values that exist from the start, at zero: an alert must see the step from
            zero to one.
        per_rank: each rank of an engine counts its own share, so values are summed over ranks.
            Otherwise every rank counts the same windows, and one rank's value is the engine's.
    """

    name: str
    help: str
    label: str | None = None
    known: tuple[str, ...] = ()
    per_rank: bool = attrs.field(default=False, kw_only=True)

    @property
    def is_counter(self) -> bool:
        """True if the value only grows."""
        return self.name.endswith("_total")

    def values(self, snapshot: Mapping[str, float]) -> Iterator[tuple[str | None, float]]:
        """Yield the label value and the number of each of the family's entries in a flat snapshot.

        A family without a label has one entry, under None.

        Raises:
            KeyError: the snapshot lacks a family without a label.
        """
        if self.label is None:
            yield None, snapshot[self.name]
            return
        prefix = f"{self.name}_"
        for name, value in snapshot.items():
            if name.startswith(prefix):
                yield name.removeprefix(prefix), value


#: The ways in which a window ends.
_OUTCOMES: Final = tuple(state.value for state in WindowState if state in FINAL)

FAMILIES: Final = (
    Family(
        "kvtxn_windows_total",
        "Windows that ended, by final state.",
        "outcome",
        _OUTCOMES,
    ),
    Family(
        "kvtxn_bypassed_windows_total",
        "Steps that could have had a window but ran without one, by reason.",
        "reason",
    ),
    Family(
        "kvtxn_fallbacks_total",
        "Windows that went on with direct writes after a failure, by the operation that failed.",
        "reason",
        OPERATIONS,
        per_rank=True,
    ),
    Family(
        "kvtxn_hook_errors_total",
        "Errors raised by commit and abort hooks, by the kind of hook.",
        "moment",
        ("on_commit", "on_abort"),
        per_rank=True,
    ),
    Family(
        "kvtxn_windows_refused_total",
        "Commits that wrote nothing because a slot on the device was outside its cache.",
        per_rank=True,
    ),
    Family("kvtxn_rows_staged_total", "Draft rows staged; a row counts once, not once per layer."),
    Family("kvtxn_rows_committed_total", "Draft rows that were accepted and became durable."),
    Family("kvtxn_rows_rejected_total", "Draft rows that were rejected."),
    Family("kvtxn_stage_operations_total", "Staged rows times layers.", per_rank=True),
    Family(
        "kvtxn_bytes_written_total",
        "Bytes written to memory for draft rows, spare slots and restored rows included.",
        per_rank=True,
    ),
    Family(
        "kvtxn_bytes_avoided_total",
        "Bytes of rejected draft rows that were never written to memory.",
        per_rank=True,
    ),
    Family(
        "kvtxn_acceptance_rate",
        "Committed draft rows divided by staged draft rows, since the start.",
    ),
)

#: Writes of each draft row per policy: (if committed, if rejected). Under undo a rejected row is
#: written, and its slot restored: two writes. A draft in a spare slot is written there first.
_WRITES: Final = {"deferred": (1, 0), "undo": (1, 2), "direct": (1, 1), "spare slots": (2, 1)}


def as_label(reason: object) -> str:
    """Return a reason as part of a Prometheus name: each run of other characters is one "_".

    An empty reason is "unnamed".
    """
    return re.sub(r"[^a-zA-Z0-9_]+", "_", str(reason)) or "unnamed"


@attrs.define(eq=False)
class Metrics:
    """The counters of one manager.

    Attributes:
        policy: the manager's resolved policy; decides how often a row is written.
        put_off: functions that count what a step has put off; called before counters are read.
        fallbacks: windows that went to direct writes, by reason.
        hook_errors: hooks that raised, by the moment they were called at.
        bypassed: steps that could have had a window and did not, by reason.
        layer_calls: rows x layers staged, padding included.
        row_bytes: bytes of a row, or of a state, by group.
        overwrites: by group, True if its lines of ``rows`` count slots and not rows.
        rows: int64 ``[3, num_counts, 4]`` on the device: staged, committed and rejected rows,
            and refused commits, of windows under the policy [0], of those written through [1], and
            of those under ``deferred`` whose drafts wait in tensors that the caller gave [2].
        under_policy: ``rows[0]``.
        written_through: ``rows[1]``.
        in_spare_slots: ``rows[2]``. Each draft counts the write to where it waits, such as a spare
            slot of the cache, a committed draft counts the copy to its own slot as well, and no
            byte counts as avoided.
    """

    policy: str
    row_bytes: tuple[int, ...]
    overwrites: tuple[bool, ...]
    rows: Tensor
    put_off: list[Callable[[], None]] = attrs.Factory(list)
    _windows: dict[str, int] = attrs.Factory(lambda: dict.fromkeys(_OUTCOMES, 0))
    fallbacks: Counter[str] = attrs.Factory(Counter)
    hook_errors: Counter[str] = attrs.Factory(Counter)
    bypassed: Counter[str] = attrs.Factory(Counter)
    layer_calls: int = 0
    under_policy: Tensor = attrs.field(init=False)
    written_through: Tensor = attrs.field(init=False)
    in_spare_slots: Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.under_policy, self.written_through, self.in_spare_slots = self.rows.unbind(0)

    @classmethod
    def build(cls, policy: str, layers: Sequence[LayerRef], device: torch.device) -> Metrics:
        """Return counters at zero for these layers."""
        groups = dict.fromkeys(ref.group for ref in layers)
        row_bytes = tuple(
            sum(ref.row_bytes for ref in layers if ref.group == group) for group in groups
        )
        overwrites = {ref.group: ref.kind.overwrites for ref in layers}
        lines = 1 if list(overwrites.values()) == [False] else len(groups) + 1
        with torch.inference_mode(False):  # later counting may be in inference mode or not
            rows = torch.zeros(3, lines, 4, dtype=torch.int64, device=device)
        return cls(policy, row_bytes, tuple(overwrites.values()), rows)

    @property
    def windows(self) -> dict[str, int]:
        """Windows by outcome, the ones that were put off included; a plain dict to count in."""
        for count in self.put_off:
            count()
        return self._windows

    def restart(self) -> None:
        """Count windows and rows from zero again, as after an engine's warm-up.

        In place, since captured graphs count in ``rows``. Failures stay counted.
        """
        self.rows.zero_()
        self.windows.update(dict.fromkeys(_OUTCOMES, 0))
        self.bypassed.clear()
        self.layer_calls = 0

    def snapshot(self) -> dict[str, float]:
        """Return every counter by Prometheus name, with labels folded into the name.

        A family with a label has its sum under its own name, and each value under
        ``<name>_<label>``. Waits for the device.
        """
        values, flat = self._values(self.windows), dict[str, float]()
        for family in FAMILIES:
            if family.label is None:
                flat[family.name] = values[family.name, None]
                continue
            keys: list[tuple[str, str | None]] = [(family.name, label) for label in family.known]
            keys += [key for key in values if key[0] == family.name and key not in keys]
            flat[family.name] = sum(values.get(key, 0) for key in keys)
            flat |= {f"{name}_{label}": values.get((name, label), 0) for name, label in keys}
        return flat

    def _values(self, windows: dict[str, int]) -> dict[tuple[str, str | None], float]:
        """Return the counters by family name and label value. Waits for the device."""
        rows = self.rows.cpu()
        staged, committed, rejected, refused = (int(n) for n in rows[:, 0].sum(0))
        written, avoided = self._bytes(rows)
        values: dict[tuple[str, str | None], float] = {
            ("kvtxn_windows_refused_total", None): refused,
            ("kvtxn_rows_staged_total", None): staged,
            ("kvtxn_rows_committed_total", None): committed,
            ("kvtxn_rows_rejected_total", None): rejected,
            ("kvtxn_stage_operations_total", None): self.layer_calls,
            ("kvtxn_bytes_written_total", None): written,
            ("kvtxn_bytes_avoided_total", None): avoided,
            ("kvtxn_acceptance_rate", None): committed / staged if staged else 0.0,
        }
        for family, counts in (
            ("kvtxn_windows_total", windows),
            ("kvtxn_fallbacks_total", self.fallbacks),
            ("kvtxn_hook_errors_total", self.hook_errors),
            ("kvtxn_bypassed_windows_total", self.bypassed),
        ):
            values |= {(family, label): count for label, count in counts.items()}
        return values

    def _bytes(self, rows: Tensor) -> tuple[int, int]:
        """Return two sums: bytes written for draft rows; bytes of rejected rows never written."""
        written = avoided = 0
        groups = rows if rows.shape[1] == 1 else rows[:, 1:]
        for how, counts in zip(
            (self.policy, "direct", "spare slots"), groups.tolist(), strict=True
        ):
            for row_bytes, overwrites, (_, committed, rejected, _) in zip(
                self.row_bytes, self.overwrites, counts, strict=True
            ):
                # Rings and states keep the policy's writes even in windows that fell back.
                per_committed, per_rejected = _WRITES[self.policy if overwrites else how]
                written += row_bytes * (per_committed * committed + per_rejected * rejected)
                avoided += row_bytes * rejected if per_rejected == 0 else 0
        return written, avoided
