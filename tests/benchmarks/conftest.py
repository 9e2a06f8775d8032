"""Fixtures of results that engines which only pretend have given."""

from __future__ import annotations

from pretended_engines import cell, log, result

__all__ = ["cell", "log", "result"]
