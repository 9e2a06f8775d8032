"""``Batch``: the rows of one window, with their slots and their content."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ..layers import LayerRef
from .caches import LayerSpec, TestCache, noise
from .number_formats import NumberFormat
from .oracle import Row

#: Settled and draft rows per request, by a name for the special feature of the shape.
SHAPES: Final[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "one": ((1,), (3,)),
    "uneven": ((1, 1, 1, 1), (3, 0, 5, 1)),
    "none-settled": ((0, 0), (2, 4)),
    "many-settled": ((3, 1, 0), (2, 2, 3)),
    "settled-laps": ((6, 4, 1), (2, 0, 5)),
    "only-settled": ((1, 1, 2), (0, 0, 0)),
    "an-empty-request": ((0, 1, 0), (0, 2, 1)),
    "no-rows": ((0, 0), (0, 0)),
    "no-requests": ((), ()),
    "seventeen-rows": ((1, 1, 1), (7, 6, 1)),
}

#: The probability that a row has no slot, or a request no state.
PADDING: Final = 0.2


@attrs.frozen(eq=False)
class Batch:
    """The rows of one window.

    Attributes:
        settled: settled rows per request.
        draft_len: draft rows per request.
        slots: by group, one slot per row; -1 is padding.
        tensors: by layer, the tensors for ``stage``: key and value, or one latent; then the scales
            of codes, if scales lie beside the rows. See ``handed_in``.
        rows: by layer and row, the words that the cache must hold if the row is written; none for
            replayed layers.
        states: by group of replayed layers, the slot of each request's state.
        crossings: by group, the boundary and the slot beyond of each request; empty without any.
    """

    settled: tuple[int, ...]
    draft_len: tuple[int, ...]
    slots: Mapping[str, list[int]]
    tensors: Mapping[str, tuple[Tensor, ...]]
    rows: Mapping[str, list[Row]]
    states: Mapping[str, list[int]] = attrs.Factory(dict)
    crossings: Mapping[str, tuple[list[int], list[int]]] = attrs.Factory(dict)

    @property
    def num_rows(self) -> int:
        """Rows of the window."""
        return sum(self.settled) + sum(self.draft_len)

    @property
    def drafts(self) -> list[bool]:
        """Per row, True if it is a draft."""
        return [draft is not None for _, draft in self.owners]

    @property
    def owners(self) -> list[tuple[int, int | None]]:
        """Per row, its request, and its number among the request's drafts (None: settled)."""
        owners: list[tuple[int, int | None]] = []
        for request, (known, drafts) in enumerate(zip(self.settled, self.draft_len, strict=True)):
            owners += [(request, None)] * known
            owners += [(request, draft) for draft in range(drafts)]
        return owners

    def kept(self, accepted: Sequence[int]) -> list[bool]:
        """Return for each row whether it is kept, by the accepted drafts of each request."""
        return [draft is not None and draft < accepted[request] for request, draft in self.owners]

    def taken_in(self, kept: Sequence[bool]) -> list[list[int]]:
        """List, by request, the rows that its state takes in, in order.

        Settled rows and the kept drafts.
        """
        taken: list[list[int]] = [[] for _ in self.settled]
        for row, (request, draft) in enumerate(self.owners):
            if draft is None or kept[row]:
                taken[request].append(row)
        return taken

    def count(
        self, kept: Sequence[bool] | None = None, groups: Sequence[str] | None = None
    ) -> tuple[int, int, int]:
        """Count draft rows staged, committed and rejected, once per row with a slot in any group.

        Args:
            kept: the rows that a commit keeps; None is an abort.
            groups: the groups that count; None is all.
        """
        groups = list(self.slots) if groups is None else groups
        real = [any(self.slots[g][row] != -1 for g in groups) for row in range(self.num_rows)]
        drafts = [draft and there for draft, there in zip(self.drafts, real, strict=True)]
        staged, committed = sum(drafts), sum(map(all, zip(drafts, kept or drafts, strict=True)))
        committed = 0 if kept is None else committed
        return staged, committed, staged - committed


def make_batch(
    caches: Sequence[TestCache],
    shape: tuple[Sequence[int], Sequence[int]],
    device: torch.device,
    rng: random.Random,
    *,
    padding: float = PADDING,
    payload: str = "native",
    avoid: Sequence[int] = (),
) -> Batch:
    """Make random slots and payload for a window of this shape.

    Slots are distinct, but for the rows of one request in a ring or a state.

    Args:
        caches: the layers.
        shape: settled and draft rows per request.
        device: the device of the payload.
        rng: the source of all random numbers.
        padding: the probability that a row has no slot.
        payload: ``"native"``, bit patterns in the cache's own dtype, or ``"cast"``, numbers in
            another floating dtype.
        avoid: slots that must not be used.
    """
    settled, draft_len = tuple(shape[0]), tuple(shape[1])
    num_rows = sum(settled) + sum(draft_len)
    limits: dict[str, int] = {}
    for cache in caches:
        group = cache.spec.group
        limits[group] = min(cache.num_slots, limits.get(group, cache.num_slots))
    lengths = [known + drafts for known, drafts in zip(settled, draft_len, strict=True)]
    specs = {cache.spec.group: cache.spec for cache in caches}
    slots = {}
    for group, limit in limits.items():
        if specs[group].kind == "recurrent":
            states = rng.sample(range(limit), len(lengths))
            states = [-1 if rng.random() < padding else state for state in states]
            slots[group] = [states[r] for r, rows in enumerate(lengths) for _ in range(rows)]
            continue
        if specs[group].kind == "ring":
            free = _ring_slots(specs[group], limit, lengths, rng)
        else:
            free = rng.sample([slot for slot in range(limit) if slot not in avoid], num_rows)
        slots[group] = [-1 if rng.random() < padding else slot for slot in free]
    tensors: dict[str, tuple[Tensor, ...]] = {}
    rows: dict[str, list[Row]] = {}
    for cache in caches:
        make = native if payload == "native" else cast
        parts = [
            make(cache.spec.fmt, num_rows, plane.heads, plane.size, rng) for plane in cache.sides
        ]
        if payload == "native":
            for plane in cache.planes[len(parts) :]:
                scales = noise(num_rows * plane.heads, torch.int32, rng).view(torch.float32)
                parts.append(scales.view(num_rows, plane.heads))
        tensors[cache.name], rows[cache.name] = as_tensors(cache, parts, device), cache.rows(parts)
    return Batch(settled, draft_len, slots, tensors, rows)


