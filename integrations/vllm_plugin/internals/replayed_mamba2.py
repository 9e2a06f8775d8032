"""Mamba-2 layers of vLLM on a GPU, by kvtxn's own kernel: verify stages rows and writes no state.

The convolution before it and the gated norm behind it are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from ....backends.mamba2 import verify_mamba2
from . import mamba2_hooks
from .replayed_layer import ReplayedLayer


@attrs.frozen(eq=False)
class ReplayedMamba2(ReplayedLayer):
    """A Mamba-2 layer; its keys are B, its values ``x * dt``."""

    @staticmethod
    def sizes_of(module: Any) -> tuple[int, int, int, int]:
        """Return a layer's groups, its heads, and the sizes of a head's state and of a head."""
        ranks = module.tp_size
        heads = module.n_groups // ranks, module.num_heads // ranks
        return (*heads, int(module.ssm_state_size), int(module.head_dim))

    def hook(self) -> None:
        """Let the layer verify without writing a state, and keep its rows."""
        mamba2_hooks.hook_kernel(self.module, self.verify)

    def unhook(self) -> None:
        """Give the layer its own method back."""
        mamba2_hooks.unhook_kernel(self.module)

    def verify(self, kernel: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Verify in place of vLLM's kernel; in steps without drafts launch that kernel."""
        if named.get("num_accepted_tokens") is None:
            return kernel(*given, **named)
        _, x, dt, _, b, c, *_ = given
        self.launch(x, dt[:, :, 0], b, c, named["cu_seqlens"], named["out"])
        return None

    def launch(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, starts: Tensor, out: Tensor
    ) -> None:
        """Launch the kernel over the states that the tables name."""
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
