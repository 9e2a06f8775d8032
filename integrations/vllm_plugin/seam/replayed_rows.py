"""Recurrent layers of vLLM on a GPU, by kvtxn's own kernels: verify stages rows, a commit replays.

In a verify step a kernel of kvtxn's takes the place of vLLM's: it reads each request's state,
writes none, and keeps per row what the state needs in order to take it in. The commit is one launch
for all layers, which reads and writes each state once. Sums are in float32, as vLLM's are, but in
another order; so outputs differ from those of vLLM's kernels as these differ from each other.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from ....backends.gated_delta import DeltaLayers, DeltaRows, advance_gated_delta, verify_gated_delta
from ....backends.mamba2 import verify_mamba2
from ..policy.engine_facts import GATED_DELTA, MAMBA2
from . import state_layers
from .runner_protocols import GatedDeltaMetadata
from .state_commits import StateCommits, StateTables, VerifyStep
from .state_layers import StateLayer


@attrs.frozen(eq=False)
class ReplayedLayer(abc.ABC):
    """A layer whose drafts kvtxn's own kernel verifies.

    Attributes:
        kind: of the layer.
        module: vLLM's layer.
        tables: the tables of all layers.
        group: number of the layer's group in the tables.
        rows: room for what a step's rows leave.
        longest: most rows of a request.
    """

    kind: ClassVar[str]
    module: Any
    tables: StateTables
    group: int
    rows: DeltaRows
    longest: int

    @staticmethod
    @abc.abstractmethod
    def sizes_of(module: Any) -> tuple[int, int, int, int]:
        """Return this rank's heads of keys and heads, and the sizes of a key and a value."""

    def hook(self) -> None:
        """Let kvtxn's kernel run in the layer's place: it writes no state, and keeps the rows."""
        state_layers.hook_kernel(self.module, self.kind, self.verify)

    @abc.abstractmethod
    def verify(self, kernel: Callable[..., object], *given: Any, **named: Any) -> object:
        """Verify in place of vLLM's Triton kernel; in steps without drafts launch that kernel.

        Args:
            kernel: vLLM's.
            given: its positional arguments.
            named: its keyword arguments; without ``num_accepted_tokens`` no drafts are verified.

        Returns:
            What the kernel returns.
        """

    def unhook(self) -> None:
        """Give the layer its own methods back."""
        state_layers.unhook_kernels(self.module, self.kind)

    @abc.abstractmethod
    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel that verifies, for the layouts of rows that vLLM's methods have.

        No request may have a block yet: the kernel reads and writes no state then.
        """

    def name_sources(self, starts: Tensor) -> Tensor:
        """Return the blocks of a step's requests, int32 ``[requests]``, for kernels to read.

        In a forward that is captured, they are copied there within the graph.

        Args:
            starts: int32 ``[requests + 1]``, the first row of each request, and the end.
        """
        self.tables.name_in_graph(self.group, self)
        return self.tables.sources[self.group, : starts.shape[0] - 1, -1]


@attrs.frozen(eq=False)
class ReplayedDelta(ReplayedLayer):
    """A gated delta net."""

    kind = GATED_DELTA

    @staticmethod
    def sizes_of(module: Any) -> tuple[int, int, int, int]:
        """Return this rank's heads of keys and heads, and the sizes of a key and a value."""
        ranks = module.tp_size
        heads = module.num_k_heads // ranks, module.num_v_heads // ranks
        return (*heads, int(module.head_k_dim), int(module.head_v_dim))

    def hook(self) -> None:
        """Let kvtxn's kernel run in place of vLLM's two, and rows be split into views.

        It writes no state, and keeps the rows.
        """
        state_layers.hook_kernel(self.module, self.kind, self.verify)
        if getattr(self.module, "enable_fused_gdn_spec_decode", False):
            setattr(self.module, state_layers.FUSED, self.verify_fused)
        for name in state_layers.GATED_DELTA_SPLIT:
            setattr(self.module, name, self.views)

    def verify(self, kernel: Callable[..., object], *_: object, **given: Any) -> object:
        """Verify in place of vLLM's Triton kernel; in steps without drafts launch that kernel.

        vLLM's kernel is given contiguous copies, as it needs them.
        """
        if given.get("num_accepted_tokens") is None:
            return kernel(**given | {name: given[name].contiguous() for name in ("q", "k", "v")})
        query, key, value = (given[name][0] for name in ("q", "k", "v"))
        out = torch.empty_like(given["v"], memory_format=torch.contiguous_format)
        starts = given["cu_seqlens"]
        self.launch(query, key, value, given["a"], given["b"], starts, out[0])
        return out, given["initial_state"]

    def verify_fused(
        self,
        mixed_qkv: Tensor,
        b: Tensor,
        a: Tensor,
        output_gate: Tensor,
        core_attn_out: Tensor,
        attn_metadata: GatedDeltaMetadata,
    ) -> None:
        """Verify in place of vLLM's fused kernel, and apply the layer's gated norm.

        The outputs are written to ``core_attn_out``.
        """
        query, key, value = self.split(mixed_qkv)
        starts = attn_metadata.spec_query_start_loc[: attn_metadata.num_spec_decodes + 1]
        self.launch(query, key, value, a, b, starts, core_attn_out)
        self.norm(core_attn_out, output_gate)

    def norm(self, out: Tensor, gate: Tensor) -> None:
        """Apply the layer's gated norm to ``out`` in place.

        On a GPU in one launch of kvtxn's, if it knows this norm; else by vLLM's method.
        """
        norm = self.module.norm
        known = (
            norm.norm_before_gate
            and norm.bias is None
            and norm.group_size in (None, out.shape[-1])
            and norm.activation in ("silu", "swish", "sigmoid")
        )
        if not (known and out.is_cuda):
            self.module._rms_norm_gated_cuda(out, gate, out)
            return
        from ....backends.gated_delta.gated_norm import gated_norm

        gated_norm(out, gate, norm.weight, norm.eps, sigmoid=norm.activation == "sigmoid")

    def split(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of rows in one piece: query, key and value, ``[rows, heads, size]`` each."""
        key_heads, heads, key_size, value_size = self.sizes_of(self.module)
        widths = [key_heads * key_size] * 2 + [heads * value_size]
        query, key, value = mixed_qkv.split(widths, dim=-1)
        keys = key_heads, key_size
        return query.unflatten(1, keys), key.unflatten(1, keys), value.unflatten(1, (heads, -1))

    def views(self, mixed_qkv: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return views of query, key and value, ``[1, rows, heads, size]``; None thrice for None.

        The layer's own method makes copies. vLLM's kernel needs them, so ``verify`` makes them
        where it launches that one.
        """
        if mixed_qkv is None:
            return None, None, None
        return tuple(part.unsqueeze(0) for part in self.split(mixed_qkv))

    def launch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        a: Tensor,
        b: Tensor,
        starts: Tensor,
        out: Tensor,
    ) -> None:
        """Verify rows from the states that the tables name; write the outputs to ``out``.

        Args:
            query: ``[rows, key_heads, key_size]``.
            key: ``[rows, key_heads, key_size]``.
            value: ``[rows, heads, value_size]``.
            a: ``[rows, heads]``.
            b: ``[rows, heads]``.
            starts: int32 ``[requests + 1]``, the first row of each request, and the end.
            out: ``[rows, heads, value_size]``, written; what the commit needs of rows is kept, too.
        """
        module = self.module
        sources = self.name_sources(starts)
        verify_gated_delta(
            *(query, key, value, a, b, module.A_log, module.dt_bias),
            module.kv_cache[1],
            sources,
            starts,
            out,
            self.rows,
            scale=module.head_k_dim**-0.5,
            longest=self.longest,
        )

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel for the layouts of rows of vLLM's two paths, and the gated norm."""
        key_heads, heads, key_size, value_size = self.sizes_of(self.module)
        keys, values, device = key_heads * key_size, heads * value_size, self.tables.whole.device
        mixed = torch.zeros(self.longest, 2 * keys + values, dtype=dtype, device=device)
        b, a = torch.zeros(self.longest, 2 * heads, dtype=dtype, device=device).chunk(2, dim=1)
        starts = torch.tensor([0, self.longest], dtype=torch.int32, device=device)
        query, key, value = self.split(mixed)
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        self.launch(query, key, value, a, b, starts, out)
        if getattr(self.module, "enable_fused_gdn_spec_decode", False):
            gate = out.new_zeros(self.longest, 2 * values)[:, :values]
            self.norm(out, gate.unflatten(1, (heads, -1)))
        query, key, value, a, b = (part.contiguous() for part in (query, key, value, a, b))
        self.launch(query, key, value, a, b, starts, out)


