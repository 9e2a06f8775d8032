"""Rows, requests and bytes that the commits of recurrent states take on a GPU, by formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..policy.engine import GATED_DELTA, MAMBA2, OLMO_DELTA
from . import config
from .commit_graphs import BRANCHES, uses_graphs
from .protocols.runners import Runner
from .replayed_rows import REPLAYED, staged_bytes
from .state_layers import kind_of, modules_of
from .verified_rows import LAUNCHES, row_elements


def bytes_of_buffers(runner: Runner, *, fast: bool = False) -> int:
    """Return the bytes of the buffers and tables of ``HeldStates``, before the caches exist."""
    kinds = list(found_kinds(modules_of(runner)).values())
    sizes = most_rows(runner), most_requests(runner), width(runner)
    found = bytes_by_formula(kinds, *sizes, int(runner.dtype.itemsize), fast=fast)
    own = [(module, kind) for module, kind in kinds if not (fast and kind in REPLAYED)]
    return found + (bytes_of_graphs(runner, own) if uses_graphs(runner) else 0)


def bytes_of_graphs(runner: Runner, kinds: Sequence[tuple[Any, str]]) -> int:
    """Return the bytes of outputs that captured commits write and nobody reads.

    vLLM's Triton kernels of gated delta nets make them anew for each layer; those of the layers in
    one branch of a graph take each other's place.
    """
    makes = (GATED_DELTA, OLMO_DELTA)
    sizes = [module.value_dim // module.tp_size for module, kind in kinds if kind in makes]
    most = sum(sizes[:BRANCHES])
    return most_rows(runner) * int(most) * int(runner.dtype.itemsize)


def bytes_by_formula(
    kinds: Sequence[tuple[Any, str]],
    rows: int,
    requests: int,
    width: int,
    size: int,
    *,
    fast: bool = False,
) -> int:
    """Return the bytes of buffers and tables; of the tables at most so many.

    Args:
        kinds: vLLM's layers that have a state, each with its kind.
        rows: most rows of a step.
        requests: most requests of a step.
        width: most rows of a request.
        size: bytes of a number of the model's dtype.
        fast: kvtxn's own kernels verify layers of ``REPLAYED``, and keep float32 numbers.
    """
    own = [(module, kind) for module, kind in kinds if not (fast and kind in REPLAYED)]
    replayed = [(module, kind) for module, kind in kinds if fast and kind in REPLAYED]
    elements = sum(row_elements(module, kind) for module, kind in own)
    shared = max((_scratch_elements(module, kind) for module, kind in own), default=0)
    tables = 12 * len(kinds) * requests * (width + 4)
    staged = sum(staged_bytes(module, kind) for module, kind in replayed)
    return rows * ((elements + shared) * size + staged) + tables


def _scratch_elements(module: Any, kind: str) -> int:
    """Return how many numbers per row the commits write that nobody reads."""
    if kind == GATED_DELTA:
        return 2 * int(module.value_dim // module.tp_size)
    if kind == MAMBA2:
        return int(module.num_heads // module.tp_size * module.head_dim)
    return 0


def found_kinds(modules: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the layers that have states, beside the past of a convolution, with their kinds."""
    found = {name: (module, kind_of(module) or "") for name, module in modules.items()}
    return {name: (module, kind) for name, (module, kind) in found.items() if kind in LAUNCHES}


def width(runner: Runner) -> int:
    """Return the most rows of a request: the last sampled token, and the drafts."""
    return int(runner.vllm_config.num_speculative_tokens) + 1


def most_rows(runner: Runner) -> int:
    """Return the most rows that requests with drafts can have in one step."""
    return config.most_window_rows(runner.vllm_config)


def most_requests(runner: Runner) -> int:
    """Return the most requests in one table of vLLM's, padding included.

    It is a multiple of 64, so that the table of each group is as well aligned as an own tensor.
    """
    captured = runner.compilation_config.max_cudagraph_capture_size or 0
    return -(-max(int(runner.max_num_reqs), int(captured)) // 64) * 64
