"""The violations and counts that the passes leave on the device, read at the caller's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..errors import ConfigError
from ..metrics import Family
from . import books as book
from .books import Books
from .counter_copy import CounterCopy
from .epochs import BY_AGE
from .groups import Group
from .repeated_work import REPEATED
from .request_table import RequestTable
from .violation import KINDS, Violation, decode

#: The metric families; each rank checks its own share of the caches.
AUDIT_FAMILIES: Final = (
    Family("kvtxn_audit_active", "1 if reads are compared with the ledger.", per_rank=True),
    Family(
        "kvtxn_audit_unwatched_groups",
        "KV-cache groups of which nothing is compared.",
        per_rank=True,
    ),
    Family("kvtxn_audit_steps_total", "Forward passes that were watched.", per_rank=True),
    Family(
        "kvtxn_audit_rows_checked_total",
        "Rows that were compared: read, published or exported.",
        per_rank=True,
    ),
    Family(
        "kvtxn_audit_states_checked_total", "States that were read and compared.", per_rank=True
    ),
    Family(
        "kvtxn_audit_bytes_compared_total",
        "Rows and states whose bytes were compared with their checksums.",
        per_rank=True,
    ),
    Family(
        "kvtxn_audit_violations_total",
        "Wrong rows and states, by kind; a run of wrong rows counts once.",
        "kind",
        per_rank=True,
    ),
    Family(
        "kvtxn_audit_unjudged_total",
        "Requests of steps that could not be judged, by reason; 0 if the integration is right.",
        "reason",
        per_rank=True,
    ),
    Family(
        "kvtxn_audit_rows_unverified_total",
        "Rows and states taken for right although nobody can vouch for where they are from.",
        per_rank=True,
    ),
    *REPEATED,
    Family(
        "kvtxn_audit_store_dropped_total",
        "Blocks that were neither written to a store of identities nor asked for there.",
        per_rank=True,
    ),
    *BY_AGE,
)


class Findings:
    """The reader of violations and counts.

    Args:
        books: the books in which the passes leave violations and counts.
        groups: the groups, in the order of their numbers.
        requests: finds the name of a request by its serial number.

    Attributes:
        lost: number of violations that were counted and not kept, because too many waited.
        layers: names of the layers of a scrub, by number.
    """

    def __init__(self, books: Books, groups: Sequence[Group], requests: RequestTable) -> None:
        self._books: Final = books
        self._groups: Final = [(group.name, group.block_size) for group in groups]
        self._requests: Final = requests
        self._read = self._restarts = 0
        self._unread: list[Violation] = []
        self._on_host = dict.fromkeys(KINDS, 0)
        self.lost = 0
        self.layers: tuple[str, ...] = ()

    def restart(self) -> None:
        """Forget what was found, counted and lost; the caller sets the device's counters to zero.

        Copies of counters from before count nothing any more.
        """
        self._read = self.lost = 0
        self._restarts += 1
        self._unread.clear()
        self._on_host = dict.fromkeys(KINDS, 0)

    def has_more(self, copy: CounterCopy) -> bool:
        """Tell whether violations wait to be taken: of the host, or of a copy that has arrived.

        A copy from before ``restart`` has none.
        """
        return bool(self._unread) or (self._is_of_now(copy) and copy.found > self._read)

    def copy_counters(
        self, spare: CounterCopy | None = None, *, prints: bool = True
    ) -> CounterCopy:
        """Begin to copy the counters to the host, without waiting; return the copy.

        Args:
            spare: an earlier copy that nobody looks at any more; it is filled anew and returned.
            prints: copy the fingerprints, too; as it was for ``spare``.

        Raises:
            ConfigError: ``spare`` is no ``CounterCopy``.
        """
        if spare is None:
            return CounterCopy.of(self._books, self._restarts, prints=prints)
        _require_copy("copy_counters", spare)
        spare.renew(self._books, self._restarts)
        return spare

    def _is_of_now(self, copy: CounterCopy) -> bool:
        """Tell whether the ledger was not restarted since a copy was begun."""
        return copy.restarts == self._restarts

    def take(self) -> list[Violation]:
        """Return the violations found since the last call, oldest first. Waits for the device.

        Violations that the device had no room for are added to ``lost``; there is room again then.
        """
        books = self._books
        counters = books.counters.tolist()
        found = counters[book.FOUND]
        if found > self._read:
            kept = min(found, counters[book.LIMIT])
            self.lost += found - kept
            records = books.found.cpu()
            for number in range(self._read, kept):
                record = records[number % books.sizes.capacity].tolist()
                told = self._requests.name, self._requests.seed
                self._unread.append(decode(record, books.key, self._groups, self.layers, *told))
            self._read = found
            books.counters[book.LIMIT] = found + books.sizes.capacity
        new, self._unread = self._unread, []
        return new

    def counters(self, copy: CounterCopy | None = None) -> dict[str, int]:
        """Return the counts by Prometheus name: of violations their sum, and one for each kind.

        Those that were found on the host count, too; counts by age are not among them.

        Args:
            copy: a copy that has arrived; None: the counts of now, for which the host waits.
        """
        counts = (self._books.counters if copy is None else copy.counters).tolist()
        kinds = {
            kind: counts[book.BY_KIND + number] + self._on_host[kind]
            for number, kind in enumerate(KINDS)
        }
        return {
            "kvtxn_audit_active": 1,
            "kvtxn_audit_steps_total": counts[book.STEP],
            "kvtxn_audit_rows_checked_total": counts[book.ROWS_CHECKED],
            "kvtxn_audit_states_checked_total": counts[book.STATES_CHECKED],
            "kvtxn_audit_violations_total": sum(kinds.values()),
            **{f"kvtxn_audit_violations_total_{kind}": n for kind, n in kinds.items()},
            "kvtxn_audit_unjudged_total": counts[book.REFUSED] + counts[book.UNRESOLVED],
            "kvtxn_audit_unjudged_total_malformed": counts[book.REFUSED],
            "kvtxn_audit_unjudged_total_unresolved": counts[book.UNRESOLVED],
            "kvtxn_audit_rows_unverified_total": counts[book.UNVERIFIED],
        }

    def fingerprints(self, copy: CounterCopy | None = None) -> dict[int, dict[str, int]]:
        """Return, by step and group, the fingerprints of the last steps. Waits for the device.

        Args:
            copy: the copy to read; None: one of now. Empty for a copy without fingerprints, or from
                before ``restart``.

        Raises:
            ConfigError: ``copy`` is no ``CounterCopy``.
        """
        copy = self.copy_counters() if copy is None else copy
        _require_copy("fingerprints", copy)
        if copy.fingerprints is None or not self._is_of_now(copy):
            return {}
        copy.wait()
        last = int(copy.counters[book.STEP])
        prints = copy.fingerprints.tolist()
        first = max(1, last - book.FINGERPRINTS + 2)
        names = [name for name, _ in self._groups]
        return {
            step: dict(zip(names, prints[step % book.FINGERPRINTS], strict=True))
            for step in range(first, last + 1)
        }

    def add(self, violation: Violation) -> None:
        """Count a violation that was found on the host, and keep it for ``take``."""
        self._on_host[violation.kind] += 1
        self._unread.append(violation)

    def withdraw(self, violation: Violation) -> None:
        """Count a violation no longer: nobody uses what its step computed. ``take`` returns it."""
        self._on_host[violation.kind] -= 1


def _require_copy(operation: str, copy: object) -> None:
    """Refuse what is no copy of counters.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(copy, CounterCopy):
        raise ConfigError(
            operation, "the copy is not valid",
            expected="a CounterCopy, as copy_counters() returns it",
            got=type(copy).__name__, hint="leave it out for the counters of now",
        )  # fmt: skip
