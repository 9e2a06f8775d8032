"""Metrics of prometheus_client in a registry of a test's own."""

from __future__ import annotations

import prometheus_client
import pytest
from kvtxn.integrations.serving import metrics_page


def own_registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """Let a ``MetricsPage`` make its metrics in a new registry, as a process's first page does."""
    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        plain = getattr(prometheus_client, name)

        def begin(self, *args, plain=plain, **kwargs):
            plain.__init__(self, *args, **{**kwargs, "registry": registry})

        monkeypatch.setattr(prometheus_client, name, type(name, (plain,), {"__init__": begin}))
    metrics_page._metric.cache_clear()
    return registry
