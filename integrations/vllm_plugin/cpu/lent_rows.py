"""vLLM's own attention over draft rows that wait: for one call of it, they lie in their slots.

The slots are lent to the drafts while a layer attends; after the call they hold, byte for byte, the
rows that they held before. So every sum is stock's, and between two layers no draft is in the
cache. One thread runs the layers one after another, so nobody else looks in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import LayerError
from ....row_io import read, select, write
from ...serving.state_steps import StateSteps
from ..internals import layers as attention_layers
from ..internals.class_swaps import (
    check_methods,
    is_swapped,
    restore_class,
    swap_class,
)
from ..internals.layers import TargetLayer
from ..internals.protocols.layers import AttentionLayer
from .attention import LayerHook, WindowMixin


class LentRowsMixin(WindowMixin):
    """A mixin of vLLM's attention that stages draft rows, and lends them their slots for a call.

    Attributes:
        kvtxn_before: the slots of the drafts, and the bytes that they hold between two calls, one
            tensor per plane; None while no slot is lent.
    """

    kvtxn_before: tuple[Tensor, list[Tensor]] | None = None

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write all rows, stage the draft rows, and remember the bytes below them."""
        hook = self.kvtxn
        if hook is not None and hook.steps.deferring:
            assert isinstance(hook.steps, StateSteps)
            try:
                slots = hook.steps.draft_slots(hook.ref.group)
                before = [read(plane, slots) for plane in hook.ref.planes]
                hook.steps.stage(hook.ref, *self.kvtxn_stored(layer, key, value, kv_cache))
                self.kvtxn_before = slots, before
            except Exception as error:
                hook.steps.fail("stage", error)
        super(WindowMixin, self).do_kv_cache_update(  # type: ignore[misc]
            layer, key, value, kv_cache, slot_mapping
        )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run vLLM's own attention, and take the drafts out of their slots again."""
        try:
            attended: Tensor = super(WindowMixin, self).forward(  # type: ignore[misc]
                *args, **kwargs
            )
        finally:
            self.kvtxn_give_back()
        return attended

    def kvtxn_give_back(self) -> None:
        """Put the bytes below the drafts back; not after a failure, when drafts are written."""
        hook, lent = self.kvtxn, self.kvtxn_before
        self.kvtxn_before = None
        if hook is None or lent is None or not hook.steps.deferring:
            return
        slots, before = lent
        try:
            chosen = select(slots, torch.ones_like(slots, dtype=torch.bool))
            for plane, content in zip(hook.ref.planes, before, strict=True):
                write(plane, content, chosen)
        except Exception as error:
            hook.steps.fail("attend", error)


def hook_attention(steps: StateSteps, layers: Sequence[TargetLayer]) -> None:
    """Let these layers lend their slots to drafts; ``unhook_attention`` undoes this.

    Raises:
        LayerError: an attention class is not as expected; nothing was hooked.
        KVTxnError: a layer is hooked already.
    """
    for layer in layers:
        methods = attention_layers.ATTENTION_METHODS
        wrong = "its rows are latent" if layer.latent else check_methods(type(layer.impl), methods)
        if wrong is not None:
            raise LayerError("vllm", f"the attention of {layer.name!r} is unknown: {wrong}")
    for layer in layers:
        swap_class(layer.impl, LentRowsMixin)
        layer.impl.kvtxn = LayerHook(steps, steps.manager.layers[layer.name], None)


def unhook_attention(layers: Sequence[TargetLayer]) -> None:
    """Give these layers their own attention back; layers that are not hooked stay as they are."""
    for layer in layers:
        if is_swapped(layer.impl):
            for name in [name for name in vars(layer.impl) if name.startswith("kvtxn")]:
                delattr(layer.impl, name)
            restore_class(layer.impl)
