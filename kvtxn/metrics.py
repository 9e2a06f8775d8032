"""Counters: rows on the device, everything else on the host, read lazily.

A row here is a draft row of a window, counted once and not once per layer;
settled rows and padding are not counted. ``kvtxn_stage_operations_total``
counts rows x layers. Reading a snapshot waits for the device; nothing else does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from .layers import LayerRef
from .states import WindowState

OUTCOMES: Final = (
    WindowState.COMMITTED,
    WindowState.ABORTED,
    WindowState.FELL_BACK,
    WindowState.FAILED,
)
MOMENTS: Final = ("on_commit", "on_abort")

#: What a failure can interrupt; each is the reason of a fallback.
OPERATIONS: Final = ("begin", "stage", "attend", "commit", "abort")


@attrs.frozen
class Family:
    """One metric, as Prometheus means it.

    Attributes:
        name: a counter ends in ``_total``; others are gauges.
        help: one sentence.
        label: what tells its values apart; None: there is one value.
        per_rank: each rank of an engine counts its own share, so values are summed over ranks.
            Otherwise every rank counts the same windows, and one rank's value is the engine's.
    """

    name: str
    help: str
    label: str | None = None
    per_rank: bool = False

    @property
    def is_counter(self) -> bool:
        """Whether it only grows."""
        return self.name.endswith("_total")

    def values(self, snapshot: Mapping[str, float]) -> Iterator[tuple[str | None, float]]:
        """Its values in a snapshot, by label value."""
        if self.label is None:
            yield None, snapshot[self.name]
            return
        prefix = f"{self.name}_"
        for name, value in snapshot.items():
            if name.startswith(prefix):
                yield name.removeprefix(prefix), value


FAMILIES: Final = (
    Family("kvtxn_windows_total", "Windows that ended, by outcome.", "outcome"),
    Family(
        "kvtxn_bypassed_windows_total",
        "Steps that could have had a window and did not, by reason.",
        "reason",
    ),
    Family(
        "kvtxn_fallbacks_total",
        "Windows that went to direct writes, by the operation that failed.",
        "reason",
        per_rank=True,
    ),
    Family(
        "kvtxn_hook_errors_total",
        "Commit and abort hooks that raised, by the moment they were called at.",
        "moment",
        per_rank=True,
    ),
    Family(
        "kvtxn_windows_refused_total",
        "Commits that the device refused for a slot outside its cache.",
        per_rank=True,
    ),
    Family("kvtxn_rows_staged_total", "Draft rows staged, once per window and not per layer."),
    Family("kvtxn_rows_committed_total", "Draft rows that were accepted and became durable."),
    Family("kvtxn_rows_rejected_total", "Draft rows that were rejected."),
    Family("kvtxn_stage_operations_total", "Rows times layers staged.", per_rank=True),
    Family("kvtxn_bytes_written_total", "Bytes of draft rows written to caches.", per_rank=True),
    Family(
        "kvtxn_bytes_avoided_total",
        "Bytes of rejected rows that stock would have written.",
        per_rank=True,
    ),
    Family("kvtxn_acceptance_rate", "Committed rows of all staged rows since the start."),
)

#: How often each row of a kind crosses into the cache, per policy: (committed, rejected).
_WRITES: Final = {"deferred": (1, 0), "undo": (1, 2), "direct": (1, 1)}


@attrs.define(eq=False)
class Metrics:
    """One manager's counters.

    Attributes:
        policy: the manager's resolved policy; decides what a row costs in bytes.
        windows: windows by outcome.
        fallbacks: windows that went to direct writes, by reason.
        hook_errors: hooks that raised, by the moment they were called at.
        bypassed: steps that could have had a window and did not, by reason.
        layer_calls: rows x layers staged, padding included.
        row_bytes: bytes of a row, or of a state, by group.
        overwrites: by group, whether its lines of ``rows`` count slots and not rows.
        rows: int64 ``[2, num_counts, 4]`` on the device: staged, committed and rejected rows,
            and refused commits, of windows under the policy [0] and of those written through [1].
    """

    policy: str
    row_bytes: tuple[int, ...]
    overwrites: tuple[bool, ...]
    rows: Tensor
    windows: Counter[str] = attrs.Factory(Counter)
    fallbacks: Counter[str] = attrs.Factory(Counter)
    hook_errors: Counter[str] = attrs.Factory(Counter)
    bypassed: Counter[str] = attrs.Factory(Counter)
    layer_calls: int = 0

    @classmethod
    def build(cls, policy: str, layers: Sequence[LayerRef], device: torch.device) -> Metrics:
        """Counters at zero, for these layers."""
        groups = dict.fromkeys(ref.group for ref in layers)
        row_bytes = tuple(
            sum(ref.row_bytes for ref in layers if ref.group == group) for group in groups
        )
        overwrites = {ref.group: ref.kind.overwrites for ref in layers}
        lines = 1 if list(overwrites.values()) == [False] else len(groups) + 1
        with torch.inference_mode(False):  # counted in later, in whatever mode
            rows = torch.zeros(2, lines, 4, dtype=torch.int64, device=device)
        return cls(policy, row_bytes, tuple(overwrites.values()), rows)

    def restart(self) -> None:
        """Count windows and rows from zero again, as after steps that served nobody.

        In place, since captured graphs count in ``rows``. What failed stays counted.
        """
        self.rows.zero_()
        self.windows.clear()
        self.bypassed.clear()
        self.layer_calls = 0

    def snapshot(self) -> dict[str, float]:
        """Everything, flat, by Prometheus name; labels are folded into the name.

        Waits for the device.
        """
        rows = self.rows.cpu()
        staged, committed, rejected, refused = (int(n) for n in rows[:, 0].sum(0))
        written, avoided = self._bytes(rows)
        flat: dict[str, float] = {}
        for name, labelled in (
            ("kvtxn_windows_total", _with_zeros(self.windows, *(s.value for s in OUTCOMES))),
            ("kvtxn_fallbacks_total", _with_zeros(self.fallbacks, *OPERATIONS)),
            ("kvtxn_hook_errors_total", _with_zeros(self.hook_errors, *MOMENTS)),
            ("kvtxn_bypassed_windows_total", self.bypassed),
        ):
            flat[name] = sum(labelled.values())
            flat.update({f"{name}_{label}": count for label, count in labelled.items()})
        flat |= {
            "kvtxn_windows_refused_total": refused,
            "kvtxn_rows_staged_total": staged,
            "kvtxn_rows_committed_total": committed,
            "kvtxn_rows_rejected_total": rejected,
            "kvtxn_stage_operations_total": self.layer_calls,
            "kvtxn_bytes_written_total": written,
            "kvtxn_bytes_avoided_total": avoided,
            "kvtxn_acceptance_rate": committed / staged if staged else 0.0,
        }
        return flat

    def _bytes(self, rows: Tensor) -> tuple[int, int]:
        """Bytes of draft rows written to the caches, and bytes stock would have on top."""
        written = avoided = 0
        groups = rows if rows.shape[1] == 1 else rows[:, 1:]
        sizes = tuple(zip(self.row_bytes, self.overwrites, strict=True))
        for policy, counts in zip((self.policy, "direct"), groups.tolist(), strict=True):
            for (row_bytes, overwrites), (_, committed, rejected, _) in zip(
                sizes, counts, strict=True
            ):
                # What a counter cannot take back is not written through by a fallback either.
                per_committed, per_rejected = _WRITES[self.policy if overwrites else policy]
                written += row_bytes * (per_committed * committed + per_rejected * rejected)
                avoided += row_bytes * rejected if per_rejected == 0 else 0
        return written, avoided


def _with_zeros(counts: Counter[str], *labels: str) -> dict[str, int]:
    """Known labels are there from the start: an alert has to see the step from zero to one."""
    return {**dict.fromkeys(labels, 0), **counts}
