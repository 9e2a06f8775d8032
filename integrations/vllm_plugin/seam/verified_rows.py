"""vLLM's kernels of recurrent layers on a GPU: verify reads a state, and the commit writes it.

For a verify step these kernels are given a table of state blocks. They read the state before the
step from one column, and write the state after each row to that row's column, unless the column
names no block. So one launch without any block to write to verifies; the same launch over the same
rows, with one block to write to, commits. Both compute what vLLM's own launch computes, bit for
bit.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from ..policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA
from .hooks import method_of
from .runner_protocols import GatedDeltaLayer, GatedDeltaMetadata, Mamba2Layer
from .state_commits import StateCommits, StateTables, VerifyStep
from .state_layers import FUSED, StateLayer, hook_kernel, unhook_kernels

#: Most programs along the third axis of a grid, where vLLM's Triton kernel has requests and heads.
_MOST_PROGRAMS: Final = 65535

#: Tensors that hold the rows of the fused kernel: query, key and value in one, a, and b.
_FUSED_PARTS: Final = 3


class VerifiedRows(StateCommits):
    """The rows of one layer in the present step, and the layer's own kernels.

    Args:
        layer: the layer.
        tables: the tables of all layers.
        group: number of the layer's group in the tables.
        rows: most rows of a step.
    """

    def __init__(self, layer: StateLayer, tables: StateTables, group: int, rows: int) -> None:
        self._module: Any = layer.module
        self._kind: Final = layer.kind
        self._tables: Final = tables
        self._group: Final = group
        self._most: Final = rows

    def hook(self) -> None:
        """Let the layer's kernel verify without writing a state, and keep the rows."""
        hook_kernel(self._module, self._kind, self._verify)

    def unhook(self) -> None:
        """Give the layer its own methods back."""
        unhook_kernels(self._module, self._kind)

    @abc.abstractmethod
    def _verify(self, kernel: Callable[..., object], *given: Any, **named: Any) -> object:
        """Launch vLLM's kernel; for a verify step keep its rows, and name no block to write to.

        Args:
            kernel: vLLM's.
            given: its positional arguments.
            named: its keyword arguments; without ``num_accepted_tokens`` the step verifies nothing,
                and the kernel is launched as it would have been.

        Returns:
            What the kernel returns.
        """

    @abc.abstractmethod
    def keep(self, parts: Sequence[Tensor]) -> None:
        """Copy the rows of a verify step in one launch; rows beyond the buffers' are left out.

        Args:
            parts: ``[num_rows, width]`` each, as the layer's class says.
        """

    def _sources(self, requests: int) -> Tensor:
        """Return the table by which requests are verified, int32 ``[requests, most_rows + 1]``.

        In a forward that is captured, the group's blocks are copied into it within the graph.
        """
        self._tables.name_in_graph(self._group, self)
        return self._tables.sources[self._group, :requests]


