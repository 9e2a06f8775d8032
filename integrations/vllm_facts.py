"""What matters of a vLLM engine: facts that ``vllm_policy`` decides by, and what was checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

#: vLLM releases whose internals were checked, one by one. In 0.30.0 speculation does not run on
#: the CPU, kvtxn or not, and 0.33.0 had no CPU build, so there was nothing to check.
SUPPORTED: Final = ("0.28.0", "0.29.0", "0.31.0", "0.32.0")

#: Model runners that can be hooked, per device; vLLM's own choice comes last.
RUNNERS: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("v1",), "cuda": ("v1", "v2")}

#: Attention backends whose rows can be addressed, per device.
ATTENTION: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("CPU_ATTN", "CPU_MLA"),
    "cuda": (
        *("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"),
        *("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA"),
    ),
}

#: Formats of the KV cache whose rows can be addressed, per device. Where each row has scales of its
#: own, vLLM keeps them between the rows, on GPUs alone; there they were not read yet.
FORMATS: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "cuda": ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3"),
}

#: Versions of FlashAttention that were seen reading blocks of one row.
FLASH: Final = (3,)

#: Releases whose GPU side was checked.
ON_GPU: Final = ("0.32.0",)


@attrs.frozen(kw_only=True)
class Facts:
    """A vLLM engine as far as it matters here; the defaults describe the plainest one.

    The first block is known from the configuration, the second once the model is loaded.

    Attributes:
        version: of vLLM.
        device: ``"cpu"``, ``"cuda"``, ...
        runner: ``"v1"`` or ``"v2"``, vLLM's model runner.
        method: of speculation, such as ``"ngram"``; None without speculation.
        dtype: of the model's activations.
        kv_cache_dtype: ``"auto"`` or an 8-bit format.
        tensor_parallel: ranks that share every layer's heads.
        pipeline_parallel: number of pipeline stages.
        context_parallel: ranks that share one sequence's cache.
        connector: name of the KV connector that moves rows in and out of the cache, if any.
        mla: multi-head latent attention.
        recurrent: some layers keep a state instead of rows.
        microbatches: the batch is cut into overlapping halves.
        adaptive: how many drafts are verified changes from step to step.
        batch_invariant: a request's sums must not depend on what else is in the batch.
        graph_writes: where graphs hold parts of a forward, rows are written in them.
        attention: backend of the target's layers, such as ``"CPU_ATTN"``; None before they are
            known. Of several, one that is not in ``ATTENTION``, if there is any.
        last_stage: these are the layers of the last pipeline stage.
        foreign_layer: a layer of the target with rows in a cache that is not plain attention.
        kv_sharing: some layers read another layer's rows.
        sinks: attention sinks.
        alibi: ALiBi slopes.
        flash: version of FlashAttention, where the layers use it.
        spare_blocks: on a GPU, the caches have blocks behind vLLM's own, for rows that wait.
    """

    version: str = SUPPORTED[-1]
    device: str = "cpu"
    runner: str = "v1"
    method: str | None = "ngram"
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    connector: str | None = None
    mla: bool = False
    recurrent: bool = False
    microbatches: bool = False
    adaptive: bool = False
    batch_invariant: bool = False
    graph_writes: bool = False

    attention: str | None = None
    last_stage: bool = True
    foreign_layer: str | None = None
    kv_sharing: bool = False
    sinks: bool = False
    alibi: bool = False
    flash: int | None = None
    spare_blocks: bool = True
