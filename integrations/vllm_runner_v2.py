"""vLLM's V2 model runner on a GPU, with windows.

The runner object changes its class; no class of vLLM's is patched. Per step: ``prepare_attn``
has just said which rows go where, so the step is planned there, before the forward; and
``postprocess_sampled`` is told what was accepted, so the commit is there: the sampled tokens are
on their way to the host by then, and neither drafter nor connector has seen the cache. The
forward itself may be a replayed graph and is not touched.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..config import TxnConfig
from ..manager import TransactionManager
from ..rows import LayerRows
from . import vllm_internals_gpu as inside
from .vllm_gpu import GpuSteps
from .vllm_hooks import hook_runner
from .vllm_runner_gpu import GpuHead


@cache
def window_runner(own: Any) -> Any:
    """A subclass of a runner's own class; an object of that class can become one of this."""

    class WindowRunner(GpuHead, own):  # type: ignore[misc]
        """Every method is vLLM's, plus a window."""

        kvtxn: GpuSteps | None

        def kvtxn_steps_over(self, manager: TransactionManager, rows: LayerRows | None) -> GpuSteps:
            """Steps that read the slots where this runner keeps them."""
            slots = inside.slot_mappings(self, list(manager.groups))
            return GpuSteps(manager, slots, inside.query_len(self), rows)

        def prepare_attn(self, input_batch: Any) -> Any:
            """Slots are in place after this: plan the step."""
            prepared = super().prepare_attn(input_batch)
            if self.kvtxn is not None:
                self.kvtxn.begin(*inside.batch_rows(input_batch))
            return prepared

        def postprocess_sampled(
            self,
            idx_mapping: Any,
            sampled_tokens: Any,
            num_sampled: Any,
            num_rejected: Any,
            query_start_loc: Any = None,
        ) -> None:
            """What was sampled is on its way to the host: commit, before the drafter runs.

            Of pipeline stages the last alone samples, and the others have no windows.
            """
            if self.kvtxn is not None:
                self.kvtxn.commit(num_sampled)
            super().postprocess_sampled(
                idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc
            )

    return WindowRunner


def attach(runner: Any, config: TxnConfig, rank: int) -> None:
    """Hook a runner; the KV cache does not exist yet. Hooking it twice is harmless."""
    hook_runner(runner, config, rank, inside.RUNNER_METHODS, window_runner)
