"""``ExecutorConformance``: a backend author subclasses it and supplies one fixture."""

from __future__ import annotations

from .program import RandomProgram
from .promise_all_or_nothing import AllOrNothing, Isolation
from .promise_captured import CapturedWindows
from .promise_captured_endings import StepEndings
from .promise_claims import Claims
from .promise_counts import Counts
from .promise_device import Device
from .promise_discipline import Discipline
from .promise_exactness import Exactness, Sizes
from .promise_fallback import Fallback
from .promise_histories import LongRuns
from .promise_hooks import Hooks
from .promise_overwriting import Overwriting
from .promise_own_writes import OwnWrites, TreeAttention
from .promise_saving import SavingForwards
from .promise_state_boundaries import StateBoundaries
from .promise_state_runs import StateRuns
from .promise_states import States
from .promise_steps import CapturedSteps
from .promise_supplied import SuppliedStates
from .promise_trees import Trees
from .promise_unseen import Unseen
from .state_walk import StateTable


# pytest collects the tests of the last base first, so the quick ones come last: `-x` ends soon.
class ExecutorConformance(
    RandomProgram,
    LongRuns,
    Overwriting,
    TreeAttention,
    Trees,
    SavingForwards,
    SuppliedStates,
    StepEndings,
    CapturedSteps,
    CapturedWindows,
    Hooks,
    Fallback,
    Device,
    StateTable,
    Discipline,
    Unseen,
    OwnWrites,
    Isolation,
    AllOrNothing,
    Sizes,
    Exactness,
    Counts,
    Claims,
):
    """All promises of an executor, as tests.

    Subclass it under a name that pytest collects, and supply ``backend``::

        class TestMine(ExecutorConformance):
            @pytest.fixture
            def backend(self):
                return "mine"  # a registered name, or the Executor subclass itself

    The other fixtures have defaults, and may be overridden in the same way: ``device`` ("cpu"),
    ``attention_tolerance`` (1e-4, for float32), ``program_settings``, ``tree_settings`` and
    ``history_settings`` (Hypothesis settings of the random program, trees and histories).
    """


class ReplayConformance(StateRuns, StateBoundaries, States):
    """Further promises of an executor that declares ``"replayed"`` among its ``kinds``.

    What states share with rows and rings, such as all or nothing, ``ExecutorConformance`` tests.

    Subclass it under a name that pytest collects, and supply the same fixtures.
    """
