"""Bad input to a ledger: a clear error, nothing written, and the ledger goes on as before."""

from __future__ import annotations

import warnings

import attrs
import numpy as np
import pytest
import torch

from kvtxn import AcceptanceError, BackendUnavailableError, ConfigError
from kvtxn.audit import Key, Ledger, RowGroup, StateGroup, Step, Stretch
from kvtxn.audit.books import Sizes

GROUPS = (RowGroup("a", 4, 8), RowGroup("b", 4, 8), StateGroup("s", 8))
PROMPT = [5, 6, 7, 8, 9]


def ints(values):
    return torch.tensor(values, dtype=torch.int64)


def step_of(lines, starts, first, tokens, slots, tables, **more):
    return Step(
        lines=ints(lines),
        starts=ints(starts),
        first=ints(first),
        tokens=ints(tokens),
        slots={group: ints(values) for group, values in slots.items()},
        tables={group: ints(values) for group, values in tables.items()},
        **more,
    )


@pytest.fixture
def ledger():
    """A ledger with a request "r" whose five rows lie in the last two blocks."""
    made = Ledger(GROUPS, max_requests=4, max_length=64)
    line = made.admit("r", PROMPT)
    slots = [28, 29, 30, 31, 24]
    places = {"a": slots, "b": slots, "s": [-1, -1, -1, -1, 7]}
    sources = {"s": ints([-1])}
    tables = {"a": [[7, 6]], "b": [[7, 6]]}
    made.write(step_of([line], [0, 5], [0], PROMPT, places, tables, sources=sources))
    return made


def books_of(ledger):
    """A copy of everything that a ledger knows."""
    tensors = (v for v in attrs.asdict(ledger.books, recurse=False).values())
    return [t.clone() for t in tensors if isinstance(t, torch.Tensor)]


def refused(ledger, call, error=ConfigError):
    """Make a call that is refused; returns the error's text, and what the call has changed."""
    before = books_of(ledger)
    with pytest.raises(error) as raised:
        call(ledger)
    pairs = zip(before, books_of(ledger), strict=True)
    changed = [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]
    assert raised.value.hint
    return str(raised.value), [*changed, *ledger.violations()]


def nested():
    """A tensor without a shape."""
    with warnings.catch_warnings(action="ignore"):  # torch's: its API will change
        return torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([1, 2])])


