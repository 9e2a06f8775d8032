"""``EngineFacts``: everything about a vLLM engine that ``policy.rules`` decides by."""

from __future__ import annotations

from typing import Final

import attrs

from . import supported

#: Kinds of recurrent layers: those whose operators kvtxn knows, and all others.
GATED_DELTA: Final = "gated delta nets"
OLMO_DELTA: Final = "gated delta nets of OLMo hybrid"
MAMBA2: Final = "Mamba-2 layers"
SHORT_CONV: Final = "short convolutions"
KNOWN_STATES: Final = (GATED_DELTA, OLMO_DELTA, MAMBA2, SHORT_CONV)
OTHER_STATES: Final = "other recurrent layers"


@attrs.frozen(kw_only=True)
class EngineFacts:
    """A vLLM engine, or one of its workers; the defaults describe the plainest one.

    The first block of fields comes from the configuration, the second block from the loaded model.

    Attributes:
        version: vLLM's release.
        device: ``"cpu"``, ``"cuda"``, ...
        runner: ``"v1"`` or ``"v2"``: vLLM's model runner.
        method: the method of speculation, such as ``"ngram"``; None without speculation.
        dtype: dtype of the model's activations.
        kv_cache_dtype: ``"auto"`` or the name of a cache format.
        tensor_parallel: number of ranks that share every layer's heads.
        pipeline_parallel: number of pipeline stages.
        context_parallel: number of ranks that share one sequence's cache.
        connectors: names of the KV connectors, which move rows in and out of the cache; a
            MultiConnector is replaced by its parts.
        mla: the model has multi-head latent attention.
        head_size: numbers of a head of attention; read on a CPU alone, and None for latent rows.
        recurrent: kind of the layers that keep a state instead of rows: one of ``KNOWN_STATES``,
            or ``OTHER_STATES``; None without such layers.
        states: the user's setting ``recurrent``: "off", "exact", "fast" or "auto".
        model: the model's type, as its configuration names it.
        most_requests: the most requests that run at once.
        gain: how many times as many requests of ``gain_tokens`` tokens fit into the cache with one
            state block each as in stock, rounded to hundredths; 1.0 if that is not known.
        gain_tokens: see ``gain``.
        unchecked: the user lets windows run with a release that was not checked, after a self-test,
            on pipeline stages before the last one, and over states that were not compared with
            stock.
        cached_states: the prefix cache keeps states at block boundaries.
        state_dtype: dtype of the states; None if it is not known before the model is loaded.
        inner_states: the kernel of prompts stores gated delta nets' states at block boundaries for
            the prefix cache, so prompts need not be cut there.
        odd_states: reason why kvtxn cannot hold this model's states, if it is known before loading.
            The layers of a loaded model are checked by ``held_states``.
        microbatches: vLLM cuts the batch into overlapping halves.
        adaptive: the number of drafts to verify changes from step to step.
        cascade: vLLM may attend over a prefix that requests share separately (up to 0.31, if
            asked to).
        graph_writes: vLLM's piecewise CUDA graphs contain the KV-cache write, or it is fused with
            the rotary embedding, so kvtxn cannot redirect it.
        attention: attention backend of the target's layers, such as ``"CPU_ATTN"``; None before
            the model is loaded. If the layers differ and one backend is not supported, that one.
        last_stage: the worker has the last pipeline stage.
        foreign_layer: name of a target layer that has a KV cache and is not an attention layer
            that kvtxn knows.
        kv_sharing: some layers read another layer's rows.
        sinks: some layers have attention sinks.
        alibi: some layers have ALiBi slopes.
        flash: version of FlashAttention; None if the layers do not use it.
        block_size: rows of the blocks that the layers read; the most, if they differ.
        spare_blocks: on a GPU, the caches have blocks behind vLLM's own, in which draft rows wait.
    """

    version: str = supported.MOST_CHECKED
    device: str = "cpu"
    runner: str = "v1"
    method: str | None = "ngram"
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    connectors: tuple[str, ...] = ()
    mla: bool = False
    head_size: int | None = None
    recurrent: str | None = None
    states: str = "off"
    model: str = ""
    most_requests: int = 1
    gain: float = 1.0
    gain_tokens: int = 0
    unchecked: bool = False
    cached_states: bool = False
    state_dtype: str | None = None
    inner_states: bool = False
    odd_states: str | None = None
    microbatches: bool = False
    adaptive: bool = False
    cascade: bool = False
    graph_writes: bool = False

    attention: str | None = None
    last_stage: bool = True
    foreign_layer: str | None = None
    kv_sharing: bool = False
    sinks: bool = False
    alibi: bool = False
    flash: int | None = None
    block_size: int | None = None
    spare_blocks: bool = True
