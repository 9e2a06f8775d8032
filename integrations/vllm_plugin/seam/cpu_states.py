"""vLLM's recurrent layers on a CPU, and their operators in a verify step.

These operators know nothing of drafts: they take every row that they are given into the state of
its request. A verify step is made of calls of them, each given what an engine without speculation
would be given, so outputs and states are, bit for bit, those of such an engine: prompts, then the
row of the last sampled token of each request, both over the states themselves, and then drafts, one
of each request at a time, over copies.

Gated delta nets have one function of a module's, short convolutions and Mamba-2 layers a method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ...serving.eager_steps import StateRows
from ..policy.engine_facts import MAMBA2, SHORT_CONV
from .hooks import method_of, not_called
from .runner_protocols import (
    GatedDeltaLayer,
    GatedDeltaMetadata,
    Mamba2Layer,
    RecurrentLayer,
    RunnerV1,
    SelectiveMetadata,
    ShortConvLayer,
)
from .state_layers import StateLayer, Substitute, state_slots

#: vLLM's function, in its module of the operator; by its parameters it is recognised.
CORE: Final = "_cpu_gdn_attention_nonspec"
CORE_MODULE: Final = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_PARAMETERS: Final = ("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out")


def take_in_gated_delta(
    module: GatedDeltaLayer, state: Tensor, convolved: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """Return the states after one more row each, as vLLM's gated delta operator leaves them.

    Args:
        module: the layer.
        state: float32 ``[num_requests, num_heads, key_size, value_size]``; it is not changed.
        convolved: ``[num_requests, channels]``, outputs of the convolution; queries and keys are
            normalised here.
        a: ``[num_requests, num_heads]``, of which the operator makes the decay.
        b: ``[num_requests, num_heads]``, of which it makes beta.

    Returns:
        float32, contiguous, in the shape of ``state``.
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
        """Compute these rows of the batch over the states of ``layer``, and put them into ``out``.

        The states are changed in place.

        Args:
            layer: has the states.
            rows: int64 ``[n]``, their places in the batch.
            metadata: fields of vLLM's metadata; counts that are not given are 0.
        """
        none = dict.fromkeys(
            ("num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens"), 0
        )
        said = {"spec_sequence_masks": None, "num_accepted_tokens": None, "has_initial_state": None}
        out = self.out.new_empty(rows.numel(), *self.out.shape[1:])
        given = SimpleNamespace(**said | none | metadata)
        self.own(layer, given, self.mixed_qkv[rows], self.b[rows], self.a[rows], out)
        self.out[rows] = out

    def decode(self, layer: object, rows: Tensor, slots: Tensor) -> None:
        """Compute one row of each request over the states in ``slots`` of ``layer``, as ``run``."""
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
        """Compute the rows of requests whose prompt is not done, over their states; if any."""
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

        The first row of each advances its state in place; drafts run over copies of the states. The
        parts of a draft row are the input and the output of the convolution, a and b.
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
    """Say in a sentence how vLLM's function differs from the known one; None if it does not.

    Compared are its name, its parameters, and that it is called.
    """
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
        A function that undoes it, for one call; after the last, the module has vLLM's own function.
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
    """Return a function that runs vLLM's ``own``, or, in verify steps of hooked layers, its parts.

    The hook of a layer is called with the drafts, if the step has some.
    """

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
    """Let a gated delta net hand the draft rows of each step to ``verify``; see ``hook_core``."""
    layer.module.kvtxn = verify


def unhook_layers(layers: Sequence[StateLayer]) -> None:
    """Undo ``hook_layer``; layers that are not hooked stay as they are."""
    for layer in layers:
        if hasattr(layer.module, "kvtxn"):
            del layer.module.kvtxn


# -- Mamba-2 layers and short convolutions ------------------------------------------------

#: The method of each kind of layer that computes a batch, with the parameters it must have.
FORWARDS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    MAMBA2: ("conv_ssm_forward", ("projected_states", "output")),
    SHORT_CONV: ("forward_native", ("hidden_states", "output")),
}


