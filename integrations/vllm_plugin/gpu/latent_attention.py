"""vLLM's latent attention over windows whose drafts wait in spare slots; see ``slot_reading``.

The part that decodes reads the cache by its block table. What vLLM counts among prompts reads the
step's own rows from the forward; it is vLLM's own code over vLLM's own blocks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..internals import Foreign
from .slot_reading import SlotHook, attend, write


class WindowLatentImpl:
    """A mixin of vLLM's latent attention of a layer, which reads the step's window if there is one.

    Attributes:
        kvtxn: the layer's hook; None for a layer that is not the target's.
    """

    kvtxn: SlotHook | None = None

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *others: Any,
        **named: Any,
    ) -> None:
        """Write the batch's rows: the window's drafts to spare slots, all others to their own."""
        own = super().do_kv_cache_update  # type: ignore[misc]
        write(
            self.kvtxn,
            lambda slots: own(kv_c_normed, k_pe, kv_cache, slots, *others, **named),
            slot_mapping,
        )

    def forward_mqa(
        self, q: Foreign, kv_c_and_k_pe_cache: Tensor, attn_metadata: Foreign, layer: Foreign
    ) -> Any:
        """Attend over cache and window; without a window run vLLM's own attention."""
        own = super().forward_mqa  # type: ignore[misc]
        return attend(
            self.kvtxn,
            lambda cache, metadata: own(q, cache, metadata, layer),
            *(kv_c_and_k_pe_cache, attn_metadata),
        )
