"""Layers that hold states, and the same layers of vLLM's own: a step's calls, on both sides.

vLLM's own code runs: its layers' methods, its builders' metadata classes, and its kernels through
Triton's interpreter; what ``held_layers`` writes out is the same on both sides.
"""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import interpreted
import pytest
import torch
from held_layers import (
    BLOCKS,
    DELTAS,
    DRAFTS,
    HEADS,
    KINDS,
    REQUESTS,
    SIZE,
    WIDTH,
    Layer,
)
from kernels_here import importing_kernels
from kvtxn.integrations.vllm_plugin.policy.engine_facts import MAMBA2
from kvtxn.integrations.vllm_plugin.seam.held_states import HeldStates
from kvtxn.integrations.vllm_plugin.seam.hooks import with_globals
from torch import Tensor

from kvtxn import LayerRef, TransactionManager, TxnConfig
from kvtxn.captured_windows import CapturedWindows
from kvtxn.state_supplier import Capture

with importing_kernels():  # before a step imports them, and so as its interpreter's
    import kvtxn.backends.move_rows.stage_rows  # noqa: F401


@attrs.define(eq=False)
class Side:
    """One engine: a layer and its caches; ``table`` is what its scheduler hands out."""

    layer: Layer
    table: Tensor

    def state(self, request: int, column: int) -> Tensor:
        return self.layer.kv_cache[1][self.table[request, column]]


def metadata(kind: str, table: Tensor, lengths: list[int], accepted: Tensor) -> object:
    """vLLM's metadata of a step in which every request verifies."""
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    rows, count = sum(lengths), len(lengths)
    none = {"num_prefills": 0, "num_prefill_tokens": 0}
    if kind in DELTAS:
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

        return GDNAttentionMetadata(
            **none,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=count,
            num_spec_decode_tokens=rows,
            num_actual_tokens=rows,
            spec_query_start_loc=starts,
            spec_state_indices_tensor=table,
            spec_sequence_masks=torch.ones(count, dtype=torch.bool),
            spec_sequence_masks_cpu=torch.ones(count, dtype=torch.bool),
            spec_token_indx=torch.arange(rows),
            non_spec_token_indx=torch.arange(0),
            num_accepted_tokens=accepted,
        )
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

    nothing = dict.fromkeys(("has_initial_states_p", "query_start_loc_p", "state_indices_tensor_p"))
    return Mamba2AttentionMetadata(
        **none,
        **nothing,
        num_decodes=count,
        num_decode_tokens=rows,
        num_reqs=count,
        state_indices_tensor_d=table,
        query_start_loc_d=starts,
        num_accepted_tokens=accepted,
        seq_lens=torch.full((count,), 40),
    )


def windows_with(states: HeldStates, backend: str = "torch") -> CapturedWindows:
    """Make windows that hold states, over one small layer of attention."""
    ref = LayerRef("rows", *torch.zeros(2, 4, 4, 1, 8))
    config = TxnConfig(policy="deferred", backend=backend, max_rows=REQUESTS * (DRAFTS + 1))
    slots = torch.full((1, config.max_rows), -1, dtype=torch.int64)
    return TransactionManager([ref], config).captured_windows(slots, states=states)


