"""vLLM's verify operators over recurrent states, and the plug-in's commits by them.

Each one verifies as vLLM does, writing a state per row; and as a window does: without a write, then
with a commit of one state per request. Both take the same kernel.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from ...cuda_graphs import GraphCache
from ...integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, MAMBA2
from ...integrations.vllm_plugin.seam import measuring as vllm_operators
from ...integrations.vllm_plugin.seam.held_states import bytes_by_formula
from ...integrations.vllm_plugin.seam.state_commits import (
    CommitGraphs,
    StateTables,
    VerifyStep,
    captures,
    side_streams,
    write_side_by_side,
)
from ...integrations.vllm_plugin.seam.state_layers import StateLayer
from ...integrations.vllm_plugin.seam.verified_rows import (
    GatedDeltaRows,
    Mamba2Rows,
    VerifiedRows,
)
from .state_workload import StateWorkload, Step, Turn

#: Most columns of a table that vLLM's fused kernel of gated delta nets takes.
_FUSED_COLUMNS: Final = 8


class _Layer(SimpleNamespace):
    """vLLM's layer, as far as a commit asks of it."""


@dataclass
class _Metadata:
    """vLLM's metadata of a step, as far as a commit asks of it."""

    spec_state_indices_tensor: Tensor
    num_accepted_tokens: Tensor
    spec_query_start_loc: Tensor
    num_spec_decodes: int = 0
    num_prefills: int = 0


class VllmOps(abc.ABC):
    """The verify step of all layers by one kernel of vLLM, with the plug-in's work around it.

    Args:
        load: the states and steps.

    Attributes:
        name: of the kernel.
        exact: whether the kernel can verify without writing a state; if not, only stock uses it.
        nbytes: bytes that were allocated for the rows that wait for a commit, and for the tables.
        formula: the same by formula.
    """

    name = "vLLM's, Triton"
    exact: bool = True
    formula: int
    kind: str
    _rows: list[list[Tensor]]
    _kept: list[VerifiedRows]
    _streams: list[torch.cuda.Stream] | None = None

    def __init__(self, load: StateWorkload) -> None:
        self._load = load
        self._make_rows()
        before = load.allocated()
        self._tables = StateTables.build(1, load.case.requests, load.case.drafts + 1, load.device)
        self._make_buffers()
        self.nbytes = load.allocated() - before

    @abc.abstractmethod
    def _make_rows(self) -> None:
        """Make the stand-ins for layers, and the rows of all of them."""

    @abc.abstractmethod
    def _make_buffers(self) -> None:
        """Make what holds the rows until the commit."""

    @abc.abstractmethod
    def _launch(self, table: Tensor, column: Tensor) -> None:
        """Verify; the table and column say which states are read and written."""

    def stock(self, turn: Turn) -> None:
        """Verify, and write the state after each row."""
        self._launch(turn.table, turn.before)

    def stage(self, turn: Turn) -> None:
        """Store the rows for later calls, and set the states that the kernels work on."""
        self._tables.name_sources(0, turn.table)
        for kept, parts in zip(self._kept, self._rows, strict=True):
            kept.keep([part.flatten(1) for part in parts])

    def read(self, turn: Turn) -> None:
        """Verify without writing a state."""
        sources = self._tables.sources[0]
        self._launch(sources, self._tables.whole[: sources.shape[0]])

    def commit(self, turn: Turn) -> None:
        """Write one state per request: the one after its last kept row, layer after layer."""
        self._tables.name_commits(turn.sampled, self._load.starts)
        step = self._step()
        for kept in self._kept:
            kept.commit(step)

    def _make_layers(self, cls: type[_Layer], **own: Any) -> None:
        """Make stand-ins for vLLM's layers, of a class with attributes ``own``; set ``formula``."""
        load = self._load
        self._layers = [
            cls(prefix=f"layer.{number}", kv_cache=(None, state), tp_size=1, **own)
            for number, state in enumerate(load.states)
        ]
        kinds = [(each, self.kind) for each in self._layers]
        sizes = load.case.rows, load.case.requests, load.case.drafts + 1
        self.formula = bytes_by_formula(kinds, *sizes, torch.bfloat16.itemsize)

    def _known(self) -> list[StateLayer]:
        """Describe the layers as the plug-in finds them."""
        states = [each.kv_cache[1] for each in self._layers]
        return [
            StateLayer(each.prefix, "group.0", self.kind, each, state, state)
            for each, state in zip(self._layers, states, strict=True)
        ]

    def _metadata(self) -> dict[str, object] | None:
        """Return vLLM's metadata by layer, where another kernel than Triton's verifies.

        Else None.
        """
        return None

    def _step(self) -> VerifyStep:
        """Describe the step for a commit."""
        case, starts = self._load.case, self._load.starts
        return VerifyStep(case.requests, case.rows, starts, None, self._metadata())

    def together(self, turn: Turn) -> None:
        """Commit as a captured commit does: several layers side by side, on several streams."""
        if self._streams is None:
            self._streams = side_streams(self._load.device, len(self._kept))
        self._tables.name_commits(turn.sampled, self._load.starts)
        write_side_by_side(self._kept, self._step(), self._streams)

    def captured(self) -> Step | None:
        """Return a commit of the first step as the plug-in launches it, captured.

        None without CUDA.
        """
        if self._load.device.type != "cuda":
            return None
        case, sampled = self._load.case, self._load.turns[0].sampled
        sizes = case.drafts + 1, case.requests
        graphs = CommitGraphs(self._kept, self._tables, *sizes, captures(), GraphCache())
        graphs.capture()
        return lambda: graphs.run(self._step(), sampled)


