"""Epochs of the weights: how a word tells the age of its row, and who has read rows of which age.

The *age* of a row is the number of times that the weights have changed since it was computed. The
word of a row is the word of its tokens plus its age, so a row that is written has age 0, and a step
pays nothing for ages as long as all rows that it reads are of the present epoch: their words are
the ones that are expected. When weights change, one addition makes every row older. A row whose
word is not the expected one is *stale* if it differs by an age that rows can have by now, and wrong
otherwise; the chance that a wrong row looks stale is that of an equal digest, once per epoch.

The target's weights and those of a drafter change apart. The low 32 bits of an age count epochs of
the target, the bits above those of the drafter. (An adapter is a part of a row's tokens, by its
content: another adapter's row is of other tokens, not stale.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError, meant
from ..metrics import Family
from . import books as book
from .books import AGES, Books
from .digest import EPOCH, TARGET_AGE, older
from .groups import Place
from .ledger_state import LedgerState
from .request_table import RequestTable

#: What a ledger can do with stale rows that are read; the first is the default.
STALE: Final = ("count", "alarm")


def age_in(place: Place, age: Tensor) -> Tensor:
    """Return the part of rows' ages, int64, that is of weights which compute a group's rows.

    That is the whole age for a group with a drafter's layers, else the target's epochs.
    """
    return age if place.group.drafter else age & TARGET_AGE


def count_ages(books: Books, line: Tensor, age: Tensor, *, states: bool = False) -> None:
    """Add rows or states that were read to ``Books.ages``, by reader and age.

    Args:
        books: the ledger's books.
        line: int64 ``[n]``, the reader of each.
        age: int64 ``[n]``. Epochs of the target and, for rows, those of the drafter count apart;
            0 of either is not counted.
        states: these are states.
    """
    counted = [(book.STATES if states else book.ROWS, age & TARGET_AGE)]
    counted += [] if states else [(book.DRAFT_ROWS, age >> 32)]
    for kind, epochs in counted:
        at = (epochs > 0).nonzero()[:, 0]
        one, column = torch.ones_like(at), epochs[at].clamp(max=AGES) - 1
        books.ages.index_put_((line[at], one * kind, column), one, accumulate=True)


#: The metric families, in the order of ``Books.ages``. The values only grow, while caches stay.
BY_AGE: Final = (
    Family(
        "kvtxn_audit_rows_read_by_age",
        "Rows that were compared, by the changes of weights since they were computed.",
        "age",
        per_rank=True,
    ),
    Family(
        "kvtxn_audit_draft_rows_read_by_age",
        "Rows that were read after the drafter's weights had changed, by the number of changes.",
        "age",
        per_rank=True,
    ),
    Family(
        "kvtxn_audit_states_read_by_age",
        "States that steps of later weights went on from, by the changes of weights since.",
        "age",
        per_rank=True,
    ),
)


@attrs.frozen
class ReadAges:
    """The rows of earlier epochs that one request has read; a row counts in each step that reads.

    Attributes:
        request: the request's name; None if it is forgotten.
        rows: rows of the target, by age in epochs; the largest age stands for older rows, too.
        draft_rows: rows whose drafter's weights have changed since, by age.
        states: recurrent states, by age.
    """

    request: str | None
    rows: Mapping[int, int]
    draft_rows: Mapping[int, int]
    states: Mapping[int, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON can hold: ages are text, as in the counters."""
        counts = attrs.asdict(self)
        return {
            name: {_label(age): number for age, number in value.items()}
            if isinstance(value, dict)
            else value
            for name, value in counts.items()
        }


