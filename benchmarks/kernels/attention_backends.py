"""vLLM's attention backends over rows of a verify step, by vLLM's blocks and by blocks of one row.

Each class makes the calls that vLLM's layers make: the writer, and the attention with its metadata.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ... import LayerRef, TxnConfig
from ...backends.graphs.slot_block_table import slot_tables
from ...backends.move_rows.acceptance import acceptance_arg
from ...backends.move_rows.selection import Select
from ...backends.triton_executor import TritonExecutor
from ...integrations.vllm_plugin.seam import measuring
from ...integrations.vllm_plugin.seam.gpu_cache_layout import (
    by_rows,
    keys_and_values,
    waiting_rows,
)
from ...layout import RowLayout
from .timer import COLD_BYTES

#: Query heads, KV heads, head size; and query heads, width of a latent, of its rotary part.
HEADS: Final = (32, 8, 128)
LATENT: Final = (16, 512, 64)

#: Dtype of rows and queries.
NUMBER = torch.bfloat16

#: vLLM's bound on FlashAttention's splits in captured graphs.
_SPLITS: Final = 32


@attrs.frozen
class BackendCase:
    """A verify step of one attention backend.

    Attributes:
        backend: vLLM's name of it.
        requests: number of requests.
        context: tokens of each request before the step.
        fp8: the cache has 8-bit rows.
        block_size: rows of vLLM's blocks.
        drafts: drafts of each request.
    """

    backend: str
    requests: int
    context: int
    fp8: bool = False
    block_size: int = 16
    drafts: int = 4

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.requests * (self.drafts + 1)


class BackendLoad(abc.ABC):
    """The caches of some layers, and a step over them.

    Args:
        case: what to measure.
        device: where.
        layers: number of layers; None makes enough of them that none stays in the L2.

    Attributes:
        caches: whole caches with spare rows, as vLLM's layers have them.
        slots: int64 ``[num_rows]``, each row's own slot.
        table: vLLM's block table.
        refs: the layers over the blocks that vLLM hands out.
    """

    latent = False
    #: Lines of the table by slot that each request has.
    lines = 1

    def __init__(self, case: BackendCase, device: torch.device, layers: int | None = None) -> None:
        self.case, self.device = case, device
        made = torch.Generator(device).manual_seed(7)
        self.longest = case.context + case.drafts + 1
        per = -(-self.longest // case.block_size)
        own, waiting = case.requests * per, -(-case.rows // case.block_size)
        self.spare, self.width = own * case.block_size, self._width()
        size = (own + waiting) * case.block_size * self.width
        nbytes = size * (1 if case.fp8 else NUMBER.itemsize)
        layers = layers or max(3, min(64, -(-COLD_BYTES // nbytes)))
        shape = (own + waiting, case.block_size, *self._row_shape())
        self.whole = [
            self._stored(torch.randn(shape, generator=made, device=device)) for _ in range(layers)
        ]
        self.caches = [each if self.latent else each.transpose(1, 2) for each in self.whole]
        order = torch.randperm(own, generator=made, device=device)
        self.table = order.view(case.requests, per).to(torch.int32)
        at = case.context + torch.arange(case.drafts + 1, device=device)
        slots = self.table[:, at // case.block_size].long() * case.block_size
        self.slots = (slots + at % case.block_size).reshape(-1)
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.starts = torch.arange(case.requests + 1, **numbers) * (case.drafts + 1)
        self.lengths = torch.full((case.requests,), self.longest, **numbers)
        self.layout = RowLayout.build((case.drafts,) * case.requests, (1,) * case.requests, device)
        self.one = torch.ones(1, device=device)
        self.module = SimpleNamespace(_q_scale=self.one, _k_scale=self.one, _v_scale=self.one)
        self.made = made
        self.stock = self.metadata(self.table)
        self._prepare_commit(own)
        self.written, self.ours = self.around()

    def random(self, *size: int) -> Tensor:
        """Draw random numbers of the model's dtype, on the device."""
        return torch.randn(size, generator=self.made, device=self.device).to(NUMBER)

    # -- work of a step besides its layers -----------------------------------------------

    def around(self) -> tuple[Tensor, Any]:
        """Launch what a step does around its layers: make the table by slot, then commit.

        Returns:
            The slots to write to, and the metadata by slot.
        """
        table, written = slot_tables(
            *(self.starts, self.lengths, self.table, self.slots, self.layout.position),
            spare=self.spare,
            block_size=self.case.block_size,
            longest=self.longest,
            lines=self.lines,
        )
        metadata = self.metadata(table, by_slot=True)
        self._executor.use_slots(self.slots)
        acceptance = acceptance_arg(self._accepted, self.layout)
        self._executor.kernel_call(self._plan, self.layout, self._counters, acceptance).run()
        return written, metadata

    def _prepare_commit(self, own: int) -> None:
        """Make the layers over the ``own`` blocks, and the plan of a commit from the spare rows."""
        self.refs = [self._ref(f"layer.{i}", each[:own]) for i, each in enumerate(self.whole)]
        whole = [self._ref(f"layer.{i}", each) for i, each in enumerate(self.whole)]
        self._executor = TritonExecutor(self.refs, TxnConfig(max_rows=self.case.rows))
        rows = [part for ref in whole for part in waiting_rows(ref, self.spare, self.case.rows)]
        self._plan = self._executor.plan_move("spare", self.refs, rows, Select.KEPT)
        self._accepted = torch.arange(self.case.requests, device=self.device) % 3
        self._counters = torch.zeros(1, 4, dtype=torch.int64, device=self.device)

    # -- the layers -----------------------------------------------------------------------

    def blocks(self) -> list[Tensor]:
        """Write and attend as stock, layer by layer; returns each layer's output."""
        return [self._layer(cache, cache, self.slots, self.stock) for cache in self.caches]

    def by_row(self) -> list[Tensor]:
        """Write drafts to spare slots and attend by blocks of one row; returns each output."""
        return [
            self._layer(cache, self.one_row_blocks(cache), self.written, self.ours)
            for cache in self.caches
        ]

    def forget_drafts(self) -> None:
        """Overwrite the drafts' own slots, so that a read of these slots shows in the outputs."""
        drafts = self.slots[self.layout.position >= 0]
        for each in self.whole:
            each.flatten(0, 1).view(torch.uint8)[drafts] = 37

    @abc.abstractmethod
    def _layer(self, cache: Tensor, rows: Tensor, slots: Tensor, metadata: Any) -> Tensor:
        """Write a layer's rows into ``cache``, attend over ``rows``, and return the output."""

    @abc.abstractmethod
    def metadata(self, table: Tensor, *, by_slot: bool = False) -> Any:
        """Make vLLM's metadata of the step.

        Args:
            table: vLLM's block table, or the one by slot.
            by_slot: the table is by slot.
        """

    @abc.abstractmethod
    def one_row_blocks(self, cache: Tensor) -> Tensor:
        """View a cache as blocks of one row."""

    def _width(self) -> int:
        """Return the elements of a row in one layer."""
        return HEADS[1] * 2 * HEADS[2]

    def _row_shape(self) -> tuple[int, ...]:
        """Return the shape of a row in vLLM's cache."""
        return HEADS[1], 2 * HEADS[2]

    def _stored(self, rows: Tensor) -> Tensor:
        """Return numbers in the cache's format; 8-bit ones as uint8."""
        if self.case.fp8:
            return rows.to(torch.float8_e4m3fn).view(torch.uint8)
        return rows.to(NUMBER)

    def _ref(self, name: str, whole: Tensor) -> LayerRef:
        """Describe a layer over a whole cache or its first blocks."""
        dtype = "fp8_e4m3" if self.case.fp8 else "auto"
        one = 1.0 if self.case.fp8 else None
        if self.latent:
            return LayerRef.latent(name, whole, scale=one, kv_dtype=dtype)
        sides = keys_and_values(whole.transpose(1, 2), HEADS[2])
        return LayerRef(name, *sides, k_scale=one, v_scale=one, kv_dtype=dtype)

    @property
    def dtype(self) -> str:
        """Name of the cache format, as vLLM has it."""
        return "fp8" if self.case.fp8 else "auto"


