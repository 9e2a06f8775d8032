"""Gated delta nets for the library, and hooks by which they verify over copies of their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from ....errors import LayerError
from ....layers import LayerRef
from ....recurrent import Recurrence, RowPart, ShortConv
from ...serving.state_steps import StateSteps
from ..internals import Foreign, gated_delta
from ..internals.gated_delta import StateLayer


@attrs.frozen(eq=False)
class OwnGatedDelta(Recurrence):
    """A gated delta net that takes rows in by vLLM's own operator, to the bit.

    A row is staged as three tensors in the model's dtype: the output of the convolution,
    ``[num_rows, channels]``, then a and b, ``[num_rows, num_heads]``.

    Attributes:
        module: vLLM's layer.
        channels: width of the convolution.
        dtype: dtype of the rows.
    """

    module: Foreign = attrs.field(repr=False)
    channels: int
    dtype: torch.dtype

    def check(self, layer: str, state: Tensor) -> None:
        """Refuse a state that is not float32 ``[num_states, num_heads, key_size, value_size]``."""
        if state.ndim != 4 or state.dtype is not torch.float32:
            raise LayerError(
                "LayerRef",
                f"the state of {layer!r} does not fit vLLM's operator",
                expected="float32 [num_states, num_heads, key_size, value_size]",
                got=f"{state.dtype} {list(state.shape)}",
            )

    def given(self, state: Tensor) -> tuple[RowPart, ...]:
        """List the output of the convolution, a and b."""
        heads = state.shape[1]
        return (
            RowPart.of("convolved", self.dtype, self.channels),
            RowPart.of("a", self.dtype, heads),
            RowPart.of("b", self.dtype, heads),
        )

    def step(self, state: Tensor, row: Sequence[Tensor]) -> Tensor:
        """Take one row per request into its state."""
        convolved, a, b = (part.to(self.dtype) for part in row)
        return gated_delta.take_in(self.module, state, convolved, a, b)


def state_ref(layer: StateLayer) -> LayerRef:
    """Describe a layer for the library: the past of its convolution, and its state."""
    width, channels = layer.past.shape[1] + 1, layer.past.shape[2]
    own = OwnGatedDelta(layer.module, channels, layer.past.dtype)
    return LayerRef.recurrent(
        layer.name, layer.past, layer.state, group=layer.group, replay=[ShortConv(width), own]
    )


def hook_states(steps: StateSteps, layers: Sequence[StateLayer]) -> Callable[[], None]:
    """Let layers with states verify over copies, and hand their draft rows to the steps.

    Returns:
        A function that undoes it.
    """
    undo = gated_delta.hook_core()

    def hook(layer: StateLayer) -> None:
        ref = steps.manager.layers[layer.name]
        gated_delta.hook_layer(layer, lambda rows: steps.verified(ref, rows))

    for layer in layers:
        hook(layer)

    def unhook() -> None:
        gated_delta.unhook_layers(layers)
        undo()

    return unhook
