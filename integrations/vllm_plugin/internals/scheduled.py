"""vLLM's own planning and scheduling of a hybrid's caches, without a model: how many requests fit.

vLLM plans groups and blocks from the layers' specifications, and its scheduler hands blocks out,
takes them back, and preempts. Here it is told that every step went as it does on a GPU: each
request in it that is past its prompt got one token, and some of its drafts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from .protocols.engine import VllmConfig
from .protocols.layers import KVCacheSpec
from .state_layers import one_block_each

#: Attention's pages are whole multiples of so many tokens, on a GPU.
_TOKENS: Final = 16


@attrs.frozen
class Layers:
    """The layers of a hybrid, as far as their caches go.

    Attributes:
        attention: how many have attention.
        recurrent: how many have a state.
        kv_heads: of a layer with attention.
        head_size: likewise.
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
        most: requests that ran at once.
        preempted: how often one lost its blocks to another.
        finished: requests that were answered.
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
        """Run requests that come at once.

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
        """Make vLLM's scheduler over empty caches."""
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
        from vllm import SamplingParams
        from vllm.v1.request import Request

        vocabulary = self._config.model_config.get_vocab_size()
        ids = [draw.randrange(vocabulary) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return Request(str(number), ids, sampling, None, block_hasher=self._hasher)


def _specs(layers: Layers, config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Make the specifications of a hybrid's caches as stock has them."""
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
    from vllm.v1.outputs import ModelRunnerOutput

    places = {name: number for number, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
