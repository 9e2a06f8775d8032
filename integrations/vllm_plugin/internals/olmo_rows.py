"""Gated delta nets of OLMo hybrid on a GPU: vLLM's own kernel verifies, and commits.

vLLM has one Triton kernel for them, which reads a table of state blocks as ``verified_rows`` says.
It is given the decay and the step size of each row, where the kernels of other gated delta nets
compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor

from .hooks import method_of, with_globals
from .protocols.layers import GatedDeltaLayer
from .state_layers import StateLayer
from .state_tables import StateTables, VerifyStep

_FORWARD: Final = "_forward_core"
#: The method that contains the launch, with its parameters.
METHODS: Final = {_FORWARD: ("mixed_qkv", "b", "a", "core_attn_out")}

#: By method, the global name under which it finds the kernel.
KERNEL: Final = {_FORWARD: "fused_recurrent_gated_delta_rule"}

#: Most programs along the third axis of a grid, where the kernel has requests and heads.
_MOST_PROGRAMS: Final = 65535


def row_elements(module: GatedDeltaLayer) -> int:
    """Return how many numbers of two bytes a layer keeps per row.

    Those are a key and a value of each head, and its decay and step size in float32. A query is not
    kept: no state depends on it.
    """
    return int(module.num_v_heads * (module.head_k_dim + module.head_v_dim + 4) // module.tp_size)


class OlmoDeltaRows:
    """The rows of one layer in the present step, and the layer's kernel.

    Args:
        layer: the layer.
        tables: the tables of all layers.
        group: number of the layer's group in the tables.
        rows: most rows of a step.
        dtype: the model's.
    """

    may_fuse = False

    def __init__(
        self, layer: StateLayer, tables: StateTables, group: int, rows: int, dtype: torch.dtype
    ) -> None:
        module: GatedDeltaLayer = layer.module
        self._module, self._tables, self._group = module, tables, group
        device, heads = layer.past.device, module.num_v_heads // module.tp_size
        self._heads = heads
        self._key = torch.zeros(rows, heads * module.head_k_dim, dtype=dtype, device=device)
        self._value = torch.zeros(rows, heads * module.head_v_dim, dtype=dtype, device=device)
        self._decay = torch.zeros(rows, heads, dtype=torch.float32, device=device)
        self._beta = torch.zeros_like(self._decay)

    def was_fused(self, _: VerifyStep) -> bool:
        """Tell that there is one kernel."""
        return False

    def metadata(self, *_: object) -> None:
        """Make none: there is one kernel."""

    def hook(self) -> None:
        """Let the layer verify without writing a state, and keep its rows."""
        from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as own

        kernel = partial(self._verify, own.fused_recurrent_gated_delta_rule)
        forward = with_globals(
            method_of(self._module, _FORWARD), fused_recurrent_gated_delta_rule=kernel
        )
        setattr(self._module, _FORWARD, MethodType(forward, self._module))

    def unhook(self) -> None:
        """Give the layer its own method back."""
        vars(self._module).pop(_FORWARD, None)

    def keep(self, parts: Sequence[Tensor]) -> None:
        """Copy the rows of a verify step in one launch; rows beyond ``rows`` are left out.

        Args:
            parts: ``[num_rows, width]`` each: key, value, decay and step size, as the kernel takes
                them.
        """
        from ....backends.move_rows.stage_rows import stage_rows

        rows = min(parts[0].shape[0], self._key.shape[0])
        room = [self._key, self._value, self._decay, self._beta]
        stage_rows([part[:rows] for part in parts], room)

    def _verify(self, kernel: Callable[..., object], **given: Any) -> object:
        """Launch vLLM's kernel; in a verify step without a block to write to."""
        if given.get("num_accepted_tokens") is None:
            return kernel(**given)
        self.keep([given[name][0].flatten(1) for name in ("k", "v", "g", "beta")])
        self._tables.name_in_graph(self._group, self)
        count = given["cu_seqlens"].shape[0] - 1
        given["ssm_state_indices"] = self._tables.sources[self._group, :count]
        given["num_accepted_tokens"] = self._tables.whole[:count]
        return kernel(**given)

    def commit(self, step: VerifyStep) -> None:
        """Write the states that ``StateTables.commits`` names."""
        from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as own

        rows, lines = min(step.rows, self._key.shape[0]), 2 * step.requests
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
