"""vLLM's attention backends that can read blocks of one row: their classes, and whose they are."""

from __future__ import annotations

from collections.abc import Callable

from ....errors import KVTxnError


def triton_attention() -> tuple[type, type, type]:
    """Return TRITON_ATTN's classes of metadata builders, of layers' attention, of the backend."""
    from vllm.v1.attention.backends import triton_attn as own

    return own.TritonAttentionMetadataBuilder, own.TritonAttentionImpl, own.TritonAttentionBackend


def triton_latent() -> tuple[type, type, type]:
    """Return TRITON_MLA's classes of metadata builders, of layers' attention, of the backend."""
    from vllm.v1.attention.backends.mla import triton_mla as own

    return own.TritonMLAMetadataBuilder, own.TritonMLAImpl, own.TritonMLABackend


def flash_latent() -> tuple[type, type, type]:
    """Return FLASH_ATTN_MLA's classes of builders, of layers' attention, of the backend."""
    from vllm.v1.attention.backends.mla import flashattn_mla as own

    return own.FlashAttnMLAMetadataBuilder, own.FlashAttnMLAImpl, own.FlashAttnMLABackend


def register(name: str, path: str) -> Callable[[], None]:
    """Let vLLM find the class at ``path`` under the name of one of its attention backends.

    Returns:
        A function that undoes it.

    Raises:
        KVTxnError: somebody else's class is registered under that name.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = AttentionBackendEnum[name]
    if backend.is_overridden():
        found = backend.get_path()
        if found != path:
            raise KVTxnError(
                "register_attention_backend",
                f"vLLM's attention backend {name} is replaced already",
                expected="vLLM's own",
                got=found,
                hint="use policy 'undo', or switch the other plug-in off",
            )
        return lambda: None  # an earlier engine of this process registered it, and undoes it
    register_backend(backend, path)

    def undo() -> None:
        backend.clear_override()

    return undo


def takes_slots(impl: object) -> bool:
    """Tell whether a layer's attention is kvtxn's, over kernels that read blocks of one row.

    It is vLLM's own class if a model names that class, or if vLLM remembers the class from an
    earlier engine of this process. Of FlashAttention version 3 reads such blocks; Triton's kernel
    does unless the user asks for tensor descriptors, which want whole tiles within a block.
    """
    version = getattr(impl, "vllm_flash_attn_version", 3)
    return hasattr(impl, "kvtxn") and version == 3 and not getattr(impl, "use_td", False)
