"""The engines of ``gpu_identities``: connectors that bring rows back, faults, and the rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import identity_faults

#: Rows of a prompt that come back: whole blocks.
ROWS: Final = 160
BLOCK: Final = 32
#: Prompts begin in one step, and a few of them fill the cache.
OPTIONS: Final = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 60,
    "max_model_len": 288,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "async_scheduling": False,
    "enforce_eager": True,
}
LMCACHE: Final = {"LMCACHE_CHUNK_SIZE": str(BLOCK), "LMCACHE_TRACK_USAGE": "false"}
MEMORY: Final = {"cpu_bytes_to_use": 64 << 20}
FAULTS: Final = tuple(identity_faults.BROUGHT)
FS: Final = {
    "spec_name": "TieringOffloadingSpec",
    "secondary_tiers": [{"type": "fs", "root_dir": "{store}"}],
}


def transfer(name: str, /, **settings: Any) -> dict[str, Any]:
    """The settings of a connector; "{store}" and "{port}" in them are filled in."""
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}


def engine(connector: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One engine; see ``identity_child``."""
    return {"model": "llama", "transfer": connector, "faults": FAULTS, **more}


OFFLOAD: Final = transfer("OffloadingConnector", **MEMORY)
SIMPLE: Final = transfer("SimpleCPUOffloadConnector", **MEMORY)
EXAMPLE: Final = transfer("ExampleConnector", shared_storage_path="{store}")
TIERS: Final = transfer("OffloadingConnector", cpu_bytes_to_use=64 << 20, **FS)
FEW: Final = transfer("OffloadingConnector", cpu_bytes_to_use=1 << 20, **FS)
IN_PROCESS: Final = transfer("LMCacheConnectorV1")
SERVED: Final = transfer(
    "LMCacheMPConnector", **{"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": "{port}"}
)
ENGINE_DRIVEN: Final = transfer(
    "LMCacheMPConnector",
    **SERVED["kv_connector_extra_config"],
    **{"lmcache.mp.mp_transfer_mode": "engine_driven"},
)
NIXL: Final = transfer("NixlConnector") | {"kv_load_failure_policy": "fail"}
DISK: Final = {
    "LMCACHE_LOCAL_DISK": "file://{store}/",
    "LMCACHE_MAX_LOCAL_DISK_SIZE": "1.0",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.02",
}

#: Faults of connectors themselves, in some releases: rows come wrong, and alarms are right.
PACKED: Final = (
    "LMCache moves K and V as two planes where vLLM has them side by side (LMCache #4463)"
)
UNORDERED: Final = (
    "LMCache without its cuda_ops copies staged blocks without waiting for them (as LMCache #4870)"
)
LINEAR: Final = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

#: By name. ``second``: an earlier engine in a process of its own has filled the store; ``server``:
#: LMCache's server runs beside; ``pair``: another engine hands prompts over; ``sessions``: distinct
#: prompts, more than the connector's memory holds; ``files``: blocks lie in files; ``then``: more
#: options of the second engine; ``differs``: what is other than in the engine that stored the
#: rows; ``known``: a fault of the connector itself, by which rows may come wrong.
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "offload": engine(OFFLOAD, own=True),
    "simple": engine(SIMPLE),
    "example": engine(EXAMPLE, files=True),
    "fs": engine(TIERS),
    "lmcache": engine(
        IN_PROCESS, known=PACKED, environment=LMCACHE | {"LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5"}
    ),
    "lmcache-mp": engine(
        SERVED, known=UNORDERED, environment=LMCACHE, server=["lmcache_driven"]
    ),
    "lmcache-mp-engine": engine(ENGINE_DRIVEN, environment=LMCACHE, server=["engine_driven"]),
    "nixl": engine(NIXL, pair=True),
    # A store that two engines share, one after the other.
    "example-second": engine(EXAMPLE, files=True, second=True),
    "fs-second": engine(TIERS, files=True, second=True),
    "lmcache-mp-second": engine(
        SERVED, known=UNORDERED, environment=LMCACHE, server=["lmcache_driven"], second=True
    ),
    # Public reports: another RoPE factor over the same directory; sessions that a small memory
    # pushes out; loads that do not wait for a forward; several groups between two engines.
    "fs-rope": engine(
        TIERS,
        second=True,
        faults=(),
        differs="weights",
        then={"hf_overrides": {"rope_parameters": LINEAR}},
    ),
    "lmcache-sessions": engine(
        IN_PROCESS, known=PACKED, environment=LMCACHE | DISK, sessions=24, faults=()
    ),
    "fs-sessions": engine(FEW, sessions=24, faults=()),
    "simple-pressure": engine(
        SIMPLE,
        asked={"audit_every": 1},
        faults=(),
        long={"rows": 10**9, "seconds": 60.0, "requests": 64, "longest": 900, "outputs": 60},
        options={
            "max_model_len": 1024,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 4096,
            "num_gpu_blocks_override": 200,
            "async_scheduling": True,
            "enforce_eager": False,
        },
    ),
    "nixl-groups": engine(
        NIXL, model="gemma3", pair=True, pause=4.0, faults=(),
        options={"prefix_cache_retention_interval": None, "num_gpu_blocks_override": 40},
    ),
}  # fmt: skip


