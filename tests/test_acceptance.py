"""Acceptance: three sources, three modes, one answer; no out-of-bounds read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtxn import AcceptanceError, BackendUnavailableError, ConfigError
from kvtxn.acceptance import Acceptance

CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
MODES = [("loop", "cpu"), ("vectorized", "cpu"), ("auto", "cpu")]
if torch.cuda.is_available():
    MODES += [(mode, "cuda") for mode in ("loop", "vectorized", "graph", "auto")]


@pytest.fixture(params=MODES, ids=lambda p: f"{p[0]}-{p[1]}")
def acceptance(request):
    return Acceptance(*request.param)


def ids(values, acceptance, columns=None):
    tensor = torch.tensor(values, dtype=torch.int64, device=acceptance.device)
    return tensor if columns is None else tensor.view(-1, columns)


@pytest.mark.parametrize(
    ("sampled", "draft_len", "expected"),
    [
        ([[5, 6, 7], [5, -1, -1], [5, 6, -1]], 2, [2, 0, 1]),
        ([[5, 6, 7, 8]], 2, [2]),
        ([[5, 6]], 4, [1]),
        ([[-1, -1], [-1, -1]], 1, [0, 0]),
        ([[5, 6, 7], [5, 6, 7]], [1, 0], [1, 0]),
        ([[5, 99, -1]], 2, [0]),
    ],
    ids=["mixed", "too many columns", "too few columns", "all placeholders", "uneven", "vocab"],
)
def test_from_ids(acceptance, sampled, draft_len, expected):
    """n sampled ids are n - 1 accepted drafts, within the drafts there were."""
    for _ in range(3):  # "auto" changes its way once a shape repeats
        counts = acceptance.from_ids(ids(sampled, acceptance), draft_len, vocab_size=50)
        assert counts.tolist() == expected
        assert counts.dtype is torch.int64


def test_zero_columns_and_zero_requests(acceptance):
    """Nothing sampled is nothing accepted."""
    assert acceptance.from_ids(ids([], acceptance).view(2, 0), 3).tolist() == [0, 0]
    assert acceptance.from_ids(ids([], acceptance).view(0, 3), 3).tolist() == []
    assert acceptance.from_ids(ids([], acceptance).view(0, 3), []).tolist() == []


@pytest.mark.parametrize(
    ("drafts", "targets", "draft_len", "expected"),
    [
        ([[1, 2, 3], [1, 2, 3]], [[1, 2, 9], [9, 2, 3]], 3, [2, 0]),
        ([[1, 2, 3]], [[1, 2, 3, 4]], 3, [3]),
        ([[1, 2, 3]], [[1]], 3, [1]),
        ([[1, 1], [1, 1]], [[1, 1], [1, 1]], [1, 2], [1, 2]),
    ],
    ids=["prefix", "bonus column", "missing columns", "uneven"],
)
def test_from_match(acceptance, drafts, targets, draft_len, expected):
    """A draft after the first mismatch is rejected even where it matches."""
    counts = acceptance.from_match(ids(drafts, acceptance), ids(targets, acceptance), draft_len)
    assert counts.tolist() == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.from_ids(torch.tensor([1, 2]), 1),
        lambda a: a.from_ids(torch.tensor([[1.0]]), 1),
        lambda a: a.from_ids([[1, 2]], 1),
        lambda a: a.from_ids(torch.tensor([[1, 2]]), [1, 1]),
        lambda a: a.from_ids(torch.tensor([[1, 2]]), torch.tensor([1, 1])),
        lambda a: a.from_ids(torch.tensor([[1, 2]]), -1),
        lambda a: a.from_match(torch.tensor([[1]]), torch.tensor([[1], [2]]), 1),
        lambda a: a.from_match(torch.tensor([[1]]), torch.tensor([1]), 1),
    ],
)
def test_malformed_input_is_refused(call):
    """With one kind of error, before anything is read."""
    with pytest.raises(AcceptanceError):
        call(Acceptance("vectorized"))


def test_modes_that_cannot_run_are_refused():
    """A graph needs a device; a name needs to exist."""
    with pytest.raises(BackendUnavailableError, match="CUDA"):
        Acceptance("graph", "cpu")
    with pytest.raises(ConfigError, match="fastest"):
        Acceptance("fastest")


@given(st.data())
def test_vectorized_equals_the_readable_loop(data):
    """On any ids, lengths and shapes."""
    requests, columns = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6))
    token = st.integers(-1, 4)

    def matrix():
        values = [[data.draw(token) for _ in range(columns)] for _ in range(requests)]
        return torch.tensor(values, dtype=torch.int64).view(requests, columns)

    lengths = [data.draw(st.integers(0, 7)) for _ in range(requests)]
    one, two, vocab = matrix(), matrix(), data.draw(st.sampled_from([None, 3]))
    loop, vector = Acceptance("loop"), Acceptance("vectorized")
    first = loop.from_ids(one, lengths, vocab_size=vocab)
    assert torch.equal(first, vector.from_ids(one, lengths, vocab_size=vocab))
    assert torch.equal(loop.from_match(one, two, lengths), vector.from_match(one, two, lengths))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_host_sync_on_a_device():
    """Ids to counts without the host waiting once."""
    for mode in ("vectorized", "graph", "auto"):
        acceptance = Acceptance(mode, "cuda")
        sampled = torch.randint(-1, 5, (4, 4), device="cuda")
        expected = acceptance.from_ids(sampled, 3).tolist()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            counts = acceptance.from_ids(sampled, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert counts.tolist() == expected
