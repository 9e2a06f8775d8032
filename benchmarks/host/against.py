"""``kvtxn bench steps --against``: steps of two checkouts by turns, each measured by its own code.

Each checkout has its own process on the same GPU. In a round both measure the same steps, one right
after the other, and which goes first alternates; the ratio is taken within the round.

One process differs from the next of the same code by up to a tenth, with where its objects lie in
memory. So both processes are started anew several times, and the interval is taken over the ratios
of starts: rounds of one start are not independent of each other.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ...errors import ConfigError
from ...integrations.serving.engine_process import EngineProcess, ending_with
from ..common import machine
from ..common.paired_stats import compare, order

#: The package's folders that lie beside it in a checkout.
_BESIDE: Final = ("backends", "benchmarks", "integrations")

Row = dict[str, Any]

#: Policy, requests, and whether batches change.
Steps = tuple[str, int, bool]


def run(args: argparse.Namespace) -> int:
    """Measure every combination in new processes again and again; print a line for each."""
    settings = {"model": args.model, "drafts": args.drafts, "steps": args.steps}
    settings |= {"requests": args.requests}
    combinations = list(itertools.product(args.policies, args.requests, (False, True)))
    found: dict[Steps, list[Turns]] = {asked: [] for asked in combinations}
    for start in range(args.starts):
        with processes(args.against) as (new, old):
            for each in (new, old):
                each.ask(settings, "while it imported its benchmark")
            for asked in combinations:
                found[asked].append(measured(new, old, asked, args.rounds))
        for policy in args.policies:
            last = [turns[-1] for asked, turns in found.items() if asked[0] == policy]
            ratio = statistics.median(ratio for turns in last for ratio in turns.ratios)
            print(f"start {start + 1}, {policy}: new / old {ratio:.3f}", flush=True)
    rows = [row_of(asked, turns) for asked, turns in found.items()]
    together = {policy: joint(rows, policy) for policy in args.policies}
    for policy, all_rows in together.items():
        print(f"{policy}, all together: new / old {show(all_rows)}")
    if args.save:
        shown = {"suite": "steps", "model": args.model, "drafts": args.drafts, "rows": rows}
        shown |= {"against": machine.commit_of(args.against / "benchmarks"), "together": together}
        print(f"written to {machine.write(args.save, shown)}")
    return 0


@attrs.frozen
class Turns:
    """The times of steps of one kind, from one start of both processes.

    Attributes:
        new: this kvtxn's microseconds by part of a step, one mapping per round.
        old: the other checkout's.
    """

    new: Sequence[Mapping[str, float]]
    old: Sequence[Mapping[str, float]]

    @property
    def ratios(self) -> list[float]:
        """New by old, both halves of a step together, for each round."""
        return [own["all"] / other["all"] for own, other in zip(self.new, self.old, strict=True)]


def measured(new: EngineProcess, old: EngineProcess, asked: Steps, rounds: int) -> Turns:
    """Measure steps of one kind by turns; a first round warms up and is dropped.

    Args:
        new: the process of this kvtxn.
        old: the process of the other checkout.
        asked: policy, requests, and whether batches change.
        rounds: how many count.
    """
    both = (new, old)
    times: list[list[Mapping[str, float]]] = [[], []]
    for turn in range(rounds + 1):
        for place in order(2, turn):
            times[place].append(both[place].ask(asked, "while it measured steps"))
    return Turns(times[0][1:], times[1][1:])


def row_of(asked: Steps, starts: Sequence[Turns]) -> Row:
    """Make one row of the table; prints it, too.

    Returns:
        Medians over all rounds of this kvtxn's times in microseconds, the other's as ``old``, the
        median ratio of each start as ``ratios``, and of these ``of_old``, with an interval.
    """
    policy, requests, changing = asked
    own, other = (
        {part: round(statistics.median(each[part] for each in times), 2) for part in times[0]}
        for times in (
            [each for start in starts for each in start.new],
            [each for start in starts for each in start.old],
        )
    )
    ratios = [statistics.median(start.ratios) for start in starts]
    row: Row = {"policy": policy, "requests": requests, "changing": changing, **own}
    row |= {"old": other, "ratios": ratios, "of_old": attrs.asdict(compare(ratios))}
    batch = "changing" if changing else "steady"
    times_now = f"{own['all']:.2f} us, old {other['all']:.2f} us"
    print(f"{policy}, {requests} requests, {batch}: {times_now}, {show(row['of_old'])}", flush=True)
    return row


def joint(rows: Sequence[Row], policy: str) -> dict[str, float]:
    """Join a policy's ratios: the median of its rows in each start, and of these an interval."""
    by_row = [row["ratios"] for row in rows if row["policy"] == policy]
    return attrs.asdict(compare([statistics.median(each) for each in zip(*by_row, strict=True)]))


def show(found: Mapping[str, float]) -> str:
    """Show a ratio with its interval."""
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


@contextlib.contextmanager
def processes(checkout: Path) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Start a process that imports this kvtxn, and one that imports another checkout's.

    Raises:
        ConfigError: ``checkout`` is not a folder with a checkout of kvtxn.
    """
    script = str(Path(__file__).with_name("steps_child.py"))
    found: list[EngineProcess] = []
    with package_of(checkout) as site, ending_with(found):
        for name, folder in (("this kvtxn", ""), (str(checkout), str(site))):
            found.append(EngineProcess([script, folder], name=name, operation="bench steps"))
        yield found[0], found[1]


@contextlib.contextmanager
def package_of(checkout: Path) -> Iterator[Path]:
    """Make a folder of links from which Python imports a checkout's kvtxn.

    A checkout keeps parts of the package beside it, and an installation puts them into it.
    """
    if not (checkout / "kvtxn" / "__init__.py").is_file():
        raise ConfigError(
            "bench steps",
            f"{checkout} is not a checkout of kvtxn",
            expected="a folder with kvtxn/__init__.py in it",
            got=str(checkout),
            hint="git worktree add FOLDER COMMIT makes one",
        )
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "kvtxn"
        package.mkdir()
        for source in (*(checkout / "kvtxn").iterdir(), *(checkout / name for name in _BESIDE)):
            (package / source.name).symlink_to(source.resolve())
        yield Path(folder)
