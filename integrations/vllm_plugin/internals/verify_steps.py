"""The requests that a step verifies, read from vLLM's metadata of its recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..policy.engine import GATED_DELTA, MAMBA2, OLMO_DELTA
from .protocols.layers import GatedDeltaMetadata, SelectiveMetadata
from .state_tables import VerifyStep

#: The method of vLLM's ``model_state`` that makes a step's metadata, with its parameters.
METHODS: Final = {
    "prepare_attn": (
        *("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups"),
        *("kv_cache_config", "for_capture", "ubatch_idx", "model_specific_attn_metadata"),
    ),
}


def kept(step: VerifyStep, sampled: Tensor) -> Tensor:
    """Select the counts of the step's requests from those of the batch."""
    if step.places is not None:
        return sampled[step.places]
    return sampled if sampled.shape[0] <= step.requests else sampled[: step.requests]


def _gated_delta_step(given: GatedDeltaMetadata, metadata: object) -> VerifyStep | None:
    """Describe the step of gated delta nets, by the metadata of one of them."""
    count = int(given.num_spec_decodes)
    if given.spec_sequence_masks is None or not count:
        return None
    places = None
    if given.num_prefills or given.num_decodes:
        # Sorted on the device, since counting what is true there would make the host wait.
        first = given.spec_sequence_masks.to(torch.int8).argsort(descending=True, stable=True)
        places = first[:count]
    starts = given.spec_query_start_loc[: count + 1]
    return VerifyStep(count, int(given.num_spec_decode_tokens), starts, places, metadata)


def _mamba2_step(given: SelectiveMetadata, metadata: object) -> VerifyStep | None:
    """Describe the step of Mamba-2 layers, by the metadata of one of them."""
    count = int(given.num_decodes)
    if not count or given.num_accepted_tokens is None:
        return None
    starts = given.query_start_loc_d[: count + 1]
    return VerifyStep(count, int(given.num_decode_tokens), starts, None, metadata)


#: By kind of layer, what describes a step by the metadata of one of its layers.
STEPS: Final[Mapping[str, Callable[[Any, Any], VerifyStep | None]]] = {
    GATED_DELTA: _gated_delta_step,
    OLMO_DELTA: _gated_delta_step,
    MAMBA2: _mamba2_step,
}


#: Place of ``for_capture`` among the arguments after the mode of graphs, in ``METHODS``.
_FOR_CAPTURE: Final = METHODS["prepare_attn"].index("for_capture") - 2


def is_capture(args: tuple[object, ...], named: Mapping[str, object]) -> bool:
    """Tell whether metadata is made for a forward that will be captured.

    Args:
        args: of vLLM's ``prepare_attn``, those after the mode of graphs.
        named: its arguments by name.
    """
    given = args[_FOR_CAPTURE] if len(args) > _FOR_CAPTURE else named.get("for_capture")
    return bool(given)


def is_replay(mode: object) -> bool:
    """Tell whether a step of a mode of graphs is the replay of a graph of a whole forward."""
    return getattr(mode, "name", "") == "FULL"
