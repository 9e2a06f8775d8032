"""Descriptions of recurrences: what they refuse, what they stage, and what they compute."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from kvtxn import (
    BackendUnavailableError,
    LayerError,
    LayerRef,
    SlotMappingError,
    TransactionManager,
    TreeError,
    TxnConfig,
)
from kvtxn.recurrent import GatedDelta, Mamba2, ShortConv, StateSlots

DELTA, CONV = GatedDelta(2), ShortConv(4)


def constant(heads: int = 4) -> torch.Tensor:
    return -torch.linspace(0.5, 2, heads)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GatedDelta(0), "key_heads is not valid.*positive int"),
        (lambda: GatedDelta(2, decay="row"), "decay is not valid.*head, channel"),
        (lambda: GatedDelta(2, key_dtype=torch.int8), "key_dtype is not valid"),
        (lambda: ShortConv(1), "at least 2 taps"),
        (lambda: ShortConv(True), "positive int"),
        (lambda: Mamba2([1.0]), "A is not valid"),
        (lambda: Mamba2(constant().double()), "A is not valid.*float32"),
        (lambda: Mamba2(constant(), D=torch.zeros(2, 2)), "D is not valid"),
        (lambda: Mamba2(-constant()), "A is not valid.*a negative number per head.*up to 2"),
        (lambda: Mamba2(constant() * float("nan")), "A is not valid.*got up to nan"),
        (lambda: Mamba2(constant(), 0), "groups is not valid"),
        (lambda: Mamba2(constant(), dtype=torch.float64), "dtype is not valid"),
    ],
)
def test_what_is_no_recurrence(make, message):
    with pytest.raises(LayerError, match=message):
        make()


@pytest.mark.parametrize(
    ("states", "replay", "message"),
    [
        ([torch.zeros(3, 4, 5)], DELTA, "does not fit its recurrence.*value_size, key_size"),
        ([torch.zeros(3, 4, 5, 6).double()], DELTA, "float32 or bfloat16"),
        ([torch.zeros(3, 5, 3, 6)], DELTA, "divisor of the state's 5 heads"),
        ([torch.zeros(3, 4, 8)], CONV, "3 inputs for 4 taps"),
        ([torch.zeros(3, 4, 5, 6)], Mamba2(constant(3)), "A of 's' does not fit"),
        ([torch.zeros(3, 4, 5, 6)], Mamba2(constant(), D=constant(2)), "D of 's' does not fit"),
        ([torch.zeros(3, 4, 5, 6)], Mamba2(constant(), 3), "groups of 's'"),
        ([torch.zeros(3, 3, 5), torch.zeros(3, 4, 5, 6)], CONV, "a recurrence for each state"),
        ([torch.zeros(3, 3, 5)], "conv", "replay of 's' is not valid"),
        ([torch.zeros(3, 3, 5)], [None], "replay of 's' is not valid"),
    ],
)
def test_states_that_do_not_fit(states, replay, message):
    with pytest.raises(LayerError, match=message):
        LayerRef.recurrent("s", *states, replay=replay)


def test_only_states_are_replayed():
    with pytest.raises(LayerError, match="a recurrence for each state, or for none"):
        LayerRef("rows", *torch.zeros(2, 3, 4, 1, 2), replay=(CONV,))


@pytest.mark.parametrize(
    ("replay", "parts"),
    [
        (DELTA, [("key", (2, 6)), ("value", (4, 5)), ("decay", (4,))]),
        (GatedDelta(4, decay="channel"), [("key", (4, 6)), ("value", (4, 5)), ("decay", (4, 6))]),
        (Mamba2(constant(), 2), [("x", (4, 5)), ("dt", (4,)), ("B", (2, 6))]),
    ],
)
def test_what_is_staged(replay, parts):
    """The shapes that the documents name, and a hundredth of a state."""
    ref = LayerRef.recurrent("s", torch.zeros(3, 4, 5, 6), replay=replay)
    assert [(part.part, part.row_shape) for part in ref.given] == parts
    assert ref.needs == {"recurrent", "replayed"}
    assert pickle.loads(pickle.dumps(ref)).given[0].row_shape == parts[0][1]
    shape = LayerRef.recurrent("s", torch.zeros(2, 32, 128, 128), replay=GatedDelta(16))
    assert sum(part.row_bytes for part in shape.kept) < shape.row_bytes / 80


@pytest.mark.parametrize("policy", ["undo", "direct"])
def test_policies_that_cannot(policy):
    ref = LayerRef.recurrent("s", torch.zeros(3, 3, 5), replay=CONV)
    with pytest.raises(BackendUnavailableError, match=f"policy '{policy}' cannot .*state"):
        TransactionManager([ref], TxnConfig(policy=policy))
    assert TransactionManager([ref]).policy == "deferred"


def test_mamba2_rows_wait_in_the_kernels_form():
    """B as it came, x dt and exp(dt A): computed once, when the row is staged."""
    x, dt, b = torch.randn(3, 4, 5), torch.rand(3, 4), torch.randn(3, 2, 6)
    key, value, decay = Mamba2(constant(), 2).prepare((x, dt, b))
    assert key is b
    assert torch.equal(value, x * dt[:, :, None])
    assert torch.equal(decay, torch.exp(dt * constant()))


def double_gated_delta(state, query, key, value, beta, decay):
    """The recurrence as its paper writes it, in float64, one request."""
    outputs = []
    repeat = state.shape[0] // key.shape[1]
    for q, k, v, b, e in zip(query, key, value, beta, decay, strict=True):
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = q.repeat_interleave(repeat, 0), k.repeat_interleave(repeat, 0)
        factor = e[:, None, :] if e.ndim == 2 else e[:, None, None]
        identity = torch.eye(k.shape[-1], dtype=torch.float64)
        erase = identity - b[:, None, None] * k[:, :, None] * k[:, None, :]
        state = state * factor @ erase + b[:, None, None] * v[:, :, None] * k[:, None, :]
        outputs.append((state @ q[:, :, None]).squeeze(-1) * q.shape[-1] ** -0.5)
    return state, torch.stack(outputs)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_gated_delta_is_what_the_paper_says(decay):
    """The corrected value, replayed, is the paper's product with (I - beta k k^T)."""
    torch.manual_seed(1)
    state = torch.randn(3, 4, 5, 6)
    rows, recurrence = 7, GatedDelta(2, decay=decay)
    query, key = torch.randn(2, rows, 2, 6).unbind()
    value = torch.randn(rows, 4, 5)
    beta, factor = torch.rand(rows, 4), torch.rand(rows, 4, *([6] if decay == "channel" else []))
    outputs, staged = recurrence.outputs(state, [1], [rows], query, key, value, beta, factor)
    wide = [each.double() for each in (state[1], query, key, value, beta, factor)]
    expected_state, expected = double_gated_delta(*wide)
    assert torch.allclose(outputs.double(), expected, atol=1e-5)
    ref = LayerRef.recurrent("s", state, replay=recurrence)
    with TransactionManager([ref]).window([rows - 1], [1], settled=1) as window:
        window.stage(ref, staged)
        window.commit(rows - 1)
    assert torch.allclose(state[1].double(), expected_state, atol=1e-5)


