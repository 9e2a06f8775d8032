"""kvtxn inside vLLM: the plug-in's entry point, and the functions that users call."""

from typing import TYPE_CHECKING

from ...lazy import first_use
from .plugin import register, unregister

if TYPE_CHECKING:
    from .engine_calls import audit_report, last_snapshots, new_weights, snapshots
else:
    __getattr__ = first_use(
        __name__,
        dict.fromkeys(
            ("audit_report", "last_snapshots", "new_weights", "snapshots"), ".engine_calls"
        ),
    )

__all__ = [
    "audit_report",
    "last_snapshots",
    "new_weights",
    "register",
    "snapshots",
    "unregister",
]
