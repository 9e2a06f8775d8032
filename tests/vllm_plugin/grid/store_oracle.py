"""Watches a KV connector that takes every row: at which moments it gets rows of rejected drafts."""

from __future__ import annotations

from typing import Any

from cache_oracle import CacheOracle, Step


class StoreOracle(CacheOracle):
    """Methods for ``collective_rpc``; ``self`` is vLLM's worker."""

    taking: Any = None

    def store_install(self) -> None:
        """Judge what the ``EveryRowConnector`` takes from now on; after ``oracle_install``."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.taking = connector = get_kv_transfer_group()
        self.moments: list[str] = []
        self.judged: tuple[Step, list[int]] | None = None
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

    def before_forward(self, step: Step | None) -> None:
        """Forget what was taken in the step before."""
        if self.taking is not None:
            self.taking.taken.clear()
            self.moments.clear()

    def after_forward(self, step: Step) -> None:
        """Note the moment."""
        self._at("forward")

    def after_sampling(self, step: Step, rejected: list[int]) -> None:
        """Note which drafts were rejected."""
        if self.taking is not None:
            self.judged = step, rejected
