"""Recurrent layers for the library, and hooks by which they verify over copies of their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from ....errors import LayerError
from ....layers import LayerRef
from ....recurrent import Recurrence, RowPart, ShortConv
from ...serving.state_steps import StateSteps
from ..internals import Foreign, gated_delta, mixers
from ..internals.class_swaps import check_methods
from ..internals.mixers import StateBatch
from ..internals.replaced_names import not_called
from ..internals.state_layers import StateLayer
from ..policy.engine import GATED_DELTA, MAMBA2, SHORT_CONV


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
        expected = "float32 [num_states, num_heads, key_size, value_size]"
        _check(layer, state, expected, (torch.float32,))

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


@attrs.frozen(eq=False)
class OwnMamba2(Recurrence):
    """A Mamba-2 layer that takes rows in by vLLM's own operator, to the bit.

    A row is staged as two tensors in the model's dtype: the output of the convolution,
    ``[num_rows, channels]``, then dt, ``[num_rows, num_heads]``. A state is rounded to its dtype
    after each row, as vLLM rounds it after each token.

    Attributes:
        module: vLLM's layer.
        channels: width of the convolution.
        dtype: dtype of the rows.
        stored: dtype of the states.
    """

    module: Foreign = attrs.field(repr=False)
    channels: int
    dtype: torch.dtype
    stored: torch.dtype

    def check(self, layer: str, state: Tensor) -> None:
        """Refuse a state that is not ``[num_states, num_heads, head_size, state_size]``."""
        expected = "float32 or bfloat16 [num_states, num_heads, head_size, state_size]"
        _check(layer, state, expected, (torch.float32, torch.bfloat16))

    def given(self, state: Tensor) -> tuple[RowPart, ...]:
        """List the output of the convolution, and dt."""
        return (
            RowPart.of("convolved", self.dtype, self.channels),
            RowPart.of("dt", self.dtype, state.shape[1]),
        )

    def step(self, state: Tensor, row: Sequence[Tensor]) -> Tensor:
        """Take one row per request into its state."""
        convolved, dt = (part.to(self.dtype) for part in row)
        return mixers.take_in(self.module, state.to(self.stored), convolved, dt).float()


def _check(layer: str, state: Tensor, expected: str, dtypes: Sequence[torch.dtype]) -> None:
    if state.ndim != 4 or state.dtype not in dtypes:
        raise LayerError(
            "LayerRef",
            f"the state of {layer!r} does not fit vLLM's operator",
            expected=expected,
            got=f"{state.dtype} {list(state.shape)}",
        )


def state_ref(layer: StateLayer) -> LayerRef:
    """Describe a layer for the library: the past of its convolution, and its state."""
    width, channels = layer.past.shape[1] + 1, layer.past.shape[2]
    given, dtype = (layer.module, channels, layer.past.dtype), {"group": layer.group}
    if layer.state is None:
        return LayerRef.recurrent(layer.name, layer.past, replay=[ShortConv(width)], **dtype)
    own: Recurrence = OwnGatedDelta(*given)
    if layer.kind == MAMBA2:
        own = OwnMamba2(*given, layer.state.dtype)
    replay = [ShortConv(width), own]
    return LayerRef.recurrent(layer.name, layer.past, layer.state, replay=replay, **dtype)


def operators_differ(modules: Sequence[Foreign]) -> str | None:
    """Say in a sentence how vLLM's operators differ from the known ones; None if they do not."""
    from ..internals.state_layers import kind_of

    kinds = {kind_of(module): type(module) for module in modules}
    if GATED_DELTA in kinds and (wrong := gated_delta.core_differs()) is not None:
        return wrong
    for kind in (MAMBA2, SHORT_CONV):
        if kind in kinds:
            name, parameters = mixers.FORWARDS[kind]
            wrong = check_methods(kinds[kind], {name: parameters})
            wrong = wrong or not_called(getattr(kinds[kind], name))
            if wrong is not None:
                return wrong
    return None


def hook_states(
    steps: StateSteps, layers: Sequence[StateLayer], batch: Callable[[], StateBatch | None]
) -> Callable[[], None]:
    """Let layers with states verify over copies, and hand their draft rows to the steps.

    Args:
        steps: the steps of the layers' runner.
        layers: the layers.
        batch: returns the requests of the present step; None outside of steps.

    Returns:
        A function that undoes it.
    """
    undo = gated_delta.hook_core() if any(one.kind == GATED_DELTA for one in layers) else None

    def hook(layer: StateLayer) -> None:
        ref = steps.manager.layers[layer.name]
        if layer.kind == GATED_DELTA:
            gated_delta.hook_layer(layer, lambda rows: steps.verified(ref, rows))
        else:
            mixers.hook_mixer(layer, batch, lambda rows: steps.verified(ref, rows))

    for layer in layers:
        hook(layer)

    def unhook() -> None:
        gated_delta.unhook_layers(layers)
        mixers.unhook_mixers(layers)
        if undo is not None:
            undo()

    return unhook
