"""Engines with KV connectors on a CPU, with windows and without, and the process of one of them.

Two oracles watch each: the image of all durable bytes (``egress_oracle``), and kvtxn's ledger,
which knows the tokens that a block is stored under.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

from connected_kinds import KINDS
from connector_scenarios import SCENARIOS
from engine_child import played
from engine_options import connector, options
from kvtxn.integrations.vllm_plugin import audit_report, snapshots
from model_files import write


def build(kind: dict[str, Any], policy: str, folder: Path) -> Any:
    """Build an engine of a kind, with windows unless the policy is "stock"."""
    from vllm import LLM

    more = dict(kind["options"])
    if "connector" in kind:
        more["kv_transfer_config"] = connector(folder, kind["connector"])
    kvtxn = {} if policy == "stock" else {"policy": policy, "on_error": "raise"}
    if kind.get("connector") != "bench":  # a connector's numbers are no rows of any token
        kvtxn["audit"] = "ledger"
    more["worker_extension_cls"] = "egress_oracle.EgressOracle"
    more["additional_config"] = {"kvtxn": kvtxn} if kvtxn else {}
    return LLM(**{**options(write("llama", folder), {}), **more})


def scenarios(llm: Any, kind: dict[str, Any]) -> dict[str, Any]:
    """Run the scenarios of a kind; returns the report of each."""
    llm.collective_rpc("egress_install")
    results: dict[str, Any] = {"idle": snapshots(llm)}
    for name in kind["scenarios"]:
        results[name] = played(llm, name, SCENARIOS, lambda: llm.collective_rpc("egress_take")[0])
        if "error" in results[name]:
            raise RuntimeError(f"{name}: {results[name]['error']}")
    results["violations"] = audit_report(llm)[0]
    return results


def _first(kind: dict[str, Any], policy: str, folder: Path) -> None:
    """Fill the store."""
    scenarios(build(kind, policy, folder), kind)
    os._exit(0)


def run(folder: Path) -> dict[str, Any]:
    """Run the engine that the folder is named after; returns its report."""
    name, _, policy = folder.name.removeprefix("connected-").partition(".")
    kind = KINDS[name]
    if kind.get("first"):
        earlier = multiprocessing.get_context("fork").Process(
            target=_first, args=(kind, policy, folder)
        )
        earlier.start()
        earlier.join()
        if earlier.exitcode:
            raise RuntimeError(f"the first engine's process ended with {earlier.exitcode}")
    return scenarios(build(kind, policy, folder), kind)
