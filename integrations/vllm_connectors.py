"""vLLM's KV connectors: which rows they take out of the cache, and when.

A connector is called layer by layer within the forward (``save_kv_layer``) and once when the
step is over (``wait_for_save``), after the sampler and so after commit. What it takes within
the forward, nobody has judged yet: under ``undo``, as in stock, drafts are in the cache by then.
"""

from __future__ import annotations

from typing import Final

#: Those that store settled rows alone, and were seen to, under every policy.
CHECKED: Final = ("ExampleConnector",)

#: Those that may take rows before it is known which are kept.
WITHIN_FORWARD: Final = (
    "FlexKVConnectorV1",
    "HiSparseConnector",
    "LMCacheConnectorV1",
    "MoRIIOConnector",
    "MultiConnector",
)

#: Those that take rows after a step, but were not run with windows: on vLLM's CPU platform, and
#: without a service beside it, none of them runs.
AFTER_STEP: Final = (
    "HF3FSKVConnector",
    "LMCacheMPConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)

KNOWN: Final = (*CHECKED, *WITHIN_FORWARD, *AFTER_STEP)
