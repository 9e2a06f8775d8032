"""Recordings of the kit's small engine, and the pages made of them: no vLLM, no model."""

from __future__ import annotations

from typing import Any

from kvtxn.integrations.audit_command import page
from kvtxn.integrations.audit_command.jobs import Found
from kvtxn.integrations.audit_command.verdict import judge_found
from ledger_kit.engine import SmallEngine
from ledger_kit.life import GROUPS, live

from kvtxn.audit import RecordingLedger, RowGroup
from kvtxn.audit.recording import HAPPENINGS

PLAIN = (RowGroup("group.0", 4, 40),)


def found(
    groups: Any = PLAIN,
    *,
    engine: Any = SmallEngine,
    steps: int = 60,
    seed: int = 1,
    policy: str | None = None,
    most: int = 400_000,
    **sizes: Any,
) -> Found:
    """Let a small engine live under a ledger that records."""
    groups = GROUPS[groups] if isinstance(groups, str) else groups
    longest = sizes.get("max_length", 60)
    ledger = RecordingLedger(groups, most=most, max_requests=24, max_length=longest + 16)
    small = engine(groups, [ledger], seed=seed, **sizes)
    live(small, steps)
    ledger.violations()
    return Found(
        engine={"vLLM": "0.0", "model": "small"},
        counters=[dict(ledger.counters())],
        recordings=[{**ledger.recording(), "policy": policy}],
        requests=small.names,
        aborted=0,
        failed=[],
        seconds=1.0,
    )


def large(blocks: int = 640, size: int = 16, steps: int = 1000) -> Found:
    """Make up the recording of a large cache: requests of 4 blocks, a draft in every step."""
    result = found(steps=2)
    number = {name: index for index, name in enumerate(HAPPENINGS)}
    runs: list[tuple[int, ...]] = []
    for request in range(blocks // 4):
        begin, slot = 2 + 2 * (request * (steps - 60) // (blocks // 4)), request * 4 * size
        runs.append((begin, number["handed_out"], 0, slot, 4 * size, -1, -1))
        for step in range(4 * size - 1):
            time = begin + 2 * min(step, 58)
            what = "kept" if step % 3 else "rejected"
            runs.append((time, number["durable"], 0, slot + step, 1, request, step))
            runs.append((time, number["draft"], 0, slot + step + 1, 1, request, step + 1))
            runs.append((time + 1, number[what], 0, slot + step + 1, 1, request, step + 1))
    runs.sort(key=lambda run: run[0])
    life = {"end": None, "admitted": 1, "reused": 0, "rows": 127, "drafts": 63, "accepted": 42}
    result.recordings[0] |= {
        "groups": [{**result.recordings[0]["groups"][0], "block_size": size, "num_blocks": blocks}],
        "requests": [{"name": f"r{r}", "begin": 2, **life} for r in range(blocks // 4)],
        "steps": [[1, 2, 1, 1]] * steps,
        "runs": [value for run in runs for value in run],
    }
    return result


def data(result: Found, title: str = "kvtxn audit") -> dict[str, Any]:
    """Return the data of the page of a result."""
    return page.data(title, judge_found(result), result, "kvtxn audit --workload chat")


def html(result: Found) -> str:
    """Return the page of a result."""
    return page.page(data(result))