def test_mamba2_is_what_the_paper_says():
    """h = exp(dt A) h + dt x B^T and y = h C + D x, in float64."""
    torch.manual_seed(2)
    state, skip = torch.randn(2, 4, 5, 6), torch.randn(4)
    rows, recurrence = 6, Mamba2(constant(), 2, D=skip)
    x, dt = torch.randn(rows, 4, 5), torch.rand(rows, 4)
    b, c = torch.randn(2, rows, 2, 6).unbind()
    outputs, _ = recurrence.outputs(state, [0], [rows], x, dt, b, c)
    now = state[0].double()
    for row in range(rows):
        wide_b, wide_c = (p[row].repeat_interleave(2, 0).double() for p in (b, c))
        step = dt[row].double()
        now = now * torch.exp(step * constant().double())[:, None, None]
        now = now + (x[row].double() * step[:, None])[:, :, None] * wide_b[:, None, :]
        y = (now * wide_c[:, None, :]).sum(-1) + skip.double()[:, None] * x[row]
        assert torch.allclose(outputs[row].double(), y, atol=1e-5)


def test_short_conv_is_torchs_convolution():
    """Over the past and the rows together; requests of other lengths, one of them new."""
    torch.manual_seed(3)
    state, weight, bias = torch.randn(4, 3, 5), torch.randn(5, 4), torch.randn(5)
    inputs = torch.randn(5, 5)
    outputs, (staged,) = CONV.outputs(
        state, torch.tensor([2, -1, 0]), [3, 2, 0], inputs, weight, bias
    )
    assert staged is inputs
    for past, rows, found in (
        (state[2], inputs[:3], outputs[:3]),
        (0 * state[0], inputs[3:], outputs[3:]),
    ):
        line = torch.cat([past, rows]).T.unsqueeze(0)
        expected = torch.nn.functional.conv1d(line, weight.unsqueeze(1), bias, groups=5)
        assert torch.allclose(found, expected.squeeze(0).T, atol=1e-6)


