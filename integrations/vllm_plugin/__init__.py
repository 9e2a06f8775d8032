"""kvtxn inside vLLM: the plug-in's entry point, and the functions that users call."""

from typing import TYPE_CHECKING

from ...lazy import first_use
from .plugin import register, unregister

if TYPE_CHECKING:
    from .audit.engine_calls import audit_report, new_weights
    from .metrics import last_snapshots, snapshots
else:
    __getattr__ = first_use(
        __name__,
        {
            "audit_report": ".audit.engine_calls",
            "new_weights": ".audit.engine_calls",
            "last_snapshots": ".metrics",
            "snapshots": ".metrics",
        },
    )

__all__ = [
    "audit_report",
    "last_snapshots",
    "new_weights",
    "register",
    "snapshots",
    "unregister",
]
