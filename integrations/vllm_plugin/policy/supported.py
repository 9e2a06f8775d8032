"""Everything about vLLM that kvtxn was checked with.

Releases (``releases.json``), model runners, attention backends, cache formats and KV connectors.
``policy.rules`` turns an engine outside of these lists away, and names the list in its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from . import releases

_RELEASES: Final = releases.load()

#: Releases whose CPU side was checked, one by one, oldest first: the list is ``releases.json``.
RELEASES: Final = releases.checked_for("cpu", _RELEASES)

#: Releases whose GPU side was checked; some have no build for CPUs.
GPU_RELEASES: Final = releases.checked_for("gpu", _RELEASES)

#: Releases whose CPU operators of recurrent layers were checked.
STATE_RELEASES: Final = releases.checked_for("states", _RELEASES)


#: Releases whose kernels of recurrent layers on a GPU are known.
GPU_STATE_RELEASES: Final = ("0.32.0",)


def releases_for(device: str) -> tuple[str, ...]:
    """Return the releases that were checked on a device, such as ``"cuda"``, oldest first."""
    return GPU_RELEASES if device == "cuda" else RELEASES


def is_listed(version: str) -> bool:
    """Tell whether something was checked with a release, so that its configuration is known."""
    return version in RELEASES or version in GPU_RELEASES


#: Model runners that can be hooked, per device; the one that vLLM chooses by itself comes last.
RUNNERS: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("v1",), "cuda": ("v1", "v2")}

#: Attention backends whose rows can be addressed, per device.
ATTENTION: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("CPU_ATTN", "CPU_MLA", "AMX_MLA"),
    "cuda": (
        *("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"),
        *("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA"),
    ),
}

#: Versions of FlashAttention that were seen reading blocks of one row.
FLASH_VERSIONS: Final = (3,)

#: Formats of the KV cache whose rows can be addressed, per device. Formats with scales per row are
#: not among them: vLLM keeps such scales between the rows, on GPUs only, and kvtxn does not read
#: them.
CACHE_FORMATS: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "cuda": ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3"),
}


# -- attention backends: features that vLLM's own lack --------------------------------

_EIGHT_BITS: Final = ("fp8", "fp8_e4m3")

#: By attention backend: dtypes, cache formats and model features that vLLM's backend itself does
#: not take, with or without kvtxn. Read from the backends' declarations and refusals in 0.32.0;
#: GPUs only, since several backends can be chosen by name there.
LACKS: Final[Mapping[str, tuple[str, ...]]] = {
    "FLASH_ATTN": ("float32",),
    "FLASHINFER": ("float32",),
    "FLEX_ATTENTION": (*_EIGHT_BITS, "ALiBi", "attention sinks", "shared rows"),
    "TRITON_MLA": ("float32",),
    "FLASHMLA": ("float32",),
    "FLASH_ATTN_MLA": ("float32", *_EIGHT_BITS),
}


def lacking(attention: str | None, wanted: Sequence[str]) -> str:
    """Name the first wanted feature that vLLM's attention backend lacks.

    Args:
        attention: the backend's name; None if it is not known yet.
        wanted: dtypes, cache formats and features, named as in ``LACKS``.

    Returns:
        One of ``wanted``; "" if the backend has all of them or is not in ``LACKS``.
    """
    return next((each for each in wanted if each in LACKS.get(attention or "", ())), "")


# -- KV connectors ----------------------------------------------------------------------
# vLLM calls a connector for each layer within the forward (``save_kv_layer``) and once after the
# step (``wait_for_save``), when the sampler and so the commit are done. Rows that a connector takes
# within the forward are not judged yet: under policy ``undo``, as in stock vLLM, the cache holds
# draft rows at that time.

#: Connectors that store settled rows only; tests saw that under every policy.
CONNECTORS_CHECKED: Final = ("ExampleConnector",)

#: Connectors that may take rows before the sampler has decided which drafts are kept.
CONNECTORS_WITHIN_FORWARD: Final = (
    "FlexKVConnectorV1",
    "HiSparseConnector",
    "LMCacheConnectorV1",
    "MoRIIOConnector",
    "MultiConnector",
)

#: Connectors that take rows after a step, but never ran in the tests: on vLLM's CPU platform, or
#: without a service beside it, none of them starts.
CONNECTORS_AFTER_STEP: Final = (
    "HF3FSKVConnector",
    "LMCacheMPConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)

CONNECTORS: Final = (*CONNECTORS_CHECKED, *CONNECTORS_WITHIN_FORWARD, *CONNECTORS_AFTER_STEP)
