"""Stand-ins for vLLM's two model runners on a GPU, whose model is one recurrent layer."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from held_layers import DRAFTS


class ModelState:
    """Stands for vLLM's ``model_state``."""

    def prepare_attn(
        self,
        input_batch,
        cudagraph_mode,
        block_tables,
        slot_mappings,
        attn_groups,
        kv_cache_config,
        for_capture=False,
        ubatch_idx=0,
        model_specific_attn_metadata=None,
    ):
        return input_batch


class Own:
    """Stands for vLLM's runners; its model is one layer."""

    def __init__(self, rig):
        vars(self).update(vars(rig.runner))
        self.rig, self.calls = rig, []
        self.model_config = SimpleNamespace(is_hybrid=True, runner_type="generate")

    def get_model(self):
        return SimpleNamespace(modules=lambda: [self.rig.sides[1].layer])

    def get_kv_cache_spec(self):
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

        states = MambaSpec(
            shapes=((4, 4),), dtypes=(torch.float32,), block_size=64, num_speculative_blocks=3
        )
        rows = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        return {"it": states, "attention": rows}

    def profile_run(self, randomize_inputs=False):
        self.calls.append("profile")

    def initialize_kv_cache(
        self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None
    ):
        self.calls.append("caches")


class OwnV1(Own):
    """Stands for vLLM's V1 runner."""

    def __init__(self, rig):
        super().__init__(rig)
        self.seq_lens = torch.tensor([40, 30], dtype=torch.int32)
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor([0, 4, 6], dtype=torch.int32))

    def _update_states(self, scheduler_output):
        self.calls.append("update")

    def _may_reorder_batch(self, scheduler_output):
        self.calls.append("reorder")

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        return None, SimpleNamespace(num_draft_tokens=self.drafts), 5

    def _determine_batch_execution_and_padding(
        self,
        num_tokens,
        num_reqs,
        num_scheduled_tokens_np,
        max_num_scheduled_tokens,
        use_cascade_attn=False,
        allow_microbatching=True,
        force_eager=False,
        force_uniform_decode=None,
        force_has_lora=None,
        force_num_active_loras=None,
        num_encoder_reqs=0,
    ):
        return force_uniform_decode

    def _build_attention_metadata(
        self,
        num_tokens,
        num_reqs,
        max_query_len,
        num_tokens_padded=None,
        num_reqs_padded=None,
        ubatch_slices=None,
        logits_indices=None,
        max_num_sampled_tokens=None,
        use_spec_decode=False,
        for_cudagraph_capture=False,
        num_scheduled_tokens=None,
        slot_mappings=None,
    ):
        return self.made, "common"

    def _sample(self, logits, spec_decode_metadata):
        self.calls.append("sample")
        return SimpleNamespace(sampled_token_ids=logits)

    def begin(self, metadata):
        """Make the metadata of a step."""
        self.made = metadata
        assert self._build_attention_metadata(6, 2, max_query_len=4) == (metadata, "common")

    def sampled(self, counts):
        """Sample so many tokens of each request."""
        ids = torch.where(torch.arange(DRAFTS + 1) < torch.tensor(counts)[:, None], 7, -1)
        assert self._sample(ids, None).sampled_token_ids is ids
        assert self.calls[-1] == "sample"


class OwnV2(Own):
    """Stands for vLLM's V2 runner."""

    def __init__(self, rig):
        super().__init__(rig)
        self.model_state, self.speculator = ModelState(), None

    def prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, num_active_loras):
        """As vLLM's own."""

    def prepare_attn(self, input_batch):
        return input_batch

    def sample(self, hidden_states, input_batch, grammar_output):
        return None

    def postprocess_sampled(
        self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=None
    ):
        self.calls.append("postprocess")

    def update_pp_decode_requests(self):
        pass  # one stage

    def begin(self, metadata):
        """Make the metadata of a step."""
        assert self.model_state.prepare_attn(metadata, *[None] * 5) == metadata

    def sampled(self, counts):
        """Sample so many tokens of each request."""
        self.postprocess_sampled(None, None, torch.tensor(counts).int(), None)
        assert self.calls[-1] == "postprocess"


class Steps:
    """Stands for the windows of attention."""

    deferred = False

    def commit_ids(self, ids):
        pass

    def abandon(self):
        pass

    def commit(self, sampled):
        pass
