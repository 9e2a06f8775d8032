"""Watches a KV connector: which rows it stores, and whether rejected drafts are among them."""

from __future__ import annotations

from typing import Any

import torch
from cache_oracle import CacheOracle, Step, planes
from torch import Tensor


class StoreOracle(CacheOracle):
    """Methods for ``collective_rpc``; ``self`` is vLLM's worker.

    A rejected row is known by its bytes in the last layer: what the forward left there, slot by
    slot. In a stock engine they stay until something else is written to the slot.
    """

    watches_store = False
    taking: Any = None

    def store_install(self) -> None:
        """Watch every row that the connector stores from now on; after ``oracle_install``."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.rejected: dict[int, Tensor] = {}
        self.watches_store = True
        connector: Any = get_kv_transfer_group()
        save, counts = connector.save_kv_layer, self.oracle_counts

        def saved(layer_name: str, kv_layer: Tensor, attn_metadata: Any, **others: Any) -> None:
            save(layer_name, kv_layer, attn_metadata, **others)
            if layer_name == self.oracle_names[-1]:
                for request in connector._get_connector_metadata().requests:
                    slots = request.slot_mapping.tolist() if request.is_store else []
                    counts["stored"] += len(slots)
                    counts["stored_drafts"] += len(self.drafts & set(slots))
                    counts["stored_rejected"] += sum(map(self._holds_rejected, slots))
                counts["rejected_in_reach"] += sum(map(self._holds_rejected, self.rejected))

        connector.save_kv_layer = saved
        if hasattr(connector, "taken"):
            self._watch_taking(connector)

    def _watch_taking(self, connector: Any) -> None:
        """Judge what an ``EveryRowConnector`` took, once a step is over."""
        self.taking, self.moments, self.judged = connector, [], None
        steps = getattr(self.model_runner, "kvtxn", None)  # type: ignore[attr-defined]
        if steps is not None:
            steps.manager.on_commit(lambda _: self._at("commit"))
        wait = connector.wait_for_save

        def waited() -> None:
            wait()
            self._at("step")
            self._judge()

        connector.wait_for_save = waited

    def _at(self, moment: str) -> None:
        if self.taking is not None:
            self.moments.append(moment)
            if moment == "commit":
                self.taking.take(moment)

    def _judge(self) -> None:
        """Count rejected rows that were taken at each moment, and accepted rows that were not."""
        if self.judged is None:
            return
        step, rejected = self.judged
        kept = [row for row in step.drafted() if row not in rejected]
        self.oracle_counts["order: " + ", ".join(self.moments)] += 1
        for moment, copies in self.taking.taken.items():
            self.oracle_counts[f"{moment}: rejected"] += step.changed(rejected, copies)
            self.oracle_counts[f"{moment}: accepted"] += step.changed(kept, copies)
        self.judged = None

    def _holds_rejected(self, slot: int) -> bool:
        found = self.rejected.get(slot)
        return found is not None and torch.equal(found, self._row(slot))

    def _row(self, slot: int) -> Tensor:
        found = self.oracle_layers[self.oracle_names[-1]].kv_cache
        parts = [part[slot // part.shape[1], slot % part.shape[1]] for part in planes(found)]
        return torch.cat([part.flatten() for part in parts])

    def before_forward(self, step: Step | None) -> None:
        """Note where drafts go."""
        self.drafts = set()
        if self.taking is not None:
            self.taking.taken.clear()
            self.moments.clear()
        if self.watches_store and step is not None:
            self.drafts = set(self._slots(step, step.drafted()))
            self.old = {slot: self._row(slot) for slot in self.drafts}

    def after_forward(self, step: Step) -> None:
        """Note what drafts look like, where they are in the cache."""
        self._at("forward")
        now = {slot: self._row(slot) for slot in self.drafts}
        self.fresh = {
            slot: row for slot, row in now.items() if not torch.equal(row, self.old[slot])
        }

    def after_sampling(self, step: Step, rejected: list[int]) -> None:
        """Note which of them were rejected."""
        if self.watches_store:
            for slot in self.fresh.keys() & set(self._slots(step, rejected)):
                self.rejected[slot] = self.fresh[slot]
            self.judged = step, rejected

    def _slots(self, step: Step, rows: list[int]) -> list[int]:
        found: list[int] = step.slots[self.oracle_names[-1]][rows].tolist()
        return found
