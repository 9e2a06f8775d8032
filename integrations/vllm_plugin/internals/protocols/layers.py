"""vLLM's layers, their attention and its metadata as kvtxn reads them; see ``engine``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

# -- caches ---------------------------------------------------------------------------


class KVCacheSpec(Protocol):
    """``vllm.v1.kv_cache_interface.KVCacheSpec``: the cache of a layer, or of a group of them."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """The bytes of a block in one layer."""


# -- layers ---------------------------------------------------------------------------


class Layer(Protocol):
    """``vllm.model_executor.layers.attention_layer_base.AttentionLayerBase``: one with a cache."""

    kv_cache: Tensor | tuple[Tensor, ...]


class Backend(Protocol):
    """``vllm.v1.attention.backend.AttentionBackend``."""

    def get_name(self) -> str:
        """Return vLLM's name of the backend."""


class AttentionLayer(Protocol):
    """``vllm.model_executor.layers.attention.attention.Attention``; ``MLAAttention`` likewise."""

    impl: Any  # each backend's is another; ``FlashImpl`` and ``LatentImpl`` are two of them
    kv_cache: Tensor
    kv_cache_dtype: str
    layer_name: str
    _k_scale: Tensor
    _v_scale: Tensor
    _k_scale_float: float
    _v_scale_float: float

    def get_attn_backend(self) -> Backend:
        """Return the layer's backend."""


class ScaledImpl(Protocol):
    """``vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl``: how it makes scores."""

    scale: float
    sliding_window: int
    logits_soft_cap: float


class FlashImpl(Protocol):
    """``vllm.v1.attention.backends.flash_attn.FlashAttentionImpl``."""

    alibi_slopes: Tensor | None
    kv_cache_dtype: str
    logits_soft_cap: float
    scale: float
    sinks: Tensor | None
    sliding_window: tuple[int, int]
    vllm_flash_attn_version: int | None


class RecurrentLayer(Protocol):
    """``vllm.model_executor.layers.mamba.abstract.MambaBase``: a layer with states."""

    kv_cache: tuple[Tensor, ...]


class GatedDeltaLayer(RecurrentLayer, Protocol):
    """``vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention``."""

    A_log: Tensor
    dt_bias: Tensor
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    norm: nn.Module
    num_k_heads: int
    num_v_heads: int
    prefix: str
    tp_size: int
    value_dim: int

    def rearrange_mixed_qkv(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of rows."""

    def _can_use_fused_gdn_mtp_decode(self, attn_metadata: GatedDeltaMetadata) -> bool:
        """Tell whether the fused kernel computes a step."""


class Mamba2Layer(RecurrentLayer, Protocol):
    """``vllm.model_executor.layers.mamba.mamba_mixer2.MambaMixer2``."""

    A: Tensor
    D: Tensor
    dt_bias: Tensor
    head_dim: int
    is_blackwell: bool
    n_groups: int
    num_heads: int
    prefix: str
    ssm_state_size: int
    tp_size: int
    tped_conv_size: int
    tped_dt_size: int
    tped_intermediate_size: int

    def split_hidden_states_B_C_fn(self, hidden_states_B_C: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of the convolution's output: rows, B and C."""


class ShortConvLayer(RecurrentLayer, Protocol):
    """``vllm.model_executor.layers.mamba.short_conv.ShortConv``."""

    in_proj: nn.Module
    out_proj: nn.Module
    prefix: str


# -- metadata of a forward ------------------------------------------------------------


class BatchMetadata(Protocol):
    """``vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadata``; others have the same."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_actual_tokens: int


class TritonMetadata(BatchMetadata, Protocol):
    """``vllm.v1.attention.backends.triton_attn.TritonAttentionMetadata``."""

    max_seq_len: int


class FlashMetadata(TritonMetadata, Protocol):
    """``vllm.v1.attention.backends.flash_attn.FlashAttentionMetadata``."""

    causal: bool | Tensor
    max_num_splits: int
    max_query_len: int
    scheduler_metadata: Tensor | None


class LatentDecodes(Protocol):
    """``vllm.model_executor.layers.attention.mla_attention.MLACommonDecodeMetadata``."""

    block_table: Tensor
    seq_lens: Tensor


class LatentMetadata(Protocol):
    """``vllm.model_executor.layers.attention.mla_attention.MLACommonMetadata``."""

    causal: bool
    decode: LatentDecodes | None
    max_seq_len: int
    num_decode_tokens: int
    query_start_loc: Tensor


class FlashLatentDecodes(LatentDecodes, Protocol):
    """``vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLADecodeMetadata``."""

    max_num_splits: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    scheduler_metadata: Tensor | None


class FlashLatentMetadata(LatentMetadata, Protocol):
    """``vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLAMetadata``."""

    decode: FlashLatentDecodes | None


class GatedDeltaMetadata(Protocol):
    """``vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata``.

    A tensor is None where the counts say that nothing is in it; it is looked at after them.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    has_initial_state: Tensor
    non_spec_query_start_loc: Tensor
    non_spec_state_indices_tensor: Tensor | None
    non_spec_token_indx: Tensor
    num_accepted_tokens: Tensor
    num_decodes: int
    num_prefills: int
    num_spec_decode_tokens: int
    num_spec_decodes: int
    spec_query_start_loc: Tensor
    spec_sequence_masks: Tensor | None
    spec_sequence_masks_cpu: Tensor
    spec_state_indices_tensor: Tensor
    spec_token_indx: Tensor


class SelectiveMetadata(Protocol):
    """``vllm.v1.attention.backends.mamba_attn.BaseMambaAttentionMetadata``.

    A tensor is None where the counts say that nothing is in it; it is looked at after them.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    num_accepted_tokens: Tensor | None
    num_decode_tokens: int
    num_decodes: int
    num_prefills: int
    query_start_loc_d: Tensor
    state_indices_tensor_d: Tensor | None
    state_indices_tensor_p: Tensor


class MetadataBuilder(Protocol):
    """``vllm.v1.attention.backend.AttentionMetadataBuilder``."""

    layer_names: Sequence[str]


class FlashBuilder(MetadataBuilder, Protocol):
    """``vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder``."""

    block_size: int

    def _get_scheduler_metadata(self, **arguments: object) -> Tensor | None:
        """Make FlashAttention's schedule of a batch."""


class FlashLatentBuilder(MetadataBuilder, Protocol):
    """``vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLAMetadataBuilder``."""

    page_size: int

    def _schedule_decode(self, **arguments: object) -> Tensor | None:
        """Make FlashAttention's schedule of the rows that decode."""


class ForwardContext(Protocol):
    """``vllm.forward_context.ForwardContext``."""

    attn_metadata: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    slot_mapping: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
