"""vLLM's latent attention by Triton over windows whose drafts wait in spare slots.

See ``slot_reading``. The kernel takes tiles of one size, so its sums are stock's.
"""

from __future__ import annotations

from ..internals import backends
from ..internals.backends import TritonLatentTables
from .slot_reading import SlotBuilder, WindowLatentImpl

_LatentBuilder, _LatentImpl, _LatentBackend = backends.triton_latent()


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


class WindowTritonLatentBackend(_LatentBackend):  # type: ignore[misc, valid-type]
    """kvtxn's attention backend, which vLLM finds under the name TRITON_MLA."""

    @staticmethod
    def get_impl_cls() -> type[WindowTritonLatentImpl]:
        """Return the class of the layers' attention."""
        return WindowTritonLatentImpl

    @staticmethod
    def get_builder_cls() -> type[WindowTritonLatentBuilder]:
        """Return the class of the metadata builders."""
        return WindowTritonLatentBuilder
