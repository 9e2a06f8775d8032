"""The sentences of a ledger's errors and violations say what was asked, expected and given."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from kvtxn import AcceptanceError, CapacityError, ConfigError, LayerError, LayerRef
from kvtxn.audit import (
    Admission,
    Key,
    Ledger,
    RecordingLedger,
    RowGroup,
    Scrub,
    StateGroup,
    Step,
    Violation,
)

GROUP = RowGroup("a", 4, 8)


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def made(kind=Ledger, **named):
    return kind([GROUP], **{"max_requests": 3, "max_length": 16, **named})


def layer(group="a"):
    cache = torch.zeros(8, 4, 2, 8)
    return LayerRef("l", cache, cache.clone(), group=group)


def drafting(ledger):
    """Write a step of one request with two drafts."""
    line = ledger.admit("r", [1, 2, 3])
    step = Step(
        lines=ints(line), starts=ints(0, 5), first=ints(0), tokens=ints(1, 2, 3, 4, 5),
        drafts=ints(2), slots={"a": ints(4, 5, 6, 7, 8)}, tables={"a": ints(1, 2)[None]},
    )  # fmt: skip
    ledger.write(step)
    return step


# -- requests that come --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Ledger, RecordingLedger])
def test_requests_may_come_in_an_iterator(kind):
    """It is read once, and each request gets its line and its tokens."""
    ledger = made(kind)
    given = (Admission(name, [n, n]) for n, name in enumerate("xy", 1))
    lines = ledger.admit_all(given)
    assert lines == [ledger.line("x"), ledger.line("y")]
    own = ledger.books.own[lines].tolist()
    other = made(key=ledger.books.key)
    assert own == [other.books.own[other.admit(n, [i, i])].tolist() for i, n in enumerate("xy", 1)]
    assert ledger.change(iter(["x", "y"]), iter([Admission("z", [1])])) == [ledger.line("z")]
    assert "x" not in ledger
    assert "y" not in ledger


@pytest.mark.parametrize("kind", [Ledger, RecordingLedger])
@pytest.mark.parametrize("given", [["q0"], "q0", None, 3, {"q0": [1]}])
def test_what_comes_has_to_be_admissions(kind, given):
    ledger = made(kind)
    with pytest.raises(ConfigError, match=r"^admit_all: .* expected an iterable of ") as raised:
        ledger.admit_all(given)
    assert raised.value.got
    assert "Admission(name, tokens)" in raised.value.hint
    with pytest.raises(ConfigError, match=r"^change: admission 1 is not valid"):
        ledger.change((), [Admission("there", [1]), given])
    assert "there" not in ledger
    assert len({ledger.admit(name, [1]) for name in "xyz"}) == 3  # no line was lost


def test_an_iterator_s_own_error_is_the_caller_s():
    def broken():
        yield Admission("x", [1])
        raise TypeError("of the caller's")

    ledger = made()
    with pytest.raises(TypeError, match=r"of the caller's"):
        ledger.admit_all(broken())
    assert "x" not in ledger


def test_a_full_ledger_says_how_many_are_there():
    ledger = made()
    ledger.admit_all([Admission(name, [1]) for name in "xy"])
    with pytest.raises(CapacityError, match="got 1 that stay and 3 that come") as raised:
        ledger.change(["x"], [Admission(name, [1]) for name in "abc"])
    assert raised.value.expected == "at most 3 requests at one time"
    assert "x" in ledger


# -- outcomes ------------------------------------------------------------------------------------

NO_NUMBERS = ["1", None, [1], True, torch.tensor(1), 1.5, -1, 2**70]


@pytest.mark.parametrize("besides", NO_NUMBERS, ids=repr)
def test_tokens_besides_are_a_number(besides):
    """Counts on the device, which go the quick way, and a list; the step can be resolved still."""
    ledger = made()
    step = drafting(ledger)
    scrub = Scrub(ledger, [layer()])
    for accepted in (ints(2), [2]):
        with pytest.raises(
            AcceptanceError, match=r"^resolve: besides is not valid; expected an in"
        ):
            ledger.resolve(accepted, besides=besides)
    ledger.resolve(ints(2), besides=1)
    assert ledger.kept(step).tolist() == [1]
    for accepted in (ints(2), [2], None):
        with pytest.raises(AcceptanceError, match=r"^seal: besides is not valid; expected an int "):
            scrub.seal(step, accepted, besides=besides)
    scrub.seal(step, [2], besides=1)


def test_tokens_besides_may_be_an_int_of_numpy():
    ledger = made()
    step = drafting(ledger)
    ledger.resolve(ints(2), besides=np.int64(1))
    assert ledger.kept(step).tolist() == [1]


# -- names, groups, outputs ----------------------------------------------------------------------

CALLS = {
    "publish": lambda ledger: ledger.publish("nobody", "a", [1], 0, 4),
    "export": lambda ledger: ledger.export("nobody", "a", [1], 0, 4),
    "import_rows": lambda ledger: ledger.import_rows("nobody", "a", [1], 0, 4),
    "line": lambda ledger: ledger.line("nobody"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_request_is_told_by_the_call(name):
    with pytest.raises(ConfigError) as raised:
        CALLS[name](made())
    told = raised.value
    assert (told.operation, told.got) == (name, "'nobody'")
    assert told.expected == "the name of an admitted request"


def test_a_scrub_tells_an_unknown_request_by_its_own_call():
    ledger = made()
    with pytest.raises(ConfigError, match=r"^import_rows: request 'nobody' is not admitted"):
        Scrub(ledger, [layer()]).import_rows("nobody", "a", [1], 0, 4)


def test_a_layer_of_an_unknown_group_is_told_with_the_groups():
    with pytest.raises(LayerError, match=r"got no group 'b' among \['a'\]"):
        Scrub(made(), [layer("b")])
    reader = Ledger([GROUP, RowGroup("b", 4, 8, reads="a")], max_requests=1, max_length=8)
    with pytest.raises(LayerError, match="got a group that reads the rows of 'a'"):
        Scrub(reader, [layer("b")])
    with pytest.raises(LayerError, match="got 32 slots in the cache, 36 in the group"):
        Scrub(Ledger([RowGroup("a", 4, 9)], max_requests=1, max_length=8), [layer()])


def test_poison_is_a_list_of_groups():
    with pytest.raises(ConfigError, match="poison is neither a bool nor a list; expected a bool, "):
        Scrub(made(), [layer()], poison="a")
    with pytest.raises(ConfigError, match=r"poison names groups without layers; .* got \['b'\]"):
        Scrub(made(), [layer()], poison=["b"])


def test_outputs_are_told_with_dtype_and_shape():
    ledger = made()
    step = drafting(ledger)
    scrub = Scrub(ledger, [layer()])
    said = r"expected float \[2, \.\.\.\] on cpu, got torch\.int64 \[2, 3\] on cpu"
    with pytest.raises(ConfigError, match=said):
        scrub.trace(step, torch.zeros(2, 3, dtype=torch.int64), ints(0, 1))
    with pytest.raises(ConfigError, match=r"got torch\.float32 \[3\] on cpu"):
        scrub.locate(step, torch.zeros(3), ints(0, 1))
    with pytest.raises(ConfigError, match="got list"):
        scrub.trace(step, [0.0, 1.0], ints(0, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RowGroup("a\ud800", 4, 8),
        lambda: StateGroup("\udc80", 8),
        lambda: Key.derived("secret \udfff"),
    ],
)
def test_text_that_cannot_be_encoded_is_refused(make):
    with pytest.raises(ConfigError, match=r"expected a str .*lone surrogates"):
        make()
    assert RowGroup("\U0001f600 ä", 4, 8).name
    assert Key.derived("\U0001f600") == Key.derived("\U0001f600")


# -- violations ----------------------------------------------------------------------------------

READ = Violation("foreign", 7, "r", "a", None, 5, 2, 9, "foreign", (1, 2, 3))
NOWHERE = {"slot": None, "block": None}
RANKS = Violation("ranks", 7, None, "a", None, None, None, None, "foreign", ())
SAID = [
    (attrs.evolve(READ, kind=kind), f"{kind}: in step 7 request r {deed} slot 9 (block 2) of "
     "group 'a' as position 5; found foreign")
    for kind, deed in (
        ("foreign", "read"), ("published", "published"), ("exported", "sent out"),
        ("imported", "was given"), ("state", "went on from"),
    )
] + [
    (attrs.evolve(READ, kind="published", **NOWHERE), "published: in step 7 request r published a "
     "place outside of group 'a' as position 5; found foreign"),
    (attrs.evolve(READ, kind="changed", found="nan", expected=(), **NOWHERE),
     "changed: in step 7 request r has a NaN in an output as position 5; found nan"),
    (attrs.evolve(READ, kind="state", group="", found="count", **NOWHERE), "state: in step 7 "
     "request r was told a wrong number of accepted drafts at position 5; found count"),
    (RANKS, "ranks: in step 7 this rank wrote other rows of group 'a' than another rank"),
]  # fmt: skip


@pytest.mark.parametrize(("violation", "said"), SAID)
def test_a_violation_says_what_its_request_did(violation, said):
    assert str(violation) == said


def test_a_users_tokens_are_in_no_line_of_a_log():
    """Not in the sentence, nor where objects or errors are shown; in the fields they are."""
    written = {"written_for": (70001, 70002), "written_position": 5, "written_step": 3}
    told = attrs.evolve(READ, expected=(70003, 70004), **written, differs="tokens")
    admission = Admission("r", [70001], embedded={0: 70002})
    for said in (str(told), repr(told), repr(admission)):
        assert "7000" not in said
    assert str(told).endswith("written in step 3 by the engine for position 5, of other tokens")
    assert told.as_dict()["expected"] == [70003, 70004]
    for wrong in (lambda: ("r", [70001]), lambda: Admission("r", [1], embedded=[70001])):
        with pytest.raises(ConfigError) as refused:
            made().admit_all([wrong()])
        assert "7000" not in str(refused.value)


def test_a_violation_says_what_differs():
    """In words, where the last tokens are the same: the adapter, or something before them."""
    group = RowGroup("a", 4, 8)

    def differs(tokens, *, extras=(), embedded=None, first=0):
        ledger = Ledger([group], max_requests=2, max_length=16)
        ledger.admit("w", [1, 2, 3, 4, 5, 6, 7, 8], extras=[9])
        rows = torch.arange(4, 12)
        step = Step(
            lines=torch.tensor([ledger.line("w")]), starts=torch.tensor([0, 8]),
            first=torch.tensor([0]), tokens=torch.arange(1, 9), slots={"a": rows}, tables={},
        )  # fmt: skip
        ledger.write(step)
        ledger.release("w")
        ledger.admit("r", tokens, extras=extras, embedded=embedded)
        ledger.publish("r", "a", [1, 2], first, 8)
        told = ledger.violations()[-1]
        return told.differs, str(told).rpartition(", ")[2]

    same = [1, 2, 3, 4, 5, 6, 7, 8]
    adapter = "with another adapter or encoder input"
    assert differs(same) == differs(same, extras=[3]) == ("extras", adapter)
    assert differs([1, 2, 3, 4, 9, 6, 7, 8], extras=[9]) == ("tokens", "of other tokens")
    image = "with another image or vector in the place of a token"
    assert differs(same, extras=[9], embedded={4: 77}) == ("embedded", image)
    assert differs([9, *same[1:]], extras=[9])[0] == "earlier"
    assert differs([0, *same[:7]], extras=[9])[0] == "tokens"
    ledger = Ledger([group], max_requests=2, max_length=16)
    ledger.admit("r", [1, 2], extras=[3])
    ledger.publish("r", "a", [1], 0, 2)
    assert ledger.violations()[0].differs is None  # nobody wrote it


def test_content_that_is_embedded_keeps_its_ids():
    """They tell which content it was."""
    ledger = made()
    ledger.admit("r", [1, 0, 0], embedded={1: 5, 2: 5})
    ledger.publish("r", "a", [1], 2, 3)
    (told,) = ledger.violations()
    ids = ledger.books.key.embedded_ids(torch.tensor([5, 5]), torch.tensor([1, 2])).tolist()
    assert told.as_dict()["expected"] == [1, *ids]
