"""vLLM as benchmarks measure it: running engines, its operators, and its planning of caches.

Of running engines they change start and acceptance, and read memory and how many requests
it holds. No engine of a user's runs these functions, so the operators are no hook points of a
release.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from .engine_protocols import KVCacheSpec, VllmConfig, VllmEngine, Worker
from .state_layers import one_block_each


def together(engine: VllmEngine, add: Callable[[], None]) -> float:
    """Let requests begin in one step, however long it takes to add them.

    The engine goes on even if ``add`` raises; the error reaches the caller.

    A core in a process of its own begins with the first request that reaches it. How many of the
    others join its first steps is then a race, and times to first token differ by a third between
    runs of the same work. So the core's scheduler is paused while requests are added. A core in
    this process makes no step meanwhile anyway.

    Returns:
        The ``time.perf_counter()`` at which the engine was let go on.
    """
    call = getattr(engine.engine_core, "call_utility", None)
    if call is None:
        add()
        return time.perf_counter()
    call("pause_scheduler", "keep", False)
    try:
        add()
    finally:
        released = time.perf_counter()
        call("resume_scheduler")
    return released


def set_acceptance(worker: Worker, rates: tuple[float, ...]) -> None:
    """Change the synthetic acceptance of a running engine, in the sampler's own tensors.

    Args:
        worker: vLLM's worker.
        rates: for each draft position the share of requests that accept the draft there and all
            drafts before it.
    """
    sampler = worker.model_runner.rejection_sampler
    before = (1.0, *rates)
    given = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]
    for number, rate in enumerate(given):
        sampler.synthetic_conditional_rates[number].fill_(rate)


def reported_requests(engine: VllmEngine) -> float:
    """Return how many requests of the longest length fit into the cache, as vLLM reports it.

    The engine's core is in this process.
    """
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config as most

    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    return float(most(engine.vllm_config, config))


def running_requests(engine: VllmEngine) -> int:
    """Return the number of requests that run: they have blocks, and take part in steps.

    The engine's core is in this process.
    """
    return len(engine.engine_core.engine_core.scheduler.running)


def occupied(worker: Worker) -> dict[str, int]:
    """Read what a worker that rests has, after a collection of garbage.

    Returns:
        ``device``: bytes of tensors on the GPU, 0 on a CPU; ``graphs``: bytes of captured commits,
        which lie beside them; ``open``: 1 if a window is open that nobody ended, else 0.
    """
    give_back()
    steps = getattr(worker.model_runner, "kvtxn", None)
    device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return {
        "device": int(device),
        "graphs": 0 if steps is None else steps.manager.executor.graphs.nbytes,
        "open": 0 if steps is None or steps.manager.current is None else 1,
    }


def give_back() -> None:
    """Collect garbage, and let the C library give freed memory back to the system, if it can."""
    gc.collect()
    with suppress(AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)


#: Module and class of each attention backend's implementation, by vLLM's name.
_ATTENTION: Final = {
    "TRITON_ATTN": ("triton_attn", "TritonAttentionImpl"),
    "TRITON_MLA": ("mla.triton_mla", "TritonMLAImpl"),
    "FLASH_ATTN_MLA": ("mla.flashattn_mla", "FlashAttnMLAImpl"),
}


@cache
def _of_vllm(name: str) -> Any:
    """Import one of vLLM's modules, by its name without ``vllm.``."""
    return import_module(f"vllm.{name}")


# -- writing rows -----------------------------------------------------------------------


def write_rows(
    rows: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], slots: Tensor, scale: Tensor
) -> None:
    """Write keys and values to their slots of the caches, in the dtype that they have."""
    ops = _of_vllm("_custom_ops")
    ops.reshape_and_cache_flash(*rows, *caches, slots, "auto", scale, scale)


def write_latents(
    rows: tuple[Tensor, Tensor], latents: Tensor, slots: Tensor, scale: Tensor
) -> None:
    """Write latents and their rotary parts to their slots of the cache, in their own dtype."""
    _of_vllm("_custom_ops").concat_and_cache_mla(*rows, latents, slots, "auto", scale)


# -- attention --------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, value: Tensor, *sizes: object, **how: object) -> None:
    """Call FlashAttention with arguments of ``flash_attn_varlen_func``; drop what it returns."""
    _of_vllm("vllm_flash_attn").flash_attn_varlen_func(query, key, value, *sizes, **how)


