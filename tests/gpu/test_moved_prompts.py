"""Drafters' copies of tokens, which engines of the state grid keep right though vLLM does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from moved_prompts import with_moved_prompts


@pytest.mark.parametrize(
    ("before", "new", "copied"),
    [
        (None, ["begun", "answered"], ["begun", "answered"]),
        ({"answered": 2}, [], ["begun"]),
        ({"answered": 2, "begun": 1}, [], []),
        ({"answered": 2}, ["begun"], ["begun"]),
    ],
)
def test_a_request_without_an_answer_takes_its_tokens_along(before, new, copied):
    """vLLM copies the tokens of new requests, and moves those of requests that sampled."""
    requests = {name: SimpleNamespace(req_id=name) for name in ("begun", "answered", "ended")}
    batch = SimpleNamespace(
        prev_req_id_to_index=before, req_id_to_index={"begun": 0, "answered": 1}
    )
    told = []
    update = with_moved_prompts(lambda *given, **named: told.append((given, named)), requests)
    update(batch, "tokens", "counts", [requests[name] for name in new], "device", buffer=1)
    (((_, tokens, counts, given, device), named),) = told
    assert [each.req_id for each in given] == copied
    assert (tokens, counts, device, named) == ("tokens", "counts", "device", {"buffer": 1})
