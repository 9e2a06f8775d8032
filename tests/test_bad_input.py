"""Whatever is passed in, a refusal is kvtxn's own: the call, what came, and a next step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_caches import rows

from kvtxn import (
    AcceptanceError,
    BackendUnavailableError,
    CapturedRows,
    ConfigError,
    KVTxnError,
    LayerError,
    LayerRef,
    SampledIds,
    SlotMappingError,
    TransactionManager,
    TxnConfig,
    WindowState,
    WindowStateError,
)
from kvtxn.accepted_forms import as_accepted
from kvtxn.layout import RowLayout

SEVERAL = np.zeros(3)  # has no truth value of its own


@pytest.fixture
def manager(layers):
    """Over the small caches, deferred."""
    return TransactionManager(layers, TxnConfig(policy="deferred"))


@pytest.fixture
def window(manager, layers):
    """One request with two drafts, every layer staged."""
    opened = manager.window(2, [0, 1, 2])
    for ref in layers:
        opened.stage(ref, *rows(3))
    return opened


def says(caught, *words):
    """Every word is in the message, and the fields are there."""
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.operation
    assert caught.value.hint


@pytest.mark.parametrize("captured", ["x", 1, object(), SEVERAL, CapturedRows(check=False)])
def test_rows_that_were_not_captured(manager, captured):
    """``rows`` is checked before anything is asked of it; the collector itself is no mapping."""
    slots = torch.full((len(manager.groups), 8), -1, dtype=torch.int64)
    with pytest.raises(LayerError) as caught:
        manager.captured_windows(slots, captured)
    says(caught, "rows is not a mapping", type(captured).__name__, "CapturedRows.rows")
    assert manager.current is None


@pytest.mark.parametrize("parts", [None, 1, "kv", (), (1, 2), ("k", "v")])
def test_rows_of_a_layer_that_are_no_tensors(manager, parts):
    """The layer is named, and what was given in place of its tensors."""
    slots = torch.full((len(manager.groups), 8), -1, dtype=torch.int64)
    with pytest.raises(LayerError) as caught:
        manager.captured_windows(slots, dict.fromkeys(manager.layers, parts))
    says(caught, next(iter(manager.layers)), "one tensor per plane")


@pytest.mark.parametrize("position", ["x", 1, [0, 1], SEVERAL])
def test_marks_that_are_no_tensor(manager, position):
    """``position`` is checked before anything is written to it."""
    slots = torch.full((len(manager.groups), 8), -1, dtype=torch.int64)
    with pytest.raises(LayerError) as caught:
        manager.captured_windows(slots, position=position)
    says(caught, "position", "int64")


@pytest.mark.parametrize("check", ["no", 0, None, SEVERAL])
def test_a_check_of_captured_rows_that_is_no_bool(check):
    """A word that means no would have meant yes."""
    with pytest.raises(ConfigError) as caught:
        CapturedRows(check=check)
    says(caught, "check", "a bool")


@pytest.mark.parametrize("what", ["draft_len", "settled"])
@pytest.mark.parametrize("value", [iter([1]), {1: 2}, {1}, b"x", "1"])
def test_lengths_are_sequences(manager, what, value):
    """An iterator could be read once only; keys, members and bytes are no lengths."""
    with pytest.raises(SlotMappingError) as caught:
        manager.window(**{"draft_len": 1, "slots": [0, 1], what: value})
    says(caught, what, "one int per request")


@pytest.mark.parametrize("field", ["policy", "backend", "acceptance", "on_error", "staging"])
def test_settings_that_are_no_words(field):
    """Also what cannot be compared with a word."""
    with pytest.raises((ConfigError, BackendUnavailableError)) as caught:
        TxnConfig(**{field: SEVERAL})
    says(caught, "TxnConfig", "expected")


def test_other_words_that_are_none(manager):
    """The same of ``written_by`` and ``kv_dtype``."""
    cache = torch.zeros(2, 4, 1, 2)
    for call in (
        lambda: manager.window(1, [0, 1], written_by=SEVERAL),
        lambda: LayerRef("a", cache, cache.clone(), kv_dtype=SEVERAL),
    ):
        with pytest.raises(KVTxnError, match="expected"):
            call()


@pytest.mark.parametrize("states", [1.5, 3, torch.zeros(3), "ab"])
def test_states_are_a_tuple(states):
    """One tensor would be taken apart along its first dimension."""
    cache = torch.zeros(2, 4, 1, 2)
    with pytest.raises(LayerError) as caught:
        LayerRef("a", cache, None, states=states)
    says(caught, "states", type(states).__name__)


@pytest.mark.parametrize("table", ["x", [[[0]]], np.zeros((4, 1, 2), int), torch.zeros(4, 1, 2)])
def test_offset_tables_are_int_tensors(table):
    """A list, an array or a table of floats is refused, not converted."""
    right = torch.arange(8).view(4, 1, 2)
    for tables in ((table, right), (right, table)):
        with pytest.raises(LayerError, match="offset tables"):
            LayerRef(
                "a",
                torch.zeros(2, 8),
                torch.zeros(2, 8),
                key_offsets=tables[0],
                value_offsets=tables[1],
            )


def test_a_whole_number_of_any_size_is_a_scale():
    """Ints are numbers, also those that no int64 holds."""
    code = torch.zeros(2, 4, 1, 2, dtype=torch.int8)
    ref = LayerRef("a", code, code.clone(), k_scale=2**70, v_scale=3)
    assert ref.planes[0].format.scale == 2.0**70


def test_caches_of_two_dtypes_are_named_as_the_caller_knows_them():
    """The message says bfloat16, not how the bytes are looked at."""
    cache = torch.zeros(2, 4, 1, 2)
    with pytest.raises(LayerError) as caught:
        LayerRef("a", cache, cache.bfloat16())
    says(caught, "torch.float32", "torch.bfloat16")


@pytest.mark.parametrize("layers_given", [torch.tensor(3), torch.zeros(2), 5, None])
def test_layers_that_are_none(layers_given):
    """A tensor is iterable, or says so."""
    with pytest.raises(LayerError, match="TransactionManager"):
        TransactionManager(layers_given)
    with pytest.raises(ConfigError, match="config is not a TxnConfig"):
        TransactionManager([], {"policy": "undo"})


@pytest.mark.parametrize("state", [None, 5, 1.5, object(), "xy"])
def test_states_to_stage(state):
    """A recurrent layer is staged with tensors."""
    ref = LayerRef.recurrent("m", torch.zeros(5, 2, 3), torch.zeros(5, 4))
    opened = TransactionManager([ref]).window(1, [0])
    with pytest.raises(LayerError, match="one tensor per state"):
        opened.stage(ref, state)
    opened.stage(ref, (torch.zeros(2, 2, 3), torch.zeros(2, 4)))


def test_attention_of_no_layer(window):
    """None is no layer, though no layer is called so either."""
    with pytest.raises(LayerError, match="is not staged"):
        window.attend(None, torch.zeros(3, 2, 8), torch.zeros(1, 1), torch.zeros(1))


@pytest.mark.parametrize("name", ["scale", "sliding_window", "soft_cap"])
@pytest.mark.parametrize("value", [2**70, float("nan"), float("inf"), -float("inf")])
def test_scores_are_finite(window, layers, name, value):
    """A value that the executor could only fail at is refused; the window stays as it is."""
    heads, size = layers[0].key_cache.shape[2:]
    query = torch.zeros(3, heads, size)
    table, lengths = torch.tensor([[0]]), torch.tensor([3])
    with pytest.raises(LayerError) as caught:
        window.attend(layers[0], query, table, lengths, **{name: value})
    says(caught, name, "finite")
    assert window.state is WindowState.STAGED
    assert window.fallback_reason is None


@pytest.mark.parametrize(
    "settings", [{"placeholder": "x"}, {"placeholder": None}, {"vocab_size": 1.5}]
)
def test_sampled_ids_with_odd_settings(window, settings):
    """A placeholder that no id equals would count every column."""
    with pytest.raises(AcceptanceError) as caught:
        window.commit(SampledIds(torch.tensor([[5, 7, -1]]), **settings))
    says(caught, *settings, "commit")
    assert window.state is WindowState.STAGED


def test_more_sampled_ids_than_drafts(window):
    """As a count out of range; and no id at all accepts nothing."""
    with pytest.raises(AcceptanceError) as caught:
        window.commit(SampledIds(torch.tensor([[5, 7, 8, 9, -1]])))
    says(caught, "more sampled ids", "commit")
    assert window.state is WindowState.STAGED
    window.commit(SampledIds(torch.tensor([[5, 7, 8, -1, -1]])))


def test_a_hook_that_opens_a_window(manager, layers):
    """It is told why it cannot, not to commit a window that is committed."""
    caught = []

    def hook(_):
        with pytest.raises(WindowStateError) as error:
            manager.window(1, [0, 1])
        caught.append(error)

    manager.on_commit(hook)
    with manager.window(2, [0, 1, 2]) as w:
        for ref in layers:
            w.stage(ref, *rows(3))
        w.commit(1)
    says(caught[0], "COMMITTED", "a hook tried to open a window")
    assert "manager.current.abort()" not in str(caught[0].value)


@pytest.mark.parametrize(
    "counts",
    [
        np.array([2, 1])[1:],
        np.array([1, 2])[::-1][1:],
        np.array([1], dtype=">i8"),
        np.array([1], dtype=object),
        np.array([1], dtype=np.uint64),
        np.array(1),
        np.array([1, 1, 0], dtype=bool),
    ],
    ids=str,
)
def test_counts_in_arrays(window, counts):
    """Of any stride, byte order and dtype that holds ints; one draft is accepted."""
    window.commit(counts)
    assert window.state is WindowState.COMMITTED


@pytest.mark.parametrize(
    "counts",
    [
        np.array([1.0]),
        np.array(["1"]),
        np.array([1], dtype="datetime64[s]"),
        np.array([(1,)], dtype=[("a", int)]),
        np.array([2**63 + 1], dtype=np.uint64),
        np.array(True),
        np.array([None]),
        torch.tensor([1]).to_sparse(),
        torch.nested.nested_tensor([torch.tensor([1])], layout=torch.jagged),
        SampledIds(torch.ones(1, 3, dtype=torch.int64).to_sparse()),
    ],
    ids=lambda counts: str(getattr(counts, "dtype", type(counts))),
)
def test_counts_that_are_none_leave_the_window_staged(window, counts):
    with pytest.raises(AcceptanceError) as caught:
        window.commit(counts)
    says(caught, "commit", "expected")
    assert window.state is WindowState.STAGED
    window.commit(1)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_counts_on_a_device(dtype):
    """A kernel could not compare them with the number of drafts."""
    meta = torch.device("meta")
    layout = RowLayout.build((2, 3), (1, 1), meta)
    with pytest.raises(AcceptanceError) as caught:
        as_accepted(torch.ones(2, dtype=dtype, device=meta), layout, meta)
    says(caught, str(dtype), "int32 or int64")


@pytest.mark.parametrize("most", [2**31, 2**80])
def test_more_rows_than_a_kernel_counts(most):
    with pytest.raises(ConfigError) as caught:
        TxnConfig(max_rows=most)
    says(caught, "max_rows", str(2**31 - 1))


def not_plain(*shape):
    """Tensors of a shape whose numbers do not lie in memory as they are, by name."""
    numbers = torch.ones(shape)
    return {
        "nested": torch.nested.nested_tensor([*numbers]),
        "sparse": numbers.to_sparse(),
        "quantised": torch.quantize_per_tensor(numbers, 1.0, 0, torch.qint8),
        "negated": torch._neg_view(numbers),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["nested", "sparse", "quantised", "negated"])
@pytest.mark.parametrize(
    "describe",
    [
        lambda wrong: LayerRef("a", wrong, torch.ones(8, 4, 2, 6)),
        lambda wrong: LayerRef("a", torch.ones(8, 4, 2, 6), wrong),
        lambda wrong: LayerRef.recurrent("a", wrong),
        lambda wrong: LayerRef.recurrent("a", torch.ones(8, 3), wrong),
    ],
    ids=["key", "value", "state", "second state"],
)
def test_caches_without_plain_memory(describe, kind):
    """A quantised state ended the process."""
    with pytest.raises(LayerError) as caught:
        describe(not_plain(8, 4, 2, 6)[kind])
    says(caught, "has no memory to write to", "dense tensor")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["nested", "sparse", "quantised"])
def test_scales_and_offsets_without_plain_memory(kind):
    """They are read before they are compared with the cache."""
    wrong = not_plain(8, 4, 2)[kind]
    codes = torch.zeros(2, 8, 4, 2, 6, dtype=torch.int8)
    with pytest.raises(LayerError, match="a number or a dense tensor"):
        LayerRef("a", *codes, k_scale=wrong)
    with pytest.raises(LayerError, match="offset tables of 'a' are misshapen"):
        LayerRef("a", *torch.zeros(2, 2, 64), key_offsets=wrong, value_offsets=wrong)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["nested", "sparse", "quantised", "negated"])
def test_rows_without_plain_memory(manager, layers, kind):
    """A window and a captured forward refuse them, as rows and as buffers for a forward's rows."""
    wrong = not_plain(3, 2, 8)[kind]
    opened = manager.window(2, [0, 1, 2])
    for pair in (wrong, torch.ones(3, 2, 8)), (torch.ones(3, 2, 8), wrong):
        with pytest.raises(LayerError) as caught:
            opened.stage(layers[0], *pair)
        says(caught, "is sparse, nested", "memory of its own")
    opened.abort()
    with pytest.raises(LayerError, match="is sparse, nested"):
        CapturedRows().stage(layers[0], wrong, wrong)
    given = {ref.name: (not_plain(512, 2, 8)[kind], torch.ones(512, 2, 8)) for ref in layers}
    with pytest.raises(LayerError, match="do not fit the layer"):
        manager.captured_windows(torch.zeros(1, 512, dtype=torch.int64), given)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["nested", "sparse", "quantised", "negated"])
def test_a_query_without_plain_memory(window, layers, kind):
    """A kernel would read what lies in memory; and no mistake writes drafts."""
    table, lengths = torch.tensor([[0]]), torch.tensor([3])
    with pytest.raises(LayerError, match="query does not fit"):
        window.attend(layers[0], not_plain(3, 2, 8)[kind], table, lengths)
    for given in (table.to_sparse(), lengths), (table, lengths.to_sparse()):
        with pytest.raises(LayerError, match="does not fit the window"):
            window.attend(layers[0], torch.ones(3, 2, 8), *given)
    assert window.state is WindowState.STAGED


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lengths_and_marks_without_plain_memory(manager):
    """Lengths that torch cannot list, and marks that are sparse."""
    with pytest.raises(SlotMappingError, match="draft_len is not a host tensor of ints"):
        manager.window(not_plain(1)["quantised"], [0, 1])
    marks = torch.zeros(512, dtype=torch.int64).to_sparse()
    with pytest.raises(LayerError, match="position cannot hold"):
        manager.captured_windows(torch.zeros(1, 512, dtype=torch.int64), None, marks)
