"""A KV connector that takes all it can reach: every row of every block, whoever they belong to."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class EveryRowConnector(ExampleConnector):
    """Copies whole caches at each moment at which vLLM calls a connector.

    Attributes:
        taken: by moment and layer, the copies of this step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caches: dict[str, Tensor] = {}
        self.taken: dict[str, dict[str, Tensor]] = {}

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Called once, before the first step."""
        super().register_kv_caches(kv_caches)
        self.caches = kv_caches

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, *args: Any, **kwargs: Any) -> None:
        """Called within the forward, when the layer's attention is done."""
        super().save_kv_layer(layer_name, kv_layer, *args, **kwargs)
        self.taken.setdefault("forward", {})[layer_name] = kv_layer.clone()

    def wait_for_save(self) -> None:
        """Called when the step is over."""
        super().wait_for_save()
        self.take("step")

    def take(self, moment: str) -> None:
        """Copy every cache."""
        self.taken[moment] = {name: cache.clone() for name, cache in self.caches.items()}
