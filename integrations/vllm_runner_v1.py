"""vLLM's V1 model runner on a GPU, with windows.

As on the CPU (``vllm_runner``) the runner object changes its class; as under the V2 runner
(``vllm_runner_v2``) the forward may be a replayed graph and is not touched, and nothing waits
for the device. ``_prepare_inputs`` says which rows are drafts and has their slots computed;
``_sample`` says what was accepted, before the drafter or a connector sees the cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..config import TxnConfig
from ..manager import TransactionManager
from ..rows import LayerRows
from . import vllm_internals as internals
from . import vllm_internals_gpu as inside
from .vllm_gpu_packed import PackedSteps
from .vllm_hooks import hook_runner
from .vllm_runner_gpu import GpuHead
from .vllm_runner_head import V1Head


@cache
def window_runner(own: Any) -> Any:
    """A subclass of a runner's own class; an object of that class can become one of this."""

    class WindowRunner(V1Head, GpuHead, own):  # type: ignore[misc]
        """Every method is vLLM's, plus a window."""

        kvtxn: PackedSteps | None

        def kvtxn_steps_over(
            self, manager: TransactionManager, rows: LayerRows | None
        ) -> PackedSteps:
            """Steps over slots of their own, since this runner keeps them by group."""
            return PackedSteps(manager, inside.query_len(self), internals.vocab_size(self), rows)

        def _may_reorder_batch(self, scheduler_output: Any) -> None:
            """The fixed buffers say of the rows that lead a batch which of them wait."""
            super()._may_reorder_batch(scheduler_output)
            if self.kvtxn is not None and self.kvtxn.deferred:
                inside.lead_with_drafts(self, scheduler_output)

        def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            """Slots are in place after this: plan the step."""
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
            steps = self.kvtxn
            if steps is not None:
                rows = inside.prepared_rows(self, prepared, num_scheduled_tokens)
                slots = inside.slots_of_groups(self, list(steps.manager.groups))
                steps.begin_among(*rows, slots)
            return prepared

        def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
            """What was sampled says what was accepted: commit."""
            output = super()._sample(logits, spec_decode_metadata)
            if self.kvtxn is not None:
                self.kvtxn.commit_ids(internals.sampled_ids(output))
            return output

    return WindowRunner


def attach(runner: Any, config: TxnConfig, rank: int) -> None:
    """Hook a runner; the KV cache does not exist yet. Hooking it twice is harmless."""
    hook_runner(runner, config, rank, inside.V1_METHODS, window_runner)
