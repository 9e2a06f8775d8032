"""From what a sampler returns to the draft rows that were accepted.

Three sources: sampled token ids with placeholders, draft and target ids to
compare, or counts. Three ways that give the same answer: ``loop`` is the
readable reference and works on the host; ``vectorized`` never leaves the
device; ``graph`` replays ``vectorized`` as one CUDA graph per shape.

Speculative sampling accepts a prefix of each request's drafts and adds one
token of the target's own (Leviathan et al., 2023, arXiv:2211.17192), so ``n``
sampled ids mean ``n - 1`` accepted drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from .config import ACCEPTANCE_MODES
from .errors import AcceptanceError, BackendUnavailableError, ConfigError, SlotMappingError
from .executor import SampledIds
from .layout import SIGNED, Lengths, RowLayout, as_lengths, to_device

#: On the host a Python loop beats torch's dispatch up to about this many ids.
_LOOP_UP_TO: Final = 64

#: Shapes that keep a captured graph each; beyond, ``auto`` stays vectorized.
_MAX_GRAPHS: Final = 64


class Acceptance:
    """Counts accepted drafts, in one mode.

    Args:
        mode: ``"loop"``, ``"vectorized"``, ``"graph"`` or ``"auto"``: on a CUDA device a
            graph where the shape repeats, on the host a loop while the batch is small.
        device: where ids come from and counts go to.

    Raises:
        BackendUnavailableError: ``"graph"`` without a CUDA device.
        ConfigError: no such mode.
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
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._seen: set[tuple[object, ...]] = set()

    def from_ids(
        self,
        sampled: Tensor,
        draft_len: Lengths,
        *,
        placeholder: int = -1,
        vocab_size: int | None = None,
    ) -> Tensor:
        """Accepted drafts per request from sampled ids.

        Args:
            sampled: int ``[num_requests, num_columns]``: accepted drafts, then one token of
                the target's own, then placeholders. Any number of columns, zero included.
            draft_len: drafts per request: an int, a sequence, or int ``[num_requests]``.
            placeholder: the id that stands for "nothing".
            vocab_size: ids at or above it count as nothing, too.

        Returns:
            int64 ``[num_requests]``, each in ``[0, draft_len]``. In graph mode the buffer is
            reused by the next call of the same shape.

        Raises:
            AcceptanceError: wrong rank, dtype, or number of requests.
        """
        _check_ids("from_ids", sampled)
        _check_settings("from_ids", placeholder, vocab_size)
        limit = self._limit(draft_len, sampled.shape[0])
        settings = (placeholder, vocab_size)
        return self._run("ids", _ids_loop, _ids_vector, (sampled, limit), settings)

    def from_match(self, draft_ids: Tensor, target_ids: Tensor, draft_len: Lengths) -> Tensor:
        """Accepted drafts per request under greedy verification: the matching prefix.

        Args:
            draft_ids: int ``[num_requests, num_columns]``, anything beyond ``draft_len``.
            target_ids: int ``[num_requests, num_columns or more or fewer]``: the target's
                choice at each draft's position; a missing column matches nothing.
            draft_len: as for ``from_ids``.

        Returns:
            int64 ``[num_requests]``, each in ``[0, draft_len]``.

        Raises:
            AcceptanceError: wrong rank, dtype, or number of requests.
        """
        _check_ids("from_match", draft_ids)
        _check_ids("from_match", target_ids)
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

    def of_window(
        self, sampled: SampledIds, layout: RowLayout, *, takes_ids: bool
    ) -> Tensor | SampledIds:
        """What ``commit`` hands an executor for ``sampled``: counts, in this mode.

        Ids stay ids for an executor that ``takes_ids``, in its own launch or graph, unless
        the mode names another way ("loop", "vectorized").

        Raises:
            AcceptanceError: the ids do not fit the window, or are on another device.
        """
        ids = sampled.ids
        _check_ids("commit", ids)
        _check_settings("commit", sampled.placeholder, sampled.vocab_size)
        elsewhere = ids.device != self.device
        if ids.shape[0] != layout.num_requests or (elsewhere and not ids.is_cpu):
            raise AcceptanceError(
                "commit",
                "sampled ids do not fit the window",
                expected=f"[{layout.num_requests}, num_columns] on {self.device}",
                got=f"{list(ids.shape)} on {ids.device}",
                hint="one line of ids per request of the window",
            )
        if elsewhere:
            ids = to_device(ids, self.device, ids.dtype)
        if takes_ids and self.mode in ("auto", "graph"):
            return attrs.evolve(sampled, ids=ids) if elsewhere else sampled
        return self.from_ids(
            ids, layout.draft_len, placeholder=sampled.placeholder, vocab_size=sampled.vocab_size
        )

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
            lengths = as_lengths("draft_len", draft_len, num_requests)
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
        """What "auto" does for this shape on this device."""
        if self.device.type != "cuda":
            return "loop" if size <= _LOOP_UP_TO else "vectorized"
        if torch.cuda.is_current_stream_capturing() or size == 0:
            return "vectorized"  # becomes part of the graph being captured
        if key in self._graphs or (key in self._seen and len(self._graphs) < _MAX_GRAPHS):
            return "graph"
        self._seen.add(key)
        return "vectorized"


class _Graph:
    """A captured call: inputs are copied into fixed buffers, the output buffer is reused."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        tensors: tuple[Tensor, ...],
        settings: tuple[Any, ...],
    ) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up outside the capture
            function(*self._inputs, *settings)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(*self._inputs, *settings)

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


def _check_settings(operation: str, placeholder: object, vocab_size: object) -> None:
    for name, value in (("placeholder", placeholder), ("vocab_size", vocab_size)):
        optional = name == "vocab_size" and value is None
        if not optional and (not isinstance(value, int) or isinstance(value, bool)):
            raise AcceptanceError(
                operation,
                f"{name} is not valid",
                expected="an int" if name == "placeholder" else "an int, or None",
                got=repr(value),
                hint="pass the sampler's own: the id that stands for nothing, the number of ids",
            )


def _check_ids(operation: str, ids: Tensor) -> None:
    shaped = isinstance(ids, Tensor) and ids.ndim == 2
    if not shaped or ids.dtype not in SIGNED:
        raise AcceptanceError(
            operation,
            "token ids are malformed",
            expected="signed int [num_requests, num_columns]",
            got=f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__,
            hint="add the request dimension, or pass counts to commit() directly",
        )
