"""What the states of recurrent layers must be: a float64 recurrence, and vLLM's operator's bits.

Both take one token after another in, and nothing but tokens that were kept. There is a pair for
gated delta nets, for Mamba-2 layers and for short convolutions.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from cache_oracle import words
from torch import Tensor


class Twin:
    """A layer's recurrence for one request, in float64.

    Attributes:
        past: ``[width - 1, channels]``, the last inputs of the convolution, in their own dtype.
        state: the state of one request.
    """

    def __init__(self, layer: Any, weight: Tensor, bias: Tensor | None = None) -> None:
        self.layer, self.weight, self.bias = layer, weight.double(), bias
        past, *states = layer.kv_cache
        self.past = torch.zeros(weight.shape[1] - 1, weight.shape[0], dtype=past.dtype)
        self.state = torch.zeros([*states[0].shape[1:]] if states else [1], dtype=torch.float64)

    def convolve(self, row: Tensor) -> Tensor:
        """Take the input of the convolution in; returns its output, as the operator stores it."""
        line = torch.cat([self.past, row.unsqueeze(0)])
        self.past = line[1:]
        mixed = (line.double() * self.weight.T).sum(0)
        mixed = mixed if self.bias is None else mixed + self.bias.double()
        return torch.nn.functional.silu(mixed).to(row.dtype).double()


class GatedTwin(Twin):
    """A gated delta net: a row is the input of the convolution, and both gates."""

    def take_in(self, row: Tensor, b: Tensor, a: Tensor) -> None:
        """Take one token in."""
        layer, mixed = self.layer, self.convolve(row)
        heads = layer.num_v_heads // layer.tp_size
        keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
        _, key, value = mixed.split([keys, keys, values])
        key = key.view(layer.num_k_heads // layer.tp_size, -1)
        key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
        key = key.repeat_interleave(heads // key.shape[0], 0)
        value = value.view(heads, -1)
        rate = torch.nn.functional.softplus(a.double() + layer.dt_bias.double())
        decay = torch.exp(-layer.A_log.double().exp() * rate)
        beta = torch.sigmoid(b.double())
        state = self.state * decay[:, None, None]
        fresh = beta[:, None] * (value - (state * key.unsqueeze(-1)).sum(1))
        self.state = state + key.unsqueeze(-1) * fresh.unsqueeze(1)


class MambaTwin(Twin):
    """A Mamba-2 layer: a row is the input of the convolution, and dt."""

    def take_in(self, row: Tensor, dt: Tensor) -> None:
        """Take one token in."""
        layer, mixed = self.layer, self.convolve(row)
        heads, size, inner = self.state.shape
        rows, b, _ = mixed.split([heads * size, layer.n_groups * inner, layer.n_groups * inner])
        rate = torch.nn.functional.softplus(dt.double() + layer.dt_bias.double())
        b = b.view(layer.n_groups, inner).repeat_interleave(heads // layer.n_groups, 0)
        fresh = (rate[:, None] * rows.view(heads, size)).unsqueeze(-1) * b.unsqueeze(1)
        self.state = self.state * torch.exp(rate * layer.A.double())[:, None, None] + fresh


class ConvTwin(Twin):
    """A short convolution: a row is its input."""

    def take_in(self, row: Tensor) -> None:
        """Take one token in."""
        self.convolve(row)


class Bits:
    """A layer's states of one request, taken in token by token by vLLM's own operator.

    Attributes:
        states: past of the convolution and state, one place each beside an empty one.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.states = [cache.new_zeros(2, *cache.shape[1:]) for cache in layer.kv_cache]
        self.one = torch.tensor([[1]], dtype=torch.int32)

    def copy(self, layer: Any, block: int) -> None:
        """Begin where a prompt has led to."""
        for mine, cache in zip(self.states, layer.kv_cache, strict=True):
            mine[1] = cache[block]

    def differ(self, layer: Any, block: int) -> bool:
        """Tell whether the cache holds other bits."""
        return not all(
            torch.equal(words(mine[1]), words(cache[block]))
            for mine, cache in zip(self.states, layer.kv_cache, strict=True)
        )

    def convolve(self, row: Tensor, weight: Tensor, bias: Any, activation: Any) -> Tensor:
        """Take an input of the convolution in; returns ``[1, channels]``."""
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        past = self.states[0] if is_conv_state_dim_first() else self.states[0].transpose(-1, -2)
        line = row.unsqueeze(0).clone()
        where: dict[str, Any] = {"conv_state_indices": self.one}
        return causal_conv1d_update(line, past, weight, bias, activation, **where)