def schedule(*sizes: object, **how: object) -> Tensor:
    """Make FlashAttention's schedule; arguments are those of ``get_scheduler_metadata``."""
    made: Tensor = _of_vllm("vllm_flash_attn").get_scheduler_metadata(*sizes, **how)
    return made


def attention_of(backend: str) -> Any:
    """Return vLLM's class of a layer's attention, by the name of a backend in ``_ATTENTION``."""
    module, name = _ATTENTION[backend]
    return getattr(_of_vllm(f"v1.attention.backends.{module}"), name)


def num_compute_units() -> int:
    """Return the number of the GPU's multiprocessors, as vLLM counts them."""
    return int(_of_vllm("utils.platform_utils").num_compute_units())


# -- recurrent states -------------------------------------------------------------------


def verify_gated_delta(**given: object) -> None:
    """Call vLLM's Triton kernel that verifies gated delta nets, with its own arguments."""
    own = _of_vllm("model_executor.layers.mamba.gdn.qwen_gdn_linear_attn")
    own.fused_sigmoid_gating_delta_rule_update(**given)


def verify_gated_delta_fused(**given: object) -> None:
    """Call vLLM's kernel that verifies gated delta nets and applies their gated norm.

    The arguments are the kernel's own.
    """
    _of_vllm("_custom_ops").fused_gdn_decode_post_conv_mtp(**given)


def has_gated_delta_fused() -> bool:
    """Tell whether this release has the fused kernel of gated delta nets; loads its libraries."""
    for library in ("_C_stable_libtorch", "_C"):
        with contextlib.suppress(ImportError):
            _of_vllm(library)
    return hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp")


def choose_mamba2_kernel() -> None:
    """Let vLLM choose its kernel of Mamba-2 layers, as an engine does for its caches.

    The choice holds for this process.
    """
    spec = _of_vllm("v1.kv_cache_interface").MambaSpec(
        block_size=1, shapes=((1,),), dtypes=(torch.float32,)
    )
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    settings = _of_vllm("config.mamba").MambaConfig()
    dispatch = _of_vllm("model_executor.layers.mamba.ops.ssu_dispatch")
    dispatch.initialize_mamba_ssu_backend(settings, caches)


def verify_mamba2(*given: object, **more: object) -> None:
    """Call vLLM's Triton kernel that verifies Mamba-2 layers, with its own arguments."""
    own = _of_vllm("model_executor.layers.mamba.mamba_mixer2")
    own.selective_state_update(*given, **more)


#: Attention's pages are whole multiples of so many tokens, on a GPU.
_TOKENS: Final = 16


