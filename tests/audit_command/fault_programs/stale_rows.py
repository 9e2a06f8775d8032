"""Weights are updated while a request runs; requests that come after it read rows of the old ones.

    python tests/audit_command/fault_programs/stale_rows.py [--json]

A trainer loads other weights, and empties the prefix cache. While a request runs, vLLM leaves the
cache as it is and answers False, which a trainer easily overlooks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fault_engine import Played, SmallEngine, main, tokens


def play(folder: Path, cached: bool) -> Played:
    """Ask before and after an update; ``cached``: a request runs, so the old rows stay."""
    import model_files

    small = SmallEngine(folder, {"stale": "alarm"}, num_gpu_blocks_override=64)
    text = tokens(200, seed=5)
    small.send("before", text)
    small.finish()
    if cached:
        small.send("runs", tokens(40, seed=6))
        small.step()
    other = model_files.write("llama", folder / "updated", seed=1)
    small.llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    if small.llm.reset_prefix_cache() is cached:
        raise RuntimeError("the prefix cache is emptied while no request runs, and only then")
    small.send("after", text)
    small.finish()
    return small.played()


if __name__ == "__main__":
    sys.exit(main(play, ("after",), "an empty prefix cache"))
