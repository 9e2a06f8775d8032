"""``kvtxn bench steps --against``: steps of two checkouts by turns, each measured by its own code.

Each checkout has a process of its own on the same GPU. In a round both measure the same steps, one
right after the other, and which goes first alternates; the ratio is taken within the round.
"""

from __future__ import annotations

import argparse
import contextlib
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


def run(args: argparse.Namespace) -> int:
    """Measure every combination in every round; print a line for each, and one for each policy."""
    settings = {"model": args.model, "drafts": args.drafts, "steps": args.steps}
    settings |= {"requests": args.requests}
    with processes(args.against) as (new, old):
        for each in (new, old):
            each.ask(settings, "while it imported its benchmark")
        rows = [
            measured(new, old, (policy, requests, changing), args.rounds)
            for policy in args.policies
            for requests in args.requests
            for changing in (False, True)
        ]
    together = {policy: joint(rows, policy) for policy in args.policies}
    for policy, found in together.items():
        print(f"{policy}, all together: new / old {show(found)}")
    if args.save:
        shown = {"suite": "steps", "model": args.model, "drafts": args.drafts, "rows": rows}
        shown |= {"against": machine.commit_of(args.against / "benchmarks"), "together": together}
        print(f"written to {machine.write(args.save, shown)}")
    return 0


def measured(
    new: EngineProcess, old: EngineProcess, asked: tuple[str, int, bool], rounds: int
) -> Row:
    """Measure steps of one kind by turns; a first round warms up and is dropped.

    Args:
        new: the process of this kvtxn.
        old: that of the other checkout.
        asked: policy, requests, and whether batches change.
        rounds: how many count.

    Returns:
        Medians over rounds of this kvtxn's times in microseconds, the other's as ``old``, and the
        ratio of both halves together as ``of_old``.
    """
    both = (new, old)
    times: list[list[Mapping[str, float]]] = [[], []]
    for turn in range(rounds + 1):
        for place in order(2, turn):
            times[place].append(both[place].ask(asked, "while it measured steps"))
    kept = [each[1:] for each in times]
    ratios = [own["all"] / other["all"] for own, other in zip(*kept, strict=True)]
    policy, requests, changing = asked
    own, other = (
        {part: round(statistics.median(each[part] for each in found), 2) for part in found[0]}
        for found in kept
    )
    row: Row = {"policy": policy, "requests": requests, "changing": changing, **own}
    row |= {"old": other, "ratios": ratios, "of_old": attrs.asdict(compare(ratios))}
    batch = "changing" if changing else "steady"
    times_now = f"{own['all']:.2f} us, old {other['all']:.2f} us"
    print(f"{policy}, {requests} requests, {batch}: {times_now}, {show(row['of_old'])}", flush=True)
    return row


def joint(rows: Sequence[Row], policy: str) -> dict[str, float]:
    """Join the ratios of all rounds of a policy into one, with its interval."""
    ratios = [ratio for row in rows if row["policy"] == policy for ratio in row["ratios"]]
    return attrs.asdict(compare(ratios))


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
