"""Mamba-2: a selective state space whose decay is one number per head.

The algorithm is that of Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient
Algorithms Through Structured State Space Duality" (2024), in its recurrent form.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ..draft_tree import Parents
from ..errors import LayerError
from ..recurrence import (
    FLOATS,
    Paths,
    RowPart,
    by_request,
    check_heads,
    check_rows,
    check_state,
    one_of,
    positive,
    states_of,
)
from .rank_one import RankOne, take_in


def _per_head(recurrence: object, attribute: attrs.Attribute[Tensor], value: object) -> None:
    """Validate that a constant is a float32 tensor with one number per head, or an allowed None.

    Raises:
        LayerError: it is something else.
    """
    if value is None and attribute.default is None:
        return
    if not isinstance(value, Tensor) or value.ndim != 1 or value.dtype is not torch.float32:
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise LayerError(
            type(recurrence).__name__,
            f"{attribute.name} is not valid",
            expected="a float32 tensor [num_heads]",
            got=got,
            hint="A is negative, after -exp(A_log); a constant that is the same in each head "
            "may be expanded",
        )


def _decays(recurrence: object, attribute: attrs.Attribute[Tensor], value: Tensor) -> None:
    """Validate that no head's state grows from row to row: A is not above 0, and no NaN.

    A tensor on the device meta is not looked at.

    Raises:
        LayerError: a number is above 0, or NaN.
    """
    if not value.is_meta and not bool((value <= 0).all()):
        raise LayerError(
            type(recurrence).__name__,
            f"{attribute.name} is not valid",
            expected="a negative number per head",
            got=f"up to {float(value.max())}",
            hint="A is -exp(A_log), as the model's code computes it from its weights",
        )


@attrs.frozen(eq=False)
class Mamba2(RankOne):
    """Describe the state ``[num_states, num_heads, head_size, state_size]`` of a Mamba-2 layer.

    A row is staged as three tensors, in this order:

    - x, ``[num_rows, num_heads, head_size]``: after the convolution and its activation;
    - dt, ``[num_rows, num_heads]``: after its bias and softplus;
    - B, ``[num_rows, groups, state_size]``, in ``dtype``.

    These parts wait for the commit as B, ``x * dt`` and ``exp(dt * A)``. The last two are float32
    and computed once, when the row is staged, so that no executor computes an exponential.

    Attributes:
        A: float32 ``[num_heads]``, negative.
        groups: groups of heads that share B and C; divides the heads.
        D: float32 ``[num_heads]``, the factor of x in the output; None leaves the term out. No
            state depends on it.
        dtype: the dtype in which x and B are staged, and in which B waits for the commit.

    Raises:
        LayerError: an attribute does not have one of these values.
    """

    A: Tensor = attrs.field(validator=[_per_head, _decays], repr=False)
    groups: int = attrs.field(default=1, validator=positive)
    D: Tensor | None = attrs.field(default=None, validator=_per_head, repr=False)
    dtype: torch.dtype = attrs.field(default=torch.float32, validator=one_of(*FLOATS))

    def check(self, layer: str, state: Tensor) -> None:
        """Refuse a state whose heads differ from A's or D's, or are not a multiple of ``groups``.

        Raises:
            LayerError: it is another one, or of another rank, dtype or device.
        """
        check_state(layer, state, "[num_states, num_heads, head_size, state_size]", FLOATS)
        check_heads(layer, "groups", self.groups, state.shape[1])
        for name, constant in (("A", self.A), ("D", self.D)):
            if constant is not None and (
                constant.shape[0] != state.shape[1] or constant.device != state.device
            ):
                raise LayerError(
                    "LayerRef",
                    f"{name} of {layer!r} does not fit its state",
                    expected=f"[{state.shape[1]}] on {state.device}",
                    got=f"{list(constant.shape)} on {constant.device}",
                )

    def given(self, state: Tensor) -> tuple[RowPart, ...]:
        """List x, dt and B."""
        heads, head_size, state_size = state.shape[1:]
        return (
            RowPart.of("x", self.dtype, heads, head_size),
            RowPart.of("dt", torch.float32, heads),
            RowPart.of("B", self.dtype, self.groups, state_size),
        )

    def kept(self, state: Tensor) -> tuple[RowPart, ...]:
        """List key, value and decay, which hold B, ``x * dt`` and ``exp(dt * A)``."""
        return self.parts_of(state, self.groups, self.dtype, per_channel=False)

    def prepare(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return B unchanged, and ``x * dt`` and ``exp(dt * A)`` in float32."""
        x, dt, b = parts
        return b, x.float() * dt.unsqueeze(-1), torch.exp(dt * self.A)

    def outputs(
        self,
        state: Tensor,
        slots: Tensor | Sequence[int],
        lengths: Sequence[int],
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        parents: Parents | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Compute the outputs of a window's rows, and the tensors that the rows stage.

        A row sees its request's state with all rows of the window up to itself taken in. Nothing
        is written. This is the reference: one row after another, in float32, with sums over
        the state dimension in torch's order; a kernel with another order of sums agrees
        within 1e-5 of the largest output.

        Args:
            state: ``[num_states, num_heads, head_size, state_size]``, any strides.
            slots: int ``[num_requests]``, the state of each request; -1 starts from zeros.
            lengths: rows of each request, settled and draft; they lie request by request.
            x: ``[num_rows, num_heads, head_size]``.
            dt: ``[num_rows, num_heads]``, after its bias and softplus.
            b: ``[num_rows, groups, state_size]``.
            c: ``[num_rows, groups, state_size]``.
            parents: the parent of each draft row, if drafts are trees: as ``tree`` of
                ``TransactionManager.window``, with one draft row for each parent. A row then sees
                the settled rows and its own path. Waits for the device.

        Returns:
            Outputs, float32 ``[num_rows, num_heads, head_size]``, and the tensors to stage: x,
            dt, B.

        Raises:
            LayerError: the state is not Mamba-2's, the rows do not fit it or the lengths, or the
                slots are not the requests'.
            TreeError: the trees are malformed, or do not fit the lengths.
        """
        self.check("outputs", state)
        num_heads, head_size, state_size = state.shape[1:]
        lengths = check_rows(
            lengths,
            x=(x, (num_heads, head_size)),
            dt=(dt, (num_heads,)),
            b=(b, (self.groups, state_size)),
            c=(c, (self.groups, state_size)),
        )
        if parents is not None:
            paths = Paths.of(slots, lengths, parents)
            taken = (paths.take(part) for part in (x, dt, b, c))
            outputs, staged = self.outputs(state, paths.slots, paths.lengths, *taken)
            first = paths.first
            return outputs[first], (staged[0][first], staged[1][first], staged[2][first])
        staged = (x.to(self.dtype), dt.float(), b.to(self.dtype))
        key, value, decay = self.prepare(staged)
        rows = (key.float(), value, decay, c.float())
        each = zip(*(by_request(part, lengths) for part in rows), strict=True)
        per_group = state.shape[1] // self.groups
        outputs = torch.empty_like(value)
        number = 0
        for now, parts in zip(states_of(state, slots, lengths, torch.float32), each, strict=True):
            for k, v, e, reads in zip(*parts, strict=True):
                now = take_in(now, k, v, e)
                wide = reads.repeat_interleave(per_group, dim=0).unsqueeze(-2)
                outputs[number] = (now * wide).sum(-1)
                number += 1
        if self.D is not None:
            outputs += staged[0].float() * self.D[:, None]
        return outputs, staged
