"""Replayed states under test: their memories, and their expected content.

The oracle shares no code with the library. A state is a list of Python floats, a row is taken in
with one product and one sum after another, each rounded to float32, and rounded once more when
the window ends.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from itertools import product
from typing import Final

import attrs
import torch
from torch import Tensor

from ..layers import LayerRef
from ..recurrent import GatedDelta, Mamba2, Recurrence, ShortConv
from .caches import GUARD, noise
from .number_formats import FORMATS, NumberFormat, float32

#: Families of recurrences, as specs name them.
FAMILIES: Final = ("gated_delta", "kda", "mamba2", "short_conv")


@attrs.frozen
class StateSpec:
    """A state of a replayed layer.

    Attributes:
        family: one of ``FAMILIES``.
        fmt: the number format of the stored state.
        layout: ``"plain"``, ``"gapped"`` (a view into something larger in every dimension) or
            ``"permuted"`` (the last two dimensions are swapped in memory).
        heads: heads of the state.
        key_heads: number of distinct keys, each shared by the same number of heads.
        value_size: values per head.
        key_size: keys per head; for a convolution, channels.
        width: taps of a convolution.
        key_dtype: the dtype in which keys wait.
    """

    family: str
    fmt: NumberFormat = FORMATS["fp32"]
    layout: str = "plain"
    heads: int = 4
    key_heads: int = 2
    value_size: int = 3
    key_size: int = 5
    width: int = 4
    key_dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one state."""
        if self.family == "short_conv":
            return self.width - 1, self.key_size
        return self.heads, self.value_size, self.key_size

    @property
    def constant(self) -> Tensor:
        """A of Mamba-2, one number per head."""
        return -torch.linspace(0.25, 2, self.heads)

    def recurrence(self, device: torch.device) -> Recurrence:
        """Return the recurrence of the family as the library's own description."""
        match self.family:
            case "short_conv":
                return ShortConv(self.width)
            case "mamba2":
                return Mamba2(self.constant.to(device), self.key_heads, dtype=self.key_dtype)
            case "kda":
                return GatedDelta(self.key_heads, decay="channel", key_dtype=self.key_dtype)
        return GatedDelta(self.key_heads, key_dtype=self.key_dtype)


@attrs.frozen
class ReplayedSpec:
    """A replayed layer: its states, and the number of slots of each."""

    states: tuple[StateSpec, ...]
    group: str = "state"
    num_states: int = 9
    kind: str = attrs.field(default="replayed", init=False)


def word_of(value: float, fmt: NumberFormat) -> int:
    """Round a float32 number to the nearest word of a format, ties to even; a signed int.

    Raises:
        OverflowError: the number is too large for float16.
    """
    if fmt.dtype is torch.bfloat16:
        bits = int(struct.unpack("I", struct.pack("f", value))[0])
        bits += 0x7FFF + (bits >> 16 & 1)
        word = bits >> 16 & 0xFFFF
        return word - 0x10000 if word & 0x8000 else word
    code, held = ("e", "h") if fmt.dtype is torch.float16 else ("f", "i")
    return int(struct.unpack(held, struct.pack(code, value))[0])


