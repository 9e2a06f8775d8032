"""What every hooked model runner has in front of vLLM's own class.

The runner object changes its class for one that has one of these and then its own as bases; no
class of vLLM's is patched, and changing it back undoes everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import attrs
from torch import Tensor

from .. import __version__
from ..config import Policy, TxnConfig
from ..log import get_logger
from . import vllm_internals as internals
from .vllm_facts import Facts
from .vllm_policy import decide

log = get_logger()


class RunnerHead:
    """Steps that live as long as the KV cache does.

    Attributes:
        kvtxn: the steps, once the KV cache exists; None while kvtxn stays out.
        kvtxn_config: the settings.
        kvtxn_rank: the worker's rank.
        kvtxn_room: memory held while vLLM measures what is free, for the steps to take.
    """

    kvtxn: Any = None
    kvtxn_config: TxnConfig
    kvtxn_rank: int = 0
    kvtxn_room: Tensor | None = None

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **others: Any
    ) -> None:
        """Caches are new: so are the steps. None for a profiling run's caches."""
        self.kvtxn = None
        super().initialize_kv_cache(kv_cache_config, is_profiling, **others)  # type: ignore[misc]
        if not is_profiling:
            self.kvtxn_room = None  # the allocator keeps it, and gives it to the steps
            self.kvtxn = open_steps(self)

    def kvtxn_facts(self, layers: Sequence[internals.TargetLayer], facts: Facts) -> Facts:
        """What is known of the engine once its caches exist."""
        return facts

    def kvtxn_steps(
        self, layers: Sequence[internals.TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[Any, dict[str, object]]:
        """Steps over the target's layers, and what else the log says about them.

        Args:
            layers: with their caches.
            kv_dtype: their format, as vLLM calls it.
            settings: with the policy that was decided on.
        """
        raise NotImplementedError


class V1Head(RunnerHead):
    """The same for vLLM's V1 runner, on any device."""

    def _update_states(self, scheduler_output: Any) -> Any:
        """A step begins: a window that is still open belongs to one that was abandoned."""
        if self.kvtxn is not None:
            self.kvtxn.abandon()
        return super()._update_states(scheduler_output)  # type: ignore[misc]


def open_steps(runner: Any) -> Any:
    """Steps over a hooked runner's new caches, or None and the reason in the log."""
    config: TxnConfig = runner.kvtxn_config
    try:
        layers, facts = internals.target_layers(runner)
        policy, why = decide(config.policy, runner.kvtxn_facts(layers, facts))
        if policy == "off":
            log.warning("vllm.inactive", rank=runner.kvtxn_rank, why=why)
            return None
        settings = attrs.evolve(config, policy=cast(Policy, policy))
        steps, more = runner.kvtxn_steps(layers, facts.kv_cache_dtype, settings)
    except Exception as error:
        if config.on_error == "raise":
            raise
        log.exception("vllm.inactive", rank=runner.kvtxn_rank, why=repr(error))
        return None
    manager = steps.manager
    log.info(
        "vllm.active",
        rank=runner.kvtxn_rank,
        policy=policy,
        why=why,
        backend=manager.executor.name,
        layers=len(manager.layers),
        groups=len(manager.groups),
        max_rows=settings.max_rows,
        **more,
        kvtxn=__version__,
        vllm=internals.version(),
    )
    return steps
