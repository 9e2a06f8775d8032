"""vLLM's attention by Triton over windows whose drafts wait in spare slots: of rows, of latents.

See ``slot_reading``. The kernels take tiles of a size that does not depend on the blocks', so their
sums are stock's.
"""

from __future__ import annotations

from torch import Tensor

from ..seam import backends
from ..seam.backends import BatchTables, TritonLatentTables
from ..seam.runner_protocols import AttentionLayer
from .slot_reading import SlotBuilder, SlotHook, WindowBackend, WindowLatentImpl, attend, write

_TritonBuilder, _TritonImpl, _TritonBackend = backends.triton_attention()
_LatentBuilder, _LatentImpl, _LatentBackend = backends.triton_latent()


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
        """Write the batch's rows as ``write`` does: the window's drafts to spare slots."""
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
        """Attend over cache and window into ``output``, and return it, as ``attend`` does."""
        own, given = super().forward, (layer, query, key, value)
        scales = output_scale, output_block_scale
        found: Tensor = attend(
            self.kvtxn,
            lambda cache, metadata: own(*given, cache, metadata, output, *scales),
            *(kv_cache, attn_metadata),
        )
        return found


class WindowTritonBackend(WindowBackend, _TritonBackend):  # type: ignore[misc, valid-type]
    """kvtxn's attention backend, which vLLM finds under the name TRITON_ATTN."""

    supports_kv_cache_update_bypass = False
    kvtxn_impl, kvtxn_builder = WindowTritonImpl, WindowTritonBuilder


# -- latent rows ------------------------------------------------------------------------------


class WindowTritonLatentBuilder(SlotBuilder, _LatentBuilder):  # type: ignore[misc, valid-type]
    """vLLM's builder of TRITON_MLA's metadata, which also marks forwards that have a window."""

    kvtxn_tables = TritonLatentTables()


class WindowTritonLatentImpl(WindowLatentImpl, _LatentImpl):  # type: ignore[misc, valid-type]
    """vLLM's attention of a layer with TRITON_MLA; its kernel takes tiles of one size.

    Attributes:
        kvtxn_line_per_row: each decoding row has a line of the table, see ``TritonLatentTables``.
        kvtxn_keeps_order: the order of a batch decides which kernel a request gets: it decodes if
            it has as many rows as the first one, and counts among prompts otherwise.
    """

    kvtxn_line_per_row = True
    kvtxn_keeps_order = True


class WindowTritonLatentBackend(WindowBackend, _LatentBackend):  # type: ignore[misc, valid-type]
    """kvtxn's attention backend, which vLLM finds under the name TRITON_MLA."""

    kvtxn_impl, kvtxn_builder = WindowTritonLatentImpl, WindowTritonLatentBuilder