@attrs.frozen(eq=False)
class StateBatch:
    """The requests of a step.

    Attributes:
        starts: int64 ``[num_requests]``, the first row of each request.
        settled: int64 ``[num_requests]``, the rows of each request before its drafts.
        drafts: int64 ``[num_requests]``, the drafts of each request.
        begun: bool ``[num_requests]``, True if the request has a state already.
        slots: the block of each request's state, int64 ``[num_requests]``, by KV-cache group.
    """

    starts: Tensor
    settled: Tensor
    drafts: Tensor
    begun: Tensor
    slots: Mapping[str, Tensor]

    @property
    def decoding(self) -> Tensor:
        """The requests, int64 ``[n]``, that have one settled row, and a state that takes it in."""
        return (self.begun & (self.settled == 1)).nonzero().squeeze(1)

    @property
    def prompting(self) -> Tensor:
        """The requests, int64 ``[n]``, that have several settled rows, or no state yet."""
        return (~self.begun | (self.settled != 1)).nonzero().squeeze(1)

    def settled_rows(self, requests: Tensor) -> Tensor:
        """Return the numbers of these requests' settled rows, int64, request by request."""
        pairs = zip(self.starts[requests].tolist(), self.settled[requests].tolist(), strict=True)
        return torch.cat([torch.arange(start, start + count) for start, count in pairs])


def step_batch(runner: RunnerV1, drafts: Sequence[int], groups: Sequence[str]) -> StateBatch:
    """Describe the step that a V1 runner is about to compute.

    Args:
        runner: the runner.
        drafts: draft rows of each request; empty: nobody has drafts.
        groups: names of the groups of states.
    """
    count = runner.input_batch.num_reqs
    places = torch.from_numpy(runner.query_start_loc.np[: count + 1].copy()).long()
    computed = runner.input_batch.num_computed_tokens_cpu[:count].copy()
    most = torch.tensor(drafts or [0] * count)
    return StateBatch(
        starts=places[:-1],
        settled=places.diff() - most,
        drafts=most,
        begun=torch.from_numpy(computed) > 0,
        slots=state_slots(runner, groups),
    )


@attrs.frozen(eq=False)
class _Rows:
    """Rows that one call of vLLM's method computes, and its metadata."""

    rows: Tensor
    metadata: SelectiveMetadata

    @classmethod
    def decode(cls, found: SelectiveMetadata, rows: Tensor, slots: Tensor) -> _Rows:
        """Make a call for one row of each request, over the states in ``slots``, int ``[n]``."""
        count = rows.numel()
        changes = _NOTHING | {
            **dict.fromkeys(("num_reqs", "num_decodes", "num_decode_tokens"), count),
            "state_indices_tensor_d": slots.int().unsqueeze(1),
        }
        return cls(rows, replace(found, **changes))

    @classmethod
    def prompts(
        cls, found: SelectiveMetadata, batch: StateBatch, requests: Tensor, slots: Tensor
    ) -> _Rows:
        """Make a call for the settled rows of ``requests``, over the states in ``slots``.

        Args:
            found: vLLM's metadata of the step, which stays as it is.
            batch: the step's requests.
            requests: int64 ``[n]``, those that prefill.
            slots: int64 ``[n]``, the block of each one's state.
        """
        rows, begun = batch.settled_rows(requests), batch.begun[requests]
        ends = batch.settled[requests].cumsum(0)
        changes = _NOTHING | {
            **dict.fromkeys(("num_reqs", "num_prefills"), requests.numel()),
            "num_prefill_tokens": rows.numel(),
            "has_initial_states_p": begun,
            "query_start_loc_p": torch.cat([ends.new_zeros(1), ends]).int(),
            "state_indices_tensor_p": slots.int(),
        }
        if hasattr(found, "prep_initial_states"):
            changes["prep_initial_states"] = bool(begun.any())
        return cls(rows, replace(found, **changes))


#: A step without rows, as vLLM's metadata has it.
_NOTHING: Final[dict[str, Any]] = {
    **dict.fromkeys(("num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens"), 0),
    **dict.fromkeys(
        (
            *("num_accepted_tokens", "query_start_loc_d", "query_start_loc_p"),
            *("state_indices_tensor_d", "state_indices_tensor_p", "has_initial_states_p"),
        )
    ),
}


@contextmanager
def _given(layer: str, metadata: object) -> Iterator[None]:
    """Let this metadata stand in vLLM's forward context for a layer's, then put that back."""
    from vllm.forward_context import get_forward_context

    found: Any = get_forward_context().attn_metadata
    before = found[layer]
    found[layer] = metadata
    try:
        yield
    finally:
        found[layer] = before


