"""``Violation``: one wrong read, and the write that caused it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from .digest import EMBEDDED, MAX_POSITION, TARGET_AGE, Key

#: All kinds of violations; the device stores an index into this tuple.
KINDS: Final = (
    "unwritten",
    "rejected",
    "foreign",
    "state",
    "published",
    "exported",
    "imported",
    "changed",
    "ranks",
    "stale",
    "weights",
)
KIND_NUMBER: Final = {name: number for number, name in enumerate(KINDS)}

#: Findings at a read; the device stores an index into this tuple.
FOUND: Final = (
    "unwritten",  # no row was written since the block was handed out
    "rejected",  # the row of a draft that was taken back
    "foreign",  # a row of other tokens
    "draft",  # the row of a draft, where a durable row was needed
    "owner",  # the right state, written by another request
    "count",  # a count of accepted drafts that is not the sampler's
    "bytes",  # other bytes than were written
    "nan",  # an output that is not a number, where dead rows are filled with NaN
    "length",  # attention that reads more or fewer rows than the request has, from there on
    "stale",  # a row of the right tokens that earlier weights computed
    "weights",  # weights that have changed, and nobody said so
)
FOUND_NUMBER: Final = {name: number for number, name in enumerate(FOUND)}

#: The int64 fields of a violation as the device stores it.
FIELDS: Final = (
    "kind",
    "step",
    "serial",
    "group",
    "position",
    "place",
    "slot",
    "found",
    "wanted_0",
    "wanted_1",
    "wanted_2",
    "writer_step",
    "writer_serial",
    "writer_position",
    "written_0",
    "written_1",
    "written_2",
    "layer",  # of a stale row or state its age: it concerns all layers
)
FIELD: Final = {name: number for number, name in enumerate(FIELDS)}
NOBODY: Final = -1
#: The position of a writer from here down: a connector brought the row; see ``books``.
BROUGHT: Final = -2

#: By kind: what the request did with a row or state; with those of other kinds, it read them.
VERBS: Final[Mapping[str, str]] = {
    "published": "published",
    "exported": "sent out",
    "imported": "was given",
    "state": "went on from",
}

#: The fields that have users' text.
TOKEN_FIELDS: Final = ("expected", "written_for")

#: What differs between the row that was found and the one expected, and how a sentence says it.
DIFFERENCES: Final[Mapping[str, str]] = {
    "position": "of another position",
    "tokens": "of other tokens",
    "embedded": "with another image or vector in the place of a token",
    "extras": "with another adapter or encoder input",
    "earlier": "with other tokens, images or vectors before its last tokens",
    "weights": "of the same tokens, computed by other weights",
    "unknown": "with other tokens before its last ones, or another adapter",
}

#: Ids from ``digest.EMBEDDED`` on stand for a part of an image or other embedded content.
Tokens = tuple[int, ...]


@attrs.frozen
class Violation:
    """A wrong read, write or count.

    Its tokens are in its fields alone, not in ``str`` and ``repr``, which end up in logs.

    A run of neighbouring wrong rows of one kind in one block is one violation, named by its first
    row; of rows whose bytes ``changed`` each is one. Each request that reads a wrong row is told of
    it once, until its tokens are given again (a session's next turn), it goes back to earlier
    positions, or it gets rows of a connector. Whoever publishes or exports the row is told each
    time. Steps of a request that read outside a group of rows are reported once per group.

    Attributes:
        kind: one of ``KINDS``.
        step: the step that read it, counted from 1.
        request: the request that read, by the name given to ``admit``; None if no request did.
        group: the name of the group; "" if no group is concerned (``ranks``).
        layer: the layer's name if bytes were compared (``Scrub``); else None.
        position: the position that the row, or the last token of the state, stands for; None for
            the state that a request begins with.
        block: the block; None if the table led outside the group.
        slot: the slot in the group; None if the table led outside the group.
        found: one of ``FOUND``.
        expected: up to three tokens: the reader's last tokens up to ``position``.
        written_for: up to three tokens: the last tokens of the prefix that the row was computed
            from; empty if the writer is not known any more.
        written_position: the position that the row was written for; None if not known (any more).
        written_step: the step that wrote the row; None if not known any more.
        written_request: the request that wrote the row; None if not known any more.
        brought: a connector brought the row. What is "written" above is then of the request that
            stored the row, and of the step in which it did; or, where nobody knows who stored it
            (``written_position`` is None), of the request that it was brought for. Of another
            process the request is a label that names both, and there is no step.
        differs: a key of ``DIFFERENCES``: the first, by their order, in which a row of other tokens
            (``found`` is "foreign") differs from the one expected; None if it was found to be
            something else, or if it is not known for which tokens it was written.
        age: for a stale row, how often the weights have changed since it was computed.
        weights: whose weights these are, "target" or "drafter": those that computed a stale row, or
            those that have changed although nobody said so.
    """

    kind: str
    step: int
    request: str | None
    group: str
    layer: str | None
    position: int | None
    block: int | None
    slot: int | None
    found: str
    expected: Tokens = attrs.field(repr=False)
    written_for: Tokens = attrs.field(default=(), repr=False)
    written_position: int | None = None
    written_step: int | None = None
    written_request: str | None = None
    brought: bool = False
    differs: str | None = None
    age: int | None = None
    weights: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a flat dict, with tokens as lists."""
        flat = attrs.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}

    def __str__(self) -> str:
        """Return one sentence for a log, without tokens: they are a user's text."""
        begin = f"{self.kind}: in step {self.step}"
        if self.kind == "ranks":
            return f"{begin} this rank wrote other rows of group {self.group!r} than another rank"
        if self.kind == "weights":
            return f"{begin} the {self.weights}'s weights had changed, and nobody had said so"
        what = f"position {self.position}"
        if self.position is None:
            what = "the state before its first token"
        text = f"{begin} {_named(self.request)} {self._deed()} {what}"
        text += f"; found {self.found}"
        if self.age is not None:
            text += f", of {self.weights} weights {self.age} epoch{'s' * (self.age > 1)} before"
        if self.written_step is not None:
            deed, by = ("written", "by")
            if self.brought:
                deed, by = ("brought", "for") if self.written_position is None else ("stored", "by")
            text += f", {deed} in step {self.written_step} {by} {_named(self.written_request)}"
        elif self.written_request is not None:  # of another process, whose steps are its own
            text += f", stored by {self.written_request}"
        if self.written_position is not None:
            text += f" for position {self.written_position}"
        if self.differs is not None:
            text += f", {DIFFERENCES[self.differs]}"
        return text

    def _deed(self) -> str:
        """Return the middle of the sentence: the deed and the slot, up to "as" or "at"."""
        if self.found == "count":
            return "was told a wrong number of accepted drafts at"
        where = f"a place outside of group {self.group!r}"
        if self.slot is not None:
            where = f"slot {self.slot} (block {self.block}) of group {self.group!r}"
        if self.layer is not None:
            where += f", layer {self.layer!r},"
        if self.found == "length":
            return f"read more or fewer rows than it has, from {where} on, as"
        if self.found == "nan":
            return (
                "has a NaN in an output" + ("" if self.slot is None else f", from {where}") + " as"
            )
        return f"{VERBS.get(self.kind, 'read')} {where} as"