class GatedDeltaOps(VllmOps):
    """vLLM's Triton kernel of gated delta nets."""

    kind = GATED_DELTA

    def _make_rows(self) -> None:
        """Make the stand-ins for layers, and random rows of all of them."""
        load, shape = self._load, self._load.case.shape
        keys, values = shape.key_heads * shape.key_size, shape.heads * shape.value_size
        self._make_layers(
            self._layer_class(),
            key_dim=keys,
            value_dim=values,
            num_v_heads=shape.heads,
            head_k_dim=shape.key_size,
            head_v_dim=shape.value_size,
            A_log=torch.zeros(shape.heads, device=load.device),
            dt_bias=load.random(shape.heads),
            norm=SimpleNamespace(weight=torch.ones_like(load.random(shape.value_size))),
            enable_fused_gdn_spec_decode=self._layer_class() is _FusedLayer,
        )
        widths = *self._widths(keys, values), shape.heads, shape.heads
        self._rows = [
            [load.random(load.case.rows, width) for width in widths] for _ in self._layers
        ]

    def _layer_class(self) -> type[_Layer]:
        """Return the class of the stand-ins for vLLM's layers."""
        return _Layer

    def _widths(self, keys: int, values: int) -> tuple[int, ...]:
        """Return the widths of the tensors with query, key and value."""
        return keys, keys, values

    def _make_buffers(self) -> None:
        """Make room for the rows of each layer until the commit."""
        load, shape = self._load, self._load.case.shape
        size = 2, load.case.rows, shape.heads, shape.value_size
        gate, out = torch.zeros(size, dtype=torch.bfloat16, device=load.device)
        facts = self._tables, 0, load.case.rows, torch.bfloat16, (gate, out)
        self._kept = [GatedDeltaRows(known, *facts) for known in self._known()]

    def _launch(self, table: Tensor, column: Tensor) -> None:
        """Verify all layers by vLLM's Triton kernel."""
        load, shape = self._load, self._load.case.shape
        for at, (query, key, value, a, b) in zip(self._layers, self._rows, strict=True):
            vllm_operators.verify_gated_delta(
                A_log=at.A_log,
                a=a,
                b=b,
                dt_bias=at.dt_bias,
                q=query.view(1, -1, shape.key_heads, shape.key_size),
                k=key.view(1, -1, shape.key_heads, shape.key_size),
                v=value.view(1, -1, shape.heads, shape.value_size),
                initial_state=at.kv_cache[1],
                inplace_final_state=True,
                cu_seqlens=load.starts,
                ssm_state_indices=table,
                num_accepted_tokens=column,
                use_qk_l2norm_in_kernel=True,
            )


class _FusedLayer(_Layer):
    """The same, with vLLM's launch of its fused kernel."""

    def _can_use_fused_gdn_mtp_decode(self, _: object) -> bool:
        """Return True: the kernel takes the step."""
        return True

    def _forward_core_decode_spec_post_conv_fused_norm(
        self,
        mixed_qkv: Tensor,
        b: Tensor,
        a: Tensor,
        output_gate: Tensor,
        core_attn_out: Tensor,
        attn_metadata: _Metadata,
    ) -> None:
        """Launch vLLM's fused kernel for one layer; it writes ``core_attn_out`` and the states."""
        starts = attn_metadata.spec_query_start_loc
        count = starts.shape[0] - 1
        vllm_operators.verify_gated_delta_fused(
            mixed_qkv=mixed_qkv,
            a=a,
            b=b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            state_indices=attn_metadata.spec_state_indices_tensor[:count],
            cu_seqlens=starts,
            num_accepted_tokens=attn_metadata.num_accepted_tokens[:count],
            state=self.kv_cache[1],
            output_gate=output_gate,
            norm_weight=self.norm.weight,
            out=core_attn_out,
            scale=self.head_k_dim**-0.5,
        )


