"""Short causal convolutions: the state is the last inputs of each request.

A depthwise convolution over time of few taps, as in Gated delta net, Mamba ("Mamba: Linear-Time
Sequence Modeling with Selective State Spaces", Gu and Dao, 2023, section 3.4) and LFM2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from ..draft_tree import Parents
from ..errors import LayerError
from ..recurrence import (
    FLOATS,
    Paths,
    Recurrence,
    RowPart,
    by_request,
    check_rows,
    check_state,
    positive,
    states_of,
)


@attrs.frozen
class ShortConv(Recurrence):
    """Describe the state ``[num_states, width - 1, channels]`` of a convolution of ``width`` taps.

    The state is the last ``width - 1`` inputs, the oldest first. A row is staged as one tensor,
    ``[num_rows, channels]`` in the state's dtype: the input of the convolution. Commit moves
    bytes and computes nothing.

    Attributes:
        width: taps of the convolution, at least 2.

    Raises:
        LayerError: ``width`` is not an int of at least 2.
    """

    moves_bytes: ClassVar[bool] = True

    width: int = attrs.field(validator=positive)

    @width.validator
    def _has_a_past(self, attribute: attrs.Attribute[int], value: int) -> None:
        """Refuse, with a LayerError, a width below 2."""
        if value < 2:
            raise LayerError(
                "ShortConv", "width is not valid", expected="at least 2 taps", got=value
            )

    def check(self, layer: str, state: Tensor) -> None:
        """Refuse, with a LayerError, a state that does not hold ``width - 1`` inputs of floats."""
        check_state(layer, state, "[num_states, width - 1, channels]", FLOATS)
        if state.shape[1] != self.width - 1:
            raise LayerError(
                "LayerRef",
                f"the state of {layer!r} does not hold the past of its convolution",
                expected=f"{self.width - 1} inputs for {self.width} taps",
                got=f"{state.shape[1]} in {list(state.shape)}",
                hint="pass a view of the last width - 1 inputs if the buffer is longer",
            )

    def given(self, state: Tensor) -> tuple[RowPart, ...]:
        """Name the one part of a row: the input of the convolution."""
        return (RowPart.of("input", state.dtype, state.shape[2]),)

    def step(self, state: Tensor, row: Sequence[Tensor]) -> Tensor:
        """Drop the oldest input, and add the row as the newest."""
        return torch.cat([state[:, 1:], row[0].unsqueeze(1)], dim=1)

    def outputs(
        self,
        state: Tensor,
        slots: Tensor | Sequence[int],
        lengths: Sequence[int],
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        parents: Parents | None = None,
    ) -> tuple[Tensor, tuple[Tensor]]:
        """Convolve a window's rows, each over its request's past and the rows before it.

        Nothing is written. This is the reference: the products of the taps are added in float32
        from the oldest to the newest, then the bias.

        Args:
            state: ``[num_states, width - 1, channels]``, any strides.
            slots: int ``[num_requests]``, the state of each request; -1 starts from zeros.
            lengths: rows of each request, settled and draft; they lie request by request.
            inputs: ``[num_rows, channels]``.
            weight: ``[channels, width]``, the newest tap last.
            bias: ``[channels]``.
            parents: the parent of each draft row, if drafts are trees: as ``tree`` of
                ``TransactionManager.window``, with one draft row for each parent. A row then sees
                the settled rows and its own path. Waits for the device.

        Returns:
            Outputs, float32 ``[num_rows, channels]``, without any activation, and the tensor to
            stage: the inputs.

        Raises:
            LayerError: the state is not the convolution's, the rows do not fit it or the lengths,
                the weight or the bias does not fit, or the slots are not the requests'.
            TreeError: the trees are malformed, or do not fit the lengths.
        """
        self.check("outputs", state)
        channels = state.shape[2]
        lengths = check_rows(lengths, inputs=(inputs, (channels,)))
        check_rows([channels], weight=(weight, (self.width,)))
        if bias is not None:
            check_rows([channels], bias=(bias, ()))
        if parents is not None:
            paths = Paths.of(slots, lengths, parents)
            rows = paths.take(inputs)
            whole, (staged,) = self.outputs(state, paths.slots, paths.lengths, rows, weight, bias)
            return whole[paths.first], (staged[paths.first],)
        staged = inputs.to(state.dtype)
        outputs = []
        requests = zip(
            states_of(state, slots, lengths, torch.float32),
            by_request(staged, lengths),
            strict=True,
        )
        for past, rows in requests:
            line = torch.cat([past, rows.float()])
            total = torch.zeros_like(rows, dtype=torch.float32)
            for tap in range(self.width):
                total = total + line[tap : tap + rows.shape[0]] * weight[:, tap].float()
            outputs.append(total if bias is None else total + bias.float())
        whole = torch.cat(outputs) if outputs else staged.float()
        return whole, (staged,)
