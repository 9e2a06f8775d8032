"""Each stage of a step fails once where a test asks for it, and the steps recover."""

from __future__ import annotations

import pytest
from failing_stage import STAGES, InjectedFault, failing_stage
from step_rig import Rig, anywhere  # noqa: F401  # a fixture

CASES = [(policy, stage) for policy in STAGES for stage in STAGES[policy] if stage != "attend"]


@pytest.mark.parametrize(("policy", "stage"), CASES)
def test_each_stage_fails_once(policy, stage):
    """A failure is counted, later steps go well (``test_flash_backend`` has the attention's)."""
    rig = Rig(policy)
    with failing_stage(rig.steps, stage, 0):
        rig.begin([3], [4])
        rig.commit([2])
    assert rig.count("fallbacks_total") == 1
    while rig.begin([2], [3]) is None and rig.steps.window is None:
        rig.commit([1])
    rig.commit([1])
    assert rig.count("windows_total_committed") == 1


@pytest.mark.parametrize("policy", STAGES)
def test_a_batch_that_comes_again_can_fail_at_its_plan(policy):
    """Plans are remembered, and a test of the plan's failure would find no plan to fail."""
    rig = Rig(policy)
    for _ in range(2):
        rig.begin([3], [4])
        rig.commit([2])
    with failing_stage(rig.steps, "plan", 0) as calls:
        rig.begin([3], [4])
        rig.commit([2])
    assert calls == [1]
    assert rig.count("fallbacks_total") == 1


@pytest.mark.parametrize("policy", STAGES)
def test_the_fault_is_raised_where_errors_are_asked_for(policy):
    """``on_error="raise"`` hands the test's own exception out."""
    rig = Rig(policy, on_error="raise")
    with failing_stage(rig.steps, "commit", 0):
        rig.begin([3], [4])
        with pytest.raises(InjectedFault):
            rig.commit([2])
