"""Kinds of engines with KV connectors on a CPU; ``engine_jobs`` has their policies and weights."""

from __future__ import annotations

from typing import Any

from connector_scenarios import SCENARIOS

#: Prompts begin in one step: of a longer one ExampleConnector stores what is not there yet.
WHOLE = {"max_num_batched_tokens": 2048, "num_gpu_blocks_override": 34}
SMALL = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64}
ALL = [*SCENARIOS]

#: By name: the connector, options, scenarios, and the engine that it is compared with. ``first``:
#: an earlier engine fills the store.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"options": SMALL, "scenarios": ALL},
    "offload": {
        "connector": "offloading",
        "options": SMALL,
        "scenarios": ALL,
        "plain": "plain",
    },
    "second": {
        "connector": "example",
        "options": WHOLE,
        "scenarios": ["come_back"],
        "plain": "plain",
        "first": True,
    },
    "several": {
        "connector": "several",
        "options": WHOLE,
        "scenarios": ["come_back", "full_blocks"],
        "plain": "plain",
    },
    # What it fills is no request's own, so its tokens are those of stock with it.
    "bench": {"connector": "bench", "options": WHOLE, "scenarios": ["come_back"]},
}