class TritonAttn(BackendLoad):
    """TRITON_ATTN; ``own`` is vLLM's attention of all layers."""

    def __init__(self, case: BackendCase, device: torch.device, layers: int | None = None) -> None:
        heads, kv_heads, size = HEADS
        dtype = "fp8" if case.fp8 else "auto"
        self.own = measuring.attention_of("TRITON_ATTN")(
            heads, size, size**-0.5, kv_heads, None, None, dtype
        )
        super().__init__(case, device, layers)
        query = self.random(case.rows, heads, size)
        self.query = query.to(torch.float8_e4m3fn) if case.fp8 else query
        self.key, self.value = self.random(2, case.rows, kv_heads, size)

    def _layer(self, cache: Tensor, rows: Tensor, slots: Tensor, metadata: Any) -> Tensor:
        """Write a layer's rows into ``cache``, attend over ``rows``, and return the output."""
        self.own.do_kv_cache_update(self.module, self.key, self.value, cache, slots)
        out = torch.empty(self.query.shape, dtype=NUMBER, device=self.device)
        given = self.query, self.key, self.value, rows, metadata, out
        found: Tensor = self.own.forward(self.module, *given)
        return found

    def metadata(self, table: Tensor, *, by_slot: bool = False) -> Any:
        """Return vLLM's metadata of the step, over this block table."""
        none = torch.empty(0, device=self.device)
        return SimpleNamespace(
            num_actual_tokens=self.case.rows,
            max_query_len=self.case.drafts + 1,
            query_start_loc=self.starts,
            max_seq_len=self.longest,
            seq_lens=self.lengths,
            block_table=table,
            seq_threshold_3D=16,
            num_par_softmax_segments=16,
            softmax_segm_output=none,
            softmax_segm_max=none,
            softmax_segm_expsum=none,
            causal=True,
            mm_prefix_range_tensor=None,
            rswa_prefix_lens=None,
            rswa_window=None,
        )

    def one_row_blocks(self, cache: Tensor) -> Tensor:
        """View a cache as blocks of one row."""
        rows = by_rows(cache)
        assert rows is not None
        return rows