def row_elements(module: Any, kind: str) -> int:
    """Return how many numbers of the model's dtype a layer keeps per row on this rank.

    0 for kinds without a state of their own.
    """
    ranks = module.tp_size
    if kind == GATED_DELTA:
        return int((2 * module.key_dim + module.value_dim + 2 * module.num_v_heads) // ranks)
    if kind == OLMO_DELTA:
        # Numbers of two bytes: a key and a value of each head, its decay and step size in float32.
        # A query is not kept: no state depends on it.
        return int(module.num_v_heads * (module.head_k_dim + module.head_v_dim + 4) // ranks)
    if kind == MAMBA2:
        groups = 2 * module.n_groups * module.ssm_state_size
        return int((module.num_heads * (module.head_dim + 1) + groups) // ranks)
    return 0


class GatedDeltaRows(VerifiedRows):
    """A gated delta net of Qwen3-Next or Qwen3.5; vLLM has a Triton kernel, and a fused one.

    Args:
        layer: as for ``VerifiedRows``, and so are the next three.
        tables: see there.
        group: see there.
        rows: see there.
        dtype: the model's.
        scratch: ``[rows, num_heads, value_size]`` of the model's dtype, two tensors that all layers
            share: a gate that nobody reads, and room for outputs that nobody reads.
    """

    def __init__(
        self,
        layer: StateLayer,
        tables: StateTables,
        group: int,
        rows: int,
        dtype: torch.dtype,
        scratch: tuple[Tensor, Tensor],
    ) -> None:
        super().__init__(layer, tables, group, rows)
        self._scratch: Final = scratch
        module: GatedDeltaLayer = layer.module
        ranks = module.tp_size
        self._keys, self._values = module.key_dim // ranks, module.value_dim // ranks
        heads, device = module.num_v_heads // ranks, layer.past.device
        width = 2 * self._keys + self._values
        self._flat = torch.zeros(rows * width, dtype=dtype, device=device)
        self._a = torch.zeros(rows, heads, dtype=dtype, device=device)
        self._b = torch.zeros_like(self._a)
        self.may_fuse = bool(
            getattr(module, "enable_fused_gdn_spec_decode", False)
            and dtype == torch.bfloat16
            and module.norm.weight.dtype in (torch.bfloat16, torch.float32)
        )

    # -- what verify kept -----------------------------------------------------------

    def _split(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the first rows' query, key and value, ``[rows, width]`` each, contiguous.

        They share memory with ``_mixed``: a step uses one of both.
        """
        keys, most, flat = self._keys, self._most, self._flat
        ends = most * keys, 2 * most * keys
        return (
            flat[: ends[0]].view(most, keys)[:rows],
            flat[ends[0] : ends[1]].view(most, keys)[:rows],
            flat[ends[1] :].view(most, self._values)[:rows],
        )

    def _mixed(self, rows: int) -> Tensor:
        """Return a view of the first rows, each with query, key and value in one piece."""
        width = 2 * self._keys + self._values
        return self._flat[: rows * width].view(rows, width)

    def keep(self, parts: Sequence[Tensor]) -> None:
        """Copy the rows of a verify step in one launch; rows beyond ``rows`` are left out.

        Args:
            parts: ``[num_rows, width]`` each: query, key, value, a and b, as the Triton kernel
                takes them; or query, key and value in one, then a and b, as the fused one does.
        """
        from ....backends.move_rows.stage_rows import stage_rows

        rows = min(parts[0].shape[0], self._most)
        pieces = [self._flat] if len(parts) == _FUSED_PARTS else self._split(rows)
        stage_rows([part[:rows] for part in parts], [*pieces, self._a, self._b])

    # -- verify ---------------------------------------------------------------------

    def hook(self) -> None:
        """Let vLLM's Triton and fused kernels verify without writing a state; keep the rows."""
        hook_kernel(self._module, self._kind, self._verify)
        if self.may_fuse:
            setattr(self._module, FUSED, self._verify_fused)

    def _verify(self, kernel: Callable[..., object], *_: object, **given: Any) -> object:
        """Launch vLLM's Triton kernel; for a verify step keep its rows, and write no state."""
        if given.get("num_accepted_tokens") is None:
            return kernel(**given)
        parts = [given[name][0].flatten(1) for name in ("q", "k", "v")]
        self.keep([*parts, given["a"], given["b"]])
        count = given["cu_seqlens"].shape[0] - 1
        given["ssm_state_indices"] = self._sources(count)
        given["num_accepted_tokens"] = self._tables.whole[:count]
        return kernel(**given)

    def _verify_fused(
        self,
        mixed_qkv: Tensor,
        b: Tensor,
        a: Tensor,
        output_gate: Tensor,
        core_attn_out: Tensor,
        attn_metadata: GatedDeltaMetadata,
    ) -> None:
        """Keep a verify step's rows, and launch vLLM's fused kernel without a block to write to.

        The outputs go to ``core_attn_out``.
        """
        self.keep([mixed_qkv, a, b])
        self._tables.name_in_graph(self._group, self)
        sources = self._tables.sources[self._group]
        self._fused(mixed_qkv, b, a, output_gate, core_attn_out, attn_metadata, sources)

    def _fused(
        self,
        mixed_qkv: Tensor,
        b: Tensor,
        a: Tensor,
        output_gate: Tensor,
        out: Tensor,
        metadata: GatedDeltaMetadata,
        table: Tensor,
        **other: object,
    ) -> None:
        """Launch vLLM's fused kernel with ``table`` for its states.

        It reads each request's state from the table's last column, and writes those that the
        columns before it name.

        Args:
            mixed_qkv: ``[rows, width]``, query, key and value in one.
            b: ``[rows, num_heads]``.
            a: ``[rows, num_heads]``.
            output_gate: ``[rows, num_heads, value_size]``.
            out: written: the outputs, of the same shape.
            metadata: vLLM's of the step, which stays as it is.
            table: int32 ``[lines, most_rows + 1]``, as in ``StateTables``.
            other: fields of the metadata to replace.
        """
        given = replace(
            metadata,
            spec_state_indices_tensor=table,
            num_accepted_tokens=self._tables.whole,
            **other,
        )
        method_of(self._module, FUSED)(
            self._module,
            mixed_qkv=mixed_qkv,
            b=b,
            a=a,
            output_gate=output_gate,
            core_attn_out=out,
            attn_metadata=given,
        )

    # -- commit ---------------------------------------------------------------------

    def was_fused(self, step: VerifyStep) -> bool:
        """Tell whether vLLM's fused kernel verified a step, by vLLM's own conditions.

        A graph does not say which one it launched.
        """
        if not self.may_fuse or step.metadata is None:
            return False
        given = step.metadata[self._module.prefix]
        return given.num_prefills == 0 and bool(self._module._can_use_fused_gdn_mtp_decode(given))

    def metadata(
        self, requests: int, rows: int, starts: Tensor
    ) -> tuple[str, GatedDeltaMetadata] | None:
        """Make metadata of a step that the fused kernel verifies.

        Args:
            requests: of the step.
            rows: of the step.
            starts: int32 ``[requests + 1]``, the first row of each request, and the end.

        Returns:
            The layer's name and its metadata; None if its steps cannot be fused.
        """
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

        if not self.may_fuse:
            return None
        none = ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens")
        masks = torch.ones(requests, dtype=torch.bool)
        made: GatedDeltaMetadata = GDNAttentionMetadata(
            **dict.fromkeys(none, 0),
            num_spec_decodes=requests,
            num_spec_decode_tokens=rows,
            num_actual_tokens=rows,
            spec_query_start_loc=starts,
            spec_state_indices_tensor=self._tables.sources[self._group, :requests],
            spec_sequence_masks=masks.to(starts.device),
            spec_sequence_masks_cpu=masks,
            num_accepted_tokens=self._tables.whole[:requests],
        )
        return self._module.prefix, made

    def commit(self, step: VerifyStep) -> None:
        """Write the states that ``StateTables.commits`` names, by the kernel that verified."""
        module, rows, lines = self._module, min(step.rows, self._most), 2 * step.requests
        a, b, commits = self._a[:rows], self._b[:rows], self._tables.commits[self._group]
        starts = self._tables.kept[: lines + 1]
        if self.was_fused(step):
            gate, out = (each[:rows] for each in self._scratch)
            given = step.metadata[module.prefix]
            every = {"spec_query_start_loc": starts, "num_spec_decodes": lines}
            self._fused(self._mixed(rows), b, a, gate, out, given, commits, **every)
            return
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as own

        if lines * module.num_v_heads // module.tp_size > _MOST_PROGRAMS:
            commits, starts, lines = commits[::2], step.starts, step.requests
        query, key, value = self._split(rows)
        own.fused_sigmoid_gating_delta_rule_update(
            A_log=module.A_log,
            a=a,
            b=b,
            dt_bias=module.dt_bias,
            q=query.view(1, rows, -1, module.head_k_dim),
            k=key.view(1, rows, -1, module.head_k_dim),
            v=value.view(1, rows, -1, module.head_v_dim),
            initial_state=module.kv_cache[1],
            inplace_final_state=True,
            cu_seqlens=starts,
            ssm_state_indices=commits[:lines],
            num_accepted_tokens=self._tables.whole[:lines],
            use_qk_l2norm_in_kernel=True,
        )


class Mamba2Rows(VerifiedRows):
    """A Mamba-2 layer; for the arguments see ``GatedDeltaRows``."""

    def __init__(
        self,
        layer: StateLayer,
        tables: StateTables,
        group: int,
        rows: int,
        dtype: torch.dtype,
        scratch: Tensor,
    ) -> None:
        super().__init__(layer, tables, group, rows)
        self._scratch: Final = scratch
        module: Mamba2Layer = layer.module
        ranks, device = module.tp_size, layer.past.device
        heads, groups = module.num_heads // ranks, module.n_groups // ranks
        shapes = (
            *((heads, module.head_dim), (heads,)),
            *[(groups, module.ssm_state_size)] * 2,
        )
        self._parts = [torch.zeros(rows, *shape, dtype=dtype, device=device) for shape in shapes]

    def keep(self, parts: Sequence[Tensor]) -> None:
        """Copy the rows of a verify step in one launch; rows beyond ``rows`` are left out.

        Args:
            parts: ``[num_rows, width]`` each: x, dt, B and C, as the kernel takes them.
        """
        from ....backends.move_rows.stage_rows import stage_rows

        stage_rows([part[: self._most] for part in parts], self._parts)

    def _verify(self, kernel: Callable[..., object], *given: Any, **named: Any) -> object:
        """Launch vLLM's kernel; for a verify step keep its rows, and name no block to write to."""
        if named.get("num_accepted_tokens") is None:
            return kernel(*given, **named)
        _, x, dt, _, b, c, *_ = given
        self.keep([x.flatten(1), dt[:, :, 0], b.flatten(1), c.flatten(1)])
        named |= self._table(self._sources(named["cu_seqlens"].shape[0] - 1))
        return kernel(*given, **named)

    def _table(self, blocks: Tensor) -> dict[str, Tensor]:
        """Return the kernel's arguments that say which states it reads and writes: by ``blocks``.

        Args:
            blocks: int32 ``[lines, most_rows + 1]``, as in ``StateTables``.
        """
        return {
            "state_batch_indices": blocks,
            "dst_state_batch_indices": blocks,
            "num_accepted_tokens": self._tables.whole[: blocks.shape[0]],
        }

    def commit(self, step: VerifyStep) -> None:
        """Write the states that ``StateTables.commits`` names, by vLLM's kernel."""
        from vllm.model_executor.layers.mamba import mamba_mixer2 as own

        module, rows = self._module, min(step.rows, self._most)
        x, dt, b, c = (part[:rows] for part in self._parts)
        size, inner = module.head_dim, module.ssm_state_size
        own.selective_state_update(
            module.kv_cache[1],
            x,
            dt[:, :, None].expand(-1, -1, size),
            module.A[:, None, None].expand(-1, size, inner).to(dtype=torch.float32),
            b,
            c,
            module.D[:, None].expand(-1, size),
            module.dt_bias[:, None].expand(-1, size),
            dt_softplus=True,
            out=self._scratch[:rows],
            cu_seqlens=step.starts,
            is_blackwell=module.is_blackwell,
            # Without a block this kernel does not end sooner: it takes each request's own line.
            **self._table(self._tables.commits[self._group, : 2 * step.requests : 2]),
        )


def make_rows(
    layers: Sequence[StateLayer],
    groups: Sequence[str],
    tables: StateTables,
    rows: int,
    dtype: torch.dtype,
) -> list[StateCommits]:
    """Make the buffers of each layer that has a state, in the order of ``layers``.

    Layers of a kind share room for outputs that nobody reads.

    Args:
        layers: the layers; those of another kind than gated delta nets, OLMo's, and Mamba-2 are
            left out.
        groups: names of the groups with states, in the order of ``tables``.
        tables: the tables that name each commit.
        rows: the most rows of a verify step.
        dtype: of the rows.
    """
    made: list[StateCommits] = []
    gates: tuple[Tensor, Tensor] | None = None
    outputs: Tensor | None = None
    for layer in layers:
        module = layer.module
        group, device = groups.index(layer.group), tables.whole.device
        if layer.kind == GATED_DELTA:
            if gates is None:
                heads = module.num_v_heads // module.tp_size
                shape = 2, rows, heads, module.head_v_dim
                gate, output = torch.zeros(shape, dtype=dtype, device=device).unbind()
                gates = gate, output
            made.append(GatedDeltaRows(layer, tables, group, rows, dtype, gates))
        elif layer.kind == OLMO_DELTA:
            made.append(OlmoDeltaRows(layer, tables, group, rows, dtype))
        elif layer.kind == MAMBA2:
            if outputs is None:
                heads = module.num_heads // module.tp_size
                outputs = torch.zeros(rows, heads, module.head_dim, dtype=dtype, device=device)
            made.append(Mamba2Rows(layer, tables, group, rows, dtype, outputs))
    return made


class OlmoDeltaRows(VerifiedRows):
    """A gated delta net of OLMo hybrid, for which vLLM has one Triton kernel.

    The kernel is given the decay and the step size of each row, where the kernels of other gated
    delta nets compute them.
    """

    def __init__(
        self, layer: StateLayer, tables: StateTables, group: int, rows: int, dtype: torch.dtype
    ) -> None:
        super().__init__(layer, tables, group, rows)
        module: GatedDeltaLayer = layer.module
        device, heads = layer.past.device, module.num_v_heads // module.tp_size
        self._heads = heads
        self._key = torch.zeros(rows, heads * module.head_k_dim, dtype=dtype, device=device)
        self._value = torch.zeros(rows, heads * module.head_v_dim, dtype=dtype, device=device)
        self._decay = torch.zeros(rows, heads, dtype=torch.float32, device=device)
        self._beta = torch.zeros_like(self._decay)

    def keep(self, parts: Sequence[Tensor]) -> None:
        """Copy the rows of a verify step in one launch; rows beyond ``rows`` are left out.

        Args:
            parts: ``[num_rows, width]`` each: key, value, decay and step size, as the kernel takes
                them.
        """
        from ....backends.move_rows.stage_rows import stage_rows

        rows = min(parts[0].shape[0], self._most)
        room = [self._key, self._value, self._decay, self._beta]
        stage_rows([part[:rows] for part in parts], room)

    def _verify(self, kernel: Callable[..., object], *_: object, **given: Any) -> object:
        """Launch vLLM's kernel; for a verify step keep its rows, and name no block to write to."""
        if given.get("num_accepted_tokens") is None:
            return kernel(**given)
        self.keep([given[name][0].flatten(1) for name in ("k", "v", "g", "beta")])
        count = given["cu_seqlens"].shape[0] - 1
        given["ssm_state_indices"] = self._sources(count)
        given["num_accepted_tokens"] = self._tables.whole[:count]
        return kernel(**given)

    def commit(self, step: VerifyStep) -> None:
        """Write the states that ``StateTables.commits`` names, by vLLM's kernel."""
        from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as own

        rows, lines = min(step.rows, self._most), 2 * step.requests
        commits, starts = self._tables.commits[self._group], self._tables.kept[: lines + 1]
        if lines * self._heads > _MOST_PROGRAMS:
            commits, starts, lines = commits[::2], step.starts, step.requests
        key = self._key[:rows].view(1, rows, self._heads, -1)
        own.fused_recurrent_gated_delta_rule(
            q=key,  # outputs depend on it, and nobody reads them
            k=key,
            v=self._value[:rows].view(1, rows, self._heads, -1),
            g=self._decay[None, :rows],
            beta=self._beta[None, :rows],
            initial_state=self._module.kv_cache[1],
            inplace_final_state=True,
            cu_seqlens=starts,
            ssm_state_indices=commits[:lines],
            num_accepted_tokens=self._tables.whole[:lines],
            use_qk_l2norm_in_kernel=True,
        )
