"""The class a backend author subclasses: all promises, one fixture to supply."""

from __future__ import annotations

from .honesty import Honesty
from .program import RandomProgram
from .promise_captured import CapturedWindows
from .promise_counts import Counts
from .promise_device import Device
from .promise_discipline import Discipline
from .promise_exactness import Exactness
from .promise_fallback import Fallback
from .promise_histories import LongRuns
from .promise_hooks import Hooks
from .promise_isolation import AllOrNothing, Isolation
from .promise_overwriting import Overwriting
from .promise_own_writes import OwnWrites
from .promise_sizes import Sizes
from .promise_tree_attention import TreeAttention
from .promise_tree_evicting import EvictingTrees
from .promise_trees import Trees
from .promise_unseen import Unseen
from .state_walk import StateTable


class ExecutorConformance(
    Honesty,
    Exactness,
    Sizes,
    AllOrNothing,
    Isolation,
    OwnWrites,
    Unseen,
    Discipline,
    StateTable,
    Device,
    Fallback,
    Counts,
    Hooks,
    CapturedWindows,
    Trees,
    TreeAttention,
    EvictingTrees,
    Overwriting,
    LongRuns,
    RandomProgram,
):
    """Everything an executor promises, as tests.

    Subclass it under a name that pytest collects, and supply ``backend``::

        class TestMine(ExecutorConformance):
            @pytest.fixture
            def backend(self):
                return "mine"  # a registered name, or the Executor subclass itself

    The other fixtures have defaults, and may be overridden likewise: ``device`` ("cpu"),
    ``attention_tolerance`` (1e-4, for float32), ``program_settings``, ``tree_settings`` and
    ``history_settings`` (Hypothesis settings of the random program, trees and histories).
    """
