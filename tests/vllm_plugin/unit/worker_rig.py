"""Stand-ins for vLLM's worker, its configuration and its model runner."""

from __future__ import annotations

from types import SimpleNamespace


class Runner:
    """Looks like vLLM's, from outside."""

    def initialize_kv_cache(
        self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None
    ):
        """Nothing to allocate."""

    def _update_states(self, scheduler_output):
        return "updated"

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        return ("indices", None, 1)

    def _model_forward(
        self, input_ids=None, positions=None, intermediate_tensors=None, inputs_embeds=None,
        **model_kwargs,
    ):  # fmt: skip
        return "hidden"

    def _sample(self, logits, spec_decode_metadata):
        return "sampled"


class OtherRunner(Runner):
    """A release later."""

    def _sample(self, logits, spec_decode_metadata, something_new):
        return "sampled"


def wrapper(kvtxn=None, runner=None, head_size=64, **changes):
    """A worker's wrapper with a configuration that asks for ``kvtxn``."""
    config = SimpleNamespace(
        additional_config={} if kvtxn is None else {"kvtxn": kvtxn},
        speculative_config=SimpleNamespace(num_speculative_tokens=4, method="ngram"),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        model_config=SimpleNamespace(
            use_mla=False, dtype="torch.float32", is_hybrid=False, get_head_size=lambda: head_size
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=None,
        use_v2_model_runner=False,
    )
    vars(config).update(changes)
    worker = SimpleNamespace(model_runner=runner or Runner())
    return SimpleNamespace(vllm_config=config, worker=worker, rpc_rank=0)