def test_outputs_write_nothing_and_refuse_other_lengths():
    state = torch.full((2, 3, 5), math.nan)
    with pytest.raises(LayerError, match=r"inputs does not fit the lengths.*\[4, 5\], got .*3, 5"):
        CONV.outputs(state, [0], [4], torch.zeros(3, 5), torch.zeros(5, 4))
    CONV.outputs(state, [0], [3], torch.zeros(3, 5), torch.zeros(5, 4))
    assert bool(state.isnan().all())


def arguments(recurrence):
    """Arguments of ``outputs`` for one request of two rows, by name."""
    zeros = torch.zeros
    if recurrence == "delta":
        rows = {"query": zeros(2, 2, 8), "key": zeros(2, 2, 8), "value": zeros(2, 4, 6)}
        found = {"state": zeros(3, 4, 6, 8), **rows, "beta": zeros(2, 4), "decay": zeros(2, 4)}
    elif recurrence == "mamba2":
        rows = {"x": zeros(2, 4, 6), "dt": zeros(2, 4), "b": zeros(2, 2, 8), "c": zeros(2, 2, 8)}
        found = {"state": zeros(3, 4, 6, 8), **rows}
    else:
        rows = {"inputs": zeros(2, 5), "weight": zeros(5, 4), "bias": zeros(5)}
        found = {"state": zeros(3, 3, 5), **rows}
    return {**found, "slots": [0], "lengths": [2]}


RECURRENCES = {
    "delta": DELTA,
    "mamba2": Mamba2(constant(), groups=2),
    "conv": CONV,
}


@pytest.mark.parametrize("as_tree", [False, True])
@pytest.mark.parametrize(
    ("recurrence", "name"),
    [
        (recurrence, name)
        for recurrence in RECURRENCES
        for name in arguments(recurrence)
        if name != "slots"
    ],
)
def test_outputs_refuse_what_does_not_fit(recurrence, name, as_tree):
    """Each argument by itself, by its name, in a LayerError."""
    given = arguments(recurrence)
    more = {"parents": [[-1]]} if as_tree else {}
    outputs = RECURRENCES[recurrence].outputs
    assert outputs(**given, **more)
    wrong = [2.0] if name == "lengths" else given[name].unsqueeze(0)
    with pytest.raises(LayerError, match=f"state|{name}"):
        outputs(**{**given, name: wrong}, **more)
    if name not in ("lengths", "state"):
        with pytest.raises(LayerError, match=rf"{name} does not fit .*got list"):
            outputs(**{**given, name: given[name].tolist()}, **more)


@pytest.mark.parametrize("more", [{}, {"parents": [[-1], [-1]]}], ids=["rows", "trees"])
@pytest.mark.parametrize("lengths", [torch.tensor([1, 1]), np.array([1, 1]), [True, True]], ids=str)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_lengths_are_whole_numbers_of_any_kind(recurrence, lengths, more):
    given = arguments(recurrence) | {"slots": [0, 1]} | more
    found, _ = RECURRENCES[recurrence].outputs(**given | {"lengths": lengths})
    expected, _ = RECURRENCES[recurrence].outputs(**given | {"lengths": [1, 1]})
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("boundary", "beyond", "message"),
    [
        ([1], [4, 5], r"boundary of group 'default' is not valid.*int \[2\]"),
        ([1.5, 2], [4, 5], "boundary .*float32"),
        (["a", "b"], [4, 5], r"boundary .*int \[num_requests\]"),
        ([-1, 2], [4, 5], "0 or more"),
        ([1, 2], [4, 6], "beyond .*-1, or 0 to 5"),
        ([1, 2], [4, -2], "beyond .*-1, or 0 to 5"),
        ([1, 2], [4, 4], "distinct slots that no request has"),
        ([1, 2], [4, 0], "distinct slots that no request has"),
    ],
)
def test_boundaries_that_do_not_fit(boundary, beyond, message):
    manager = TransactionManager([LayerRef.recurrent("s", torch.zeros(6, 3, 5), replay=CONV)])
    with pytest.raises(SlotMappingError, match=message):
        manager.window([2, 2], StateSlots([0, 1], boundary, beyond))
    assert manager.current is None


