"""Buffers for the rows of recurrent layers whose kernels are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..policy.engine import GATED_DELTA, MAMBA2, OLMO_DELTA
from .olmo_rows import OlmoDeltaRows
from .state_layers import StateLayer
from .state_tables import StateCommits, StateTables
from .verified_rows import GatedDeltaRows, Mamba2Rows


def make_rows(
    layers: Sequence[StateLayer],
    groups: Sequence[str],
    tables: StateTables,
    rows: int,
    dtype: torch.dtype,
) -> list[StateCommits]:
    """Make the buffers of each layer that has a state.

    Args:
        layers: the layers; of those without a state nothing is made.
        groups: the names of all groups, in the order of the tables.
        tables: the tables of all layers.
        rows: most rows of a step.
        dtype: the model's.
    """
    made: list[StateCommits] = []
    shared: Any = None
    for layer in layers:
        module: Any = layer.module
        group, device = groups.index(layer.group), tables.whole.device
        if layer.kind == GATED_DELTA:
            if shared is None:
                heads = module.num_v_heads // module.tp_size
                shape = 2, rows, heads, module.head_v_dim
                shared = torch.zeros(shape, dtype=dtype, device=device).unbind()
            made.append(GatedDeltaRows(layer, tables, group, rows, dtype, shared))
        elif layer.kind == OLMO_DELTA:
            made.append(OlmoDeltaRows(layer, tables, group, rows, dtype))
        elif layer.kind == MAMBA2:
            if shared is None:
                heads = module.num_heads // module.tp_size
                shared = torch.zeros(rows, heads, module.head_dim, dtype=dtype, device=device)
            made.append(Mamba2Rows(layer, tables, group, rows, dtype, shared))
    return made
