"""Engines of ``kvtxn bench vllm`` with an audit: its rows read, its violations, and its cost.

An audited engine is stock vLLM with kvtxn's audit and without windows. Everything here is asked of
the engine by the plug-in's own functions, which are the same on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import attrs

from ...audit.books import Sizes
from ...integrations.serving.audit_settings import AUDITS as SETTINGS
from ...integrations.vllm_plugin.seam import workers

#: The engines that ``--policies`` knows beside stock and the policies: values of ``audit``.
AUDITS: Final = tuple(each for each in SETTINGS if each != "off")

#: Violations of a cell that a result has in full; the counters have all.
_KEPT: Final = 5
#: Bytes of a digest or a checksum.
_WORD: Final = 8

_COUNTS: Final = {
    "steps": "kvtxn_audit_steps_total",
    "rows": "kvtxn_audit_rows_checked_total",
    "states": "kvtxn_audit_states_checked_total",
    "violations": "kvtxn_audit_violations_total",
    "unjudged": "kvtxn_audit_unjudged_total",
}


@attrs.frozen(kw_only=True)
class Audited:
    """The rows that a worker's audit has read since its start, and its findings.

    Attributes:
        counters: the worker's ``snapshots``.
        report: the worker's ``audit_report``, oldest violation first.
    """

    counters: Mapping[str, float]
    report: Sequence[Mapping[str, Any]]


def between(before: Sequence[Audited], after: Sequence[Audited]) -> dict[str, Any]:
    """Sum up the rows read and violations of all ranks' audits between two readings.

    Returns:
        ``steps``, ``rows``, ``states``, ``violations`` and ``unjudged``: the differences of the
        counters, summed over ranks; ``kinds``: the violations by kind; ``first``: the first few of
        them in full, each with its rank.
    """
    pairs = list(zip(before, after, strict=True))

    def grown(counter: str) -> int:
        """Return by how much a counter has grown, summed over ranks."""
        return int(sum(b.counters.get(counter, 0) - a.counters.get(counter, 0) for a, b in pairs))

    folded = f"{_COUNTS['violations']}_"
    names = sorted({name for _, now in pairs for name in now.counters if name.startswith(folded)})
    kinds = {name.removeprefix(folded): grown(name) for name in names}
    found = [
        {"rank": rank, **each}
        for rank, (old, now) in enumerate(pairs)
        for each in now.report[len(old.report) :]
    ]
    return {
        **{name: grown(counter) for name, counter in _COUNTS.items()},
        "kinds": {kind: count for kind, count in kinds.items() if count},
        "first": found[:_KEPT],
    }


def memory(worker: Any) -> dict[str, int] | None:
    """Return the memory of a worker's audit on its device, beside the formula's.

    Returns:
        Bytes: ``taken`` by the tensors that exist, ``formula`` by ``Sizes.num_bytes`` (with
        ``Scrub.num_bytes``, where bytes are compared), and its parts: ``slots``, 8 per slot and
        state of each group; ``positions``, 8 per request and position; ``checksums``, 8 per slot
        and layer; ``constant``, the rest. None without an audit.
    """
    watch = getattr(workers.runner_of_worker(worker), "kvtxn_audit", None)
    if watch is None:
        return None
    books, scrub = watch.ledger.books, watch.scrub
    sizes: Sizes = books.sizes
    taken, formula, checksums = books.num_bytes, sizes.num_bytes(watch.ledger.groups), 0
    if scrub is not None:
        layers = {place.group.name: len(each) for place, each in scrub.books.layers.items()}
        checksums = scrub.num_bytes(watch.ledger.groups, layers, sizes.max_requests)
        own = (scrub.books.seals, scrub.books.nans, scrub.books.compared)
        sums = (layer.sums for layer in chain(*scrub.books.layers.values()))
        taken += sum(tensor.numel() * tensor.element_size() for tensor in (*own, *sums))
    slots = _WORD * (books.layout.num_words + books.layout.num_states)
    positions = _WORD * sizes.max_requests * (sizes.max_length + 1)
    return {
        "taken": int(taken),
        "formula": int(formula + checksums),
        "slots": slots,
        "positions": positions,
        "checksums": int(checksums),
        "constant": int(formula) - slots - positions,
    }


def complaints(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per cell and engine with violations, and one with requests not judged.

    Empty if there are neither.
    """
    lines = []
    for cell in cells:
        where = f"{cell['scenario']}, context {cell['context']}, requests {cell['requests']}"
        for label, engine in cell["engines"].items():
            found = engine.get("audit") or {"violations": 0, "unjudged": 0}
            if found["violations"]:
                lines.append(f"{label}, {where}: {_violations(found)}")
            if found["unjudged"]:
                lines.append(f"{label}, {where}: {found['unjudged']} requests were not judged")
    return lines


def _violations(found: Mapping[str, Any]) -> str:
    """Return a text: how many violations, of which kinds, and the first in full."""
    count = found["violations"]
    kinds = ", ".join(f"{kind} {number}" for kind, number in found["kinds"].items())
    first: Mapping[str, Any] = next(iter(found["first"]), {})
    facts = ", ".join(f"{key} {value}" for key, value in first.items() if value is not None)
    how_many = "1 violation" if count == 1 else f"{count} violations"
    return f"{how_many} ({kinds}); the first: {facts or 'not kept'}"