@pytest.mark.parametrize(
    ("slots", "boundary", "beyond"),
    [
        ([1, 1], [0, 1], [2, 3]),  # one reads it, the other writes it
        ([1, 1], [0, 0], [2, -1]),
        ([1, 1], [1, 2], [2, 3]),  # both write it
        ([1, 1], [0, 0], [-1, -1]),
    ],
)
def test_a_state_that_a_request_writes_is_its_own(slots, boundary, beyond):
    manager = TransactionManager([LayerRef.recurrent("s", torch.zeros(6, 3, 5), replay=CONV)])
    with pytest.raises(SlotMappingError, match=r"two requests have state 1 .*boundary of 0"):
        manager.window([2, 2], StateSlots(slots, boundary, beyond))
    with pytest.raises(SlotMappingError, match=r"two requests have state 1 .*StateSlots"):
        manager.window([2, 2], slots)
    assert manager.current is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_boundaries_are_copied(dtype):
    """The caller may refill all three tensors for the next step before commit."""
    state = torch.zeros(6, 3, 5)
    ref = LayerRef.recurrent("s", state, replay=CONV)
    given = StateSlots(*(torch.tensor(values, dtype=dtype) for values in ([0], [1], [4])))
    with TransactionManager([ref]).window([2], given) as window:
        window.stage(ref, torch.ones(3, 5))
        given.slots.fill_(1)
        given.boundary.fill_(2)
        given.beyond.fill_(5)
        window.commit(2)
    assert state[:, :, 0].tolist() == [[0, 0, 1], *[[0, 0, 0]] * 3, [1, 1, 1], [0, 0, 0]]


def test_a_request_without_a_state_has_nothing_beyond():
    """-1 is padding, not a state of zeros: no executor would write the slot beyond."""
    manager = TransactionManager([LayerRef.recurrent("s", torch.zeros(6, 3, 5), replay=CONV)])
    with pytest.raises(SlotMappingError, match=r"no state to begin from.*zeros"):
        manager.window([2, 2], StateSlots([-1, 0], [0, 0], [3, 4]))
    manager.window([2, 2], StateSlots([-1, 0], [0, 0], [-1, 4])).abort()


def test_only_replayed_layers_have_boundaries():
    selected = LayerRef.recurrent("s", torch.zeros(6, 3, 5))
    replayed = LayerRef.recurrent("r", torch.zeros(6, 3, 5), replay=CONV)
    for layers in ([selected], [selected, replayed]):  # two of them in one group
        with pytest.raises(SlotMappingError, match="do not replay rows"):
            TransactionManager(layers).window([2], StateSlots([0], [1], [2]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (StateSlots([1], [1], [2]), StateSlots([1], [0], [2])),
        (StateSlots([1], [1], [2]), StateSlots([1], [1], [4])),
        (StateSlots([1], [1], [2]), [1]),
        ([1], StateSlots([1], [1], [2])),
    ],
)
def test_boundaries_belong_to_the_mapping(first, second):
    """A second layer cannot bring other boundaries; its equal mapping is no second one."""
    refs = [LayerRef.recurrent(name, torch.zeros(6, 3, 5), replay=CONV) for name in "ab"]
    with TransactionManager(refs).window([2]) as window:
        window.stage(refs[0], torch.ones(3, 5), slots=first)
        with pytest.raises(SlotMappingError, match="second, different slot mapping"):
            window.stage(refs[1], torch.ones(3, 5), slots=second)
        window.stage(refs[1], torch.ones(3, 5), slots=first)
        window.commit(2)
    assert torch.equal(refs[0].states[0], refs[1].states[0])


def outputs_of(recurrence, slots, lengths):
    """Run ``outputs`` on ones."""
    rows = sum(lengths)
    if isinstance(recurrence, ShortConv):
        return recurrence.outputs(torch.ones(5, 3, 6), slots, lengths, torch.ones(rows, 6),
                                  torch.ones(6, 4))  # fmt: skip
    ones = [torch.ones(rows, *shape) for shape in ((2, 5), (2, 5), (4, 3), (4,), (4,))]
    if isinstance(recurrence, Mamba2):
        ones = [torch.ones(rows, *shape) for shape in ((4, 3), (4,), (2, 5), (2, 5))]
    return recurrence.outputs(torch.ones(5, 4, 3, 5), slots, lengths, *ones)


