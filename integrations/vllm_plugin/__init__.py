"""kvtxn inside vLLM: the plug-in's entry point, and the functions that users call."""

from .plugin import audit_report, last_snapshots, register, snapshots, unregister

__all__ = ["audit_report", "last_snapshots", "register", "snapshots", "unregister"]
