"""Count the accepted drafts of each request from sampled token ids.

Three modes with the same result: ``loop`` is the readable reference and works on the host;
``vectorized`` never leaves the device; ``graph`` replays ``vectorized`` as one CUDA graph per
shape.

Speculative sampling accepts a prefix of each request's drafts and adds one
token of the target's own (Leviathan et al., 2023, arXiv:2211.17192), so ``n``
sampled ids mean ``n - 1`` accepted drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from cachetools import LRUCache
from torch import Tensor

from .accepted_forms import SampledIds, check_ids
from .config import AcceptanceMode
from .cuda_graphs import capture
from .errors import BackendUnavailableError
from .host_values import to_device
from .layout import RowLayout

#: On the host a Python loop beats torch's dispatch up to about this many ids.
_LOOP_UP_TO: Final = 64

#: At most this many shapes keep a captured graph each. Beyond that, mode "graph" drops the least
#: recently used graph, and "auto" stays vectorized.
_MAX_GRAPHS: Final = 64


class Acceptance:
    """Counts accepted drafts, in one mode.

    Args:
        mode: ``"loop"``, ``"vectorized"``, ``"graph"`` or ``"auto"``: on a CUDA device a
            graph once a shape repeats, on the host a loop while the batch is small.
        device: the device of the ids and of the counts.

    Raises:
        BackendUnavailableError: ``"graph"`` without a CUDA device.
    """

    def __init__(self, mode: AcceptanceMode, device: torch.device) -> None:
        self.device = device
        if mode == "graph" and self.device.type != "cuda":
            raise BackendUnavailableError(
                "Acceptance",
                f"acceptance='graph' needs a CUDA device, not {self.device}",
                hint="use 'auto', or 'vectorized'",
            )
        self.mode = mode
        self._graphs: LRUCache[tuple[object, ...], _Graph] = LRUCache(_MAX_GRAPHS)
        self._seen: LRUCache[tuple[object, ...], bool] = LRUCache(_MAX_GRAPHS)

    def from_ids(self, sampled: SampledIds, draft_len: Sequence[int]) -> Tensor:
        """Count the accepted drafts of each request: its ids that are tokens, less one.

        Args:
            sampled: the ids; more of them than a request can have accepted are left out.
            draft_len: drafts per request.

        Returns:
            int64 ``[num_requests]``, each in ``[0, draft_len]``. In graph mode the buffer is
            reused by the next call of the same shape.

        Raises:
            AcceptanceError: wrong rank, dtype, or number of requests.
        """
        ids = sampled.ids
        check_ids(ids, len(draft_len))
        limit = to_device(draft_len, self.device, torch.int64)
        key = (tuple(ids.shape), ids.dtype, sampled.placeholder, sampled.vocab_size)
        mode = self._choose(key, ids.numel()) if self.mode == "auto" else self.mode
        if mode == "loop":
            return _by_loop(sampled, draft_len)
        if mode == "graph":
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._graphs[key] = _Graph(sampled, limit)
            return graph.replay(ids, limit)
        return _on_device(sampled, limit)

    def counted(
        self, sampled: SampledIds, layout: RowLayout, *, takes_ids: bool
    ) -> Tensor | SampledIds:
        """Return the value that ``commit`` hands an executor for ``sampled``: counts, or the ids.

        The ids stay ids for an executor that ``takes_ids`` and counts them in its own launch or
        graph, unless this object's mode is "loop" or "vectorized", which count here.
        """
        if takes_ids and self.mode in ("auto", "graph"):
            return sampled
        return self.from_ids(sampled, layout.draft_len)

    def _choose(self, key: tuple[object, ...], size: int) -> str:
        """Return the mode that "auto" takes for a call with ``size`` ids.

        On the host: "loop" for up to ``_LOOP_UP_TO`` ids, else "vectorized". On a GPU: "graph" for
        a shape that came before, while there is room for its graph; else "vectorized", as for no
        ids and while a stream is being captured. On a GPU a new shape is remembered.
        """
        if self.device.type != "cuda":
            return "loop" if size <= _LOOP_UP_TO else "vectorized"
        if torch.cuda.is_current_stream_capturing() or size == 0:
            return "vectorized"  # becomes part of the graph being captured
        # A full cache is not made to drop graphs here: with more shapes than it has room for, each
        # step would capture one.
        if key in self._graphs or (key in self._seen and len(self._graphs) < _MAX_GRAPHS):
            return "graph"
        self._seen[key] = True
        return "vectorized"


class _Graph:
    """A captured count: inputs are copied to fixed buffers, and the output buffer is reused."""

    def __init__(self, sampled: SampledIds, limit: Tensor) -> None:
        fixed = attrs.evolve(sampled, ids=sampled.ids.clone())
        self._inputs = [fixed.ids, limit.clone()]
        self._output = _on_device(fixed, self._inputs[1])  # warm-up outside the capture

        def run() -> None:
            self._output = _on_device(fixed, self._inputs[1])

        self._graph = capture(run)

    def replay(self, ids: Tensor, limit: Tensor) -> Tensor:
        """Count the drafts of ids of the captured shape; the next call overwrites the result."""
        torch._foreach_copy_(self._inputs, [ids, limit])
        self._graph.replay()
        return self._output


def _by_loop(sampled: SampledIds, draft_len: Sequence[int]) -> Tensor:
    """Count accepted drafts, valid ids less one, as int64 on the ids' device; waits for a GPU."""
    placeholder, vocab_size = sampled.placeholder, sampled.vocab_size
    counts = []
    for ids, drafts in zip(sampled.ids.tolist(), draft_len, strict=True):
        tokens = [i for i in ids if i != placeholder and (vocab_size is None or i < vocab_size)]
        counts.append(max(0, min(len(tokens) - 1, drafts)))
    return torch.tensor(counts, dtype=torch.int64, device=sampled.ids.device)


def _on_device(sampled: SampledIds, limit: Tensor) -> Tensor:
    """Count the accepted drafts by torch operations, int64 ``[num_requests]``, without waiting."""
    return torch.minimum(sampled.counts(), limit).clamp(min=0)
