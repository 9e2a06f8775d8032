"""The issues for vLLM: their form, their counts, and the script that runs their programs."""

from __future__ import annotations

import importlib.util
import re

import pytest
from building import ROOT
from kvtxn.integrations.vllm_plugin.seam.hook_points import HOOK_POINTS

FOLDER = ROOT / "upstream"
_SPEC = importlib.util.spec_from_file_location("upstream_check", FOLDER / "check.py")
check = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check)

SECTIONS = ["What happens", "Program", "Expected", "Actual", "Cause, in 0.33.0", "A possible fix"]
#: A row of the RFC's table: what hook points are for, their names, and how many there are.
ROW = re.compile(r"^\| [^|`]+ \| (`.*`) \| (\d+) \|$", re.MULTILINE)
ISSUE = """# [Bug]: Two is three

## Program

```python
print("two is", 3)
print()
raise AssertionError
```

## Actual

```text
two is 3
AssertionError
```

| place | code |
|---|---|
| `numbers.py:2` | `TWO = 3` |
"""


@pytest.mark.parametrize("issue", check.ISSUES, ids=lambda issue: issue.stem)
def test_an_issue_is_complete(issue):
    """Its sections, a program without kvtxn, what it printed, and lines of vLLM's sources."""
    text = issue.read_text()
    assert text.startswith("# [Bug]: ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    for row in ("Releases", "Engine", "Shown", "Related"):
        assert f"\n| {row} | " in text
    program = check.PROGRAM.search(text)[1]
    compile(program, issue.name, "exec")
    assert "kvtxn" not in text
    assert re.search(r"^(assert |    llm\.generate)", program.splitlines()[-1])
    assert re.search(r"\n\w+Error.*\n$", check.ACTUAL.search(text)[2])
    assert len(check.QUOTED.findall(text)) >= 3


def test_every_issue_is_listed():
    listed = re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\)", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(
        path.name for path in [*check.ISSUES, check.RFC, check.CANDIDATES]
    )


def test_the_rfc_counts_hook_points():
    """Each name that would go is a hook point, and the numbers are theirs."""
    text = check.RFC.read_text()
    known = {name for names in HOOK_POINTS.values() for name in names}
    gone = set()
    for names, number in ROW.findall(text):
        v2 = "update_requests" in names
        owner = "gpu.model_runner." if v2 else ".gpu_model_runner." if "_sample`" in names else "."
        for name in re.findall(r"`(.+?)`", names):
            found = [full for full in known if full.endswith(f".{name}") and owner in full]
            assert len(found) == 1, (name, found)
            gone |= {*found}
        assert names.count(", ") + 1 == int(number)
    said = re.search(
        r"of (\d+) methods, functions and classes.* would replace (\d+) of", text, re.S
    )
    assert [len(known), len(gone)] == [int(said[1]), int(said[2])]


def test_a_program_is_run(tmp_path):
    """Its lines and its error come back, empty lines left out."""
    issue = tmp_path / "two.md"
    issue.write_text(ISSUE)
    assert check.run(issue) == check.ACTUAL.search(ISSUE)[2] == "two is 3\nAssertionError\n"


@pytest.mark.parametrize("end", ["", "import os; os._exit(3)"])
def test_a_program_that_shows_nothing_is_an_error(tmp_path, end):
    """It ended well, or in another way than by an error of Python's."""
    issue = tmp_path / "two.md"
    issue.write_text(ISSUE.replace("raise AssertionError", end))
    with pytest.raises(RuntimeError, match=r"two\.md: exit code [03]"):
        check.run(issue)


def test_a_line_that_moved_is_told(tmp_path):
    (tmp_path / "two.md").write_text(ISSUE)
    (tmp_path / "numbers.py").write_text("ONE = 1\nTWO = 3\n")
    assert check.wrong_lines(tmp_path / "two.md", tmp_path) == []
    (tmp_path / "numbers.py").write_text("ZERO = 0\nONE = 1\nTWO = 3\n")
    (told,) = check.wrong_lines(tmp_path / "two.md", tmp_path)
    assert told == "two.md: numbers.py:2 is not `TWO = 3`; it is in [3]"
