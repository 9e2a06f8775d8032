"""A request loses its blocks in the step that it was scheduled in; they stay published.

    python tests/audit_command/fault_programs/preempted_in_its_step.py [--json]

vLLM publishes a block under the hash of its tokens when it schedules the step that is to compute
it. With priorities, a request that was scheduled already may lose its blocks to a more important
one in the same step. Nobody computes them then, and they stay published.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fault_engine import Played, SmallEngine, main, tokens


def play(folder: Path, full: bool) -> Played:
    """Let an urgent request need a block when all are taken; without ``full``, some are left."""
    small = SmallEngine(
        folder,
        scheduling_policy="priority",
        max_num_batched_tokens=128,
        long_prefill_token_threshold=64,
        num_gpu_blocks_override=10 if full else 64,  # vLLM keeps one for itself
    )
    text = tokens(260, seed=30)
    small.send("earlier", tokens(250, seed=31))
    small.finish()
    small.send("background", text, priority=9)
    small.step()  # 128 tokens, 4 blocks
    small.send("urgent", tokens(32, seed=32), priority=0)
    small.step()  # 64 tokens more, 6 blocks; and the prompt of "urgent", 1 block
    small.step()  # the last 2 blocks are for 64 tokens more; then "urgent" needs a second one
    small.finish()
    small.send("later", text[:250] + tokens(5, seed=33))
    small.finish()
    return small.played()


if __name__ == "__main__":
    sys.exit(main(play, ("background", "later"), "a larger cache"))
