"""Sampled ids become counts: three modes, one answer; no out-of-bounds read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtxn import AcceptanceError, BackendUnavailableError, SampledIds
from kvtxn.acceptance import Acceptance

CPU = torch.device("cpu")
MODES = [("loop", "cpu"), ("vectorized", "cpu"), ("auto", "cpu")]
if torch.cuda.is_available():
    MODES += [(mode, "cuda") for mode in ("loop", "vectorized", "graph", "auto")]


@pytest.fixture(params=MODES, ids=lambda p: f"{p[0]}-{p[1]}")
def acceptance(request):
    mode, device = request.param
    return Acceptance(mode, torch.device(device))


def counted(acceptance, sampled, draft_len, **settings):
    """Count ids, given as lists or a tensor."""
    ids = torch.as_tensor(sampled, dtype=torch.int64, device=acceptance.device)
    return acceptance.from_ids(SampledIds(ids, **settings), draft_len)


@pytest.mark.parametrize(
    ("sampled", "draft_len", "expected"),
    [
        ([[5, 6, 7], [5, -1, -1], [5, 6, -1]], [2, 2, 2], [2, 0, 1]),
        ([[5, 6, 7, 8]], [2], [2]),
        ([[5, 6]], [4], [1]),
        ([[-1, -1], [-1, -1]], [1, 1], [0, 0]),
        ([[5, 6, 7], [5, 6, 7]], [1, 0], [1, 0]),
        ([[5, 99, -1]], [2], [0]),
    ],
    ids=["mixed", "too many columns", "too few columns", "all placeholders", "uneven", "vocab"],
)
def test_counts(acceptance, sampled, draft_len, expected):
    """n sampled ids are n - 1 accepted drafts, within the drafts there were."""
    for _ in range(3):  # "auto" changes its way once a shape repeats
        counts = counted(acceptance, sampled, draft_len, vocab_size=50)
        assert counts.tolist() == expected
        assert counts.dtype is torch.int64


def test_zero_columns_and_zero_requests(acceptance):
    """Nothing sampled is nothing accepted."""
    assert counted(acceptance, torch.empty(2, 0), [3, 3]).tolist() == [0, 0]
    assert counted(acceptance, torch.empty(0, 3), []).tolist() == []


@pytest.mark.parametrize(
    "ids", [torch.tensor([1, 2]), torch.tensor([[1.0]]), [[1, 2]], torch.tensor([[1], [2]])]
)
def test_malformed_ids_are_refused(ids):
    """With one kind of error, before anything is read."""
    with pytest.raises(AcceptanceError):
        Acceptance("vectorized", CPU).from_ids(SampledIds(ids), [1])


def test_a_mode_that_cannot_run_is_refused():
    """A graph needs a device."""
    with pytest.raises(BackendUnavailableError, match="CUDA"):
        Acceptance("graph", CPU)


@given(st.data())
def test_vectorized_equals_the_readable_loop(data):
    """On any ids, lengths and shapes."""
    requests, columns = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6))
    values = [[data.draw(st.integers(-1, 4)) for _ in range(columns)] for _ in range(requests)]
    ids = torch.tensor(values, dtype=torch.int64).view(requests, columns)
    lengths = [data.draw(st.integers(0, 7)) for _ in range(requests)]
    settings = {"vocab_size": data.draw(st.sampled_from([None, 3]))}
    loop, vector = Acceptance("loop", CPU), Acceptance("vectorized", CPU)
    first = counted(loop, ids, lengths, **settings)
    assert torch.equal(first, counted(vector, ids, lengths, **settings))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_host_sync_on_a_device():
    """Ids to counts without the host waiting once."""
    cuda = torch.device("cuda")
    for mode in ("vectorized", "graph", "auto"):
        acceptance = Acceptance(mode, cuda)
        sampled = SampledIds(torch.randint(-1, 5, (4, 4), device="cuda"))
        expected = acceptance.from_ids(sampled, [3, 3, 3, 3]).tolist()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            counts = acceptance.from_ids(sampled, [3, 3, 3, 3])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert counts.tolist() == expected
