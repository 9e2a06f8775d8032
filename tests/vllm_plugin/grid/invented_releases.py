"""Releases of vLLM that do not exist, listed for a test: so no test depends on what is listed."""

from __future__ import annotations

import pytest
from kvtxn.integrations.vllm_plugin.policy import supported
from kvtxn.integrations.vllm_plugin.policy.decision import ON_ONE_GPU, WITHOUT_STAGES

#: By check: the name of its list in ``supported``.
LISTS = {
    "audit": "AUDIT_RELEASES",
    "cpu": "RELEASES",
    "gpu": "GPU_RELEASES",
    "gpus": "MORE_GPU_RELEASES",
    "gpu-stages": "STAGE_RELEASES",
    "gpu-backends": "ROW_RELEASES",
    "states": "STATE_RELEASES",
    "gpu-states": "GPU_STATE_RELEASES",
}


@pytest.fixture
def invented(monkeypatch):
    """The releases that examples of rules name."""
    for check, name in LISTS.items():
        more = [ON_ONE_GPU] if check in ("cpu", "gpu") else []
        more += [WITHOUT_STAGES] if check != "gpu-stages" else []
        monkeypatch.setattr(supported, name, (*getattr(supported, name), *more))
    monkeypatch.setitem(supported.LEFT_OUT, ON_ONE_GPU, {"mtp": "it died"})
    monkeypatch.setitem(supported.LEFT_OUT, WITHOUT_STAGES, {"FLASH_ATTN_MLA": "nobody had time"})
