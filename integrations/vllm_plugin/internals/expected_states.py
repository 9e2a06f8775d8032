"""Facts of recurrent layers that a loaded model tells, from the configuration alone.

``kvtxn doctor`` judges engines that do not run yet. A running one reads its layers, in
``state_layers`` and ``held_states``, and what these say counts.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..policy import releases
from ..policy.engine import GATED_DELTA, MAMBA2, EngineFacts
from . import state_share
from .protocols.engine import VllmConfig

#: The first release in which FlashInfer's kernel of prompts leaves states in their middle.
_LEAVES: Final = (0, 33)

#: Values of the setting ``gdn_prefill_backend`` with which vLLM may take FlashInfer's kernel.
_MAY_BE_FLASHINFER: Final = ("auto", "flashinfer")

#: Most rows of a request that kvtxn's kernels take.
MOST_REPLAYED: Final = 16

#: Why kvtxn cannot hold the states of some layers.
NO_ATTENTION: Final = "the model has no layers of attention"
NOT_TRITON: Final = "vLLM's backend of Mamba-2 layers is not Triton: leave mamba_backend out"
OWN_REPLAY: Final = "vLLM's own replay of Mamba-2 layers is on: leave use_replayssm out"


def too_many(kind: str | None) -> str:
    """Say that requests have more drafts than kvtxn's kernels of a kind of layer take."""
    return f"kvtxn's kernels of {kind} take at most {MOST_REPLAYED - 1} drafts"


def expected_states(config: VllmConfig, facts: EngineFacts) -> dict[str, Any]:
    """Read the facts of a model's recurrent layers.

    Args:
        config: the ``VllmConfig``.
        facts: the other facts of the engine.

    Returns:
        Fields of ``EngineFacts``; empty unless windows would hold states.
    """
    if facts.recurrent is None or facts.states == "off":
        return {}
    found: dict[str, Any] = {}
    if facts.recurrent in (GATED_DELTA, MAMBA2):
        found["state_dtype"] = state_share.state_dtype(config)
    if facts.device != "cuda":
        return found
    found["odd_states"] = _odd(config, facts)
    if facts.recurrent == GATED_DELTA:
        found["inner_states"] = _leaves_inner_states(config, facts)
    return found


def _leaves_inner_states(config: VllmConfig, facts: EngineFacts) -> bool:
    """Tell whether prompts will leave states in their middle for the prefix cache.

    vLLM takes FlashInfer's kernel by the setting and by the GPU.
    """
    given = config.additional_config
    asked = given.get("gdn_prefill_backend", "auto") if isinstance(given, dict) else "auto"
    aligned = getattr(config.cache_config, "mamba_cache_mode", "none") == "align"
    if releases.number(facts.version) < _LEAVES or not aligned:
        return False
    return str(asked).strip().lower() in _MAY_BE_FLASHINFER and _takes_flashinfer(config)


def _takes_flashinfer(config: VllmConfig) -> bool:
    """Tell whether vLLM takes FlashInfer's kernel of prompts on this GPU, if the setting lets it.

    It does on compute capability 9.0, and on 10.x and 12.x with CUDA 13 for keys of 128 numbers.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    major = 0 if capability is None else int(capability.major)
    if major == 9:
        return bool(capability.minor == 0)
    cuda = int((torch.version.cuda or "0").partition(".")[0])
    keys = getattr(config.model_config.hf_text_config, "linear_key_head_dim", None)
    return major in (10, 12) and cuda >= 13 and keys == 128


def _odd(config: VllmConfig, facts: EngineFacts) -> str | None:
    """Say in a sentence what rules these layers out; None if nothing does."""
    if not config.model_config.is_hybrid:
        return NO_ATTENTION
    if facts.recurrent == MAMBA2 and config.mamba_config.backend.value != "triton":
        return NOT_TRITON
    if facts.recurrent == MAMBA2 and getattr(config.cache_config, "use_replayssm", False):
        return OWN_REPLAY
    replayed = facts.states == "fast" and facts.recurrent in (GATED_DELTA, MAMBA2)
    speculation = config.speculative_config
    drafts = 0 if speculation is None else int(speculation.num_speculative_tokens)
    return too_many(facts.recurrent) if replayed and drafts >= MOST_REPLAYED else None
