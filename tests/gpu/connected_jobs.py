"""The engines with KV connectors on GPUs, their scenarios, and the rules for their reports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from connector_scenarios import SCENARIOS
from gpu_jobs import BOTH, UNDO, V1, job
from gpu_judge import Bounded, beyond
from gpu_ties import NEAR, NOISE

DEFERRED = ("deferred",)


#: The last scenario is for OffloadingConnector alone, which can forget what it has stored.
ALL = [name for name in SCENARIOS if name != "interrupted"]
EVERY = {"scenarios": [*SCENARIOS]}

#: Every prompt begins in one step: of a longer one ExampleConnector stores what is not there yet.
WHOLE = {"max_num_batched_tokens": 2048, "num_gpu_blocks_override": 80}
MEMORY = {"cpu_bytes_to_use": 8 << 20}  # of an engine; some keep it in /dev/shm
#: Outputs, too, which verify steps write.
OFFLOAD = ("OffloadingConnector", MEMORY | {"offload_prompt_only": False})
SIMPLE = ("SimpleCPUOffloadConnector", MEMORY)
LAZY = ("SimpleCPUOffloadConnector", MEMORY | {"lazy_offload": True})
EXAMPLE = ("ExampleConnector", {"shared_storage_path": "stored"})
BENCH = ("DecodeBenchConnector", {})


def connected(policies: tuple[str, ...], says: str, *connectors: Any, **more: Any) -> Any:
    """An engine with connectors; ``plain``: the engine without any that it is compared with."""
    given = {"scenarios": ALL, "plain": "connectors_plain", **more}
    return job("llama", "FLASH_ATTN", policies, says, connectors=list(connectors), **given)


#: Without connectors: what all others have to say.
PLAIN: dict[str, Any] = {
    "connectors_plain": connected((), "no connector", **EVERY),
    "connectors_plain_whole": connected((), "no connector", options=WHOLE),
    "connectors_plain_v1": connected((), "no connector, the V1 runner", environment=V1, **EVERY),
}
TO_WHOLE: dict[str, Any] = {
    "options": WHOLE,
    "scenarios": ["come_back"],
    "plain": "connectors_plain_whole",
}
TO_V1: dict[str, Any] = {"environment": V1, "plain": "connectors_plain_v1"}

JOBS: dict[str, dict[str, Any]] = {
    # Its layout has heads before rows, which FlashAttention cannot read by slot.
    "connectors_offload": connected(
        *(("undo", "auto"), "blocks copied when the next step begins", OFFLOAD), **EVERY
    ),
    "connectors_simple": connected(BOTH, "blocks copied once a step is over", SIMPLE),
    "connectors_lazy": connected(
        *(DEFERRED, "blocks copied before they are reused", LAZY),
        scenarios=["come_back", "preempted"],
        loads=False,
    ),
    "connectors_example": connected(
        *(BOTH, "prompts read within the forward", EXAMPLE), **TO_WHOLE
    ),
    "connectors_second": connected(
        *(BOTH, "prompts that an earlier engine stored", EXAMPLE), first=True, **TO_WHOLE
    ),
    "connectors_several": connected(
        *(BOTH, "two connectors, one within the forward", SIMPLE, EXAMPLE), **TO_WHOLE
    ),
    "connectors_both_offload": connected(
        *(UNDO, "two connectors that keep blocks in memory", OFFLOAD, SIMPLE),
    ),
    # What it loads is no request's own, so its tokens are those of stock with it.
    "connectors_bench": connected(
        *(BOTH, "blocks of numbers instead of prompts", BENCH), **TO_WHOLE | {"plain": None}
    ),
    "connectors_v1_offload": connected(UNDO, "the V1 runner", OFFLOAD, **TO_V1, **EVERY),
    "connectors_v1_simple": connected(BOTH, "the V1 runner", SIMPLE, **TO_V1),
}


def transfer(connectors: list[Any], folder: Path) -> dict[str, Any]:
    """The settings of these connectors, of several together those of a MultiConnector."""

    def one(name: str, more: dict[str, Any]) -> dict[str, Any]:
        places = {key: str(folder / more[key]) for key in more if key == "shared_storage_path"}
        both = {"kv_connector": name, "kv_role": "kv_both"}
        return {**both, "kv_connector_extra_config": {**more, **places}}

    found = [one(*each) for each in connectors]
    several = one("MultiConnector", {"connectors": found})
    return found[0] if len(found) == 1 else several


def engines(names: list[str]) -> dict[str, dict[str, Any]]:
    """An engine for each policy of these jobs, and stock; and the engines without connectors."""
    plain = dict.fromkeys(filter(None, (JOBS[name]["plain"] for name in names)))
    found = {f"{name}.stock": PLAIN[name] | {"policy": "stock"} for name in plain}
    for name in names:
        for policy in ("stock", *JOBS[name]["policies"]):
            found[f"{name}.{policy}"] = JOBS[name] | {"policy": policy}
    return found


# -- rules ------------------------------------------------------------------------------


def strange(found: dict[str, Any]) -> dict[str, Bounded]:
    """Return what rounding cannot explain between tokens, as ``gpu_ties.compare`` found it."""
    return beyond(
        {
            "noise": (found["noise"], -math.inf, NOISE),
            "gap": (found["gap"], -math.inf, NEAR),
            "by_lot": (found["by_lot"], 0, 0),
        }
    )


def leaked(seen: dict[str, Any], counts: dict[str, Any]) -> dict[str, Bounded]:
    """Return the oracle's numbers that may not be, of an engine with windows."""
    bypassed = counts.get("kvtxn_bypassed_windows_total", 0)
    return beyond(
        {
            "rejected drafts": (seen.get("rejected", 0), 1, math.inf),
            "bytes stored that were not durable": (seen.get("stored_wrong", 0), 0, 0),
            "slots stored while drafts were in them": (seen.get("stored_pending", 0), 0, 0),
            "bytes loaded that were not stored": (seen.get("loaded_wrong", 0), 0, 0),
            "rows that are not durable": (seen.get("residue", 0), 0, math.inf if bypassed else 0),
            "fallbacks": (counts.get("kvtxn_fallbacks_total", 0), 0, 0),
            "windows": (counts.get("kvtxn_windows_total_committed", 0), 1, math.inf),
        }
    )


#: Counters that a diagnosis shows, of windows and of the oracle.
WINDOWS = ("windows_total_committed", "bypassed_windows_total", "fallbacks_total")
SEEN = (
    *("stored_blocks", "stored_rows", "stored_wrong", "stored_pending", "loaded_blocks"),
    *("loaded_wrong", "kept", "rejected", "residue", "under_way"),
)


def told(name: str, report: dict[str, Any]) -> list[str]:
    """Say in a few lines what an engine showed, or how it ended."""
    if "error" in report:
        lines = report.get("log", "").splitlines()[-12:]
        return [f"== {name}: {report['error']}", *(line[-240:] for line in lines)]
    found = [f"== {name}: {report['seconds']} s, {report['runner']}, {report['release']}"]
    for scenario, seen in report.items():
        if isinstance(seen, dict) and "egress" in seen:
            counts = seen["kvtxn"][-1] if seen["kvtxn"] else {}
            windows = "/".join(str(int(counts.get(f"kvtxn_{key}", 0))) for key in WINDOWS)
            numbers = {key: seen["egress"][key] for key in SEEN if seen["egress"].get(key)}
            found.append(f"  {scenario}: cached {seen['cached']}, windows {windows}, {numbers}")
            found += [f"    {line}" for line in seen["egress"]["told"][:2] if "stock" not in name]
    return found
