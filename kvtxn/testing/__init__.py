"""The conformance kit: the promises of every executor, as tests to subclass.

It needs pytest and Hypothesis (``pip install kvtxn[testing]``); nothing else
in kvtxn imports it.
"""

import pkgutil

import pytest

# Before the tests are imported: then a failing assert shows both sides of its comparison.
pytest.register_assert_rewrite(*(f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__)))

from .caches import LAYOUTS, LayerSpec  # noqa: E402  (assertions are rewritten on import)
from .conformance import ExecutorConformance, ReplayConformance  # noqa: E402
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
    "ReplayConformance",
    "Rig",
    "faulty",
    "registered",
]