@attrs.define(eq=False)
class StateMemory:
    """A state tensor: a flat memory of noise between guard pages, and its expected words."""

    spec: StateSpec
    memory: Tensor
    strides: tuple[int, ...]
    num_states: int
    truth: list[int]

    @classmethod
    def build(
        cls, spec: StateSpec, num_states: int, device: torch.device, rng: random.Random
    ) -> StateMemory:
        """Fill a memory with noise, states and guard pages included, and expect just that."""
        sizes = list(spec.shape)
        order = list(range(len(sizes)))
        if spec.layout == "permuted":
            order[-2:] = reversed(order[-2:])
        strides, step, gap = [0] * len(sizes), 1, 3 if spec.layout == "gapped" else 0
        for dim in reversed(order):
            strides[dim] = step
            step = step * sizes[dim] + gap
        whole = (step, *strides)
        words = noise(num_states * step + 2 * GUARD, spec.fmt.word, rng)
        memory = words.to(device).clone()
        return cls(spec, memory, whole, num_states, memory.tolist())

    def view(self) -> Tensor:
        """Return the states as the view that the library gets."""
        shape = (self.num_states, *self.spec.shape)
        return self.memory.view(self.spec.fmt.dtype).as_strided(shape, self.strides, GUARD)

    def places(self, slot: int) -> list[int]:
        """List the index in the memory of each word of a state."""
        each = product(*(range(size) for size in self.spec.shape))
        start = GUARD + slot * self.strides[0]
        return [
            start + sum(i * s for i, s in zip(index, self.strides[1:], strict=True))
            for index in each
        ]

    def read(self, slot: int) -> list[int]:
        """Return the expected words of a state; the memory itself is not read."""
        return [self.truth[place] for place in self.places(slot)]

    def write(self, slot: int, words: Sequence[int]) -> None:
        """Set the expected words of a state; the memory itself stays as it is."""
        for place, word in zip(self.places(slot), words, strict=True):
            self.truth[place] = word

    def make_up(self, slot: int, words: Sequence[int]) -> None:
        """Write a state's words into the memory and expect them, as a past that a test makes up."""
        self.write(slot, words)
        values = torch.tensor(words, dtype=self.memory.dtype).to(self.memory.device)
        self.memory[torch.tensor(self.places(slot)).to(self.memory.device)] = values

    def parts_of(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Bring staged tensors to the host, as ``take_in`` reads them.

        Mamba-2's decays are computed on the device on which the library computes them, because
        these tests do not compare two implementations of the exponential.
        """
        if self.spec.family == "mamba2":
            dt = parts[1]
            parts = [*parts, torch.exp(dt * self.spec.constant.to(dt.device))]
        return [part.cpu() for part in parts]

    def take_in(
        self, slot: int, rows: Sequence[Sequence[Tensor]], boundary: int = 0, beyond: int = -1
    ) -> None:
        """Take these rows into the expected state; past a boundary, into two states.

        Args:
            slot: the slot of the state; -1 is none.
            rows: part by part, as ``parts_of`` returns them.
            boundary: number of rows after which the request continues in ``beyond``.
            beyond: the slot beyond the boundary; -1 without a boundary.
        """
        if slot == -1:
            return
        before = self.read(slot)
        if beyond != -1 and len(rows) > boundary:
            self.write(beyond, self._after(before, rows))
            rows = rows[:boundary]
        if rows:
            self.write(slot, self._after(before, rows))

    def _after(self, words: list[int], rows: Sequence[Sequence[Tensor]]) -> list[int]:
        """Compute the words of a state after these rows, from the words before them.

        A convolution's inputs are moved as words; other states are rounded once, at the end.
        """
        if self.spec.family == "short_conv":
            for (row,) in rows:
                words = words[self.spec.key_size :] + row.view(self.spec.fmt.word).tolist()
            return words
        (numbers,) = self.spec.fmt.decode(words, (1.0,))
        for parts in rows:
            numbers = _rank_one(self.spec, numbers, parts)
        return [word_of(number, self.spec.fmt) for number in numbers]


def _rank_one(spec: StateSpec, state: list[float], row: Sequence[Tensor]) -> list[float]:
    """Return ``state * decay + value * key``, heads x values x keys; each operation in float32."""
    after = []
    for number, (head, value, key) in enumerate(
        product(range(spec.heads), range(spec.value_size), range(spec.key_size))
    ):
        shared = head // (spec.heads // spec.key_heads)
        if spec.family == "mamba2":
            x, dt, b, decays = row
            decay = float(decays[head])
            fresh, wanted = float32(float(x[head, value]) * float(dt[head])), float(b[shared, key])
        else:
            keys, values, decays = row
            decay = float(decays[head] if spec.family == "gated_delta" else decays[head, key])
            fresh, wanted = float(values[head, value]), float(keys[shared, key])
        after.append(float32(float32(state[number] * decay) + float32(fresh * wanted)))
    return after


@attrs.frozen(eq=False)
class ReplayedLayer:
    """A replayed layer under test.

    Attributes:
        spec: the description of the layer.
        ref: the ``LayerRef`` for the library.
        memories: one for each state.
    """

    spec: ReplayedSpec
    ref: LayerRef
    memories: tuple[StateMemory, ...]

    @classmethod
    def build(
        cls, name: str, spec: ReplayedSpec, device: torch.device, rng: random.Random
    ) -> ReplayedLayer:
        """Make a layer whose states are random bits, NaN included, until requests begin there."""
        memories = tuple(
            StateMemory.build(state, spec.num_states, device, rng) for state in spec.states
        )
        ref = LayerRef.recurrent(
            name,
            *(memory.view() for memory in memories),
            replay=[state.recurrence(device) for state in spec.states],
            group=spec.group,
        )
        return cls(spec, ref, memories)

    def begin(self, slots: Sequence[int], rng: random.Random) -> None:
        """Fill the states of requests with random numbers, as a prefill does, and expect these."""
        for memory, slot in product(self.memories, slots):
            size = math.prod(memory.spec.shape)
            numbers = [float32(rng.gauss(0, 1)) for _ in range(size)]
            memory.make_up(slot, [word_of(number, memory.spec.fmt) for number in numbers])

    def end(self, slots: Sequence[int], rng: random.Random) -> None:
        """Fill the states of ended requests with noise, NaN included, and expect that."""
        for memory, slot in product(self.memories, slots):
            size = math.prod(memory.spec.shape)
            memory.make_up(slot, noise(size, memory.spec.fmt.word, rng).tolist())

    def draw(
        self, real: Sequence[bool], device: torch.device, rng: random.Random
    ) -> tuple[Tensor, ...]:
        """Draw numbers for each part of the rows to stage; NaN in rows that are not real.

        Decays and steps are from 0 to 1.
        """
        tensors = []
        for part in self.ref.given:
            count = len(real) * math.prod(part.row_shape)
            positive = part.part in ("decay", "dt")
            values = [rng.random() if positive else rng.gauss(0, 1) for _ in range(count)]
            tensor = torch.tensor(values).view(len(real), *part.row_shape).to(part.format.dtype)
            tensor[[not each for each in real]] = math.nan
            tensors.append(tensor.to(device))
        return tuple(tensors)

    def take_in(
        self,
        slots: Sequence[int],
        parts: Sequence[Tensor],
        rows: Sequence[Sequence[int]],
        crossings: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """Expect states that took in these rows of a window; the memories stay as they are.

        Args:
            slots: the slot of each request's state.
            parts: the tensors that were staged.
            rows: the rows that each request's state takes in.
            crossings: the boundary and the slot beyond of each request.
        """
        given = iter(parts)
        bounds = crossings or ([0] * len(rows), [-1] * len(rows))
        for memory, recurrence, state in zip(
            self.memories, self.ref.replay, self.ref.states, strict=True
        ):
            own = memory.parts_of([next(given) for _ in recurrence.given(state)])
            for slot, taken, bound in zip(slots, rows, zip(*bounds, strict=True), strict=True):
                memory.take_in(slot, [[part[row] for part in own] for row in taken], *bound)

    def differences(self) -> list[str]:
        """Return a sentence for each memory that differs from the truth; an empty list passes."""
        found = []
        for number, memory in enumerate(self.memories):
            pairs = enumerate(zip(memory.memory.tolist(), memory.truth, strict=True))
            wrong = {place for place, (now, wanted) in pairs if now != wanted}
            if wrong:
                slots = [s for s in range(memory.num_states) if wrong & {*memory.places(s)}]
                inside = {place for slot in slots for place in memory.places(slot)}
                found.append(
                    f"{self.ref.name}, state {number} ({memory.spec.family}, "
                    f"{memory.spec.fmt.name}, {memory.spec.layout}): {len(wrong)} words differ, "
                    f"in slots {slots}, {len(wrong - inside)} in gaps or guard pages"
                )
        return found