class Rig:
    """Stock with a state per row beside one state per request, over the same rows."""

    fast = False
    batch: object = None
    windows: CapturedWindows | None = None

    def __init__(
        self,
        kind: str,
        stored: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
        make: Capture | None = None,
    ) -> None:
        from vllm.model_executor.layers.mamba import mamba_mixer2
        from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as qwen

        torch.manual_seed(0)
        self.kind, self.dtype, self.make = kind, torch.bfloat16, make
        kernel = interpreted.gated_delta()
        monkeypatch.setattr(qwen, "fused_sigmoid_gating_delta_rule_update", kernel)
        kernel = interpreted.olmo_delta()
        monkeypatch.setattr(olmo, "fused_recurrent_gated_delta_rule", kernel)
        monkeypatch.setattr(mamba_mixer2, "selective_state_update", interpreted.mamba2())
        monkeypatch.setattr(
            "vllm.model_executor.layers.mamba.mamba_utils.is_conv_state_dim_first", lambda: False
        )
        monkeypatch.setattr(qwen, "get_forward_context", lambda: self.context)
        monkeypatch.setattr(mamba_mixer2, "get_forward_context", lambda: self.context)
        cls, given, shape = KINDS[kind](self.dtype)
        past = torch.randn(BLOCKS, WIDTH - 1 + DRAFTS, given["channels"]).to(self.dtype)
        state = torch.randn(BLOCKS, *shape).to(stored)
        past[0], state[0] = 0, 0
        self.sides = []
        for columns in (DRAFTS + 1, 1):
            layer = cls(prefix="it", tp_size=1, kv_cache=(past.clone(), state.clone()), **given)
            blocks = 1 + torch.arange(REQUESTS * columns).view(REQUESTS, columns)
            self.sides.append(Side(layer, blocks.int()))
        stock, ours = self.sides
        for request in range(REQUESTS):  # the same state before the first step
            for cache in (0, 1):
                first = ours.layer.kv_cache[cache][ours.table[request, 0]]
                stock.layer.kv_cache[cache][stock.table[request, 0]] = first
        # vLLM's methods look their globals up where the rig has put them.
        for side in self.sides:
            name = "_forward_core" if kind in DELTAS else "conv_ssm_forward"
            names = {"get_forward_context": lambda: self.context}
            if kind == MAMBA2:
                names["selective_state_update"] = interpreted.mamba2()
            own = with_globals(getattr(cls, name), **names)
            setattr(type(side.layer), name, own)
        self.accepted = torch.ones(REQUESTS, dtype=torch.int32)
        self.states = self.hold(ours.layer)

    def hold(self, layer: Layer) -> HeldStates:
        """Put the layer under ``HeldStates``, as in a runner that has this layer alone."""
        group = SimpleNamespace(layer_names=["it"])
        compilation = SimpleNamespace(
            static_forward_context={"it": layer},
            max_cudagraph_capture_size=None,
            cudagraph_mode=SimpleNamespace(name="NONE"),
        )
        self.runner = SimpleNamespace(
            compilation_config=compilation,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
            vllm_config=SimpleNamespace(
                num_speculative_tokens=DRAFTS,
                speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
                cache_config=SimpleNamespace(mamba_cache_mode="none"),
                scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
            ),
            max_num_reqs=REQUESTS,
            device=torch.device("cpu"),
            dtype=self.dtype,
        )
        return HeldStates(self.runner, self.make, fast=self.fast)

    def commit(self, counts: Tensor) -> None:
        """Commit the states as a step without drafts in its rows does: by a window of its own."""
        if self.windows is None or self.windows.context.supplier is not self.states:
            self.windows = windows_with(self.states)
        if self.states.waits:
            self.windows.begin_states().commit_sampled(counts)

    @property
    def repeated(self) -> int:
        """The commits that failed, and were finished or ended their window in FAILED."""
        return 0 if self.windows is None else self.windows.context.metrics.fallbacks["states"]

    def forward(self, side: Side, lengths: list[int], rows: Tensor, more: Tensor) -> Tensor:
        """Run vLLM's method of the layer over some rows; returns its outputs."""
        table = side.table[: len(lengths)]
        given = metadata(self.kind, table, lengths, self.accepted[: len(lengths)])
        self.context = SimpleNamespace(attn_metadata={"it": given})
        layer = side.layer
        if side is self.sides[1]:
            self.states.begin(self.context.attn_metadata, self.batch)
        out = torch.zeros(rows.shape[0], HEADS, SIZE, dtype=self.dtype)
        if self.kind in DELTAS:
            b, a = more.unbind(1)
            layer._forward_core(mixed_qkv=rows.clone(), b=b, a=a, core_attn_out=out)
        else:
            gate = torch.zeros(rows.shape[0], HEADS * SIZE, dtype=self.dtype)
            projected = torch.cat([gate, rows, more[:, 0]], 1)
            layer.conv_ssm_forward(projected, out.view(rows.shape[0], -1))
        return out

    def step(self, lengths: list[int], sampled: list[int]) -> None:
        """Verify rows on both sides, commit, and compare everything."""
        rows = torch.randn(sum(lengths), self.sides[0].layer.channels).to(self.dtype)
        more = torch.randn(sum(lengths), 2, HEADS).to(self.dtype)
        ours = self.sides[1]
        before = ours.layer.kv_cache[1].clone()
        self.compare_outputs(*(self.forward(side, lengths, rows, more) for side in self.sides))
        assert torch.equal(ours.layer.kv_cache[1], before), "verify wrote a state"
        counts = torch.tensor(sampled, dtype=torch.int32)
        self.commit(counts)
        self.accepted[: len(lengths)] = counts.clamp(min=1)
        for request in range(REQUESTS):
            self.compare(request, lengths[request] if request < len(lengths) else 0)
            pasts = [side.layer.kv_cache[0][side.table[request, 0]] for side in self.sides]
            assert torch.equal(*pasts), f"the past of request {request}"
        others = torch.ones(BLOCKS, dtype=torch.bool)
        others[ours.table[:, 0].long()] = False
        assert torch.equal(ours.layer.kv_cache[1][others], before[others]), "another block"

    def compare_outputs(self, theirs: Tensor, mine: Tensor) -> None:
        """Compare a step's outputs with stock's."""
        assert torch.equal(theirs, mine)

    def compare(self, request: int, length: int) -> None:
        """Compare a request's state with stock's after the rows that were kept of ``length``."""
        stock, ours = self.sides
        column = int(self.accepted[request]) - 1
        same = torch.equal(stock.state(request, column), ours.state(request, 0))
        assert same, f"the state of request {request}"


