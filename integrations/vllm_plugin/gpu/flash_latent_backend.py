"""vLLM's FLASH_ATTN_MLA, reading windows whose drafts wait in spare slots."""

from __future__ import annotations

from ..seam import backends
from ..seam.backends import FlashLatentTables
from .slot_reading import SlotBuilder, WindowBackend, WindowLatentImpl

_BUILDER, _IMPL, _BACKEND = backends.flash_latent()


class WindowFlashLatentBuilder(SlotBuilder, _BUILDER):  # type: ignore[misc, valid-type]
    """vLLM's builder of FLASH_ATTN_MLA's metadata, which also marks forwards with a window."""

    kvtxn_tables = FlashLatentTables()


class WindowFlashLatentImpl(WindowLatentImpl, _IMPL):  # type: ignore[misc, valid-type]
    """vLLM's attention of a layer with FLASH_ATTN_MLA, which is FlashAttention 3."""


class WindowFlashLatentBackend(WindowBackend, _BACKEND):  # type: ignore[misc, valid-type]
    """kvtxn's attention backend, which vLLM finds under the name FLASH_ATTN_MLA."""

    kvtxn_impl, kvtxn_builder = WindowFlashLatentImpl, WindowFlashLatentBuilder
