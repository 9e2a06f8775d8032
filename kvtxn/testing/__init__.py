"""The conformance kit: what every executor promises, as tests to subclass.

It needs pytest and Hypothesis (``pip install kvtxn[testing]``); nothing else
in kvtxn imports it.
"""

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "honesty",
            "program",
            "promise_counts",
            "promise_device",
            "promise_discipline",
            "promise_exactness",
            "promise_fallback",
            "promise_histories",
            "promise_hooks",
            "promise_isolation",
            "promise_overwriting",
            "promise_own_writes",
            "promise_tree_attention",
            "promise_tree_evicting",
            "promise_trees",
            "state_walk",
        )
    )
)

from .caches import LAYOUTS, LayerSpec  # noqa: E402  (assertions are rewritten on import)
from .conformance import ExecutorConformance  # noqa: E402
from .faults import Faults, FaultyExecutor, InjectedFault, faulty  # noqa: E402
from .number_formats import FORMATS  # noqa: E402
from .rig import Rig, registered  # noqa: E402

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "ExecutorConformance",
    "Faults",
    "FaultyExecutor",
    "InjectedFault",
    "LayerSpec",
    "Rig",
    "faulty",
    "registered",
]
