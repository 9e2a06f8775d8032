"""Gated delta nets of vLLM on a GPU, by kvtxn's own kernel: verify stages rows, writes no state.

In a verify step one kernel takes the place of vLLM's two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from ....backends.gated_delta import verify_gated_delta
from . import gated_delta_hooks
from .replayed_layer import ReplayedLayer


@attrs.frozen(eq=False)
class ReplayedDelta(ReplayedLayer):
    """A gated delta net."""

    @staticmethod
    def sizes_of(module: Any) -> tuple[int, int, int, int]:
        """Return a layer's heads of keys, its heads, and the sizes of a key and of a value."""
        ranks = module.tp_size
        heads = module.num_k_heads // ranks, module.num_v_heads // ranks
        return (*heads, int(module.head_k_dim), int(module.head_v_dim))

    def hook(self) -> None:
        """Let the layer verify without writing a state, and keep its rows."""
        fused = getattr(self.module, "enable_fused_gdn_spec_decode", False)
        gated_delta_hooks.hook_kernels(
            *(self.module, self.verify, self.verify_fused if fused else None),
            split=self.views,
        )

    def unhook(self) -> None:
        """Give the layer its own methods back."""
        gated_delta_hooks.unhook_kernels(self.module)

    def verify(self, kernel: Callable[..., Any], **given: Any) -> Any:
        """Verify in place of vLLM's Triton kernel; elsewhere launch that kernel."""
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
        attn_metadata: Any,
    ) -> None:
        """Verify in place of vLLM's fused kernel, then apply the layer's gated norm."""
        query, key, value = self.split(mixed_qkv)
        starts = attn_metadata.spec_query_start_loc[: attn_metadata.num_spec_decodes + 1]
        self.launch(query, key, value, a, b, starts, core_attn_out)
        self.norm(core_attn_out, output_gate)

    def norm(self, out: Tensor, gate: Tensor) -> None:
        """Apply the layer's gated norm in place; in one launch, if it is one that is known."""
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
        """Return views of rows that have query, key and value in one piece."""
        key_heads, heads, key_size, value_size = self.sizes_of(self.module)
        widths = [key_heads * key_size] * 2 + [heads * value_size]
        query, key, value = mixed_qkv.split(widths, dim=-1)
        keys = key_heads, key_size
        return query.unflatten(1, keys), key.unflatten(1, keys), value.unflatten(1, (heads, -1))

    def views(self, mixed_qkv: Tensor | None) -> Any:
        """Split rows as the layer's own method does, without copies, which kvtxn's kernel spares.

        vLLM's kernel wants them; ``verify`` makes them where it launches that one.
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
        """Launch the kernel over the states that the tables name."""
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
        """Compile the kernel that verifies, for the layouts of rows that vLLM's two paths have."""
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
