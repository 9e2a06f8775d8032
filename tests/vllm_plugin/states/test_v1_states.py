"""States in the windows of the V1 runner of GPUs, beside stock: real engines, on a CPU."""

from __future__ import annotations

import pytest
from engine_jobs import OTHERS, missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines(*(name for name in OTHERS if name.startswith("v1-"))),
]

MODELS = ("nemotron_h", "lfm2")


@pytest.fixture
def both(reports):
    """The reports of a model's engines: stock's and ours."""
    return lambda model: [reports(f"v1-{model}-{who}")["alone"] for who in ("stock", "exact")]


@pytest.mark.parametrize("scenario", ["eight", "chunked"])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_and_logits_are_stocks(both, model, scenario):
    """To the bit: prompts in chunks beside drafts, and requests that differ in drafts."""
    stock, ours = (each[scenario] for each in both(model))
    assert ours["tokens"] == stock["tokens"]
    assert ours["logprobs"] == stock["logprobs"]
    assert ours["stats"]["accepted"] == stock["stats"]["accepted"] > 0
    assert ours["stats"]["drafted"] > ours["stats"]["accepted"]


@pytest.mark.parametrize("model", MODELS)
def test_a_request_that_leaves_or_is_preempted_leaves_no_state_to_another(both, model):
    """Steps, and so the last bits of sums, are others then; tokens are stock's."""
    stock, ours = both(model)
    assert ours["preempted"]["tokens"] == stock["preempted"]["tokens"]
    assert (ours["preempted"]["stats"]["preemptions"] > 0) == (model == "nemotron_h")
    assert stock["preempted"]["stats"]["preemptions"] == 0
    pairs = list(zip(ours["abort"]["tokens"], stock["abort"]["tokens"], strict=True))
    assert all(a[: len(b)] == b[: len(a)] for a, b in pairs)


@pytest.mark.parametrize("model", MODELS)
def test_a_request_has_one_state(both, model):
    """Stock has one more for each draft."""
    stock, ours = (set(each["state_blocks"]) for each in both(model))
    assert (stock, ours) == ({5}, {1})


def test_a_commit_that_fails_is_repeated(both):
    stock, ours = both("nemotron_h")
    assert ours["fault"]["logprobs"] == stock["chunked"]["logprobs"]
    [counts] = ours["fault"]["kvtxn"]
    assert counts["kvtxn_fallbacks_total_states"] == 1
    assert counts["kvtxn_windows_total_fell_back"] == 1
    assert counts["kvtxn_windows_total_committed"] > 1


def test_one_row_too_many_is_seen(both):
    """States are felt: with wrong ones nothing is stock's."""
    stock, ours = both("nemotron_h")
    pairs = zip(ours["wrong"]["tokens"], stock["chunked"]["tokens"], strict=True)
    assert not any(mine == theirs for mine, theirs in pairs)
