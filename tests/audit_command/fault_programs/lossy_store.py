"""A KV connector whose loads fail where the store has lost its files."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class LossyStore(ExampleConnector):
    """vLLM's ``ExampleConnector``, which alone ends the engine when a file is missing.

    This one loads nothing then, and names the blocks by ``get_block_ids_with_load_errors``: what
    ``kv_load_failure_policy`` is for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failed: set[int] = set()

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Called before the forward of a step whose requests have blocks in the store."""
        try:
            super().start_load_kv(*args, **kwargs)
        except FileNotFoundError:
            for request in self._get_connector_metadata().requests:
                if not request.is_store:
                    self.failed |= {int(slot) // self._block_size for slot in request.slot_mapping}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Called when the step is over."""
        failed, self.failed = self.failed, set()
        return failed
