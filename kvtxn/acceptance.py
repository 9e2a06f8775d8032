"""Count the accepted drafts of each request from token ids.

Two sources: sampled ids with placeholders, or draft and target ids to compare. Three modes with
the same result: ``loop`` is the readable reference and works on the host; ``vectorized`` never
leaves the device; ``graph`` replays ``vectorized`` as one CUDA graph per shape.

Speculative sampling accepts a prefix of each request's drafts and adds one
token of the target's own (Leviathan et al., 2023, arXiv:2211.17192), so ``n``
sampled ids mean ``n - 1`` accepted drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from cachetools import LRUCache
from torch import Tensor

from .commit_input import SIGNED, SampledIds, check_ids, check_settings
from .config import ACCEPTANCE_MODES
from .cuda_graphs import capture
from .errors import AcceptanceError, BackendUnavailableError, ConfigError, SlotMappingError
from .host_values import to_device
from .layout import Lengths, RowLayout, parse_lengths, spread_lengths

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
        ConfigError: the mode is unknown.
    """

    def __init__(self, mode: str = "auto", device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        if not isinstance(mode, str) or mode not in ACCEPTANCE_MODES:
            raise ConfigError(
                "Acceptance",
                f"no mode is called {mode!r}",
                expected=f"one of {', '.join(map(repr, ACCEPTANCE_MODES))}",
                got=repr(mode),
                hint="choose one of them",
            )
        if mode == "graph" and self.device.type != "cuda":
            raise BackendUnavailableError(
                "Acceptance",
                f"acceptance='graph' needs a CUDA device, not {self.device}",
                hint="use 'auto', or 'vectorized'",
            )
        self.mode = mode
        self._graphs: LRUCache[tuple[object, ...], _Graph] = LRUCache(_MAX_GRAPHS)
        self._seen: LRUCache[tuple[object, ...], bool] = LRUCache(_MAX_GRAPHS)

    def from_ids(
        self,
        sampled: Tensor,
        draft_len: Lengths,
        *,
        placeholder: int = -1,
        vocab_size: int | None = None,
    ) -> Tensor:
        """Count the accepted drafts of each request from sampled ids.

        Args:
            sampled: int ``[num_requests, num_columns]``: accepted drafts, then one token that
                the target chose, then placeholders. Any number of columns, zero included.
            draft_len: drafts per request: an int, a sequence, or int ``[num_requests]``.
            placeholder: the id that stands for "no token".
            vocab_size: ids at or above it count as "no token", too.

        Returns:
            int64 ``[num_requests]``, each in ``[0, draft_len]``. In graph mode the buffer is
            reused by the next call of the same shape.

        Raises:
            AcceptanceError: wrong rank, dtype, or number of requests.
        """
        check_ids("from_ids", sampled)
        check_settings("from_ids", placeholder, vocab_size)
        limit = self._limit(draft_len, sampled.shape[0])
        settings = (placeholder, vocab_size)
        return self._run("ids", _ids_loop, _ids_vector, (sampled, limit), settings)

    def from_match(self, draft_ids: Tensor, target_ids: Tensor, draft_len: Lengths) -> Tensor:
        """Count the accepted drafts of each request under greedy verification.

        These are the drafts before the first one that differs from the target's choice.

        Args:
            draft_ids: int ``[num_requests, num_columns]``; columns beyond ``draft_len`` are
                ignored.
            target_ids: int ``[num_requests, any number of columns]``: the target's choice at each
                draft's position; a draft without a column is not accepted.
            draft_len: as for ``from_ids``.

        Returns:
            int64 ``[num_requests]``, each in ``[0, draft_len]``.

        Raises:
            AcceptanceError: wrong rank, dtype, or number of requests.
        """
        check_ids("from_match", draft_ids)
        check_ids("from_match", target_ids)
        if draft_ids.shape[0] != target_ids.shape[0]:
            raise AcceptanceError(
                "from_match",
                "draft_ids and target_ids differ in requests",
                expected=draft_ids.shape[0],
                got=target_ids.shape[0],
            )
        limit = self._limit(draft_len, draft_ids.shape[0])
        tensors = (draft_ids, target_ids, limit)
        return self._run("match", _match_loop, _match_vector, tensors, ())

    def counted(
        self, sampled: SampledIds, layout: RowLayout, *, takes_ids: bool
    ) -> Tensor | SampledIds:
        """Return the value that ``commit`` hands an executor for ``sampled``: counts, or the ids.

        The ids stay ids for an executor that ``takes_ids`` and counts them in its own launch or
        graph, unless this object's mode is "loop" or "vectorized", which count here.
        """
        if takes_ids and self.mode in ("auto", "graph"):
            return sampled
        settings = {"placeholder": sampled.placeholder, "vocab_size": sampled.vocab_size}
        return self.from_ids(sampled.ids, layout.draft_len, **settings)  # type: ignore[arg-type]

    def _limit(self, draft_len: Lengths, num_requests: int) -> Tensor:
        if isinstance(draft_len, Tensor) and draft_len.device.type != "cpu":
            if draft_len.shape != (num_requests,) or draft_len.dtype not in SIGNED:
                raise AcceptanceError(
                    "acceptance",
                    "draft_len does not fit the ids",
                    expected=f"int [{num_requests}]",
                    got=f"{draft_len.dtype} {list(draft_len.shape)}",
                )
            return draft_len
        try:
            lengths = spread_lengths(
                "draft_len", parse_lengths("draft_len", draft_len), num_requests
            )
        except SlotMappingError as error:
            raise AcceptanceError(
                "acceptance",
                error.problem,
                expected=error.expected,
                got=error.got,
                hint="pass drafts per request, as an int or one int each",
            ) from None
        return to_device(lengths, self.device, torch.int64)

    def _run(
        self,
        what: str,
        loop: Callable[..., Tensor],
        vector: Callable[..., Tensor],
        tensors: tuple[Tensor, ...],
        settings: tuple[int | None, ...],
    ) -> Tensor:
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        key = (what, *shapes, *settings)
        mode = (
            self._choose(key, sum(t.numel() for t in tensors)) if self.mode == "auto" else self.mode
        )
        if mode == "loop":
            return loop(*tensors, *settings)
        if mode == "graph":
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._graphs[key] = _Graph(vector, tensors, settings)
            return graph.replay(tensors)
        return vector(*tensors, *settings)

    def _choose(self, key: tuple[object, ...], size: int) -> str:
        """Choose the mode of "auto" for a shape; a graph needs a shape that was seen before."""
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
    """A captured call: inputs are copied to fixed buffers, and the output buffer is reused."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        tensors: tuple[Tensor, ...],
        settings: tuple[Any, ...],
    ) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        self._output = function(*self._inputs, *settings)  # warm-up outside the capture

        def run() -> None:
            self._output = function(*self._inputs, *settings)

        self._graph = capture(run)

    def replay(self, tensors: tuple[Tensor, ...]) -> Tensor:
        torch._foreach_copy_(self._inputs, list(tensors))
        self._graph.replay()
        return self._output


def _ids_loop(
    sampled: Tensor, draft_len: Tensor, placeholder: int, vocab_size: int | None
) -> Tensor:
    counts = []
    for ids, drafts in zip(sampled.tolist(), draft_len.tolist(), strict=True):
        tokens = [i for i in ids if i != placeholder and (vocab_size is None or i < vocab_size)]
        counts.append(max(0, min(len(tokens) - 1, drafts)))
    return torch.tensor(counts, dtype=torch.int64, device=sampled.device)


def _ids_vector(
    sampled: Tensor, draft_len: Tensor, placeholder: int, vocab_size: int | None
) -> Tensor:
    counts = SampledIds(sampled, placeholder, vocab_size).counts()
    return torch.minimum(counts, draft_len).clamp(min=0)


def _match_loop(draft_ids: Tensor, target_ids: Tensor, draft_len: Tensor) -> Tensor:
    counts = []
    rows = zip(draft_ids.tolist(), target_ids.tolist(), draft_len.tolist(), strict=True)
    for drafts, targets, length in rows:
        count = 0
        for draft, target in list(zip(drafts, targets, strict=False))[:length]:
            if draft != target:
                break
            count += 1
        counts.append(count)
    return torch.tensor(counts, dtype=torch.int64, device=draft_ids.device)


def _match_vector(draft_ids: Tensor, target_ids: Tensor, draft_len: Tensor) -> Tensor:
    columns = min(draft_ids.shape[1], target_ids.shape[1])
    same = draft_ids[:, :columns] == target_ids[:, :columns]
    prefix = same.to(torch.int64).cumprod(1).sum(1)
    return torch.minimum(prefix, draft_len).clamp(min=0)
