"""A load from a store fails, and the request's client leaves; its blocks stay published.

    python tests/audit_command/fault_programs/failed_load.py [--json]

A connector brings a prompt's blocks within a step, and vLLM publishes them when it schedules that
step. The load fails, and the connector says so. Under ``kv_load_failure_policy="recompute"`` the
blocks stay published, since their request is to compute them in the next step. Nobody does if it
has left by then.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fault_engine import Played, SmallEngine, main, tokens


def play(folder: Path, lost: bool) -> Played:
    """Let a client leave after its load; ``lost``: the store has lost its files by then."""
    store = folder / "store"
    store.mkdir(parents=True)
    small = SmallEngine(
        folder,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=64,
        kv_transfer_config={
            "kv_connector": "LossyStore",
            "kv_connector_module_path": "lossy_store",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        },
    )
    text = tokens(200, seed=5)  # 6 blocks, and 8 tokens more
    small.send("earlier", text)  # its blocks go into the store
    small.finish()
    small.llm.reset_prefix_cache()
    if lost:
        for path in store.rglob("*.safetensors"):
            path.unlink()
    small.send("leaver", text)
    small.send("sharer", text[:192] + tokens(4, seed=7))  # shares the 6 blocks
    small.step()
    small.engine.abort_request(["leaver"])
    small.finish()
    small.send("later", text[:192] + tokens(6, seed=3))
    small.finish()
    return small.played()


if __name__ == "__main__":
    sys.exit(main(play, ("sharer", "later"), "a store that lost nothing"))