def _named(request: str | None) -> str:
    """Return "request" and its name for a sentence; "the engine" for None."""
    return "the engine" if request is None else f"request {request}"


def decode(
    record: Sequence[int],
    key: Key,
    groups: Sequence[tuple[str, int]],
    layers: Sequence[str],
    name_of: Callable[[int], str | None],
    seed_of: Callable[[int], int | None],
) -> Violation:
    """Make a ``Violation`` from the fields that the device stored.

    Args:
        record: the int64 fields, in the order of ``FIELDS``.
        key: the engine's key.
        groups: name and block size of each group.
        layers: names of the layers of a scrub.
        name_of: returns a request's name for its serial number.
        seed_of: returns the digest of a request's extras for its serial number.
    """
    field = dict(zip(FIELDS, record, strict=True))
    group, block_size = groups[field["group"]] if field["group"] >= 0 else ("", 1)
    slot = field["slot"] if field["slot"] >= 0 else None
    position, written_at = field["position"], field["writer_position"]
    known = field["writer_step"] != NOBODY
    brought = known and written_at <= BROUGHT
    if brought:
        written_at = BROUGHT - 1 - written_at
    wanted = [record[FIELD["wanted_0"] + i] for i in range(3)]
    written = [record[FIELD["written_0"] + i] for i in range(3)]
    expected = _tokens(key, wanted, position)
    written_for = _tokens(key, written, written_at) if known else ()
    differs = None
    if FOUND[field["found"]] == "foreign" and written_for:
        seeds = [seed_of(field[name]) for name in ("serial", "writer_serial")]
        differs = _difference((position, expected), (written_at, written_for), seeds)
    layer = layers[field["layer"]] if 0 <= field["layer"] < len(layers) else None
    age, weights = None, None
    if KINDS[field["kind"]] == "stale":
        age, weights = field["layer"] & TARGET_AGE, "target"
        if not age:
            age, weights = field["layer"] >> 32, "drafter"
        layer = None
    return Violation(
        kind=KINDS[field["kind"]],
        step=field["step"],
        request=name_of(field["serial"]),
        group=group,
        layer=layer,
        position=position if position >= 0 else None,
        block=None if slot is None else slot // block_size,
        slot=slot,
        found=FOUND[field["found"]],
        expected=expected,
        written_for=written_for,
        written_position=written_at if written_at >= 0 else None,
        written_step=field["writer_step"] if known else None,
        written_request=name_of(field["writer_serial"]) if known else None,
        brought=brought,
        differs=differs,
        age=age,
        weights=weights,
    )


def _difference(
    wanted: tuple[int, Tokens], written: tuple[int, Tokens], seeds: Sequence[int | None]
) -> str:
    """Return the key of ``DIFFERENCES`` for a row whose digest is not the one expected.

    Args:
        wanted: the position and the last tokens that the reader expected.
        written: those that the row was written for.
        seeds: the digests of the extras of the reader and the writer; None if not known any more.
    """
    if wanted[0] != written[0]:
        return "position"
    pairs = zip(reversed(wanted[1]), reversed(written[1]), strict=False)
    others = [max(pair) for pair in pairs if pair[0] != pair[1]]
    if others:
        return "embedded" if max(others) >= EMBEDDED else "tokens"
    if None in seeds:
        return "unknown"
    return "earlier" if seeds[0] == seeds[1] else "extras"


def _tokens(key: Key, terms: Sequence[int], position: int) -> Tokens:
    """Return the tokens of up to three terms: of ``position`` and the two before; oldest first.

    A term that does not decode to its own position is left out, and so are those before it: no
    token was stored for it.
    """
    assert position < MAX_POSITION
    found = []
    for back, term in enumerate(terms):
        token, at = key.token_of(term)
        if position - back < 0 or at != position - back:
            break
        found.append(token)
    return tuple(reversed(found))
