"""Fixtures of the tests beside a toy of SGLang."""

from __future__ import annotations

import pytest
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import starting


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The rules let no engine on a CPU in."""
    monkeypatch.setattr(starting, "cannot_watch", lambda facts: None)


@pytest.fixture
def hooks(on_a_cpu):
    """The hooks of a process whose user asks for the ledger."""
    return starting.Hooks(AuditSettings(audit="ledger"))