class _Mamba2:
    """One forward of a Mamba-2 layer: rows in, rows out.

    The parts of a draft row are the input and the output of the convolution, and dt.
    """

    def __init__(self, module: Mamba2Layer, projected: Tensor, output: Tensor) -> None:
        self.module, self.projected, self.output = module, projected, output
        self.convolved: list[Tensor] = []

    def run(self, given: _Rows, states: tuple[Tensor, ...] | None = None) -> None:
        """Compute rows over the layer's own states, or over ``states``, which change in place.

        Outputs of the convolution over ``states`` are remembered for ``parts``.
        """
        target: object = self.module
        if states is not None:
            target = Substitute(
                self.module, kv_cache=states, split_hidden_states_B_C_fn=self._remembered
            )
        out = self.output.new_empty(given.rows.numel(), *self.output.shape[1:])
        with _given(self.module.prefix, given.metadata):
            method_of(self.module, "conv_ssm_forward")(target, self.projected[given.rows], out)
        self.output[given.rows] = out

    def _remembered(self, convolved: Tensor) -> tuple[Tensor, ...]:
        """Note the output of a convolution, and split it as the layer does."""
        self.convolved.append(convolved)
        return self.module.split_hidden_states_B_C_fn(convolved)

    def parts(self, rows: Tensor, order: Tensor) -> tuple[Tensor, ...]:
        """Return what draft rows stage: the input and the output of the convolution, and dt.

        Args:
            rows: int64 ``[num_drafts]``, their places in the batch.
            order: int64 ``[num_drafts]``, puts the rows in the order of computation into theirs.
        """
        module = self.module
        widths = [module.tped_conv_size, module.tped_dt_size]
        given = self.projected[rows, module.tped_intermediate_size :]
        inputs, dt = given.split(widths, dim=-1)
        return inputs, torch.cat(self.convolved)[order], dt

    def finish(self) -> None:
        """Do nothing: vLLM's method computes the rest."""