class _Latent(BackendLoad):
    """A backend of latent attention; ``own`` has what its ``forward_mqa`` reads."""

    latent = True
    own: Any

    def __init__(self, case: BackendCase, device: torch.device, layers: int | None = None) -> None:
        heads, width, rotary = LATENT
        self.own = self._make()
        vars(self.own).update(
            kv_lora_rank=width,
            qk_rope_head_dim=rotary,
            kv_cache_dtype="fp8" if case.fp8 else "auto",
            scale=(128 + rotary) ** -0.5,
            num_heads=heads,
            dcp_world_size=1,
            dcp_rank=0,
            need_to_return_lse_for_decode=False,
        )
        super().__init__(case, device, layers)
        self.query = (self.random(case.rows, heads, width), self.random(case.rows, heads, rotary))
        self.latents = self.random(case.rows, width)
        self.rotary = self.random(case.rows, 1, rotary)

    @abc.abstractmethod
    def _make(self) -> Any:
        """Make vLLM's attention of a layer."""

    def _layer(self, cache: Tensor, rows: Tensor, slots: Tensor, metadata: Any) -> Tensor:
        """Write a layer's rows into ``cache``, attend over ``rows``, and return the output."""
        self.own.do_kv_cache_update(self.latents, self.rotary, cache, slots, self.dtype, self.one)
        read = rows.view(torch.float8_e4m3fn) if self.case.fp8 else rows
        out: Tensor = self.own.forward_mqa(self.query, read, metadata, self.module)[0]
        return out

    def one_row_blocks(self, cache: Tensor) -> Tensor:
        """View a cache as blocks of one row."""
        return cache.flatten(0, 1).unsqueeze(1)

    def _width(self) -> int:
        """Return the elements of a latent's row."""
        return LATENT[1] + LATENT[2]

    def _row_shape(self) -> tuple[int, ...]:
        """Return the shape of a latent's row."""
        return (self._width(),)


class TritonMla(_Latent):
    """TRITON_MLA; by row each row of a request has a line of the table, as its kernel wants it."""

    def __init__(self, case: BackendCase, device: torch.device, layers: int | None = None) -> None:
        self.lines = case.drafts + 1
        super().__init__(case, device, layers)

    def _make(self) -> Any:
        """Make vLLM's attention of a layer, without its constructor."""
        own = object.__new__(measuring.attention_of("TRITON_MLA"))
        own._sm_count = measuring.num_compute_units()
        return own

    def metadata(self, table: Tensor, *, by_slot: bool = False) -> Any:
        """Make vLLM's metadata of the step; by slot each row is a request of its own length."""
        lengths = self.lengths
        if by_slot:
            back = torch.arange(1 - self.lines, 1, device=self.device, dtype=torch.int32)
            lengths = (lengths.unsqueeze(1) + back).flatten().clamp(min=0)
        decode = SimpleNamespace(block_table=table, seq_lens=lengths)
        return SimpleNamespace(decode=decode, max_seq_len=self.longest, causal=True)


class FlashAttnMla(_Latent):
    """FLASH_ATTN_MLA: FlashAttention 3 over latents."""

    def _make(self) -> Any:
        """Make vLLM's attention of a layer, without its constructor."""
        return object.__new__(measuring.attention_of("FLASH_ATTN_MLA"))

    def metadata(self, table: Tensor, *, by_slot: bool = False) -> Any:
        """Return vLLM's metadata of the step, with FlashAttention's schedule.

        Args:
            table: the block table.
            by_slot: it has blocks of one row.
        """
        heads, width, rotary = LATENT
        rows = self.case.drafts + 1
        schedule = measuring.schedule(
            *(self.case.requests, rows, self.longest, heads, 1, rotary, self.lengths),
            headdim_v=width,
            cu_seqlens_q=self.starts,
            page_size=1 if by_slot else self.case.block_size,
            causal=True,
            num_splits=_SPLITS,
        )
        decode = SimpleNamespace(
            block_table=table,
            seq_lens=self.lengths,
            query_start_loc=self.starts,
            max_query_len=rows,
            max_seq_len=self.longest,
            scheduler_metadata=schedule,
            max_num_splits=_SPLITS,
            dcp_tot_seq_lens=None,
        )
        return SimpleNamespace(decode=decode)


#: By vLLM's name.
LOADS: Final[Mapping[str, type[BackendLoad]]] = {
    "TRITON_ATTN": TritonAttn,
    "TRITON_MLA": TritonMla,
    "FLASH_ATTN_MLA": FlashAttnMla,
}
