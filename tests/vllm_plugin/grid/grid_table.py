"""Writes GRID.md: what the grid's last run showed. No number in it is typed.

    pytest tests/vllm_plugin          # leaves what it saw in pytest's cache
    python tests/vllm_plugin/grid/grid_table.py

takes the cells over into grid.json and draws the table from that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_jobs import COMPARED, JOBS, POLICIES
from scenarios import SCENARIOS

HERE = Path(__file__).parent
RECORD, TABLE = HERE / "grid.json", HERE / "GRID.md"
CACHE = "kvtxn/grid"

HEAD = """# The vLLM grid

What `pytest tests/vllm_plugin` showed, drawn by `python tests/vllm_plugin/grid/grid_table.py`:
{engine}.

A cell is *accepted / drafted* rows of a scenario. In every cell all tokens and vLLM's own
acceptance counters were stock's, and an oracle that reads the caches around each step found no
rejected row left behind (under `deferred`: no draft row before its commit). Tiny models with
random weights; speculation by n-grams, four drafts, where nothing else is said. What the
scenarios are stands in `scenarios.py`. An empty cell was not run; the notes say why.

"""


def cell(result: dict[str, Any]) -> dict[str, int]:
    """Reduce a scenario's result to the numbers that are recorded."""
    stats = result["stats"]
    return {name: int(stats[name]) for name in ("accepted", "drafted", "preemptions")}


def record(job: str, report: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Reduce a job's reports to cells by policy, or to the reason why a policy stays out."""
    return {
        policy: {
            scenario: cell(report[policy][scenario]) for scenario in JOBS[job]["engines"][policy][1]
        }
        if policy in JOBS[job]["engines"]
        else report["stock"]["decisions"][policy][1]
        for policy in POLICIES
        if policy not in JOBS[job].get("left_out", ())
    }


def draw(grid: dict[str, Any]) -> str:
    """The table."""
    scenarios = list(SCENARIOS)
    lines = [f"| engine | policy | {' | '.join(scenarios)} |"]
    lines.append("|---|---|" + "---:|" * len(scenarios))
    out = []
    for job, found in grid.items():
        for policy, cells in found["policies"].items():
            if isinstance(cells, str):
                out.append(f"- {job}, `{policy}`: {cells}.")
                continue
            texts = [
                f"{cells[name]['accepted']} / {cells[name]['drafted']}" if name in cells else ""
                for name in scenarios
            ]
            lines.append(f"| {job} | `{policy}` | {' | '.join(texts)} |")
    notes = [f"- {job}: {JOBS[job]['covers']}." for job in grid]
    engines = sorted({found["engine"] for found in grid.values()})
    return "\n".join(
        [
            HEAD.format(engine="; ".join(engines)) + "\n".join(lines),
            "\nWhat each engine is there for:\n",
            *notes,
            "\nPolicies that stay out, in the plug-in's own words:\n",
            *out,
            "",
        ]
    )


def main() -> None:
    """Take the last run over, as far as it went, and draw."""
    seen = HERE.parents[2] / ".pytest_cache" / "v" / CACHE
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found |= json.loads(seen.read_text()) if seen.exists() else {}
    grid = {job: found[job] for job in COMPARED if job in found}
    RECORD.write_text(json.dumps(grid, indent=1) + "\n")
    TABLE.write_text(draw(grid))


if __name__ == "__main__":
    main()