@attrs.frozen(eq=False)
class ReplayedMamba2(ReplayedLayer):
    """A Mamba-2 layer; its keys are B, its values ``x * dt``."""

    kind = MAMBA2

    @staticmethod
    def sizes_of(module: Any) -> tuple[int, int, int, int]:
        """Return this rank's groups and heads, and the sizes of a state and of a head."""
        ranks = module.tp_size
        heads = module.n_groups // ranks, module.num_heads // ranks
        return (*heads, int(module.ssm_state_size), int(module.head_dim))

    def verify(self, kernel: Callable[..., object], *given: Any, **named: Any) -> object:
        """Verify in place of vLLM's Triton kernel, into its ``out``, and return None.

        In steps without drafts launch that kernel, and return what it returns.
        """
        if named.get("num_accepted_tokens") is None:
            return kernel(*given, **named)
        _, x, dt, _, b, c, *_ = given
        self.launch(x, dt[:, :, 0], b, c, named["cu_seqlens"], named["out"])
        return None

    def launch(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, starts: Tensor, out: Tensor
    ) -> None:
        """Verify rows from the states that the tables name; write the outputs to ``out``.

        Args:
            x: ``[rows, heads, head_size]``.
            dt: ``[rows, heads]``.
            b: ``[rows, groups, state_size]``.
            c: ``[rows, groups, state_size]``.
            starts: int32 ``[requests + 1]``, the first row of each request, and the end.
            out: ``[rows, heads, head_size]``, written; what the commit needs of rows is kept, too.
        """
        module = self.module
        sources = self.name_sources(starts)
        verify_mamba2(
            *(x, dt, b, c, module.A, module.D, module.dt_bias),
            *(module.kv_cache[1], sources, starts, out, self.rows),
            longest=self.longest,
        )

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel that verifies, for rows that are views of what is projected."""
        groups, heads, state_size, head_size = self.sizes_of(self.module)
        values, keys = heads * head_size, groups * state_size
        device = self.tables.whole.device
        widths = values, values, keys, keys, heads
        projected = torch.zeros(self.longest, sum(widths), dtype=dtype, device=device)
        _, x, b, c, dt = projected.split(widths, dim=1)
        starts = torch.tensor([0, self.longest], dtype=torch.int32, device=device)
        x, b, c = (
            part.unflatten(1, (-1, size))
            for part, size in ((x, head_size), (b, state_size), (c, state_size))
        )
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.launch(x, dt, b, c, starts, out)


#: By kind of layer, the class of those that kvtxn's kernels verify.
REPLAYED: Final[Mapping[str, type[ReplayedLayer]]] = {
    GATED_DELTA: ReplayedDelta,
    MAMBA2: ReplayedMamba2,
}


def staged_bytes(module: Any, kind: str) -> int:
    """Return the bytes that a row of a layer takes until the commit, on this rank."""
    return DeltaRows.row_bytes(*REPLAYED[kind].sizes_of(module))


class ReplayedRows(StateCommits):
    """The rows of all layers of a kind in the present step, and one commit for all.

    Args:
        layers: the layers, of one kind that ``REPLAYED`` has.
        tables: the tables of all layers.
        groups: for each layer the number of its group in the tables.
        rows: most rows of a step.
        width: most rows of a request.
    """

    def __init__(
        self,
        layers: Sequence[StateLayer],
        tables: StateTables,
        groups: Sequence[int],
        rows: int,
        width: int,
    ) -> None:
        self._tables = tables
        self._found: DeltaLayers | None = None
        self._recurring: Any = None  # its module asks for Triton
        self.layers: list[ReplayedLayer] = []
        for layer, group in zip(layers, groups, strict=True):
            module: Any = layer.module
            replayed = REPLAYED[layer.kind]
            room = DeltaRows.build(rows, *replayed.sizes_of(module), layer.past.device)
            self.layers.append(replayed(module, tables, group, room, width))

    def hook(self) -> None:
        """Let kvtxn's kernel run in each layer's place: it writes no state, and keeps the rows."""
        for layer in self.layers:
            layer.hook()

    def unhook(self) -> None:
        """Give the layers their own methods back."""
        for layer in self.layers:
            layer.unhook()

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel that verifies, by the first layer; see ``ReplayedLayer.warm_up``."""
        self.layers[0].warm_up(dtype)

    def forget_caches(self) -> None:
        """Hold no cache; the next commit finds those that the layers have then."""
        self._found, self._recurring = None, None

    def _layers(self) -> DeltaLayers:
        """Return where the states and rows of all layers are; found at the first commit."""
        if self._found is None:
            self._found = DeltaLayers.build(
                [layer.module.kv_cache[1] for layer in self.layers],
                [layer.rows for layer in self.layers],
                [layer.group for layer in self.layers],
            )
        return self._found

    def commit_sampled(self, step: VerifyStep, sampled: Tensor) -> None:
        """Write the states after what was sampled; on a GPU in one launch and nothing beside it.

        Args:
            step: the step.
            sampled: int ``[num_requests]``, the number of tokens sampled for each; as in vLLM, a
                request without any keeps its first row. Requests of the step beyond these have no
                rows.
        """
        if not sampled.is_cuda:
            self._tables.name_commits(sampled[: step.requests], step.starts)
            self.commit(step)
            return
        if self._recurring is None:
            from ....backends.gated_delta.recurring import RecurringAdvance

            tables = self._tables
            self._recurring = RecurringAdvance(
                *(self._layers(), tables.sources[:, :, -1], self.layers[0].longest),
                boundary=tables.boundary,
                snapshots=tables.snapshots,
            )
        requests = min(step.requests, sampled.shape[0])
        self._recurring.run(sampled, step.starts, requests)

    def commit(self, step: VerifyStep) -> None:
        """Write the states of all layers in one launch; a raise has written none.

        Each request keeps the rows that ``StateTables.counts`` says.
        """
        count = step.requests
        tables = self._tables
        boundary, snapshots = tables.boundary, tables.snapshots
        advance_gated_delta(
            self._layers(),
            tables.sources[:, :count, -1],
            tables.counts[:count],
            step.starts[: count + 1],
            longest=self.layers[0].longest,
            boundary=None if boundary is None else boundary[:count],
            snapshots=None if snapshots is None else snapshots[:, :count],
        )
