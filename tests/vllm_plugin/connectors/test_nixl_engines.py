"""Windows in two engines on one machine, the second of which reads the first one's memory by NIXL.

    pip install --no-deps nixl nixl-cu12
    pytest tests/vllm_plugin/connectors -k nixl

Its packages are for CUDA and run without; the other tests need none of them.
"""

from __future__ import annotations

import pytest
from engine_jobs import POLICIES, missing

WHY = missing() or missing("connected-nixl")
pytestmark = [
    pytest.mark.skipif(WHY is not None, reason=str(WHY)),
    pytest.mark.engines("connected-nixl"),
]


@pytest.fixture
def both(reports):
    """The reports of both engines, by their policy."""
    return lambda policy: reports("connected-nixl")[policy]


@pytest.mark.parametrize("policy", ["stock", *POLICIES])
def test_requests_go_on_as_in_one_engine(both, policy):
    """They were handed over in the middle of an answer; all their rows but one came along."""
    found, plain = both(policy), both("plain")
    assert found["tokens"] == plain["tokens"][: len(found["tokens"])]
    assert sum(rows > 0 for rows in found["cached"]) >= len(found["cached"]) - 1
    for engine in ("first", "then"):
        assert found[engine]["counts"]["kvtxn_active"] == (policy != "stock")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_byte_that_the_other_engine_reads_is_durable(both, policy):
    """The first one runs on meanwhile; the second one's blocks are those bytes, and stay so."""
    found = both(policy)
    for engine in ("first", "then"):
        seen = found[engine]["oracle"]
        assert seen["rejected"] > 0
        assert seen["residue"] == 0, seen["told"]
        assert found[engine]["counts"]["kvtxn_fallbacks_total"] == 0
    assert found["then"]["oracle"]["loaded_blocks"] > 15
    assert found["then"]["oracle"]["loaded_wrong"] == 0, found["then"]["oracle"]["told"]
    assert found["first"]["rounds"] > 0


def test_a_stock_engine_keeps_rows_of_rejected_drafts(both):
    """The oracle can fail."""
    assert both("stock")["first"]["oracle"]["residue"] > 0
