"""``WeightWatch``: begins an epoch when weights change, whether somebody says so or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError
from ..host_values import HostCopy
from .arguments import mapped
from .digest import EPOCH, RESERVED
from .ledger import Ledger
from .violation import Violation

#: Elements of each parameter that are hashed, and the default steps between two samples.
SAMPLED: Final = 64
EVERY: Final = 64
#: Where a request has found rows in the cache, the next sample comes sooner by this factor.
SOONER: Final = 8
#: Samples after which the parameters are listed anew: a loader may have put others in their places.
_LISTED: Final = 16
#: Steps from a sample on a GPU until the host looks at it: no call waits for the device, and all
#: ranks of an engine look after the same step.
_LATER: Final = 8
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Returns the parameters of a model as they are now; asked anew for each sample.
Parameters = Callable[[], Iterable[Tensor]]


@attrs.frozen(eq=False)
class _Sample:
    """The hashes of all weights after a step, on their way to the host.

    Attributes:
        step: the step before which they were taken.
        hashes: int64 ``[num_weights]``.
        told: the weights of which somebody said since the sample before that they had changed.
    """

    step: int
    hashes: HostCopy
    told: frozenset[str]


def _nothing() -> None:
    """Do nothing: no one has to know that an epoch begins."""


class WeightWatch:
    """The weights of one engine: changes that somebody tells of, and changes that samples show.

    Changes begin with the next step: an update that loads one parameter after the other is one
    epoch if no step runs in between. Weights whose sample has changed although nobody said so are a
    violation of kind ``weights``, and begin an epoch, too.

    A sample is up to 64 elements of each parameter, spread evenly: about ten launches on a GPU. It
    is taken every ``every`` steps, and where a request has found rows in the cache an eighth of
    that after the last one. A change that touches none of the elements is not seen, nor one between
    two samples if another change was told of there.

    Args:
        ledger: the engine's ledger.
        weights: the parameters by the name of their weights, as ``Ledger.new_epoch`` takes it.
            Left out are parameters on another device than the ledger's, or of a special layout.
        every: steps between two samples.

    Raises:
        ConfigError: weights are unknown, or ``every`` is not a positive int.
    """

    def __init__(
        self, ledger: Ledger, weights: Mapping[str, Parameters], every: int = EVERY
    ) -> None:
        given = mapped("WeightWatch", "weights", weights, "by name")
        for name in given:
            _require(name)
        self._weights: Final = {
            name: _Elements(each, ledger.device) for name, each in given.items()
        }
        if type(every) is not int or every < 1:
            raise ConfigError(
                "WeightWatch", "every is not valid", expected="a positive int", got=repr(every),
                hint=f"leave it out for {EVERY}",
            )  # fmt: skip
        self._ledger: Final = ledger
        self._every: Final = every
        self._later: Final = _LATER if ledger.device.type == "cuda" else 0
        self._told: set[str] = set()
        self._told_since: set[str] = set()  # the last sample
        self._steps = self._due = self._sooner = 0
        self._sample: _Sample | None = None
        self._known: list[int] | None = None
        self._odds = torch.zeros(0, dtype=torch.int64, device=ledger.device)

    def changed(self, weights: str = "target") -> None:
        """Begin an epoch with the next step, because weights have changed.

        All parameters are listed anew for the next sample.

        Raises:
            ConfigError: there are no weights of this name.
        """
        _require(weights)
        self._told.add(weights)
        for each in self._weights.values():  # whose memory may be given away
            each.forget()

    def content(self, beside: Iterable[Tensor] = (), *, drafter: bool = True) -> int | None:
        """Return a hash of a sample of the weights, for other processes with the ledger's key.

        Waits for the device. Weights that differ in none of the elements of the sample have one
        hash, and so have those of which no parameter can be read but equal ones.

        Args:
            beside: what rows depend on besides, such as some rotary positions; hashed whole.
            drafter: the drafter's weights count as well; no row of the target depends on them.

        Returns:
            An int64; None if no parameter can be read.
        """
        samples = [
            [*each.now()] for name, each in self._weights.items() if drafter or name != "drafter"
        ]
        if not any(samples):
            return None
        samples += [[[each.flatten()]] for each in beside]
        return self._ledger.books.key.seed([int(self._hash(each)) for each in samples])

    def begin_step(self, *, hits: bool = False, before: Callable[[], object] = _nothing) -> None:
        """Begin an epoch if weights have changed; call it before each ``Ledger.write``.

        A sample is taken if one is due, and the last one compared once it is old enough.

        Args:
            hits: a request begins with rows that it has found in the cache; all ranks of an engine
                have to say the same.
            before: called before an epoch begins.
        """
        if self._told:
            before()
            for name in sorted(self._told):
                self._ledger.new_epoch(name)
            self._told_since |= self._told
            self._told.clear()
        if self._steps >= (self._sooner if hits else self._due) and self._weights:
            self._due = self._steps + self._every
            self._sooner = self._steps + max(self._every // SOONER, 1)
            self._take(before)
        if self._sample is not None and self._steps >= self._sample.step + self._later:
            self._judge(self._sample, before)
        self._steps += 1

    def _take(self, before: Callable[[], object]) -> None:
        """Hash all weights, and begin to copy the hashes to the host, to be judged later.

        An earlier sample that still waits is judged first. ``before`` is as for ``begin_step``.
        """
        if self._sample is not None:  # of fewer steps than one takes to arrive
            self._judge(self._sample, before)
        hashes = torch.stack([self._hash(each.now()) for each in self._weights.values()])
        self._sample = _Sample(self._steps, HostCopy.of(hashes), frozenset(self._told_since))
        self._told_since.clear()

    def _judge(self, sample: _Sample, before: Callable[[], object]) -> None:
        """Compare a sample with the one before, as soon as it has arrived.

        A change that nobody told of becomes a violation and begins an epoch, after ``before``.
        """
        self._sample, last, self._known = None, self._known, sample.hashes.wait().tolist()
        for number, name in enumerate(self._weights):
            same = last is None or last[number] == self._known[number]
            if not same and name not in sample.told:
                before()
                self._ledger.findings.add(untold(self._ledger.steps + 1, name))
                self._ledger.new_epoch(name)

    def _hash(self, elements: Iterable[list[Tensor]]) -> Tensor:
        """Return a hash of elements, int64, on the device; those of one dtype are together."""
        total = torch.zeros((), dtype=torch.int64, device=self._ledger.device)
        for some in elements:
            bits = torch.cat(some).view(_BITS[some[0].dtype.itemsize]).long()
            total += (bits * self._odd(len(bits))).sum()
        return total

    def _odd(self, number: int) -> Tensor:
        """Return factors of the elements of a sample, odd int64 ``[number]``."""
        if len(self._odds) < number:
            places = torch.arange(number, device=self._ledger.device)
            self._odds = self._ledger.books.key.permute(places * RESERVED) | 1
        return self._odds[:number]


class _Elements:
    """The elements of some parameters that are hashed.

    They are held from sample to sample, since to find them takes longer than to hash them.

    Args:
        parameters: lists the parameters.
        device: parameters elsewhere are left out.
    """

    def __init__(self, parameters: Parameters, device: torch.device) -> None:
        self._parameters: Final = parameters
        self._device: Final = device
        self._uses = 0
        self._listed: list[Tensor] = []
        self._addresses: list[int] = []
        self._elements: dict[torch.dtype, list[Tensor]] = {}

    def forget(self) -> None:
        """Hold no parameter, until the next sample."""
        self._uses = 0
        self._listed, self._addresses, self._elements = [], [], {}

    def now(self) -> Iterable[list[Tensor]]:
        """Return views of the elements, a list for each dtype.

        The parameters are listed anew when one has moved, and after every ``_LISTED`` calls.
        """
        moved = [each.data_ptr() for each in self._listed] != self._addresses
        if moved or self._uses % _LISTED == 0:
            self.forget()
            self._list()
        self._uses += 1
        return self._elements.values()

    def _list(self) -> None:
        """Add the elements of each parameter that is dense, on the device and not empty."""
        for parameter in self._parameters():
            each = parameter.data
            plain = type(each) is Tensor and each.layout is torch.strided
            here = plain and each.device == self._device
            if here and each.dtype.itemsize in _BITS and each.numel():
                self._listed.append(parameter)
                self._addresses.append(parameter.data_ptr())
                self._elements.setdefault(each.dtype, []).append(_some_of(each))


def untold(step: int, weights: str) -> Violation:
    """Return the violation of weights that were found changed in a step."""
    return Violation(
        "weights", step, None, "", None, None, None, None, "weights", (), weights=weights
    )


def _require(weights: object) -> None:
    """Raise a ConfigError for a name of weights that is no key of ``EPOCH``."""
    if weights not in EPOCH:
        raise ConfigError(
            "WeightWatch", "these weights are unknown", expected=f"one of {tuple(EPOCH)}",
            got=repr(weights), hint="see Ledger.new_epoch; nothing was changed",
        )  # fmt: skip


def _some_of(parameter: Tensor) -> Tensor:
    """Return up to ``SAMPLED`` elements of a parameter, spread evenly, ``[n]``, as a view.

    Of a parameter with gaps in its memory they are the first ones of its last dimension.
    """
    count, number = parameter.numel(), min(parameter.numel(), SAMPLED)
    if not parameter.is_contiguous():
        dense = sorted(zip(parameter.stride(), parameter.shape, strict=True))
        reach = 1
        for stride, size in dense:
            if stride != reach and size > 1:
                while parameter.ndim > 1:  # by views alone, which follow the parameter
                    parameter = parameter.select(0, 0)
                return parameter[:number]
            reach = max(reach, stride * size)
    return parameter.as_strided((number,), (count // number,), parameter.storage_offset())
