"""Faults inside kvtxn, in a worker of a real engine, at random steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import attrs
import torch
from kvtxn.integrations.serving import eager_steps as vllm_steps
from kvtxn.integrations.vllm_plugin.policy import rules as vllm_policy
from kvtxn.integrations.vllm_plugin.seam import layers as attention_layers
from store_oracle import StoreOracle

from kvtxn.config import POLICIES


class InjectedFault(Exception):
    """Not one of kvtxn's own errors."""


def failing(kind: str) -> Callable[..., Callable[..., Any]]:
    """Make what turns functions into ones that fail now and then, the same at every run.

    The maker takes the function, a condition on its arguments without which it does not fail, and
    a function that is called before it fails.
    """
    chance = random.Random(5)

    def sometimes(real: Callable[..., Any], when: Callable[..., bool] = lambda *_: True,
                  first: Callable[..., Any] | None = None) -> Callable[..., Any]:  # fmt: skip
        def call(*args: Any, **kwargs: Any) -> Any:
            if when(*args) and chance.random() < 0.4:
                if first is not None:
                    first(*args, **kwargs)
                raise InjectedFault(kind)
            return real(*args, **kwargs)

        return call

    return sometimes


class Faults:
    """The part of a worker extension that lets one function fail at a time."""

    def fault_begin(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Put ``function`` in the place of another, until ``fault_remove``."""
        self.fault = mock.patch.object(owner, name, function)
        self.fault.start()

    def fault_remove(self) -> None:
        """Everything works again."""
        self.fault.stop()


class Probe(Faults, StoreOracle):
    """The worker extension of these tests: the oracle, faults, and what the table says."""

    def describe(self) -> dict[str, Any]:
        """Describe the engine: each policy's outcome and reason, the attention, the block sizes."""
        layers, facts = attention_layers.target_layers(self.model_runner)  # type: ignore[attr-defined]
        return {
            "decisions": {asked: list(vllm_policy.decide(asked, facts)) for asked in POLICIES},
            "attention": facts.attention,
            "block_sizes": list({x.group: x.cache.shape[-2] for x in layers}.values()),
        }

    def fault_install(self, kind: str) -> None:
        """Make ``kind`` fail now and then, until ``fault_remove``."""
        steps = self.model_runner.kvtxn  # type: ignore[attr-defined]
        manager, executor = steps.manager, steps.manager.executor
        sometimes = failing(kind)
        middle = list(manager.layers)[len(manager.layers) // 2]
        commit = executor.commit

        def half(txn: Any, accepted: Any) -> None:
            """Commit only some layers, and count nothing."""
            everything = executor.layers
            executor.layers = everything[:2]
            commit(attrs.evolve(txn, counters=torch.zeros_like(txn.counters)), accepted)
            executor.layers = everything

        stager = manager.context.stager
        places: dict[str, tuple[Any, str, Callable[..., Any]]] = {
            "plan": (vllm_steps.Plan, "build", sometimes(vllm_steps.Plan.build)),
            "window": (manager, "window", sometimes(manager.window)),
            "save": (executor, "save", sometimes(executor.save)),
            "stage": (
                stager,
                "take_if_unchanged",  # asked first, for every layer of every window
                sometimes(stager.take_if_unchanged, lambda ref, *_: ref.name == middle),
            ),
            "attend": (vllm_steps, "write", sometimes(vllm_steps.write)),
            "accept": (manager.acceptance, "from_ids", sometimes(manager.acceptance.from_ids)),
            "commit": (executor, "commit", sometimes(commit)),
            "half": (executor, "commit", sometimes(commit, first=half)),
        }
        self.fault_begin(*places[kind])