class Epochs:
    """The epochs of a ledger's weights, and the counts of the stale rows that were read.

    Args:
        state: the ledger's state.
        stale: one of ``STALE``.
    """

    def __init__(self, state: LedgerState, stale: str) -> None:
        if stale not in STALE:
            raise ConfigError(
                "Ledger", "stale is not valid", expected=f"one of {STALE}", got=repr(stale),
                hint=meant(stale, STALE) or "leave it out to count rows of earlier weights",
            )  # fmt: skip
        self._state: Final = state
        self._books: Final = state.books
        self._alarms: Final = stale == "alarm"
        self._ended = 0  # requests that have ended since the first change of weights
        self.restart()

    def restart(self) -> None:
        """Go back to the first epoch, and set all counts of stale rows to zero.

        On the device the caller sets ``EPOCH`` to zero before; here ``ALARM`` is set.
        """
        books = self._books
        books.ages.zero_()
        books.ended.fill_(-1)
        books.counters[book.ALARM] = int(self._alarms)
        self._state.epoch = self._ended = 0

    def begin(self, weights: str) -> None:
        """Make every row and state that is there older by one epoch, because weights have changed.

        Their seals stay valid.

        Args:
            weights: which weights have changed: a key of ``EPOCH``.

        Raises:
            ConfigError: it is none.
        """
        step = EPOCH.get(weights) if isinstance(weights, str) else None
        if step is None:
            raise ConfigError(
                "new_epoch", "these weights are unknown", expected=f"one of {tuple(EPOCH)}",
                got=repr(weights), hint=meant(weights, EPOCH) or "nothing was changed",
            )  # fmt: skip
        self._state.epoch += step  # in step with the device: a wait would cost more than this sum
        self._books.counters[book.EPOCH] += step
        for words in (self._books.words, self._state.seals):
            if words is not None:
                words.copy_(older(words, step))

    def keep(self, lines: Sequence[int]) -> None:
        """Move the counts of requests that end into ``Books.ended``; others get their lines.

        They are added to the line of all that ended, too. Of too many, the oldest entries are lost.
        Before the first change of weights nothing is done.
        """
        if not (lines and self._state.epoch):
            return
        books, where = self._books, self._state.upload(lines)
        counts = books.ages.index_select(0, where)
        size = len(books.ended)
        slots = [(self._ended + n) % size for n in range(len(lines))][-size:]
        serials = books.facts[book.SERIAL].index_select(0, where)
        entries = torch.cat([serials[:, None], counts.flatten(1)], 1)[-size:]
        books.ended.index_copy_(0, self._state.upload(slots), entries)
        books.ages[-1] += counts.sum(0)
        books.ages.index_fill_(0, where, 0)
        self._ended += len(lines)

    def counters(self, rows_checked: int) -> dict[str, int]:
        """Return what was read by age, by Prometheus name with the age folded in, and the sums.

        There are none before weights have changed once; then this waits for the device.

        Args:
            rows_checked: all rows that were compared; those of no earlier epoch have age 0.
        """
        found: dict[str, int] = {}
        counts = self._books.ages.sum(0).tolist() if self._state.epoch else ()
        for family, older_ones in zip(BY_AGE, counts, strict=False):
            by_age = {_label(age): number for age, number in enumerate(older_ones, 1) if number}
            if family is BY_AGE[book.ROWS]:
                by_age = {"0": rows_checked - sum(older_ones), **by_age}
            found[family.name] = sum(by_age.values())
            found |= {f"{family.name}_{age}": number for age, number in by_age.items()}
        return found

    def read(self, requests: RequestTable) -> list[ReadAges]:
        """Return what each request has read of earlier epochs; waits for the device.

        Requests that read none are left out. One that resumed has its reads together; of an ended
        one only the reads that the books still have.
        """
        if not self._state.epoch:
            return []
        books = self._books
        ended = books.ended[books.ended[:, 0] >= 0].cpu()
        here = books.ages[:-1].flatten(1)
        present = torch.cat([books.facts[book.SERIAL][:, None], here], 1).cpu()
        entries = torch.cat([ended, present[present[:, 0] >= 0]])
        entries = entries[entries[:, 1:].any(1)]
        counts: dict[object, tuple[str | None, Tensor]] = {}  # a request that resumes is the same
        for serial, *numbers in sorted(entries.tolist()):
            name = requests.name(serial)
            key = serial if name is None else name
            _, before = counts.get(key, (name, torch.tensor(0)))
            counts[key] = name, before + torch.tensor(numbers).view(-1, AGES)
        return [ReadAges(name, *map(_by_age, each.tolist())) for name, each in counts.values()]


def _label(age: int) -> str:
    """Return the label of an age; the largest one stands for all that are older."""
    return f"{age}+" if age == AGES else str(age)


def _by_age(counts: Sequence[int]) -> dict[int, int]:
    """Return the counts of ages 1, 2 and so on by age, without those that are 0."""
    return {age: count for age, count in enumerate(counts, 1) if count}