class GatedBits(Bits):
    """A gated delta net's states."""

    def __init__(self, layer: Any) -> None:
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        super().__init__(layer)
        self.own = inspect.unwrap(gdn_attention._cpu_gdn_attention_nonspec)
        names = ("conv1d", "activation", "A_log", "dt_bias", "rearrange_mixed_qkv")
        found = {name: getattr(layer, name) for name in names}
        self.layer = SimpleNamespace(kv_cache=tuple(self.states), **found)
        heads = layer.num_v_heads // layer.tp_size
        self.out = torch.empty(1, heads, layer.head_v_dim, dtype=torch.bfloat16)

    def take_in(self, row: Tensor, b: Tensor, a: Tensor) -> None:
        """Take one token in."""
        one = SimpleNamespace(
            spec_sequence_masks=None, num_accepted_tokens=None, has_initial_state=None,
            num_decodes=1, num_decode_tokens=1, num_prefills=0, num_prefill_tokens=0,
            non_spec_state_indices_tensor=torch.tensor([1], dtype=torch.int32),
            non_spec_query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        )  # fmt: skip
        self.own(self.layer, one, *(part.unsqueeze(0) for part in (row, b, a)), self.out)


class MambaBits(Bits):
    """A Mamba-2 layer's states."""

    def take_in(self, row: Tensor, dt: Tensor) -> None:
        """Take one token in."""
        from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update

        layer, state = self.layer, self.states[1]
        heads, size, inner = state.shape[1:]
        mixed = self.convolve(row, layer.conv_weights, layer.conv1d.bias, layer.activation)
        widths = [heads * size, layer.n_groups * inner, layer.n_groups * inner]
        rows, b, c = (part.contiguous() for part in mixed.split(widths, dim=-1))
        selective_state_update(
            state, rows.view(1, heads, size), dt.view(1, heads, 1).expand(-1, -1, size),
            layer.A.view(heads, 1, 1).expand(-1, size, inner).float(),
            b.view(1, -1, inner), c.view(1, -1, inner), layer.D.view(heads, 1).expand(-1, size),
            dt_bias=layer.dt_bias.view(heads, 1).expand(-1, size), dt_softplus=True,
            state_batch_indices=self.one, dst_state_batch_indices=self.one,
            out=rows.new_empty(1, heads, size),
        )  # fmt: skip


class ConvBits(Bits):
    """A short convolution's state."""

    def take_in(self, row: Tensor) -> None:
        """Take one token in."""
        weight = self.layer.conv.weight
        self.convolve(row, weight.view(weight.shape[0], -1), self.layer.conv.bias, None)


class Family:
    """How to watch one kind of layer.

    Args:
        layer: vLLM's layer.
        weight: of a gated delta net's convolution, ``[channels, width]``, as the checkpoint has
            it: vLLM packs its own.
    """

    def __init__(self, layer: Any, weight: Tensor | None) -> None:
        self.layer = layer
        self.bias: Tensor | None = None
        self.kind = type(layer).__name__
        if self.kind == "MambaMixer2":
            self.classes: Any = (MambaTwin, MambaBits)
            self.weight, self.bias = layer.conv_weights, layer.conv1d.bias
        elif self.kind == "ShortConv":
            self.classes = (ConvTwin, ConvBits)
            self.weight = layer.conv.weight.view(layer.conv.weight.shape[0], -1)
        else:
            assert weight is not None
            self.classes = (GatedTwin, GatedBits)
            self.weight = self._of_this_rank(weight)

    def _of_this_rank(self, weight: Tensor) -> Tensor:
        layer = self.layer
        parts = weight.split([layer.key_dim, layer.key_dim, layer.value_dim])
        return torch.cat([part.chunk(layer.tp_size)[layer.tp_rank] for part in parts])

    def listen(self, keep: Any) -> None:
        """Call ``keep`` with what ``rows`` needs, at each forward."""
        layer = self.layer
        if self.kind == "QwenGatedDeltaNetAttention":
            own = layer._forward_method

            def forward(hidden_states: Tensor) -> Tensor:
                keep(hidden_states.clone())
                return own(hidden_states)

            layer._forward_method = forward
            return

        def projected(module: Any, args: Any, named: Any, output: Any) -> None:
            keep(output[0].clone())

        def scaled(module: Any, args: Any, named: Any) -> None:
            self.factor = named.get("mup_vector", args[1] if len(args) > 1 else None)

        layer.in_proj.register_forward_hook(projected, with_kwargs=True)
        if self.kind == "MambaMixer2":
            layer.register_forward_pre_hook(scaled, with_kwargs=True)

    def rows(self, seen: Tensor) -> tuple[Tensor, ...]:
        """Return what the recurrence takes in, by row."""
        layer = self.layer
        if self.kind == "MambaMixer2":
            seen = seen if self.factor is None else seen * self.factor
            widths = [layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size]
            _, row, dt = seen.split(widths, dim=-1)
            return row, dt
        if self.kind == "ShortConv":
            first, _, last = seen.chunk(3, dim=-1)
            return (first * last,)
        qkvz, _ = layer.in_proj_qkvz(seen)
        ba, _ = layer.in_proj_ba(seen)
        query, key, value, _, b, a = layer.fix_query_key_value_ordering(qkvz, ba)
        return torch.cat([part.flatten(1) for part in (query, key, value)], 1), b, a

    def twin(self) -> Any:
        """Make the float64 twin of a new request."""
        return self.classes[0](self.layer, self.weight, self.bias)

    def bits(self) -> Any:
        """Make the operator's states of a new request."""
        return self.classes[1](self.layer)
