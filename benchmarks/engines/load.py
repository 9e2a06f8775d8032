"""The work of the engines: scenarios, prompts, arrivals, acceptance; and its names in a result."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs


@attrs.frozen(kw_only=True)
class Scenario:
    """A kind of load.

    Attributes:
        context: most tokens of a prompt, unless the user says.
        tokens: most tokens to generate per request, unless the user says.
        mixed: lengths differ, requests arrive over time, and every round has new prompts, so
            that prompts are computed while other requests decode. Otherwise all requests are
            alike and arrive at once, and from the second round on their prompts come from the
            prefix cache, so that decoding is measured.
        about: one line that describes the scenario.
    """

    context: int
    tokens: int
    mixed: bool
    about: str


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "short": Scenario(context=64, tokens=32, mixed=False, about="short prompts; decoding"),
    "long": Scenario(context=8192, tokens=256, mixed=False, about="long prompts; decoding"),
    "mixed": Scenario(
        context=1024,
        tokens=128,
        mixed=True,
        about="all lengths, arriving over time",
    ),
}


@attrs.frozen(kw_only=True)
class Point:
    """A load: one cell of a result.

    Attributes:
        scenario: the scenario's name.
        context: most tokens of a prompt.
        tokens: most tokens to generate per request.
        requests: number of requests.
        acceptance: share of drafts to accept, by synthetic acceptance; None leaves it real.
    """

    scenario: str
    context: int
    tokens: int
    requests: int
    acceptance: float | None = None


@attrs.frozen(kw_only=True)
class Work:
    """The requests of one repetition.

    Attributes:
        prompts: token ids per request.
        max_tokens: tokens to generate, for each or per request.
        arrivals: seconds after the start at which each request comes; all at once if empty.
        rates: acceptance per draft position from now on; None leaves it.
    """

    prompts: Sequence[Sequence[int]]
    max_tokens: int | Sequence[int]
    arrivals: Sequence[float] = ()
    rates: Sequence[float] | None = None

    def lengths(self) -> Sequence[int]:
        """Tokens to generate, per request."""
        if isinstance(self.max_tokens, int):
            return [self.max_tokens] * len(self.prompts)
        return self.max_tokens


#: The columns of a table that ``name`` fills.
COLUMNS: Final = ("scenario", "context", "requests", "acceptance")


def name(cell: Mapping[str, Any]) -> list[str]:
    """Name the load of a result's cell, as the first columns of its row."""
    rate = cell["acceptance"]
    drafts = "real" if rate is None else f"{100 * rate:.0f} %"
    return [cell["scenario"], str(cell["context"]), str(cell["requests"]), drafts]


def load(cell: Mapping[str, Any]) -> list[str]:
    """Name the load of a result's cell in words: scenario and context, requests, acceptance."""
    scenario, context, requests, drafts = name(cell)
    how_many = "1 request" if requests == "1" else f"{requests} requests"
    return [f"{scenario}, {context} tokens of context", how_many, f"{drafts} acceptance"]


def make(
    point: Point,
    turn: int,
    *,
    text: Sequence[int] | int,
    drafts: int,
    arrivals: float,
    new: bool = False,
) -> Work:
    """Make the work of a round: the same for every engine, and in every run of the command.

    Where all requests come at once, all rounds have the same prompts, so that from the second round
    on they are in the prefix cache.

    Args:
        point: the load.
        turn: number of the round.
        text: token ids to cut prompts from; or the size of a vocabulary, for a random period
            that an n-gram drafter finds again.
        drafts: drafts per request and step.
        arrivals: requests per second, where they arrive over time.
        new: the prompts are of this round and cell alone, and so in no prefix cache.
    """
    mixed = SCENARIOS[point.scenario].mixed
    seed = f"new {turn} {point.acceptance}" if new else turn if mixed else 0
    chooser = random.Random(f"{point.context} {point.requests} {seed}")
    lengths, answers = [point.context] * point.requests, [point.tokens] * point.requests
    times: list[float] = []
    if mixed:
        lengths = [chooser.randint(-(-point.context // 8), point.context) for _ in lengths]
        answers = [chooser.randint(-(-point.tokens // 4), point.tokens) for _ in answers]
        gaps = [chooser.expovariate(arrivals) for _ in lengths]
        times = [sum(gaps[:number]) for number in range(point.requests)]
    return Work(
        prompts=[_prompt(chooser, length, text) for length in lengths],
        max_tokens=answers,
        arrivals=times,
        rates=None if point.acceptance is None else positions(point.acceptance, drafts),
    )


def _prompt(chooser: random.Random, length: int, text: Sequence[int] | int) -> list[int]:
    """Draw a prompt: a stretch of ``text`` from a random token on, round and round if need be.

    For a vocabulary's size, a random token and then one random period of 16 tokens.
    """
    if not isinstance(text, int):
        begin = chooser.randrange(len(text))
        rounds = -(-(begin + length) // len(text))
        return [*text, *(list(text) * (rounds - 1))][begin : begin + length]
    period = [chooser.randrange(2, text) for _ in range(16)]
    return [chooser.randrange(2, text), *(period * length)][:length]


def positions(rate: float, drafts: int) -> list[float]:
    """Return acceptance rates per position: each draft has one chance if all before are accepted.

    The chance is such that on average the share ``rate`` of all drafts is accepted.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        share = sum(middle**place for place in range(1, drafts + 1)) / drafts
        low, high = (middle, high) if share < rate else (low, middle)
    return [low**place for place in range(1, drafts + 1)]
