"""The ledger as a dict model: token prefixes in place of digests, one row after the other.

It has the calls of ``kvtxn.audit.Ledger`` and shares no code with it, so what both report can be
compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvtxn.audit.books import AGES
from kvtxn.audit.groups import Group
from kvtxn.audit.step import Step

#: (pool, block, offset in the block).
Word = tuple[str, int, int]


@attrs.frozen
class Row:
    """The row in a slot, of one group.

    Attributes:
        group: the group that wrote the row.
        prefix: the request's seed and tokens, up to the row's own token.
        writer: the request that wrote the row.
        step: the step that wrote the row; 0 for imported rows.
        epochs: how often the target's and the drafter's weights had changed by then.
    """

    group: str
    prefix: tuple[object, ...]
    writer: str | None
    step: int
    epochs: tuple[int, int] = (0, 0)


@attrs.frozen
class Finding:
    """The fields of a violation that a model also reports."""

    kind: str
    step: int
    request: str
    group: str
    position: int | None
    slot: int | None
    found: str
    writer: str | None = None
    written_step: int | None = None
    age: int | None = None


REJECTED = "rejected"


@attrs.define
class _Request:
    line: int
    name: str
    own: list[object]
    known: int
    durable: int = 0
    kept: int = -1
    outside: set[str] = attrs.Factory(set)
    expected: int = 0
    told: int = -1
    telling: int = -1
    told_stale: int = -1
    telling_stale: int = -1
    imported: bool = False


class LedgerModel:
    """A ledger made of dicts; see the module's text.

    Args:
        groups: the groups, as given to the ledger.
        stale: as given to the ledger.

    Attributes:
        ages: reads of stale rows and states, by reader, what is counted, and age.
    """

    def __init__(self, groups: Sequence[Group], stale: str = "count") -> None:
        self.groups = {group.name: group for group in groups}
        self.words: dict[Word, Row | str] = {}
        self.writers: dict[Word, tuple[str | None, int]] = {}
        self.owners: dict[tuple[str, int], str | None] = {}
        self.requests: dict[str, _Request] = {}
        self.findings: list[Finding] = []
        self.step = 0
        self.rows_checked = self.states_checked = 0
        self.ages: Counter[tuple[str, str, int]] = Counter()
        self._epochs, self._alarms = (0, 0), stale == "alarm"
        self._free: list[int] = list(range(1 << 12, -1, -1))
        self._open: tuple[Step, list[tuple[_Request, int, int, int, int]]] | None = None

    # -- requests and blocks -----------------------------------------------------------------

    def new_epoch(self, weights: str = "target") -> None:
        """Model of ``Ledger.new_epoch``: rows know the epochs of their weights."""
        target, drafter = self._epochs
        is_target = weights == "target"
        self._epochs = (target + is_target, drafter + (not is_target))

    def admit(self, request: str, tokens: Sequence[int], *, extras: Iterable[int] = ()) -> int:
        """Model of ``Ledger.admit`` with token prefixes in dicts."""
        before = self.requests.get(request)
        line = self._free.pop() if before is None else before.line
        durable = 0 if before is None else min(before.durable, len(tokens))
        own: list[object] = [("seed", *extras), *tokens]
        expected = len(tokens) if before is None else durable
        self.requests[request] = _Request(
            line, request, own, len(tokens), durable, expected=expected
        )
        return line

    def release(self, request: str) -> None:
        """Model of ``Ledger.release`` with token prefixes in dicts."""
        found = self.requests.pop(request, None)
        if found is not None:
            self._free.append(found.line)

    def hand_out(self, group: str, blocks: Sequence[int]) -> None:
        """Model of ``Ledger.hand_out`` with token prefixes in dicts."""
        pool = self._pool(group)
        for word in [w for w in self.words if w[0] == pool and w[1] in blocks]:
            del self.words[word]

    def copy(self, group: str, source: Sequence[int], target: Sequence[int]) -> None:
        """Model of ``Ledger.copy`` with token prefixes in dicts."""
        pool = self._pool(group)
        was = {w: content for w, content in self.words.items() if w[0] == pool}
        for here, there in zip(source, target, strict=True):
            self.hand_out(group, [there])
            for (_, block, within), content in was.items():
                if block == here:
                    self.words[(pool, there, within)] = content
                self.writers.pop((pool, there, within), None)
            self.owners[(group, there)] = None

    def _written(self, name: str) -> Group:
        group = self.groups[name]
        return group if group.reads is None else self.groups[group.reads]

    def _pool(self, name: str) -> str:
        group = self._written(name)
        return group.pool or f"own {group.name}"

    def _word(self, name: str, slot: int) -> Word:
        size = self.groups[name].block_size
        return (self._pool(name), slot // size, slot % size)

    # -- steps -------------------------------------------------------------------------------

    def write(self, step: Step) -> None:
        """Model of ``Ledger.write`` with token prefixes in dicts."""
        self.step += 1
        rows = list(self._rows(step))
        for index, (request, first, count, _start, _drafts) in enumerate(rows):
            if count > 0:
                self._check_states(step, index, request, first)
        prefixes: dict[int, tuple[object, ...]] = {}
        for request, first, count, start, drafts in rows:
            if count == 0:
                continue
            settled = first + count - drafts
            prefix = request.own[: first + 1]
            for within in range(count):
                token, position = int(step.tokens[start + within]), first + within
                given = position if step.positions is None else int(step.positions[start + within])
                prefix = [*prefix, token if given == position else (token, given)]
                if position >= request.known:
                    request.own[position + 1 :] = [token]
                prefixes[start + within] = tuple(prefix)
            request.known = max(request.known, settled)
            goes_on = request.imported or first >= request.expected
            request.imported = False
            request.told = request.telling = min(request.telling, first) if goes_on else -1
            told = min(request.telling_stale, first) if goes_on else -1
            request.told_stale = request.telling_stale = told
            request.durable = request.expected = settled
            request.kept = -1 if drafts else 0
        for name in step.slots:
            for request, _first, count, start, _drafts in rows:
                for within in range(count):
                    prefix_here = prefixes[start + within]
                    self._put(step, name, request, start + within, within, count, prefix_here)
        self._open = (step, rows)

    def _rows(self, step: Step) -> Iterable[tuple[_Request, int, int, int, int]]:
        lines = {request.line: request for request in self.requests.values()}
        starts = step.starts.tolist()
        drafts = [0] * len(step.lines) if step.drafts is None else step.drafts.tolist()
        for index, line in enumerate(step.lines.tolist()):
            if line >= 0:
                count = starts[index + 1] - starts[index]
                first = self._first(step, index, starts[index])
                yield lines[line], first, count, starts[index], drafts[index]
            else:
                yield _Request(-1, "", [], 0), 0, 0, 0, 0

    @staticmethod
    def _first(step: Step, index: int, row: int) -> int:
        if step.first is not None:
            return int(step.first[index])
        assert step.positions is not None
        return int(step.positions[row])

    def _put(
        self, step: Step, name: str, request: _Request, row: int, within: int, count: int,
        prefix: tuple[object, ...],
    ) -> None:  # fmt: skip
        word = self._target(step, name, row, within, count)
        if word is not None:
            self.words[word] = Row(name, prefix, request.name, self.step, self._epochs)
            self.writers[word] = (request.name, self.step)
            if self.groups[name].is_state:
                self.owners[(name, word[1])] = request.name

    def _target(self, step: Step, name: str, row: int, within: int, count: int) -> Word | None:
        slot, group = int(step.slots[name][row]), self.groups[name]
        if not 0 <= slot < group.num_blocks * group.block_size:
            return None
        if group.ring is not None and within + group.ring < count:
            return None
        return self._word(name, slot)

    def check(self, step: Step) -> None:
        """Model of ``Ledger.check`` with token prefixes in dicts."""
        for index, (request, first, count, _start, _drafts) in enumerate(self._rows(step)):
            for name, table in step.tables.items():
                if count:
                    low = self._first_visible(self.groups[name], first, first + count)
                    self._look(None, request, name, table[index].tolist(), low, first + count)

    @staticmethod
    def _first_visible(group: Group, first: int, end: int) -> int:
        low = 0
        if group.window is not None:
            low = max(low, first - group.window + 1)
        if group.chunk is not None:
            low = max(low, first - first % group.chunk)
        return low if group.ring is None else max(low, end - group.ring)

    def resolve(
        self, accepted: Sequence[int], sampled: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Model of ``Ledger.resolve`` with token prefixes in dicts."""
        assert self._open is not None
        step, rows = self._open
        for index, (request, first, count, start, drafts) in enumerate(rows):
            if count == 0:
                continue
            kept = min(max(accepted[index], 0), drafts)
            settled = count - drafts
            for within in range(settled + kept, count):
                for name in step.slots:
                    word = self._target(step, name, start + within, within, count)
                    if word is not None:
                        self.words[word] = REJECTED
            length = first + settled + kept
            request.durable, request.expected, request.kept = length, length, kept
            request.known = max(request.known, length)
            token = -1 if sampled is None else [*sampled[index], -1][kept]
            if token >= 0 and request.known == length:
                request.own[length + 1 :] = [token]
                request.known += 1

    # -- blocks that others read -------------------------------------------------------------

    def publish(self, request: str, group: str, table: list[int], first: int, end: int) -> None:
        """Model of ``Ledger.publish`` with token prefixes in dicts."""
        self._look("published", self.requests[request], group, table, first, end)

    def publish_state(self, request: str, group: str, block: int, length: int) -> None:
        """Model of ``Ledger.publish_state`` with token prefixes in dicts."""
        self._look("published", self.requests[request], group, [block], length - 1, length)
        self.owners[(group, block)] = None

    def export(
        self, request: str, group: str, table: list[int], first: int, end: int
    ) -> list[Row | str | None]:
        """Model of ``Ledger.export``; the result is for this model's ``import_rows``."""
        self._look("exported", self.requests[request], group, table, first, end)
        return [self.words.get(self._through(group, table, p)[1]) for p in range(first, end)]  # type: ignore[arg-type]

    def import_rows(
        self, request: str, group: str, table: list[int], first: int, end: int,
        digests: Sequence[Row | str | None] | None = None,
    ) -> None:  # fmt: skip
        """Model of ``Ledger.import_rows`` with token prefixes in dicts."""
        known = self.requests[request]
        telling = known.telling if known.imported else -1
        known.imported, known.told, known.telling = True, -1, telling
        for position in range(first, end):
            _, word = self._through(group, table, position)
            assert word is not None
            content: Row | str | None
            if digests is None:
                content = Row(group, tuple(known.own[: position + 2]), None, 0, self._epochs)
            else:
                content = digests[position - first]
            self.words.pop(word, None)
            if content is not None:
                self.words[word] = content
            self.writers[word] = (request, self.step)
        self._look("imported", known, group, table, first, end)
        if self.groups[group].is_state:
            known.telling = telling

    def export_state(
        self, request: str, group: str, block: int, length: int
    ) -> list[Row | str | None]:
        """Model of ``Ledger.export_state`` with token prefixes in dicts."""
        return self.export(request, group, [block], length - 1, length)

    def import_state(
        self, request: str, group: str, block: int, length: int,
        digest: Sequence[Row | str | None] | None = None,
    ) -> None:  # fmt: skip
        """Model of ``Ledger.import_state`` with token prefixes in dicts."""
        self.import_rows(request, group, [block], length - 1, length, digest)
        self.owners[(group, block)] = None

    # -- comparing ---------------------------------------------------------------------------

    def _through(
        self, name: str, table: Sequence[int], position: int
    ) -> tuple[int | None, Word | None]:
        group = self.groups[name]
        if group.is_state:
            position = 0
        if group.ring is not None:
            position %= group.ring
        column, within = divmod(position, group.block_size)
        if column >= len(table) or not 0 <= table[column] < group.num_blocks:
            return None, None
        slot = table[column] * group.block_size + within
        return slot, self._word(name, slot)

    def _judge(self, word: Word | None, name: str, prefix: tuple[object, ...]) -> str | None:
        content = None if word is None else self.words.get(word)
        if content is None:
            return "unwritten"
        if content == REJECTED:
            return "rejected"
        assert isinstance(content, Row)
        same = content.group == self._written(name).name and content.prefix == prefix
        return None if same else "foreign"

    def _look(
        self, kind: str | None, request: _Request, name: str, table: list[int], low: int, end: int
    ) -> None:
        group, before = self.groups[name], None
        low = low if kind else max(low, request.told)
        for position in range(low, end):
            self.rows_checked += 1
            slot, word = self._through(name, table, position)
            prefix = tuple(request.own[: position + 2])
            found = self._judge(word, name, prefix)
            age = None
            if found is None and kind is None and position >= request.told_stale:
                age = self._count_age(word, request, "rows", name)
                found = "stale" if self._alarms and age is not None else None
            if kind == "exported" and found is None and position >= request.durable:
                found = "draft"
            at = position if group.ring is None else position % group.ring
            goes_on = position > low and at % group.block_size != 0 and found == before
            first_outside = slot is not None or kind is not None or name not in request.outside
            if found is not None and not goes_on and first_outside:
                request.outside |= {name} if slot is None and kind is None else set()
                self._find(kind or found, request, name, position, slot, word, found, age)
            before = found
            if found == "stale":
                request.telling_stale = max(request.telling_stale, end)
            elif found is not None and kind != "exported":
                request.telling = max(request.telling, end)

    def _find(
        self, kind: str, request: _Request, name: str, position: int | None, slot: int | None,
        word: Word | None, found: str, age: int | None = None,
    ) -> None:  # fmt: skip
        writer: tuple[Any, Any] = (None, None)
        if word is not None and found != "unwritten":
            writer = self.writers.get(word, writer)
        self.findings.append(
            Finding(kind, self.step, request.name, name, position, slot, found, *writer, age)
        )

    def _count_age(self, word: Word | None, request: _Request, what: str, name: str) -> int | None:
        """Count the read of a stale row or state; return its age, None if it is not stale."""
        content = None if word is None else self.words[word]
        assert isinstance(content, Row)
        ages = [now - then for now, then in zip(self._epochs, content.epochs, strict=True)]
        ages[1] *= self.groups[name].drafter
        for counted, age in zip((what, "draft_rows"), ages, strict=True):
            if age:
                self.ages[request.name, counted, min(age, AGES)] += 1
        return ages[0] or ages[1] or None

    def _check_states(self, step: Step, index: int, request: _Request, first: int) -> None:
        position = first - 1 if first else None  # of the last token that the state has taken in
        for name, sources in step.sources.items():
            block = int(sources[index])
            if first == 0 and block < 0:
                continue
            self.states_checked += 1
            inside = 0 <= block < self.groups[name].num_blocks
            word = self._word(name, block) if inside else None
            found = self._judge(word, name, tuple(request.own[: first + 1]))
            owner, age, kind = self.owners.get((name, block)), None, "state"
            if found is None:
                age = self._count_age(word, request, "states", name)
            if found is None and owner not in (None, request.name):
                found, age = "owner", None
            elif found is None and age is not None and self._alarms:
                kind = found = "stale"
            if found is not None:
                slot = block if inside else None
                self._find(kind, request, name, position, slot, word, found, age)
        told = -1 if step.told is None else int(step.told[index])
        if first > 0 and told >= 0 and request.kept >= 0 and told != request.kept:
            self._find("state", request, "", position, None, None, "count")


def finding_of(violation: Mapping[str, Any]) -> Finding:
    """Return the fields of a ledger's violation, given as a dict, that a model also reports."""
    v = violation
    return Finding(
        v["kind"], v["step"], v["request"], v["group"], v["position"], v["slot"], v["found"],
        v["written_request"], v["written_step"], v["age"],
    )  # fmt: skip
