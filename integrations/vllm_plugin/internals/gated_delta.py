"""vLLM's operator of gated delta nets on a CPU, and its calls in a verify step.

vLLM has one function for engines that do not speculate: it computes a row of each request, or a
prompt, over the one state of each request. A verify step is made of calls of that function, so
outputs and states are, bit for bit, those of an engine without speculation that is given the same
rows: the row of the last sampled token goes into the state itself, drafts go into a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ...serving.state_steps import StateRows
from .hooks import not_called
from .protocols.layers import GatedDeltaLayer, GatedDeltaMetadata
from .state_layers import StateLayer, Substitute

#: vLLM's function, in its module of the operator; by its parameters it is recognised.
CORE: Final = "_cpu_gdn_attention_nonspec"
CORE_MODULE: Final = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_PARAMETERS: Final = ("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out")


def take_in(
    module: GatedDeltaLayer, state: Tensor, convolved: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """Compute the states after one more row each, by vLLM's operator.

    Args:
        module: the layer.
        state: float32 ``[num_requests, num_heads, key_size, value_size]``; it is not changed.
        convolved: ``[num_requests, channels]``, outputs of the convolution.
        a: ``[num_requests, num_heads]``.
        b: ``[num_requests, num_heads]``.
    """
    from vllm import _custom_ops

    after, count = state.clone(memory_format=torch.contiguous_format), state.shape[0]
    query, key, value = module.rearrange_mixed_qkv(convolved)
    _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=module.A_log,
        dt_bias=module.dt_bias,
        q=query,
        k=key,
        v=value,
        a=a.contiguous(),
        b=b.contiguous(),
        initial_state_source=after,
        initial_state_indices=torch.arange(count, dtype=torch.int32),
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    return after


@attrs.frozen(eq=False)
class _Call:
    """One call of vLLM's function: its arguments, and the function itself."""

    own: Callable[..., None]
    layer: GatedDeltaLayer
    metadata: GatedDeltaMetadata
    mixed_qkv: Tensor
    b: Tensor
    a: Tensor
    out: Tensor

    def run(self, layer: object, rows: Tensor, **metadata: object) -> None:
        """Compute these rows of the batch over the states of ``layer``."""
        none = dict.fromkeys(
            ("num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens"), 0
        )
        said = {"spec_sequence_masks": None, "num_accepted_tokens": None, "has_initial_state": None}
        out = self.out.new_empty(rows.numel(), *self.out.shape[1:])
        given = SimpleNamespace(**said | none | metadata)
        self.own(layer, given, self.mixed_qkv[rows], self.b[rows], self.a[rows], out)
        self.out[rows] = out

    def decode(self, layer: object, rows: Tensor, slots: Tensor) -> None:
        """Compute one row of each request, over the states in ``slots`` of ``layer``."""
        count = rows.numel()
        self.run(
            layer,
            rows,
            num_decodes=count,
            num_decode_tokens=count,
            non_spec_state_indices_tensor=slots.to(torch.int32),
            non_spec_query_start_loc=torch.arange(count + 1, dtype=torch.int32),
        )

    def prompts(self) -> None:
        """Compute the rows of requests whose prompt is not done."""
        found = self.metadata
        if not found.num_prefills:
            return
        rows = found.non_spec_token_indx.long()
        self.run(
            self.layer,
            rows,
            num_prefills=found.num_prefills,
            num_prefill_tokens=rows.numel(),
            has_initial_state=found.has_initial_state,
            non_spec_state_indices_tensor=found.non_spec_state_indices_tensor,
            non_spec_query_start_loc=found.non_spec_query_start_loc,
        )

    def verify(self) -> StateRows | None:
        """Compute the rows of the other requests; return their drafts, None without any.

        The parts of a draft row are the input and the output of the convolution, a and b.
        """
        found = self.metadata
        ends = found.spec_query_start_loc[: found.num_spec_decodes + 1].tolist()
        rows = found.spec_token_indx.long()
        slots = found.spec_state_indices_tensor[: found.num_spec_decodes, 0].long()
        first = torch.tensor(ends[:-1])
        self.decode(self.layer, rows[first], slots)
        lengths = torch.tensor([end - start - 1 for start, end in pairwise(ends)])
        drafting = lengths.nonzero().squeeze(1)
        if not drafting.numel():
            return None
        places = found.spec_sequence_masks_cpu.nonzero().squeeze(1)
        # Block 0 stands for "no state" in some of vLLM's operators.
        copies = [cache.new_zeros(drafting.numel() + 1, *cache.shape[1:])
                  for cache in self.layer.kv_cache]  # fmt: skip
        for copy, cache in zip(copies, self.layer.kv_cache, strict=True):
            copy[1:] = cache[slots[drafting]]
        taken: list[Tensor] = []
        outputs: list[Tensor] = []

        def remembered(convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            outputs.append(convolved)
            return self.layer.rearrange_mixed_qkv(convolved)

        scratch = Substitute(self.layer, kv_cache=tuple(copies), rearrange_mixed_qkv=remembered)
        for turn in range(1, int(lengths.max()) + 1):
            having = (lengths[drafting] >= turn).nonzero().squeeze(1)
            now = rows[first[drafting[having]] + turn]
            self.decode(scratch, now, having + 1)
            taken.append(now)
        order = torch.cat(taken).argsort()
        drafts = torch.cat(taken)[order]
        convolved = torch.cat(outputs)[order]
        return StateRows(
            requests=tuple(places[drafting].tolist()),
            draft_len=tuple(lengths[drafting].tolist()),
            slots=slots[drafting],
            parts=(self.mixed_qkv[drafts], convolved, self.a[drafts], self.b[drafts]),
        )


def core_differs() -> str | None:
    """Say in a sentence how vLLM's function differs from the known one; None if it does not."""
    from inspect import signature, unwrap

    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as module

    own = getattr(module, CORE, None)
    if own is None:
        return f"{module.__name__}.{CORE} is not there"
    found = tuple(signature(own).parameters)
    if found != _PARAMETERS:
        return f"{CORE} takes {found}, not {_PARAMETERS}"
    return not_called(unwrap(own))


def hook_core() -> Callable[[], None]:
    """Let layers that have an attribute ``kvtxn`` verify drafts over copies of their states.

    vLLM's operator finds the function in its module, so the hook is in the module, once, however
    many engines the process has. ``layer.kvtxn`` is called with each verify step's ``StateRows``.

    Returns:
        A function that undoes it; the last one called gives the module vLLM's own function back.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as module

    present: Any = getattr(module, CORE)
    core = present if hasattr(present, "kvtxn_users") else _with_hook(present)
    setattr(module, CORE, core)
    core.kvtxn_users += 1

    def undo() -> None:
        core.kvtxn_users -= 1
        if not core.kvtxn_users and getattr(module, CORE) is core:
            setattr(module, CORE, core.__wrapped__)

    return undo


def _with_hook(own: Callable[..., None]) -> Any:
    """Return a function that runs vLLM's ``own``, or, for drafts of hooked layers, its parts."""

    def core(
        layer: GatedDeltaLayer,
        attn_metadata_i: GatedDeltaMetadata,
        mixed_qkv: Tensor,
        b: Tensor,
        a: Tensor,
        core_attn_out: Tensor,
    ) -> None:
        hook = getattr(layer, "kvtxn", None)
        if hook is None or attn_metadata_i.spec_sequence_masks is None:
            own(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)
            return
        call = _Call(own, layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)
        call.prompts()
        drafts = call.verify()
        if drafts is not None:
            hook(drafts)

    hooked: Any = core
    hooked.kvtxn_users, hooked.__wrapped__ = 0, own
    return hooked


def hook_layer(layer: StateLayer, verify: Callable[[StateRows], None]) -> None:
    """Let a layer hand the draft rows of each step to ``verify``."""
    layer.module.kvtxn = verify


def unhook_layers(layers: Sequence[StateLayer]) -> None:
    """Undo ``hook_layer``; layers that are not hooked stay as they are."""
    for layer in layers:
        if hasattr(layer.module, "kvtxn"):
            del layer.module.kvtxn