@pytest.mark.parametrize("recurrence", [DELTA, CONV, Mamba2(constant(), 2)], ids=repr)
def test_slots_of_outputs(recurrence):
    """One per request, of the states there are; no request is as right as any."""
    for none in ([], (), torch.zeros(0, dtype=torch.int64)):
        outputs, staged = outputs_of(recurrence, none, [])
        assert {len(part) for part in (outputs, *staged)} == {0}
    for slots in ([5], [-2], [0, 1], [], [0.5], torch.tensor([1.0]), torch.tensor([[1]]), [True]):
        with pytest.raises(LayerError, match=r"slots is not valid.*-1 to 4"):
            outputs_of(recurrence, slots, [1])


@pytest.mark.parametrize("name", ["boundary", "beyond"])
@pytest.mark.parametrize(
    "wrong", [torch.tensor([0, 0], device="meta"), torch.tensor([0, 0]).to_sparse()], ids=str
)
def test_boundaries_lie_where_they_can_be_read(name, wrong):
    ref = LayerRef.recurrent("s", torch.zeros(9, 3, 8), replay=CONV)
    manager = TransactionManager([ref], TxnConfig(policy="deferred", backend="torch"))
    given = {"slots": [0, 1], "boundary": [0, 0], "beyond": [2, 3], name: wrong}
    problem = f"{name} of group 'default' is not valid.*one int per request"
    with pytest.raises(SlotMappingError, match=problem):
        manager.window([1, 1], StateSlots(**given))
    assert manager.current is None


@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize("requests", [1, 2])
def test_a_window_without_rows_falls_back(requests, end):
    """None of its requests has a draft or a settled row, so no state takes anything in."""
    layer = LayerRef.recurrent("state", torch.randn(4, 2, 5), replay=ShortConv(3))
    before = layer.states[0].clone()
    manager = TransactionManager([layer], TxnConfig(policy="deferred"))
    window = manager.window([0] * requests, [*range(1, 1 + requests)], settled=0)
    window.stage(layer, torch.zeros(0, 5))
    window.fall_back("verify", RuntimeError("a kernel failed"))
    if end == "commit":
        window.commit([0] * requests)
    else:
        window.abort()
    assert window.state.name == "FELL_BACK"
    assert torch.equal(layer.states[0], before)


#: Two requests: one settled row and this tree, and two settled rows and a sequence.
TREES, TREE_LENGTHS = [(-1, -1, 0, 1, 1), (-1, 0)], [6, 4]


@pytest.mark.parametrize("recurrence", [DELTA, Mamba2(constant(), 2), CONV])
def test_a_row_of_a_tree_sees_its_own_path(recurrence):
    """Its outputs and staged parts are those of a sequence of the settled rows and the path."""
    torch.manual_seed(3)
    shape = (3, 24) if recurrence is CONV else (4, 5, 6)
    state, parts = torch.randn(5, *shape), parts_of(recurrence, 10)
    more = (torch.randn(24, 4),) if recurrence is CONV else ()
    slots = torch.tensor([3, -1])
    outputs, staged = recurrence.outputs(state, slots, TREE_LENGTHS, *parts, *more, parents=TREES)
    paths = [(3, [0, 1, 3]), (3, [0, 2, 4]), (3, [0, 2, 5]), (-1, [6, 7, 8, 9])]
    for slot, rows in paths:
        alone = [part[rows] for part in parts]
        wanted, kept = recurrence.outputs(state, [slot], [len(rows)], *alone, *more)
        assert torch.equal(outputs[rows], wanted)
        for ours, theirs in zip(staged, kept, strict=True):
            assert torch.equal(ours[rows], theirs)


@pytest.mark.parametrize(
    ("slots", "lengths", "parents", "error"),
    [
        ([0], [3], [-1, -1, 0, 0], TreeError),
        ([0], [3], [1, 0], TreeError),
        ([0], [3], [(-1,), (-1,)], TreeError),
        ([0, 1], [3], [-1], LayerError),
        ([0], [4], [-1], LayerError),
    ],
)
def test_trees_that_do_not_fit(slots, lengths, parents, error):
    with pytest.raises(error):
        DELTA.outputs(torch.zeros(2, 4, 5, 6), slots, lengths, *parts_of(DELTA, 3), parents=parents)


def parts_of(recurrence, rows):
    """Draw the parts of some rows."""
    if recurrence is CONV:
        return (torch.randn(rows, 24),)
    heads = torch.randn(rows, 4, 5), torch.rand(rows, 4)
    keys = torch.randn(rows, 2, 6), torch.randn(rows, 2, 6)
    if recurrence is DELTA:
        return (*keys, *heads, torch.rand(rows, 4))
    return (*heads, *keys)