class _ShortConv:
    """One forward of a short convolution; the part of a draft row is the convolution's input.

    Both projections are computed for the whole batch at once.
    """

    def __init__(self, module: ShortConvLayer, hidden: Tensor, output: Tensor) -> None:
        self.module, self.hidden, self.output = module, hidden, output
        self.projected: Tensor = module.in_proj(hidden)[0]
        self.gated = self.projected.new_zeros(hidden.shape[0], self.projected.shape[1] // 3)

    def run(self, given: _Rows, states: tuple[Tensor, ...] | None = None) -> None:
        """Compute rows over the layer's own state, or over ``states``, which change in place.

        The outputs wait for ``finish``.
        """
        projected = self.projected[given.rows]
        target = Substitute(
            self.module,
            kv_cache=self.module.kv_cache if states is None else states,
            in_proj=lambda hidden: (projected, None),
            out_proj=lambda gated: (gated, None),
        )
        out = self.gated.new_empty(given.rows.numel(), self.gated.shape[1])
        with _given(self.module.prefix, given.metadata):
            method_of(self.module, "forward_native")(target, self.hidden[given.rows], out)
        self.gated[given.rows] = out

    def parts(self, rows: Tensor, order: Tensor) -> tuple[Tensor, ...]:
        """Return what draft rows stage: the input of the convolution; ``order`` is not used."""
        first, _, last = self.projected[rows].chunk(3, dim=-1)
        return (first * last,)

    def finish(self) -> None:
        """Project the rows of the whole batch and write them to the output."""
        self.output[: self.gated.shape[0]] = self.module.out_proj(self.gated)[0]


_COMPUTING: Final = {MAMBA2: _Mamba2, SHORT_CONV: _ShortConv}


def _verify(
    layer: StateLayer, found: SelectiveMetadata, batch: StateBatch, one: _Mamba2 | _ShortConv
) -> StateRows | None:
    """Compute a step of one layer; return its draft rows, None without any.

    Settled rows advance the requests' states in place; drafts run over copies of the states.
    """
    slots = batch.slots[layer.group]
    if (prompting := batch.prompting).numel():
        one.run(_Rows.prompts(found, batch, prompting, slots[prompting]))
    if (decoding := batch.decoding).numel():
        one.run(_Rows.decode(found, batch.starts[decoding], slots[decoding]))
    drafting = batch.drafts.nonzero().squeeze(1)
    if not drafting.numel():
        one.finish()
        return None
    module: RecurrentLayer = layer.module
    # Block 0 stands for "no state" in vLLM's operators.
    copies = [cache.new_zeros(drafting.numel() + 1, *cache.shape[1:]) for cache in module.kv_cache]
    for copy, cache in zip(copies, module.kv_cache, strict=True):
        copy[1:] = cache[slots[drafting]]
    first = (batch.starts + batch.settled)[drafting]
    taken = []
    for turn in range(int(batch.drafts.max())):
        having = (batch.drafts[drafting] > turn).nonzero().squeeze(1)
        taken.append(first[having] + turn)
        one.run(_Rows.decode(found, taken[-1], having + 1), tuple(copies))
    one.finish()
    order = torch.cat(taken).argsort()
    return StateRows(
        requests=tuple(drafting.tolist()),
        draft_len=tuple(batch.drafts[drafting].tolist()),
        slots=slots[drafting],
        parts=one.parts(torch.cat(taken)[order], order),
    )


def hook_mixer(
    layer: StateLayer,
    batch: Callable[[], StateBatch | None],
    verify: Callable[[StateRows], None],
) -> None:
    """Let a layer verify drafts over copies of its states, and hand its rows to ``verify``.

    vLLM's own forward runs where the step or the layer's metadata is missing.

    Args:
        layer: a layer whose forward computes in place.
        batch: returns the present step; None: vLLM's own forward runs.
        verify: gets the draft rows of each step that has some.
    """
    from vllm.forward_context import get_forward_context

    module: Any = layer.module
    name, (first, second) = FORWARDS[layer.kind]
    own, computing = getattr(module, name), _COMPUTING[layer.kind]

    def forward(*args: Tensor, **named: Tensor) -> object:
        step, metadata = batch(), get_forward_context().attn_metadata
        found = metadata.get(module.prefix) if isinstance(metadata, dict) else None
        if step is None or found is None:
            return own(*args, **named)
        given = dict(zip((first, second), args, strict=False)) | named
        rows = _verify(layer, found, step, computing(module, given[first], given[second]))
        if rows is not None:
            verify(rows)
        return None

    setattr(module, name, forward)


def unhook_mixers(layers: Sequence[StateLayer]) -> None:
    """Undo ``hook_mixer``; layers that are not hooked stay as they are."""
    for layer in layers:
        if layer.kind in FORWARDS and FORWARDS[layer.kind][0] in vars(layer.module):
            delattr(layer.module, FORWARDS[layer.kind][0])


def take_in_mamba2(module: Mamba2Layer, state: Tensor, convolved: Tensor, dt: Tensor) -> Tensor:
    """Return the states after one more row each, as vLLM's operator of Mamba-2 leaves them.

    Args:
        module: the layer.
        state: ``[num_requests, num_heads, head_size, state_size]``; it is not changed.
        convolved: ``[num_requests, channels]``, outputs of the convolution.
        dt: ``[num_requests, num_heads]``, before its bias and softplus.
    """
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import selective_state_update

    count, (heads, size, inner) = state.shape[0], state.shape[1:]
    after = state.new_zeros(count + 1, *state.shape[1:])
    after[1:] = state
    rows, b, c = (part.contiguous() for part in module.split_hidden_states_B_C_fn(convolved))
    groups = module.n_groups // module.tp_size
    slots = torch.arange(1, count + 1, dtype=torch.int32).unsqueeze(1)
    selective_state_update(
        after,
        rows.view(count, heads, size),
        dt[:, :, None].expand(-1, -1, size),
        module.A[:, None, None].expand(-1, size, inner).to(dtype=torch.float32),
        b.view(count, groups, -1),
        c.view(count, groups, -1),
        module.D[:, None].expand(-1, size),
        module.dt_bias[:, None].expand(-1, size),
        dt_softplus=True,
        state_batch_indices=slots,
        dst_state_batch_indices=slots,
        out=rows.new_empty(count, heads, size),
    )
    return after[1:]