WRONG_CALLS = {
    "hand out -1": lambda ledger: ledger.hand_out("a", [-1]),
    "hand out too much": lambda ledger: ledger.hand_out("a", [1, 8]),
    "hand out floats": lambda ledger: ledger.hand_out("a", [1.5]),
    "hand out a list of lists": lambda ledger: ledger.hand_out("a", [[1]]),
    "hand out of no group": lambda ledger: ledger.hand_out("zz", [1]),
    "hand out on a device": lambda ledger: ledger.hand_out(
        "a", torch.zeros(1, device="meta").int()
    ),
    "copy from -1": lambda ledger: ledger.copy("a", [-1], [2]),
    "copy to -1": lambda ledger: ledger.copy("a", [2], [-1]),
    "copy to one block twice": lambda ledger: ledger.copy("a", [1, 2], [3, 3]),
    "copy to fewer blocks": lambda ledger: ledger.copy("a", [1, 2], [3]),
    "import beyond the group": lambda ledger: ledger.import_rows("r", "a", [8], 0, 4),
    "import to -1": lambda ledger: ledger.import_rows("r", "a", [-1], 0, 4),
    "import by a short table": lambda ledger: ledger.import_rows("r", "a", [1], 0, 5),
    "import for nobody": lambda ledger: ledger.import_rows("x", "a", [1], 0, 4),
    "import other digests": lambda ledger: ledger.import_rows("r", "a", [1], 0, 4, ints([1, 2])),
    "import no digests": lambda ledger: ledger.import_rows("r", "a", [1], 0, 1, torch.ones(1)),
    "import a state as rows": lambda ledger: ledger.import_rows("r", "s", [1], 0, 1),
    "import a state too far": lambda ledger: ledger.import_state("r", "s", 8, 1),
    "import a state of nothing": lambda ledger: ledger.import_state("r", "s", 1, 0),
    "import rows as a state": lambda ledger: ledger.import_state("r", "a", 1, 1),
    "export a state as rows": lambda ledger: ledger.export("r", "s", [1], 0, 1),
    "export backwards": lambda ledger: ledger.export("r", "a", [7], 3, 2),
    "export too far": lambda ledger: ledger.export("r", "a", [7], 0, 65),
    "export a state of -1": lambda ledger: ledger.export_state("r", "s", -1, 1),
    "publish before the first": lambda ledger: ledger.publish("r", "a", [7], -3, 2),
    "publish too far": lambda ledger: ledger.publish("r", "a", [7, 6], 0, 65),
    "publish of nobody": lambda ledger: ledger.publish("x", "a", [7], 0, 4),
    "publish of no group": lambda ledger: ledger.publish("r", "zz", [7], 0, 4),
    "publish by a table of floats": lambda ledger: ledger.publish("r", "a", [7.5], 0, 4),
    "publish half a row": lambda ledger: ledger.publish("r", "a", [7], 0, 1.5),
    "publish a state of nothing": lambda ledger: ledger.publish_state("r", "s", 7, 0),
    "publish a state too far": lambda ledger: ledger.publish_state("r", "s", 8, 5),
    "tokens below 0": lambda ledger: ledger.admit("q", [1, -1]),
    "tokens too large": lambda ledger: ledger.admit("q", [2**39]),
    "tokens beyond int64": lambda ledger: ledger.admit("q", [2**70]),
    "tokens that are floats": lambda ledger: ledger.admit("q", [1.0]),
    "tokens that are bools": lambda ledger: ledger.admit("q", torch.tensor([True])),
    "tokens in two dimensions": lambda ledger: ledger.admit("q", [[1, 2], [3, 4]]),
    "tokens that are text": lambda ledger: ledger.admit("q", "abc"),
    "embedded behind the end": lambda ledger: ledger.admit("q", [1, 2], embedded={2: 7}),
    "embedded before the start": lambda ledger: ledger.admit("q", [1, 2], embedded={-1: 7}),
    "embedded text": lambda ledger: ledger.admit("q", [1, 2], embedded={0: "x"}),
    "a name that is no text": lambda ledger: ledger.admit(7, [1]),
    "change": lambda ledger: ledger.change(given=[1]),
    "publish_state": lambda ledger: ledger.publish_state("r", "s", 1, "x"),
    "carry, one tensor": lambda ledger: ledger.carry({"s": torch.tensor([1])}),
    "carry, one of two": lambda ledger: ledger.carry({"s": (torch.tensor([1]),)}),
    "carry, none": lambda ledger: ledger.carry({"s": None}),
    "age, one tensor": lambda ledger: ledger.age(torch.tensor([1]), 1),
    "age, of states": lambda ledger: ledger.age({"s": torch.tensor([1])}, 1),
    "age, before the ledger": lambda ledger: ledger.age({"a": torch.tensor([1])}, -1),
    "age, two lengths": lambda ledger: ledger.age({"a": torch.ones(1, 2)}, 1),
    "leave, lines in a list": lambda ledger: ledger.leave(0, {"s": torch.tensor([1])}),
    "leave, more lengths": lambda ledger: ledger.leave(
        torch.tensor([0]), {"s": torch.tensor([1])}, torch.tensor([1, 2])
    ),
    "export_state": lambda ledger: ledger.export_state("r", "s", 1, "3"),
    "import_state": lambda ledger: ledger.import_state("r", "s", 1, None),
    "import_rows, meta": lambda ledger: ledger.import_rows(
        "r", "a", [1], 0, 1, torch.empty(1, dtype=torch.int64, device="meta")
    ),
    "lines_of": lambda ledger: ledger.lines_of(None),
    "lines_of, lists": lambda ledger: ledger.lines_of([[]]),
    "change, no blocks by group": lambda ledger: ledger.change(given=torch.tensor([])),
    "write, nested": lambda ledger: ledger.write(Step(**GOOD | {"lines": nested()})),
    "write, nested tokens": lambda ledger: ledger.write(Step(**GOOD | {"tokens": nested()})),
    "write, nested slots": lambda ledger: ledger.write(Step(**GOOD | {"slots": {"a": nested()}})),
    "hand_out, nested": lambda ledger: ledger.hand_out("a", nested()),
    "kept": lambda ledger: ledger.kept(None),
    "take_back": lambda ledger: ledger.take_back(None),
    "write": lambda ledger: ledger.write(None),
    "copy_counters": lambda ledger: ledger.copy_counters(5),
    "fingerprints": lambda ledger: ledger.fingerprints(5),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_refused_and_writes_nothing(ledger, name):
    text, changed = refused(ledger, WRONG_CALLS[name])
    assert "expected" in text or "not admitted" in text
    assert changed == []
    assert "q" not in ledger


GOOD = {
    "lines": ints([0]),
    "starts": ints([0, 1]),
    "first": ints([5]),
    "tokens": ints([4]),
    "slots": {"a": ints([25]), "s": ints([7])},
    "tables": {"a": ints([[7, 6]])},
    "sources": {"s": ints([7])},
}
WRONG_STEPS = {
    "a line that is not admitted": {"lines": ints([2])},
    "a line that is too large": {"lines": ints([4])},
    "positions beyond the ledger": {"first": ints([64])},
    "a position below 0": {"first": ints([-1])},
    "rows beyond the step": {"starts": ints([0, 2])},
    "rows before the step": {"starts": ints([-1, 1])},
    "rows backwards": {"starts": ints([1, 0])},
    "no end": {"starts": ints([0])},
    "lines that are floats": {"lines": torch.zeros(1)},
    "lines in two dimensions": {"lines": ints([[0]])},
    "lines in a list": {"lines": [0]},
    "tokens on another device": {"tokens": torch.ones(1, dtype=torch.int64, device="meta")},
    "one line twice": {
        "lines": ints([0, 0]), "starts": ints([0, 1, 2]), "first": ints([5, 5]),
        "tokens": ints([4, 4]), "slots": {}, "tables": {}, "sources": {},
    },
    "slots of no group": {"slots": {"zz": ints([1])}},
    "too few slots": {"slots": {"a": ints([])}},
    "tables of no group": {"tables": {"zz": ints([[1]])}},
    "tables of states": {"tables": {"s": ints([[1]])}},
    "a table of one dimension": {"tables": {"a": ints([7, 6])}},
    "sources of rows": {"sources": {"a": ints([1])}},
    "too few drafts": {"drafts": ints([])},
    "told in floats": {"told": torch.zeros(1)},
    "no slots": {"slots": None},
    "slots in a list": {"slots": [1]},
    "tables of a tensor": {"tables": ints([[7, 6]])},
    "sources of text": {"sources": "s"},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_is_refused_and_the_next_one_is_right(ledger, name):
    wrong = Step(**{**GOOD, **WRONG_STEPS[name]})
    for call in (ledger.write, ledger.check):
        text, changed = refused(ledger, lambda _, call=call: call(wrong))
        assert "expected" in text
        assert changed == []
    text, changed = refused(ledger, lambda led: led.write("no step"))
    assert "expected a Step" in text
    assert changed == []
    ledger.write(Step(**GOOD))
    ledger.check(Step(**GOOD))
    assert ledger.violations() == []
    assert ledger.refused == 0


def test_stale_numbers_of_padding_are_not_read(ledger):
    """Engines keep buffers from step to step: behind the requests stands what stood there."""
    step = step_of(
        [0, -1, -1], [0, 1, 1, 99], [5, 10**6, -1], [4, 4, 4], {"a": [25, 99, 99], "s": [7, 7, 7]},
        {"a": [[7, 6], [99, 99], [-5, 0]]}, sources={"s": ints([7, 10**12, -9])},
        drafts=ints([0, 99, -4]), told=ints([-1, 7, 7]),
    )  # fmt: skip
    ledger.write(step)
    ledger.check(step)
    ledger.resolve([0, 5, 5])
    assert ledger.violations() == []


def test_a_request_without_rows_may_have_any_position(ledger):
    line = ledger.admit("q", [1])
    step = step_of([line, 0], [0, 0, 1], [10**6, 5], [4], {"a": [25]}, {"a": [[1, 1], [7, 6]]})
    ledger.write(step)
    ledger.check(step)
    assert ledger.violations() == []


@pytest.mark.parametrize(
    "outcome",
    [
        ("x",), (["x"],), ([0.5],), ([0, 0, 0][:0],), (None,), ([[0]],), ([0], "x"), ([0], [7]),
        ([0], [[0.5]]), ([0], torch.zeros(0, 1).int()), (torch.zeros(1, device="meta").int(),),
    ],
    ids=str,
)  # fmt: skip
def test_a_refused_outcome_does_not_lose_the_step(ledger, outcome):
    """The step can still be resolved, so its rejected draft is found when it is read."""
    step = step_of([0], [0, 2], [5], [4, 3], {"a": [25, 26]}, {"a": [[7, 6]]}, drafts=ints([1]))
    ledger.write(step)
    text, changed = refused(ledger, lambda led: led.resolve(*outcome), AcceptanceError)
    assert "expected" in text
    assert changed == []
    ledger.resolve([0], [[2, -1]])
    step = step_of([0], [0, 1], [7], [1], {"a": [27]}, {"a": [[7, 6]]})
    ledger.write(step)
    ledger.check(step)
    assert [v.kind for v in ledger.violations()] == ["rejected"]


def test_outcomes_may_be_arrays_and_have_no_columns(ledger):
    step = step_of([0], [0, 2], [5], [4, 3], {"a": [25, 26]}, {"a": [[7, 6]]}, drafts=ints([1]))
    ledger.write(step)
    ledger.resolve(np.array([1], dtype=np.int32), np.zeros((1, 0), dtype=np.int64))
    step = step_of([0], [0, 1], [7], [1], {"a": [27]}, {"a": [[7, 6]]})
    ledger.write(step)
    ledger.check(step)
    assert ledger.violations() == []


def test_a_released_request_takes_part_in_no_step(ledger):
    ledger.release("r")
    text, changed = refused(ledger, lambda led: led.write(Step(**GOOD)))
    assert "malformed" in text
    assert changed == []


def test_a_request_released_before_its_step_ended_leaves_no_draft(ledger):
    """Rejected rows are marked although the request is gone."""
    step = step_of([0], [0, 2], [5], [4, 3], {"a": [25, 26]}, {"a": [[7, 6]]}, drafts=ints([1]))
    ledger.write(step)
    ledger.release("r")
    ledger.resolve([0])
    ledger.admit("q", [*PROMPT, 4, 3])
    ledger.publish("q", "a", [7, 6], 0, 7)
    assert [(v.found, v.slot) for v in ledger.violations()] == [("rejected", 26)]


def test_tables_without_columns_lead_nowhere(ledger):
    none = torch.zeros(1, 0, dtype=torch.int64)
    ledger.write(Step(**{**GOOD, "tables": {"a": none}}))
    ledger.check(Step(**{**GOOD, "tables": {"a": none}}))
    ledger.inspect(Stretch(ints([0]), ints([0]), ints([2]), {"a": none}, "published"))
    assert [v.slot for v in ledger.violations()] == [None, None]


def test_a_stretch_is_read_as_far_as_it_has_lines(ledger):
    """Engines pass buffers that are longer; tables come by group."""
    tables = {"a": ints([[7, 6]])}
    ledger.inspect(Stretch(ints([0]), ints([0, 9]), ints([5, 9, 9]), tables, "published"))
    wrong = Stretch(ints([0]), ints([0]), ints([5]), tables["a"], "published")
    text, changed = refused(ledger, lambda led: led.inspect(wrong))
    assert "by name of the group" in text
    assert not changed


def test_blocks_beyond_a_table_are_reported_and_export_nothing(ledger):
    """Reading wrong blocks is what a ledger reports; it is no misuse of the ledger."""
    digests = ledger.export("r", "a", [7], 0, 5)
    assert digests[4] == 0
    assert [(v.kind, v.position, v.slot) for v in ledger.violations()] == [("exported", 4, None)]
    assert ledger.export("r", "a", [7, 99], 4, 5).tolist() == [0]
    assert ledger.export("r", "a", [], 0, 1).tolist() == [0]
    assert [v.slot for v in ledger.violations()] == [None, None]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_tokens_may_be_of_any_int(dtype):
    ledger = Ledger(GROUPS, max_requests=4, max_length=64)

    def digests(tokens):
        line = ledger.admit("r", tokens)
        return ledger.books.own[line, : len(tokens) + 1].tolist()

    expected = digests(PROMPT)
    assert len(set(expected)) == 6
    for tokens in (torch.tensor(PROMPT, dtype=dtype), np.array(PROMPT), tuple(PROMPT)):
        assert digests(tokens) == expected
    assert digests([]) == expected[:1]


def test_tokens_of_a_tensor_stay_the_callers():
    tokens = ints([1, 2])
    Ledger(GROUPS, max_requests=4, max_length=64).admit("r", tokens, embedded={0: 7})
    assert tokens.tolist() == [1, 2]


def test_a_token_that_is_no_token_is_not_taken_for_an_image():
    """A step that feeds -1 at a new position does not make that position match everything."""
    ledger = Ledger((RowGroup("a", 4, 8),), max_requests=4, max_length=64)
    line = ledger.admit("r", [1])
    ledger.write(step_of([line], [0, 2], [0], [1, -1], {"a": [4, 5]}, {"a": [[1]]}))
    ledger.write(step_of([line], [0, 1], [1], [3], {"a": [5]}, {"a": [[1]]}))
    ledger.publish("r", "a", [1], 0, 2)
    assert [v.found for v in ledger.violations()] == ["foreign"]


@pytest.mark.parametrize("size", [True, 0, -1, 2**80, "4", 1.0, None])
@pytest.mark.parametrize("name", ["max_requests", "max_length", "journal", "capacity"])
def test_sizes_of_a_ledger(name, size):
    sizes = {"max_requests": 1, "max_length": 8, name: size}
    with pytest.raises(ConfigError, match=f"Ledger: {name} must be a positive int"):
        Ledger(GROUPS, **sizes)
    with pytest.raises(ConfigError):
        Sizes(**sizes)


@pytest.mark.parametrize("size", [True, 0, -1, 2**80, "4", 1.0])
def test_sizes_of_groups(size):
    for make in (
        lambda: RowGroup("a", size, 8),
        lambda: RowGroup("a", 4, size),
        lambda: RowGroup("a", 4, 8, window=size),
        lambda: RowGroup("a", 4, 8, chunk=size),
        lambda: RowGroup("a", 4, 8, ring=size),
        lambda: StateGroup("s", size),
    ):
        with pytest.raises(ConfigError, match="must be a positive int"):
            make()


def test_a_ring_lies_in_the_blocks_of_its_group():
    assert RowGroup("a", 4, 8, ring=32).ring == 32
    with pytest.raises(ConfigError, match="expected at most 32, block_size times num_blocks"):
        RowGroup("a", 4, 8, ring=33)


def test_names_are_text_and_groups_are_groups():
    for make in (
        lambda: RowGroup(3, 4, 8),
        lambda: StateGroup(None, 8),
        lambda: RowGroup("", 4, 8),
        lambda: StateGroup("", 8),
        lambda: RowGroup("a", 4, 8, pool=1),
        lambda: RowGroup("a", 4, 8, reads=1),
        lambda: Ledger(["a"], max_requests=1, max_length=8),
        lambda: Key((1, 2, 3)),
        lambda: Key((1, 2, 3, 2**64)),
        lambda: Key((1, 2, 3, True)),
    ):
        with pytest.raises(ConfigError, match="expected"):
            make()


@pytest.mark.parametrize("backend", ["nope", 3, None, int])
def test_backends_are_named(backend):
    with pytest.raises(BackendUnavailableError, match="no such backend"):
        Ledger(GROUPS, max_requests=1, max_length=8, backend=backend)
