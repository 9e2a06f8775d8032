"""Everything about vLLM that kvtxn was checked with.

Releases (``releases.json``), model runners, attention backends, cache formats and KV connectors.
``policy.rules`` turns an engine outside of these lists away, and names the list in its reason. The
engines that the ledger can watch are more, and stand here as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from . import release_records

_RELEASES: Final = release_records.load()

#: The release with the most checks among all that leave nothing out; the newest, if several have as
#: many.
MOST_CHECKED: Final = max(
    reversed(_RELEASES), key=lambda each: (not each.left_out, len(each.checked))
).version

#: Releases that have the audit alone, on a CPU: they are too old for windows.
AUDIT_RELEASES: Final = release_records.checked_for("audit", _RELEASES)

#: Releases whose CPU side was checked, one by one, oldest first: the list is ``releases.json``.
RELEASES: Final = release_records.checked_for("cpu", _RELEASES)

#: Releases whose GPU side was checked, on one GPU at least; some have no build for CPUs.
GPU_RELEASES: Final = release_records.checked_for("gpu", _RELEASES)

#: Releases that were checked on several GPUs, too: tensor and pipeline parallel.
MORE_GPU_RELEASES: Final = release_records.checked_for("gpus", _RELEASES)

#: By release among ``GPU_RELEASES``: methods of speculation that were not run there, and attention
#: backends that were not measured in full, and why.
LEFT_OUT: Final[Mapping[str, Mapping[str, str]]] = {
    release.version: release.left_out for release in _RELEASES if release.left_out
}

#: Releases in which windows on pipeline stages before the last one were checked on several GPUs.
STAGE_RELEASES: Final = release_records.checked_for("gpu-stages", _RELEASES)

#: Releases in which drafts were seen waiting under other attention backends than FLASH_ATTN.
ROW_RELEASES: Final = release_records.checked_for("gpu-backends", _RELEASES)

#: Releases whose CPU operators of recurrent layers were checked.
STATE_RELEASES: Final = release_records.checked_for("states", _RELEASES)

#: Releases whose kernels of recurrent layers on a GPU were checked.
GPU_STATE_RELEASES: Final = release_records.checked_for("gpu-states", _RELEASES)


def releases_for(device: str) -> tuple[str, ...]:
    """Return the releases that were checked on a device, oldest first.

    Those of CPUs for any device but ``"cuda"``.
    """
    return GPU_RELEASES if device == "cuda" else RELEASES


def state_releases_for(device: str) -> tuple[str, ...]:
    """Return the releases whose recurrent layers were checked on a device, oldest first.

    Those of CPUs for any device but ``"cuda"``.
    """
    return GPU_STATE_RELEASES if device == "cuda" else STATE_RELEASES


def is_listed(version: str) -> bool:
    """Tell whether a release was checked for an audit or for windows, on a CPU or a GPU.

    kvtxn knows the configuration of these.
    """
    return any(version in each for each in (AUDIT_RELEASES, RELEASES, GPU_RELEASES))


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

# -- attention that reads blocks of one row -------------------------------------------
# By such blocks drafts can wait in spare slots. A backend is taken in if its sums are then stock's
# to the last bit and its time is at most 1.01 of stock's: ``kvtxn bench backends`` measures both.

#: Attention backends on a GPU that are taken in, the first in every release that is listed for
#: GPUs, the others in ``ROW_RELEASES``.
READ_ROWS: Final = ("FLASH_ATTN", "TRITON_ATTN", "TRITON_MLA", "FLASH_ATTN_MLA")

#: By attention backend: why it is not taken in; read from the kernels of 0.32.0.
NO_ROWS: Final[Mapping[str, str]] = {
    "FLASHMLA": "its kernel takes blocks of 64 rows alone",
    "FLASHINFER": "its kernels take blocks of 16, 32 or 64 rows, or divide their sums by blocks",
    "FLEX_ATTENTION": "its kernel takes tiles of at least 16 rows of one block",
}

#: Versions of FlashAttention that are taken in.
FLASH_VERSIONS: Final = (3,)

#: By version of FlashAttention: why it is not taken in.
NO_FLASH_ROWS: Final[Mapping[int, str]] = {
    2: "its kernel takes blocks of a multiple of 16 rows",
    4: "neither its sums nor its time were measured",
}


def read_rows(version: str, *, unchecked: bool) -> tuple[str, ...]:
    """Return the attention backends that are taken in with a release.

    FLASH_ATTN alone, unless the release is in ``ROW_RELEASES`` or the user says ``unchecked``.
    """
    return READ_ROWS if unchecked or version in ROW_RELEASES else READ_ROWS[:1]


def reads_no_rows(attention: str | None, flash: int | None) -> str:
    """Return why an attention backend does not read blocks of one row, as the end of a sentence.

    It begins with ": "; "" if nothing is known.

    Args:
        attention: the backend's name.
        flash: the version of FlashAttention.
    """
    says = NO_ROWS.get(attention or "") or NO_FLASH_ROWS.get(flash or 0, "")
    return f": {says}" if says else ""


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

    Returns:
        One of ``wanted``; "" if the backend has all of them or is not in ``LACKS``.
    """
    return next((each for each in wanted if each in LACKS.get(attention or "", ())), "")


