"""A connector is reset while requests run, and stores rows of another one under a prompt's hashes.

    python tests/audit_command/fault_programs/reset_connector.py [--json]

The first blocks of a request have left a sliding window, and another request has them by now. After
the reset OffloadingConnector stores the request from its first block on again, by their old ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fault_engine import Played, SmallEngine, main, tokens


def play(folder: Path, resets: bool) -> Played:
    """Ask for the beginning of a prompt that is stored; ``resets``: for the second time."""
    from engine_options import connector

    small = SmallEngine(
        folder,
        model="mistral",  # with a window of three blocks
        num_gpu_blocks_override=12,
        prefix_cache_retention_interval=None,
        kv_transfer_config=connector(folder, "offloading"),
    )
    text = tokens(200, seed=5)
    small.send("long", text)
    for _ in range(2):
        small.step()
    small.send("other", tokens(200, seed=6))
    small.step()
    if resets:
        small.llm.reset_prefix_cache(reset_connector=True)
    small.finish()
    if not small.llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache is not empty")
    small.send("later", text[:100])
    small.finish()
    return small.played()


if __name__ == "__main__":
    sys.exit(main(play, ("later",), "no reset of the connector"))