def as_tensors(
    cache: TestCache, parts: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, ...]:
    """Return copies on the device of rows ``[num_rows, heads, size]``, and scales, for ``stage``.

    Rows of states get the state's shape, and latents lose the dimension of heads.
    """
    staged = []
    for plane, part in enumerate(parts):
        if cache.spec.kind == "recurrent":
            part = part.reshape(part.shape[0], *cache.ref.states[plane].shape[1:])
        elif cache.ref.is_latent and plane == 0:
            part = part.squeeze(1)
        staged.append(part.to(device).clone())
    return tuple(staged)


def handed_in(ref: LayerRef, parts: Sequence[Tensor]) -> tuple[Tensor | tuple[Tensor, ...], ...]:
    """Return the arguments for ``Window.stage``.

    One per key and value, each in a pair with its scales. Of a replayed layer one tuple of all
    parts.
    """
    if ref.replay:
        return (tuple(parts),)
    sides = sum(not plane.is_scale for plane in ref.planes)
    if len(parts) == sides:
        return tuple(parts)
    return tuple(zip(parts[:sides], parts[sides:], strict=True))


def _ring_slots(
    spec: LayerSpec, limit: int, lengths: Sequence[int], rng: random.Random
) -> list[int]:
    """Return the slots of each request's rows, from a random position of its ring on.

    No two requests share a block.
    """
    per_ring = -(-spec.ring_size // spec.block_size)
    blocks = rng.sample(range(limit // spec.block_size), per_ring * len(lengths))
    slots = []
    for request, rows in enumerate(lengths):
        own, first = blocks[request * per_ring :], rng.randrange(3 * spec.ring_size)
        for position in range(first, first + rows):
            block, offset = divmod(position % spec.ring_size, spec.block_size)
            slots.append(own[block] * spec.block_size + offset)
    return slots


def native(fmt: NumberFormat, rows: int, heads: int, size: int, rng: random.Random) -> Tensor:
    """Make rows in the cache's own dtype with random bits: NaN, infinities and -0.0 included."""
    words = noise(rows * heads * size, fmt.word, rng)
    return words.view(fmt.dtype).view(rows, heads, size)


def cast(fmt: NumberFormat, rows: int, heads: int, size: int, rng: random.Random) -> Tensor:
    """Make rows in a wider dtype, which the library has to encode: ties, overflow, odd values.

    float64 for a format in float32, else float32; NaN only where the format has one of 8 bits.
    """
    count = rows * heads * size
    odd = [0.0, -0.0, 1e-9, -1e-9, 3e38, -3e38, float("inf"), float("-inf"), 0.4375, 2.5, -3.5]
    if fmt.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        odd.append(float("nan"))
    values = [
        rng.choice(odd) if rng.random() < 0.25 else rng.gauss(0, 1) * 10 ** rng.randint(-3, 3)
        for _ in range(count)
    ]
    dtype = torch.float64 if fmt.dtype is torch.float32 else torch.float32
    return torch.tensor(values, dtype=dtype).view(rows, heads, size)


def spread(part: Tensor) -> Tensor:
    """Return a copy as a view with gaps between elements, like a slice of a fused projection."""
    wide = part.new_zeros(*part.shape[:-1], part.shape[-1] * 2 + 1)
    view = wide[..., 1::2]
    view.copy_(part)
    return view


def every_other(part: Tensor) -> Tensor:
    """Return a copy as every other row of a tensor, from its very first element on."""
    view = part.new_zeros(2 * part.shape[0], *part.shape[1:])[::2]
    view.copy_(part)
    return view


def turned(part: Tensor) -> Tensor:
    """Return a copy with rows and heads swapped in memory, as a transposed projection."""
    return part.transpose(0, 1).contiguous().transpose(0, 1)


def one_for_all(batch: Batch, caches: Sequence[TestCache]) -> Batch:
    """Return a batch of equal layers, keys, values and heads: views that repeat the first head.

    Keys and values are one tensor, which is that of every layer; so are their scales, if any. Those
    of floating dtypes require a gradient.
    """
    one = [part[:, :1].expand(part.shape) for part in batch.tensors[caches[0].name][::2]]
    parts = [part for part in one for _ in range(2)]
    rows = {cache.name: cache.rows([part.cpu() for part in parts]) for cache in caches}
    learnt = tuple(part.requires_grad_(part.is_floating_point()) for part in parts)
    return attrs.evolve(batch, tensors=dict.fromkeys(batch.tensors, learnt), rows=rows)


def random_counts(batch: Batch, rng: random.Random) -> list[int]:
    """Draw a number of accepted drafts for each request, from 0 to all of them."""
    return [rng.randint(0, drafts) for drafts in batch.draft_len]