class Captures:
    """Stands for captured graphs: a replay makes the same calls again."""

    def __init__(self) -> None:
        self.captured, self.replays = 0, 0

    def __call__(self, run):
        self.captured += 1

        def replay():
            self.replays += 1
            run()

        return replay


def built(kind, rig, batch, *, full):
    """Let vLLM's builder make the metadata of a batch, over tables of one column.

    Args:
        kind: kind of layer.
        rig: whose configuration is used.
        batch: for each request its rows, and its drafts, or -1 for a prompt.
        full: the step replays a whole graph, padded by two requests.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec

    maker = {
        **dict.fromkeys(DELTAS, GDNAttentionMetadataBuilder),
        MAMBA2: Mamba2AttentionMetadataBuilder,
    }
    padding = [(0, -1)] * 2 if full else []
    lengths, drafts = zip(*batch, *padding, strict=True)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    lengths = torch.tensor(lengths)
    prompts = torch.tensor(drafts) < 0
    prompts[len(batch) :] = False
    seen = torch.where(prompts, lengths, lengths + 30).int()
    blocks = torch.arange(1, len(batch) + 1).int()
    table = torch.cat([blocks, torch.zeros(len(padding), dtype=torch.int32)]).unsqueeze(1)
    spec = MambaSpec(shapes=((1,),), dtypes=(torch.float32,), block_size=1024)
    made = maker[kind].__new__(maker[kind])
    modes = SimpleNamespace(has_full_cudagraphs=lambda: full)
    config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    vars(made).update(
        kv_cache_spec=spec,
        vllm_config=config,
        compilation_config=SimpleNamespace(cudagraph_mode=modes),
        num_spec=DRAFTS,
        num_spec_tokens=DRAFTS,
        use_spec_decode=True,
        use_full_cuda_graph=full,
        use_replayssm=False,
        use_flashinfer_replayssm=False,
        decode_bc_pre_scratch=None,
        reorder_batch_threshold=DRAFTS + 1,
        chunk_size=16,
        gdn_prefill_backend="triton",
        checkpoint_builder=SimpleNamespace(build=lambda *_: None),
        decode_cudagraph_max_bs=32,
        spec_state_indices_tensor=torch.full((32, DRAFTS + 1), 99).int(),
        state_indices_tensor_d=torch.full((32, DRAFTS + 1), 99).int(),
        spec_sequence_masks=torch.zeros(32, dtype=torch.bool),
        spec_token_indx=torch.zeros(128).int(),
        non_spec_token_indx=torch.zeros(128).int(),
        spec_query_start_loc=torch.zeros(33).int(),
        num_accepted_tokens=torch.zeros(32).int(),
        decode_num_accepted_tokens=torch.zeros(32).int(),
    )
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seen,
        seq_lens_cpu_upper_bound=seen,
        max_seq_len=64,
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=torch.zeros(128).long(),
        is_prefilling=prompts,
    )
    return made.build(
        0,
        common,
        num_accepted_tokens=torch.ones(len(lengths), dtype=torch.int32),
        num_decode_draft_tokens_cpu=torch.tensor(drafts).int(),
    )


SPEC = {
    **dict.fromkeys(DELTAS, "spec_state_indices_tensor"),
    MAMBA2: "state_indices_tensor_d",
}
