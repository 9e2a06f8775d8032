"""Reports of ranks as one."""

from __future__ import annotations

from merged_ranks import merged


def rank(**more):
    seen = {"states": 4, "off": 0, "worst": 1e-7, "ends": 1}
    return {"counts": {"steps": 3, "strays": 1, "commit_changed": 2}, "accepted": {"1": 3},
            "digests": {"0@5": [1, 2]}, "recurred": seen} | more  # fmt: skip


def test_states_of_all_ranks_count_and_steps_once():
    other = rank(
        digests={"0@5": [3, 4]}, recurred={"states": 4, "off": 1, "worst": 2e-7, "ends": 1}
    )
    found = merged([rank(), other])
    assert found["digests"] == {"0@5": [1, 2, 3, 4]}
    assert found["counts"] == {"steps": 3, "strays": 2, "commit_changed": 4}
    assert found["recurred"] == {"states": 8, "off": 1, "worst": 2e-7, "ends": 2}
    assert found["accepted"] == {"1": 3}


def test_one_rank_is_its_own_report():
    alone = rank(recurred={})
    assert merged([alone]) is alone
    assert merged([alone, rank(recurred={})])["recurred"] == {}
