"""vLLM's attention by Triton over windows whose drafts wait in spare slots.

See ``slot_reading``. The kernels take tiles of a size that does not depend on the blocks', so their
sums are stock's.
"""

from __future__ import annotations

from torch import Tensor

from ..internals import backends
from ..internals.backends import BatchTables
from ..internals.runner_protocols import AttentionLayer
from .slot_reading import SlotBuilder, SlotHook, attend, write

_TritonBuilder, _TritonImpl, _TritonBackend = backends.triton_attention()


class WindowTritonBuilder(SlotBuilder, _TritonBuilder):  # type: ignore[misc, valid-type]
    """vLLM's builder of metadata, which also marks forwards that have a window."""

    kvtxn_tables = BatchTables()


class WindowTritonImpl(_TritonImpl):  # type: ignore[misc, valid-type]
    """vLLM's Triton attention of a layer, which reads the step's window if the step has one."""

    kvtxn: SlotHook | None = None

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write the batch's rows: the window's drafts to spare slots, all others to their own."""
        writer = super().do_kv_cache_update
        write(self.kvtxn, lambda slots: writer(layer, key, value, kv_cache, slots), slot_mapping)

    def forward(
        self,
        layer: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: object,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend over cache and window into ``output`` as ``attend`` does."""
        own, given = super().forward, (layer, query, key, value)
        scales = output_scale, output_block_scale
        found: Tensor = attend(
            self.kvtxn,
            lambda cache, metadata: own(*given, cache, metadata, output, *scales),
            *(kv_cache, attn_metadata),
        )
        return found


class WindowTritonBackend(_TritonBackend):  # type: ignore[misc, valid-type]
    """kvtxn's attention backend, which vLLM finds under the name TRITON_ATTN."""

    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_impl_cls() -> type[WindowTritonImpl]:
        """Return the class of the layers' attention."""
        return WindowTritonImpl

    @staticmethod
    def get_builder_cls() -> type[WindowTritonBuilder]:
        """Return the class of the metadata builders."""
        return WindowTritonBuilder