def wrong(job: dict[str, Any], report: dict[str, Any]) -> Iterator[str]:
    """Say what is not as it should be."""
    if job.get("long"):
        long = report["long"]
        yield from (
            f"long: {long[name]} {name}" for name in ("violations", "unjudged") if long[name]
        )
        return
    if job.get("differs"):
        yield from _same(report["healthy"], job["differs"])
        return
    looks = {name: report[name] for name in ("healthy", "again") if name in report}
    if job.get("known") and misplaced(report):
        yield from _untold(report["healthy"])
        return  # from here on nobody can tell planted faults from the connector's own
    for name, found in looks.items():
        yield from _unhealthy(name, found, most=report["partial"])
    if not report.get("same_texts", True):
        yield "texts differ with the audit and without it"
    for name, found in report["found"].items():
        yield from _unfound(name, found)
    for name in ("stale", "reset"):
        if name in report:
            yield from _unheard(name, report[name])


def misplaced(report: dict[str, Any]) -> int:
    """Return how many blocks came with other bytes than were computed, though no fault was planted.

    Of rows that another engine hands over nobody knows it.
    """
    looks = (report.get(name, {}) for name in ("healthy", "again"))
    return sum(found.get("misplaced", 0) for found in looks)


def _untold(found: dict[str, Any]) -> Iterator[str]:
    """Blocks that the connector itself brought wrong are told or counted."""
    if not found["active"]:
        yield "healthy: the audit has ended"
    if found["told"] + found["unverified"] / BLOCK < found["misplaced"]:
        yield f"healthy: of {found['misplaced']} wrong blocks {found['told']} were told: {found}"


def _same(found: dict[str, Any], what: str) -> Iterator[str]:
    told = {(each["kind"], each["differs"]) for each in found["violations"]}
    if told != {("imported", what)}:
        yield f"rows that differ by {what} were not told: {found}"


def _unhealthy(name: str, found: dict[str, Any], most: float) -> Iterator[str]:
    if found.get("misplaced"):
        blocks = f"{found['misplaced']} of {found['blocks']} blocks"
        yield f"{name}: the connector brought {blocks} wrong, and {found['told']} alarms told of it"
    elif found["violations"]:
        yield f"{name}: false alarms: {found['violations'][:2]}"
    if not found["active"]:
        yield f"{name}: the audit has ended"
    if not found["brought"]:
        yield f"{name}: the connector brought no rows"
    if found["unverified"] > most:
        yield f"{name}: {found['unverified']:g} of {found['brought']} rows that came are unverified"


def _unfound(name: str, found: dict[str, Any]) -> Iterator[str]:
    """Faults that leave bytes which no block ever had are counted; all others are found."""
    struck, violations = found.get("struck"), found.get("violations", [])
    if "error" in found:
        yield f"fault {name}: {found['error']}"
    elif struck is None:
        yield f"fault {name} has not struck"
    elif name in identity_faults.UNKNOWN and not violations:
        if found["unverified"] < BLOCK:
            yield f"fault {name}: neither found nor counted: {struck}"
    else:
        here = [
            each
            for each in violations
            if (each["kind"], each["request"]) == ("imported", struck["request"])
            and 0 <= each["position"] - struck["position"] < BLOCK
        ]
        if not here:
            yield f"fault {name}: {struck}, found {violations[:3]}"
        elif name not in identity_faults.UNKNOWN and not here[0]["written_request"]:
            yield f"fault {name}: nobody is named: {here[0]}"


def _unheard(name: str, found: dict[str, Any]) -> Iterator[str]:
    """Rows of earlier weights that came back were told: as stale, or as another process's rows."""
    told = {each["kind"] for each in found["violations"]}
    if found["brought"] and not told & {"stale", "imported"}:
        yield f"{name}: rows of earlier weights were not told: {found}"
    if name == "stale" and not found["brought"]:
        yield f"{name}: the connector brought no rows"


def summary(job: dict[str, Any], report: dict[str, Any]) -> str:
    """One line about an engine."""
    if "long" in report:
        return f"{report['long']}, {report['seconds']} s"
    healthy, reset = report["healthy"], report.get("reset", {})
    connectors_own = job.get("known") and misplaced(report)
    found = {
        name: _told(one) or f"{one.get('unverified', math.nan):g} unverified"
        for name, one in report["found"].items()
    }
    return (
        f"{healthy['rows']} rows read, {healthy['brought']} brought, {healthy['unverified']:g} "
        f"unverified, {healthy['told']} blocks alarmed of {healthy['misplaced']} wrong ones, "
        f"same texts {report.get('same_texts')}, "
        f"faults {found}, after an update {_told(report.get('stale', {}))}, after a reset that "
        f"said {reset.get('said')} {_told(reset)} of {reset.get('brought')} rows, "
        f"{report['seconds']} s"
        + (f"; the alarms are right: {job['known']}" if connectors_own else "")
    )


def _told(found: dict[str, Any]) -> list[str]:
    """Return the kinds of what was found."""
    return sorted({each["kind"] for each in found.get("violations", ())})
