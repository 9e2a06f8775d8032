"""Several processes can share the tests, of which one has all that wait for engines."""

from __future__ import annotations

import pytest
from engine_session import needed, waits


def test_tests_that_wait_for_engines_are_where_it_is_said(request):
    """Else a second process would start the same engines once more."""
    items = request.session.items
    assert [item.nodeid for item in items if needed([item]) and not waits(item.nodeid)] == []


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("tests/vllm_plugin/grid/test_grid.py::test_a[llama]", True),
        ("tests/test_demo.py::test_a", True),
        ("tests/audit_command/test_verdict.py::test_a", False),
        ("tests/vllm_plugin/unit/test_audit_v2.py::test_a[tests/test_demo.py]", False),
    ],
)
def test_a_file_says_it(nodeid, expected):
    assert waits(nodeid) is expected