class FusedOps(GatedDeltaOps):
    """vLLM's fused kernel of gated delta nets, which also applies the gated norm."""

    name = "vLLM's, fused"

    def __init__(self, load: StateWorkload) -> None:
        # A window's table has a column more than stock's: the state that the rows begin with.
        self.exact = load.case.drafts + 2 <= _FUSED_COLUMNS
        super().__init__(load)

    @classmethod
    def takes(cls, load: StateWorkload) -> bool:
        """Tell whether vLLM has the kernel, and it takes these states."""
        case, shape = load.case, load.case.shape
        return (
            load.device.type == "cuda"
            and vllm_operators.has_gated_delta_fused()
            and {shape.key_size, shape.value_size} == {128}
            and shape.heads // shape.key_heads in (1, 2, 3, 4, 8)
            and case.drafts + 1 <= _FUSED_COLUMNS
        )

    def _layer_class(self) -> type[_Layer]:
        """Return the stand-in with vLLM's launch of its fused kernel."""
        return _FusedLayer

    def _widths(self, keys: int, values: int) -> tuple[int, ...]:
        """Return the width of the one tensor with query, key and value."""
        return (2 * keys + values,)

    def _make_rows(self) -> None:
        """Make layers and rows as the base does, and the gate and output of the norm."""
        super()._make_rows()
        shape = self._load.case.shape
        size = self._load.case.rows, shape.heads, shape.value_size
        self._gate, self._out = (self._load.random(*size) for _ in range(2))

    def _launch(self, table: Tensor, column: Tensor) -> None:
        """Verify all layers by vLLM's fused kernel."""
        for at, (mixed, a, b) in zip(self._layers, self._rows, strict=True):
            at._forward_core_decode_spec_post_conv_fused_norm(
                mixed, b, a, self._gate, self._out, _Metadata(table, column, self._load.starts)
            )

    def _metadata(self) -> dict[str, object]:
        """Return vLLM's metadata by layer, by which the plug-in's commit takes the fused kernel."""
        given = _Metadata(self._tables.sources[0], self._tables.whole, self._load.starts)
        return {each.prefix: given for each in self._layers}


class MambaOps(VllmOps):
    """vLLM's Triton kernel of Mamba-2 layers."""

    kind = MAMBA2

    def _make_rows(self) -> None:
        """Choose vLLM's kernel of Mamba-2; make the stand-ins for layers, and random rows."""
        load, shape = self._load, self._load.case.shape
        vllm_operators.choose_mamba2_kernel()
        self._make_layers(
            _Layer,
            num_heads=shape.heads,
            head_dim=shape.value_size,
            n_groups=shape.key_heads,
            ssm_state_size=shape.key_size,
            A=-torch.rand(shape.heads, device=load.device),
            D=load.random(shape.heads),
            dt_bias=load.random(shape.heads),
            is_blackwell=False,
        )
        heads, groups = shape.heads, shape.key_heads
        sizes = [(heads, shape.value_size), (heads,), *[(groups, shape.key_size)] * 2]
        self._rows = [[load.random(load.case.rows, *size) for size in sizes] for _ in self._layers]

    def _make_buffers(self) -> None:
        """Make room for the rows of each layer until the commit."""
        self._out = torch.zeros_like(self._rows[0][0])
        facts = self._tables, 0, self._load.case.rows, torch.bfloat16, self._out
        self._kept = [Mamba2Rows(known, *facts) for known in self._known()]

    def _launch(self, table: Tensor, column: Tensor) -> None:
        """Verify all layers by vLLM's Triton kernel of Mamba-2."""
        shape = self._load.case.shape
        heads, size, inner = shape.heads, shape.value_size, shape.key_size
        for at, (x, dt, b, c) in zip(self._layers, self._rows, strict=True):
            vllm_operators.verify_mamba2(
                at.kv_cache[1],
                x,
                dt[:, :, None].expand(-1, -1, size),
                at.A[:, None, None].expand(heads, size, inner),
                b,
                c,
                at.D[:, None].expand(-1, size),
                at.dt_bias[:, None].expand(-1, size),
                dt_softplus=True,
                state_batch_indices=table,
                dst_state_batch_indices=table,
                out=self._out,
                num_accepted_tokens=column,
                cu_seqlens=self._load.starts,
                is_blackwell=False,
            )


def operators(load: StateWorkload) -> list[VllmOps]:
    """Make vLLM's operators for the states of a model: the fused one only where it takes them."""
    if load.case.shape.kind == "mamba2":
        return [MambaOps(load)]
    return [GatedDeltaOps(load), *([FusedOps(load)] if FusedOps.takes(load) else [])]
