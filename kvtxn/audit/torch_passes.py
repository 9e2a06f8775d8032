"""The passes in torch: the specification, and the implementation for CPUs.

The code is short where nothing is wrong, the usual case. Once a row is wrong, requests are examined
one after the other, so that the report does not depend on how the work was divided.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..host_values import to_device
from . import books as book
from .digest import EMBEDDED, REJECTED, UNWRITTEN, age_of, as_word
from .draft_trees import SampledPath, along, followed
from .epochs import age_in, count_ages
from .groups import Place
from .new_requests import AGAIN, BEGIN, COUNT, LINE, SEED, SERIAL, Change, PackedRequests
from .passes import PLACE_FACTOR, RUN, STEP_FACTOR, Passes
from .rows import (
    Batch,
    admitted,
    computed_for,
    fill_first,
    first_visible,
    in_ring,
    next_token,
    ragged,
    same_drafts,
    word_at,
    words_read,
)
from .step import Step, Stretch
from .violation import FOUND_NUMBER, KIND_NUMBER, NOBODY
from .violation_record import record_violation

_FOREIGN = FOUND_NUMBER["foreign"]
_STALE = FOUND_NUMBER["stale"]  # the kind's number as well
#: Facts of a request that hold for a step, and what they become with the next one.
_TOLD = ((book.TOLD, book.TELLING), (book.TOLD_STALE, book.TELLING_STALE))


class TorchPasses(Passes):
    """The passes, one torch operation after another."""

    name = "torch"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return None: this implementation runs on every device, and waits for a GPU."""
        return None

    # -- writing -----------------------------------------------------------------------------

    def change(self, change: Change) -> None:
        """Put released lines, handed-out blocks and new requests into the books."""
        books = self.books
        device = books.words.device
        if change.released:
            lines = to_device(change.released, device, torch.int64)
            books.facts[book.SERIAL].index_fill_(0, lines, NOBODY)
        for place, blocks in change.given:
            there = to_device(blocks, device, torch.int64)
            for words in (books.words,) if change.seals is None else (books.words, change.seals):
                place.pool_of(words).index_fill_(0, there, UNWRITTEN)
        if change.new is not None:
            self.begin(change.new.packed(device))

    def begin(self, new: PackedRequests) -> None:
        """Put the digests and facts of new requests in place, as ``Passes.change`` describes."""
        books, tokens = self.books, new.tokens
        fields = new.fields.unbind(1)
        lines, begins, counts, seeds = (fields[at] for at in (LINE, BEGIN, COUNT, SEED))
        whose, within = ragged(counts)
        sums = torch.cat([tokens.new_zeros(1), books.key.terms(tokens, within).cumsum(0)])
        books.own[lines, 0] = seeds
        books.own[lines[whose], within + 1] = sums[1:] + (seeds - sums[begins])[whose]
        before = books.facts[book.DURABLE][lines].minimum(counts)
        facts = books.facts.new_full((book.NUM_FACTS, new.num_requests), -1)
        facts[book.SERIAL], facts[book.OUTSIDE], facts[book.KNOWN] = fields[SERIAL], 0, counts
        facts[book.DURABLE] = torch.where(fields[AGAIN] != 0, before, counts)
        books.facts[:, lines] = facts

    def write(self, step: Step) -> None:
        """Compare the states that a step reads; record its rows as ``Passes.write`` says."""
        books = self.books
        fill_first(books, step)
        batch = Batch.of(books, step)
        self._check_states(step, batch)
        owner, within = ragged(batch.counts)
        line = batch.lines[owner]
        position = column = batch.first[owner] + within
        row = batch.starts[owner] + within
        ahead = followed(step, batch, owner, within)
        known = position < books.facts[book.KNOWN][line]
        if step.parents is not None:
            position = batch.first[owner] + along(torch.ones_like(within), ahead) - 1
            known &= within < (batch.counts - batch.drafts)[owner]
        given, tokens = computed_for(step, row, position), step.tokens[row].long() & (EMBEDDED - 1)
        own_terms = books.own[line, position + 1] - books.own[line, position]
        embedded = known & (books.key.tokens_of(own_terms) >= EMBEDDED) & (given == position)
        terms = torch.where(embedded, own_terms, books.key.terms(tokens, given))
        right = torch.where(known, own_terms, books.key.terms(tokens, position))
        if step.parents is None:
            chain, truth = (self._chain(each, owner, batch) for each in (terms, right))
        else:
            before = books.own[line, batch.first[owner]]
            chain, truth = (before + along(each, ahead) for each in (terms, right))
        places = self._places(step, batch, owner, within)
        self._journal(line, position, given, terms, ahead, places)
        books.own[line, column + 1] = truth
        for place, where in places.items():
            there = where >= 0
            books.words[where[there]] = as_word(chain[there] + books.salts[place.written])
            if place.group.is_state:
                state = (where[there] - place.base) // place.stride + place.owners
                books.owners[state] = books.facts[book.SERIAL][line[there]]
        self._note_step(step, batch, chain, places)

    def _chain(self, terms: Tensor, owner: Tensor, batch: Batch) -> Tensor:
        """Return the digest up to each row: the request's digest before its rows, plus terms."""
        total = terms.cumsum(0)
        before = torch.cat([total.new_zeros(1), total])[batch.counts.cumsum(0) - batch.counts]
        start = self.books.own[batch.lines.clamp(min=0), batch.first]
        return total + (start - before)[owner]

    def _places(
        self, step: Step, batch: Batch, owner: Tensor, within: Tensor
    ) -> dict[Place, Tensor]:
        """Find the index of each row's word, int64 ``[num_rows]`` per group, -1 for none.

        In a ring, a row has none whose slot a later row of its request takes.
        """
        found = {}
        row = batch.starts[owner] + within
        for name, slots in step.slots.items():
            place = self.books.layout.places[name]
            slot = slots[row].long()
            written = (slot >= 0) & (slot < place.num_slots)
            if place.group.ring is not None:
                written &= within + place.group.ring >= batch.counts[owner]
            found[place] = torch.where(written, word_at(place, slot), -1)
        return found

    def _journal(
        self,
        line: Tensor,
        position: Tensor,
        given: Tensor,
        terms: Tensor,
        ahead: Tensor,
        places: Mapping[Place, Tensor],
    ) -> None:
        """Write a journal entry for each row: its request, position, tokens and words' indices.

        ``JOURNALLED`` stays: ``_note_step`` raises it.

        Args:
            line: int64 ``[num_rows]``, the line of each row's request.
            position: int64 ``[num_rows]``, of each row in its request.
            given: int64 ``[num_rows]``, the position that each row is computed for.
            terms: int64 ``[num_rows]``, the token of each row as ``Key.terms`` has it.
            ahead: int64 ``[num_rows]``, the row that each row follows; -1: an earlier step's.
            places: by KV-cache group, the index of each row's word; -1 for a row without one.
        """
        books, rows = self.books, len(line)
        columns = [
            books.counters[book.STEP].add(1).expand(rows),
            books.facts[book.SERIAL][line],
            given,
            terms,
        ]
        here = ahead
        for back in (1, 2):
            earlier = (position - back).clamp(min=0)
            before = books.own[line, earlier + 1] - books.own[line, earlier]
            columns.append(torch.where(here >= 0, terms[here], before))
            here = torch.where(here >= 0, ahead[here], -1)
        none = position.new_full((rows,), -1)
        columns += [places.get(p, none) for p in books.layout.places.values()]
        entries = torch.stack(columns, 1)[-books.sizes.journal :]
        number = books.counters[book.JOURNALLED] + torch.arange(rows, device=line.device)
        books.journal[number[-books.sizes.journal :] % books.sizes.journal] = entries

    def _note_step(
        self, step: Step, batch: Batch, chain: Tensor, places: Mapping[Place, Tensor]
    ) -> None:
        """Update the facts of a step's requests, the counters, and the fingerprints.

        Args:
            step: the step.
            batch: its requests.
            chain: int64 ``[num_rows]``, the digest up to each row.
            places: by group, the index of each row's word; -1 for a row without one.
        """
        books, facts, live = self.books, self.books.facts, batch.live
        line, drafts = batch.lines[live], batch.drafts[live]
        first = batch.first[live]
        settled = first + batch.counts[live] - drafts
        # A request that goes back begins anew: other blocks may hold its rows now.
        imported = facts[book.TOLD][line] == book.IMPORTED
        goes_on = imported | (first >= facts[book.DURABLE][line])
        for before, telling in _TOLD:
            told = torch.where(goes_on, facts[telling][line].minimum(first), -1)
            facts[before][line] = facts[telling][line] = told
        known = facts[book.KNOWN][line].maximum(settled)
        if step.parents is not None:  # the drafts' digests have taken the place of own ones
            known = torch.where(drafts > 0, settled, known)
        facts[book.KNOWN][line] = known
        facts[book.DURABLE][line] = settled
        facts[book.KEPT][line] = torch.where(drafts > 0, -1, 0)
        now = books.counters[book.STEP].add_(1)
        books.counters[book.JOURNALLED] += len(chain)
        books.counters[book.REFUSED] += batch.refused.sum()
        books.counters[book.UNRESOLVED] += books.counters[book.OPEN]
        books.counters[book.OPEN] = (batch.drafts > 0).sum()
        prints, written = books.fingerprints, chain.sum()
        prints[now % book.FINGERPRINTS] = prints[(now - 1) % book.FINGERPRINTS] * STEP_FACTOR
        for place, where in places.items():
            marks = written + (where * PLACE_FACTOR).sum()
            prints[now % book.FINGERPRINTS, place.index] += marks

    def resolve(
        self, step: Step, accepted: Tensor, sampled: Tensor | None, besides: int = 0
    ) -> None:
        """Mark what a step's rejected drafts wrote, and take in its tokens.

        ``KEPT``, ``DURABLE`` and ``KNOWN`` follow the drafts that stay; see ``Passes.resolve``.
        """
        accepted = accepted - besides if besides else accepted
        books, facts = self.books, self.books.facts
        batch = Batch.of(books, step, released=True)
        books.counters[book.OPEN] = 0
        kept = accepted.long().clamp(min=0).minimum(batch.drafts)
        owner, within = ragged(batch.counts)
        live = batch.live & (facts[book.SERIAL][batch.lines.clamp(min=0)] >= 0)
        settled = batch.counts - batch.drafts
        if step.parents is not None:
            drawn = kept.new_empty(len(kept), 0) if sampled is None else sampled
            path = SampledPath.of(books, batch, kept, drawn, owner, within)
            kept = path.kept
            # Of a request that has ended the digests are gone; its drafts' words say what they are.
            rejected = (within >= settled[owner]) & ~path.on & live[owner]
            self._put_path(batch, settled, path, live)
        else:
            if sampled is not None:
                kept = kept.minimum(same_drafts(step, batch, sampled))
            rejected = within >= (settled + kept)[owner]
        for where in self._places(step, batch, owner, within).values():
            books.words[where[rejected & (where >= 0)]] = REJECTED
        line = batch.lines[live]
        length = (batch.first + batch.counts - batch.drafts + kept)[live]
        facts[book.KEPT][line] = kept[live]
        facts[book.DURABLE][line] = length
        known = facts[book.KNOWN][line].maximum(length)
        facts[book.KNOWN][line] = known
        if sampled is None:
            return
        token = torch.where(accepted < 0, -1, next_token(sampled, kept))[live]
        more = (token >= 0) & (known == length) & (length < books.sizes.max_length)
        line, length, token = line[more], length[more], token[more]
        term = books.key.terms(token, length)
        books.own[line, length + 1] = books.own[line, length] + term
        facts[book.KNOWN][line] += 1

    def _put_path(self, batch: Batch, settled: Tensor, path: SampledPath, live: Tensor) -> None:
        """Put the digests of sampled paths in the place of those of the trees."""
        column = torch.arange(path.digests.shape[1], device=settled.device)
        request, at = ((column < path.kept[:, None]) & live[:, None]).nonzero(as_tuple=True)
        end = (batch.first + settled)[request] + at + 1
        self.books.own[batch.lines[request], end] = path.digests[request, at]

    # -- comparing ---------------------------------------------------------------------------

    def check(self, step: Step) -> None:
        """Compare every row that the step's queries read, and report wrong ones.

        Positions up to which the request was told of wrong rows are left out.
        """
        batch = Batch.of(self.books, step)
        end = batch.first + batch.counts
        told = self.books.facts[book.TOLD][batch.lines.clamp(min=0)]
        bounds = {
            place: (first_visible(place, batch.first, end).maximum(told), end)
            for place in map(self.books.layout.places.__getitem__, step.tables)
        }
        self._compare(batch.lines, bounds, step, None)

    def inspect(self, stretch: Stretch) -> None:
        """Compare rows that are published, exported or imported, and report wrong ones.

        Requests that are not admitted are left out, and positions that the ledger does not have.
        """
        lines = admitted(self.books, stretch.lines.long())
        number = len(lines)  # a tensor may be longer
        first = stretch.first[:number].long().clamp(min=0)
        end = torch.where(lines >= 0, stretch.end[:number].long(), 0)
        end = end.clamp(max=self.books.sizes.max_length)
        places = [self.books.layout.places[name] for name in stretch.tables]
        self._compare(lines, dict.fromkeys(places, (first, end)), stretch, stretch.kind)

    def _compare(
        self,
        lines: Tensor,
        bounds: Mapping[Place, tuple[Tensor, Tensor]],
        read: Step | Stretch,
        kind: str | None,
    ) -> None:
        """Compare and count stretches of rows, and report wrong rows request by request.

        Args:
            lines: int64 ``[num_requests]``; -1: the request is left out.
            bounds: by group, the first position of each request and the one after its last.
            read: has the tables.
            kind: the kind of a stretch; None for a step, which also counts stale rows by age.
        """
        wrong = torch.zeros(len(lines), dtype=torch.bool, device=lines.device)
        for place, (first, end) in bounds.items():
            counts = (end - first).clamp(min=0) * (lines >= 0)
            owner, within = ragged(counts)
            self.books.counters[book.ROWS_CHECKED] += len(owner)
            position = first[owner] + within
            where = words_read(read, place, owner, position)
            found, age = self._found(place, lines[owner], position, where, kind)
            if kind is None:
                count_ages(self.books, lines[owner], age)
            bad = found >= 0
            wrong[owner[bad]] = True
        for index in wrong.nonzero().flatten().tolist():
            for place, (first, end) in bounds.items():
                positions = torch.arange(int(first[index]), int(end[index]), device=lines.device)
                self._report_rows(place, index, lines[index], positions, read, kind)

    def _found(
        self, place: Place, line: Tensor, position: Tensor, where: Tensor, kind: str | None
    ) -> tuple[Tensor, Tensor]:
        """Judge rows: return a number of ``FOUND`` for each wrong row, -1 for each right row.

        A stale row is wrong where a step reads it and the ledger is to alarm; the row of an open
        draft where it is to be exported.

        Returns:
            int64 ``[num_rows]``, and the rows' ages, int64 ``[num_rows]``.
        """
        books = self.books
        word = torch.where(where >= 0, books.words[where.clamp(min=0)], UNWRITTEN)
        wanted = as_word(books.own[line, position + 1] + books.salts[place.written])
        found = torch.full_like(position, -1)
        if kind == "exported":
            found[position >= books.facts[book.DURABLE][line]] = FOUND_NUMBER["draft"]
        age = age_of(word, wanted, books.counters[book.EPOCH])
        wrong = (word != wanted) & (age == 0)
        found[wrong] = _FOREIGN
        found[wrong & (word == REJECTED)] = FOUND_NUMBER["rejected"]
        found[wrong & (word == UNWRITTEN)] = FOUND_NUMBER["unwritten"]
        age = age_in(place, age)
        if kind is None:
            age[position < books.facts[book.TOLD_STALE][line]] = 0
            if bool(books.counters[book.ALARM]):
                found[age > 0] = _STALE
        return found, age

    def _report_rows(
        self,
        place: Place,
        index: int,
        line: Tensor,
        position: Tensor,
        read: Step | Stretch,
        kind: str | None,
    ) -> None:
        """Report one request's wrong rows of one group, a run as one; note how far it was told.

        Reads of a step outside the group are reported once per request.
        """
        where = words_read(read, place, torch.full_like(position, index), position)
        found, age = self._found(place, line.expand_as(position), position, where, kind)
        wrong = found >= 0
        within = in_ring(place, position) % place.group.block_size
        goes_on = (within != 0) & (position % RUN != 0)
        goes_on[1:] &= found[1:] == found[:-1]
        goes_on[:1] = False
        heads = (wrong & ~goes_on).nonzero().flatten()
        for head in heads.tolist():
            code = int(found[head])
            if kind is None and int(where[head]) < 0 and not self._is_new_outside(place, line):
                continue
            number = code if kind is None else KIND_NUMBER[kind]
            at, word = int(position[head]), int(where[head])
            aged = int(age[head]) if code == _STALE else NOBODY
            record_violation(self.books, number, line, place, at, word, code, aged)
        if kind == "exported":
            return  # who exports a wrong row may go on, and what it reads is compared as before
        stale = found == _STALE
        for fact, told in ((book.TELLING, wrong & ~stale), (book.TELLING_STALE, stale)):
            if bool(told.any()):
                telling = self.books.facts[fact]
                telling[line] = telling[line].maximum(position[-1] + 1)

    def _is_new_outside(self, place: Place, line: Tensor) -> bool:
        """Tell whether a request reads outside a group for the first time, and remember it."""
        bits, bit = self.books.facts[book.OUTSIDE], 1 << place.index % 63
        before = int(bits[line])
        bits[line] = before | bit
        return not before & bit

    # -- states ------------------------------------------------------------------------------

    def _check_states(self, step: Step, batch: Batch) -> None:
        """Compare the states that the step begins with, and the accepted counts it was told.

        Wrong ones are reported; states that are read are counted, stale ones by age.
        """
        books, facts = self.books, self.books.facts
        first, number = batch.first, len(batch.lines)
        line = batch.lines.clamp(min=0)
        faults = []
        for name, source in step.sources.items():
            place = books.layout.places[name]
            block = source[:number].long()
            reads = batch.live & ((first > 0) | (block >= 0))
            inside = (block >= 0) & (block < place.group.num_blocks)
            where = torch.where(inside, place.base + block * place.stride, -1)
            word = torch.where(inside, books.words[where.clamp(min=0)], UNWRITTEN)
            wanted = as_word(books.own[line, first] + books.salts[name])
            owner = books.owners[torch.where(inside, place.owners + block, 0)]
            age = torch.where(reads, age_of(word, wanted, books.counters[book.EPOCH]), 0)
            right, age = (word == wanted) | (age > 0), age_in(place, age)
            count_ages(books, line, age, states=True)
            found = torch.where(right, -1, _FOREIGN)
            theirs = (owner >= 0) & (owner != facts[book.SERIAL][line])
            if bool(books.counters[book.ALARM]):
                found[age > 0] = _STALE
            found[right & theirs] = FOUND_NUMBER["owner"]
            found[word == REJECTED] = FOUND_NUMBER["rejected"]
            found[word == UNWRITTEN] = FOUND_NUMBER["unwritten"]
            found[~reads] = -1
            books.counters[book.STATES_CHECKED] += reads.sum()
            faults.append((place, where, found, age))
        told = None
        if step.told is not None:
            kept, given = facts[book.KEPT][line], step.told[:number]
            told = batch.live & (first > 0) & (given >= 0) & (kept >= 0) & (given != kept)
        wrong = any(bool((found >= 0).any()) for _, _, found, _ in faults)
        if not wrong and (told is None or not told.any()):
            return
        self._report_states(batch.lines, first, faults, told)

    def _report_states(
        self,
        lines: Tensor,
        first: Tensor,
        faults: list[tuple[Place, Tensor, Tensor, Tensor]],
        told: Tensor | None,
    ) -> None:
        """Report wrong states and wrong counts of accepted drafts, request by request."""
        state = KIND_NUMBER["state"]
        for index in range(len(lines)):
            position = int(first[index]) - 1
            for place, where, found, age in faults:
                at, code = int(where[index]), int(found[index])
                if code >= 0:
                    kind, aged = (state, NOBODY) if code != _STALE else (_STALE, int(age[index]))
                    record_violation(
                        self.books, kind, lines[index], place, position, at, code, aged
                    )
            if told is not None and told[index]:
                record_violation(
                    self.books, state, lines[index], None, position, -1, FOUND_NUMBER["count"]
                )
