"""vLLM's gated delta nets on a CPU: their layers and caches, and their operator in a verify step.

vLLM has one function for engines that do not speculate: it computes a row of each request, or a
prompt, over the one state of each request. A verify step is made of calls of that function, so
outputs and states are, bit for bit, those of an engine without speculation that is given the same
rows: the row of the last sampled token goes into the state itself, drafts go into a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ...serving.state_steps import StateRows
from . import Foreign

#: Methods of the runner that states need, beside those in ``batches.V1_METHODS``.
METHODS: Final = {"get_kv_cache_spec": ()}

#: vLLM's function, in its module of the operator; by its parameters it is recognised.
CORE: Final = "_cpu_gdn_attention_nonspec"
CORE_MODULE: Final = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_PARAMETERS: Final = ("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out")


@attrs.frozen(eq=False)
class StateLayer:
    """A gated delta net of the target model, and its caches.

    Attributes:
        name: vLLM's name of the layer.
        group: name of its KV-cache group, such as ``"group.0"``.
        module: vLLM's layer.
        past: ``[num_blocks, width - 1, channels]``, the past of the convolution.
        state: ``[num_blocks, num_heads, key_size, value_size]``.
    """

    name: str
    group: str
    module: Foreign
    past: Tensor
    state: Tensor


# -- layers and caches ----------------------------------------------------------------


def is_gated_delta(module: object) -> bool:
    """Tell whether a layer is a gated delta net whose operator this file knows.

    By the name of its class, since not every release has the module.
    """
    return any(base.__name__ == "QwenGatedDeltaNetAttention" for base in type(module).__mro__)


def modules_of(runner: Any) -> dict[str, Foreign]:
    """Return the gated delta nets of a loaded model by name."""
    found = runner.compilation_config.static_forward_context
    return {name: module for name, module in found.items() if is_gated_delta(module)}


def state_dtype(runner: Any) -> str:
    """Name the dtype of the states, or, if they differ, one that is not float32."""
    modules: Any = modules_of(runner).values()
    names = [str(module.get_state_dtype()[1]).removeprefix("torch.") for module in modules]
    return max(names, key=lambda name: name != "float32", default="float32")


def state_layers(runner: Any) -> list[StateLayer]:
    """Find the gated delta nets of a runner that has caches, in the order of their groups."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    modules, layers = modules_of(runner), []
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            if name in modules:
                module: Any = modules[name]
                past, state = module.kv_cache
                past = past.transpose(1, 2) if is_conv_state_dim_first() else past
                layers.append(StateLayer(name, f"group.{number}", module, past, state))
    return layers


def hold_one_state(runner: Any) -> Callable[[], None]:
    """Let the caches of gated delta nets be those of an engine without speculation.

    Returns:
        A function that undoes it, for caches that are made later.
    """
    modules: Any = list(modules_of(runner).values())
    before = [module.num_spec for module in modules]
    for module in modules:
        module.num_spec = 0  # the length of the convolution's past depends on it, and nothing else

    def undo() -> None:
        for module, number in zip(modules, before, strict=True):
            module.num_spec = number

    return undo


def one_block_each(specs: Mapping[str, Any]) -> dict[str, Foreign]:
    """Change the result of ``get_kv_cache_spec``: one block per request for layers with states."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return {
        name: replace(spec, num_speculative_blocks=0) if isinstance(spec, MambaSpec) else spec
        for name, spec in specs.items()
    }


def state_slots(runner: Any, groups: Sequence[str]) -> dict[str, Tensor]:
    """Return the block of each request's state, int64 ``[num_requests]``, by group."""
    tables, count = runner.input_batch.block_table, runner.input_batch.num_reqs
    return {
        group: tables[int(group.partition(".")[2])].get_cpu_tensor()[:count, 0].to(torch.int64)
        for group in groups
    }


# -- the operator ---------------------------------------------------------------------


def take_in(module: Any, state: Tensor, convolved: Tensor, a: Tensor, b: Tensor) -> Tensor:
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


class _OnCopies:
    """A layer over copies of its states, which remembers the outputs of its convolution."""

    def __init__(self, layer: Foreign, states: tuple[Tensor, ...]) -> None:
        self.kv_cache = states
        self._layer = layer
        self.convolved: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def rearrange_mixed_qkv(self, mixed_qkv: Tensor) -> Any:
        """Remember the argument, and run the layer's own method."""
        self.convolved = mixed_qkv
        return self._layer.rearrange_mixed_qkv(mixed_qkv)


@attrs.frozen(eq=False)
class _Call:
    """One call of vLLM's function: its arguments, and the function itself."""

    own: Callable[..., None]
    layer: Any
    metadata: Any
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
        scratch = _OnCopies(self.layer, tuple(copies))
        taken, outputs = [], []
        for turn in range(1, int(lengths.max()) + 1):
            having = (lengths[drafting] >= turn).nonzero().squeeze(1)
            now = rows[first[drafting[having]] + turn]
            self.decode(scratch, now, having + 1)
            assert scratch.convolved is not None
            taken.append(now)
            outputs.append(scratch.convolved)
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
    from inspect import signature

    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as module

    own = getattr(module, CORE, None)
    if own is None:
        return f"{module.__name__}.{CORE} is not there"
    found = tuple(signature(own).parameters)
    return None if found == _PARAMETERS else f"{CORE} takes {found}, not {_PARAMETERS}"


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
        layer: Any, attn_metadata_i: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor,
        core_attn_out: Tensor,
    ) -> None:  # fmt: skip
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
    module: Any = layer.module
    module.kvtxn = verify


def unhook_layers(layers: Sequence[StateLayer]) -> None:
    """Undo ``hook_layer``; layers that are not hooked stay as they are."""
    for layer in layers:
        if hasattr(layer.module, "kvtxn"):
            del layer.module.kvtxn