#: Sizes of heads for which CPU_ATTN has kernels in ``RELEASES``; the backend's own list lacks 48.
CPU_HEADS: Final = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

#: The kernels over eight bits take multiples of it.
_EIGHT_BIT_HEADS: Final = 32


def takes_heads(size: int, kv_cache_dtype: str) -> bool:
    """Tell whether CPU_ATTN has a kernel for heads of a size, over rows in a format."""
    in_eight_bits = kv_cache_dtype.startswith("fp8")
    return size in CPU_HEADS and not (in_eight_bits and size % _EIGHT_BIT_HEADS)


# -- KV connectors ----------------------------------------------------------------------
# A connector must not read a row before the row is durable. Prompts' and settled rows are durable
# once written, and drafts with the commit, which comes right after sampling. vLLM lets a connector
# read the cache within the forward, layer by layer (``save_kv_layer``), and once after the step
# (``wait_for_save``), which is after the commit: with the V1 runner because it waits for the
# drafter where an engine speculates, with the V2 runner because the windows of an engine with a
# connector are committed before the sampled tokens leave for the host.

#: Connectors that read durable rows only, per device, and why:
#:
#: - ExampleConnector reads within the forward, but only blocks of a request that begins in this
#:   step, and such a request has no drafts. (Of a prompt that is longer than a step vLLM's
#:   connector stores blocks that are not computed yet: an earlier request's old rows.)
#: - OffloadingConnector notes blocks when the step is over, and reads them when the next one
#:   begins; the stream that copies waits for the runner's own. Those are full blocks of tokens that
#:   the scheduler has seen accepted, so no later window writes to them.
#: - SimpleCPUOffloadConnector reads full blocks of accepted tokens, too, once the step is over.
#: - NixlConnector lets another engine read blocks of a request that has ended, until that engine
#:   has them. The scheduler learns of an end after the commit of the request's last step, and those
#:   blocks are not written from then on. (With ``bidirectional_kv_xfer`` vLLM counts rows of drafts
#:   past a stop as handed back: an engine with that setting counts as another connector.)
#: - DecodeBenchConnector reads nothing. It fills blocks of requests that begin.
#:
#: MultiConnector only passes calls on: it may have any of these.
CONNECTORS_CHECKED: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("ExampleConnector", "OffloadingConnector", "NixlConnector", "DecodeBenchConnector"),
    "cuda": (
        *("ExampleConnector", "OffloadingConnector"),
        *("SimpleCPUOffloadConnector", "DecodeBenchConnector"),
    ),
}

#: Connectors that may take rows before the sampler has decided which drafts are kept.
CONNECTORS_WITHIN_FORWARD: Final = (
    *("FlexKVConnectorV1", "HiSparseConnector", "LMCacheConnectorV1", "MoRIIOConnector"),
)

#: Connectors that take rows after a step, but never ran in the tests, or only on CPUs: they need a
#: service beside them, or a network.
CONNECTORS_AFTER_STEP: Final = (
    *("HF3FSKVConnector", "LMCacheMPConnector", "MooncakeConnector", "MooncakeStoreConnector"),
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
)

CONNECTORS: Final = (
    *CONNECTORS_CHECKED["cuda"],
    *CONNECTORS_WITHIN_FORWARD,
    *CONNECTORS_AFTER_STEP,
    "MultiConnector",
)


def unchecked_connector(device: str, connectors: Sequence[str]) -> str:
    """Return the first of these KV connectors that was not checked on a device; "" if all were."""
    checked = CONNECTORS_CHECKED.get(device, ())
    return next((name for name in connectors if name not in checked), "")


# -- the ledger -------------------------------------------------------------------------


def cannot_watch(device: str, runner: str, context_parallel: int) -> str | None:
    """Return why the ledger cannot watch an engine, a sentence for users; None if it can.

    Args:
        device: "cpu" or "cuda".
        runner: "v1" or "v2".
        context_parallel: ranks that share a request's rows; 1: none do.
    """
    if device not in ("cpu", "cuda"):
        return "the ledger watches engines on CPUs and on CUDA GPUs only"
    if device == "cpu" and runner == "v2":
        return "on a CPU the ledger watches the V1 model runner only"
    if context_parallel > 1:
        return "context parallelism spreads a request's rows over ranks"
    return None


def last_stage_only(runner: str, speculates: bool, last_stage: bool) -> str | None:
    """Say in a sentence why the ledger cannot watch a pipeline stage; None if it can.

    It cannot watch earlier stages of a V2 runner that speculates.
    """
    if runner == "v2" and speculates and not last_stage:
        return (
            "pipeline stages before the last learn of accepted drafts when they have begun later "
            "steps; the ledger watches the last stage"
        )
    return None


def no_bytes(attention: str, kv_dtype: str) -> str | None:
    """Say why rows on a GPU cannot be addressed, so no bytes are compared; None if they can."""
    if attention not in ATTENTION["cuda"]:
        return f"the rows of attention backend {attention} cannot be addressed"
    if kv_dtype not in CACHE_FORMATS["cuda"]:
        return f"rows in format {kv_dtype} cannot be addressed"
    return None