@attrs.frozen
class Layers:
    """The layers of a hybrid, as far as their caches go.

    Attributes:
        attention: how many have attention.
        recurrent: how many have a state.
        kv_heads: of a layer with attention.
        head_size: of a layer with attention.
        past: shape of a convolution's past, in bfloat16.
        state: shape of a state, in float32.
    """

    attention: int
    recurrent: int
    kv_heads: int
    head_size: int
    past: tuple[int, ...]
    state: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of a page of attention that has room for a state, as vLLM chooses it."""
        page = 2 * math.prod(self.past) + 4 * math.prod(self.state)
        row = 4 * self.kv_heads * self.head_size
        return math.ceil(page / row / _TOKENS) * _TOKENS


@attrs.frozen(kw_only=True)
class Ran:
    """The scheduler's treatment of requests that came at once.

    Attributes:
        most: the most requests that ran at once.
        preempted: how often a request was put back.
        finished: the number of requests, all of which ended.
    """

    most: int
    preempted: int
    finished: int


class Scheduled:
    """Caches of some bytes, and the scheduler over them.

    Args:
        arguments: of vLLM's engine; the model among them is not loaded.
        layers: whose caches are planned.
        nbytes: of all caches.
        one_state: one state block per request, as with kvtxn; else one more per draft.
    """

    def __init__(
        self, arguments: Mapping[str, object], layers: Layers, nbytes: int, *, one_state: bool
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core import kv_cache_utils as planning

        config: VllmConfig = EngineArgs(**arguments).create_engine_config()
        cache = config.cache_config
        aligned = bool(arguments["enable_prefix_caching"])
        cache.mamba_cache_mode = "align" if aligned else "none"
        cache.block_size = layers.tokens
        cache.mamba_block_size = layers.tokens if aligned else config.model_config.max_model_len
        cache.kv_cache_layout = "LBNHC"
        specs = _specs(layers, config)
        groups = planning.get_kv_cache_groups(config, one_block_each(specs) if one_state else specs)
        self._plan = planning.get_kv_cache_config_from_groups(config, groups, nbytes)
        cache.num_gpu_blocks = self._plan.num_blocks
        self._config, self._aligned = config, aligned
        assert config.speculative_config is not None  # by the arguments
        self._drafts = int(config.speculative_config.num_speculative_tokens)

    def reported(self) -> float:
        """Return how many requests of the longest length fit, as vLLM reports it."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config as most

        return float(most(self._config, self._plan))

    def run(self, count: int, prompt: int, tokens: int, at_once: int) -> Ran:
        """Schedule requests that come at once until all have ended; no model runs.

        Each accepts some of its drafts by chance, the same in every call.

        Args:
            count: of requests.
            prompt: tokens of each prompt, no two of which begin alike.
            tokens: that each request generates.
            at_once: the most that may run at once.
        """
        from vllm.v1.outputs import DraftTokenIds

        self._config.scheduler_config.max_num_seqs = at_once
        scheduler, draw = self._scheduler(), random.Random(0)
        for number in range(count):
            scheduler.add_request(self._request(number, prompt, tokens, draw))
        most = preempted = 0
        while scheduler.has_unfinished_requests():
            step = scheduler.schedule()
            preempted += len(step.preempted_req_ids or ())
            most = max(most, len(scheduler.running))
            names, sampled, drafts = [], [], []
            for name in step.num_scheduled_tokens:
                request = scheduler.requests[name]
                given = len(step.scheduled_spec_decode_tokens.get(name, ()))
                done = request.num_computed_tokens - given >= request.num_tokens
                names.append(name)
                sampled.append([1] * (1 + draw.randint(0, given)) if done else [])
                drafts.append([1] * self._drafts if done else [])
            scheduler.update_from_output(step, _output(names, sampled))
            scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return Ran(most=most, preempted=preempted, finished=count)

    def _scheduler(self) -> Any:
        """Make vLLM's scheduler over empty caches, and the hash of its requests' blocks.

        The hash is None without a prefix cache.
        """
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils as planning
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        sizes = planning.resolve_kv_cache_block_sizes(self._plan, self._config)
        planning.init_none_hash(sha256)
        make = planning.get_request_block_hasher
        self._hasher = make(sizes[1], sha256) if self._aligned else None
        manager = StructuredOutputManager(self._config)
        return Scheduler(
            self._config, self._plan, manager, block_size=sizes[0], hash_block_size=sizes[1]
        )

    def _request(self, number: int, prompt: int, tokens: int, draw: random.Random) -> object:
        """Make a request with a random prompt, drawn from ``draw``, which generates ``tokens``."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        vocabulary = self._config.model_config.get_vocab_size()
        ids = [draw.randrange(vocabulary) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return Request(str(number), ids, sampling, None, block_hasher=self._hasher)


def _specs(layers: Layers, config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Make the specifications of a hybrid's caches, by layer, as stock has them.

    Layers with a state have one block more for each draft.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    full = FullAttentionSpec(
        block_size=layers.tokens,
        num_kv_heads=layers.kv_heads,
        head_size=layers.head_size,
        dtype=torch.bfloat16,
    )
    states = MambaSpec(
        block_size=config.cache_config.mamba_block_size,
        shapes=(layers.past, layers.state),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode=config.cache_config.mamba_cache_mode,
        num_speculative_blocks=config.num_speculative_tokens,
    )
    found: dict[str, KVCacheSpec] = {
        f"recurrent.{number}": states for number in range(layers.recurrent)
    }
    return found | {f"attention.{number}": full for number in range(layers.attention)}


def _output(names: list[str], sampled: list[list[int]]) -> object:
    """Make the output of a model runner that sampled these tokens."""
    from vllm.v1.outputs import ModelRunnerOutput

    places = {name: number for number, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
