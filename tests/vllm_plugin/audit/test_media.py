"""Pictures count by their content, whatever names the clients give them."""

from __future__ import annotations

import pytest
from engine_jobs import missing
from model_files import PICTURE

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines("audit-pictures", "audit-shared-pictures"),
]

#: Rows of the picture's and the text's whole blocks.
HIT = 64


@pytest.fixture
def found(reports):
    return reports("audit-pictures")["alone"]


@pytest.mark.parametrize("named", ["without names", "with names"])
def test_right_pictures_are_healthy(found, named):
    """A picture that is sent again, or by its name alone, finds its own rows."""
    report = found[named]
    assert report["violations"] == []
    assert report["cached"] == [0, 0, HIT, HIT][: len(report["cached"])]
    first, second, *again = report["said"]
    assert again == [first, second][: len(again)]
    assert first != second


def test_two_pictures_under_one_name(found):
    """The second one is answered as if it were the first; each block of its rows is found."""
    report = found["one name for two"]
    red, blue = (request.partition("-")[0] for request in report["requests"][:2])
    assert report["cached"] == [0, HIT, 0]
    assert report["said"][1] == report["said"][0] != report["said"][2]
    assert [(v["kind"], v["position"], v["differs"]) for v in report["violations"]] == [
        ("foreign", 0, "embedded"),
        ("foreign", 32, "earlier"),
    ]
    for violation in report["violations"]:
        assert violation["request"].startswith(f"{blue}-")
        assert violation["written_request"].startswith(f"{red}-")


def test_two_pictures_under_one_name_in_two_processes(reports):
    """The connector finds the other process's rows by the name; the store knows the content."""
    red, blue = reports("audit-shared-pictures")["alone"]
    assert red == {"cached": HIT, "unverified": 0, "violations": []}
    violations = [["imported", at, "unknown"] for at in (0, 32)]
    assert blue == {"cached": HIT, "unverified": 0, "violations": violations}


def test_rows_of_an_output_that_earlier_weights_computed_are_old(found):
    """vLLM keeps an encoder's outputs; a picture that is encoded anew has no old row."""
    report = found["updated"]
    before, kept, anew = report["said"]
    assert kept == before != anew
    old = {each["request"].partition("-")[0]: each["rows"] for each in report["ages"]}
    _, second, third = (request.partition("-")[0] for request in report["requests"])
    assert set(old) == {second}
    (number,) = old[second].values()
    assert old[second] == {"1": number}
    assert number % PICTURE == 0  # all of the picture's rows, in each step that decodes
    assert number > PICTURE
    assert third not in old


def test_the_engine_was_judged_whole(found):
    assert found["counts"]["kvtxn_audit_unjudged_total"] == 0
    assert found["counts"]["kvtxn_audit_unwatched_groups"] == 0
    assert found["counts"]["kvtxn_audit_rows_checked_total"] > 500
