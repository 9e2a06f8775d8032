"""``kvtxn demo``: run a real engine three times, and compare tokens and acceptance."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import attrs
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from ...cli import natural, require
from ...errors import ConfigError
from . import smol
from .engine import MODEL, Job, Result
from .engine import run as run_engine

help: Final = "speculative decoding in a real vLLM with kvtxn off, undo and deferred, compared"
NEEDS: Final = ("rich", "vllm")

POLICIES: Final = ("off", "undo", "deferred")
PROMPTS: Final = Path(__file__).parent / "prompts.json"
#: Prompts for a model that answers.
QUESTIONS: Final = Path(__file__).parent / "questions.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--prompt",
        action="append",
        type=_text,
        metavar="TEXT",
        help="continue this text, or answer it; may be repeated",
    )
    parser.add_argument("--count", type=natural, default=8, help="prompts to use without --prompt")
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--model", type=_model, default=str(MODEL), help="a model's folder (the shipped one)"
    )
    models.add_argument(
        "--real", action="store_true", help="SmolLM2-135M-Instruct, which answers the prompts"
    )
    parser.add_argument("--max-tokens", type=natural, default=128, help="tokens to generate each")
    parser.add_argument(
        "--repetition-penalty",
        type=_penalty,
        help="of greedy decoding; 1 is none (1.1; with --real 1)",
    )
    parser.add_argument(
        "--draft-tokens", type=natural, default=4, help="most drafts per verify pass"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _text(text: str) -> str:
    """Return a prompt as it is; refuse one of white space alone, as argparse wants it."""
    if not text.strip():
        raise argparse.ArgumentTypeError("there is nothing to continue")
    return text


def _model(path: str) -> str:
    """Return a folder's path if it has a model's config; refuse others, as argparse wants it."""
    if not (Path(path) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path!r} is not a folder with a model's config.json")
    return path


def _penalty(text: str) -> float:
    """Return a penalty above 0 and up to 2; refuse other text, as argparse wants it."""
    try:
        penalty = float(text)
    except ValueError:
        penalty = 0.0
    if not 0 < penalty <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 2")
    return penalty


def first_prompts(count: int, file: Path = PROMPTS) -> list[str]:
    """Return the first ``count`` prompts of a JSON file of the demo.

    Raises:
        ConfigError: there are fewer.
    """
    texts: list[str] = json.loads(file.read_text())
    if count > len(texts):
        raise ConfigError(
            "--count", "there are not so many prompts", expected=f"1 to {len(texts)}", got=count,
            hint="lower --count",
        )  # fmt: skip
    return texts[:count]


def run(args: argparse.Namespace) -> int:
    """Generate with each policy in turn, compare, and print the results as a table or JSON.

    Returns:
        The exit code: 1 if tokens or acceptance differ, 2 if an engine failed.
    """
    require("vllm")
    file = QUESTIONS if args.real else PROMPTS
    prompts = tuple(args.prompt or first_prompts(args.count, file))
    console = Console(stderr=args.json)
    model = str(smol.prepared()) if args.real else args.model
    penalty = args.repetition_penalty or (1.0 if args.real else 1.1)
    results: dict[str, Result] = {}
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("prompts"), TimeElapsedColumn(), console=console) as bar:
        for policy in POLICIES:  # each in a process of its own, one after the other
            task = bar.add_task(policy, total=len(prompts))
            level = "debug" if args.log_level == "debug" else "error"
            job = Job(
                policy=policy,
                prompts=prompts,
                model=model,
                chat=args.real,
                max_tokens=args.max_tokens,
                repetition_penalty=penalty,
                draft_tokens=args.draft_tokens,
                log_level=level,
            )
            try:
                results[policy] = run_engine(job, partial(_advance, bar, task))
            except RuntimeError as error:
                console.print(f"[bold red]{error}", highlight=False)
                return 2
    verdict = compare(results)
    if args.json:
        runs = {policy: attrs.asdict(result) for policy, result in results.items()}
        print(json.dumps({"prompts": prompts, "runs": runs, **verdict}, indent=2))
    else:
        show(console, [f"{p}\n" for p in prompts] if args.real else prompts, results, verdict)
    return 0 if all(verdict.values()) else 1


def _advance(bar: Progress, task: TaskID, done: int) -> None:
    """Show in a task's bar how many prompts are done."""
    bar.update(task, completed=done)


#: Below the table: its last lines are no measurement of kvtxn.
_CAPTION: Final = "Seconds count what is compiled first, and say nothing of a GPU: see kvtxn bench."


def compare(results: dict[str, Result]) -> dict[str, bool]:
    """Tell whether all runs have the tokens, and the acceptance, of the run "off".

    Returns:
        ``tokens_identical``, and ``acceptance_identical`` by drafts proposed and accepted.
    """
    off = results["off"]
    return {
        "tokens_identical": all(r.token_ids == off.token_ids for r in results.values()),
        "acceptance_identical": all(
            (r.drafted, r.accepted) == (off.drafted, off.accepted) for r in results.values()
        ),
    }


def show(
    console: Console, prompts: Sequence[str], results: dict[str, Result], verdict: dict[str, bool]
) -> None:
    """Print the texts of "off", a table of all runs, and the verdict with yes or NO.

    Args:
        console: where to.
        prompts: in the order of the texts.
        results: by policy; the texts are those of "off".
        verdict: what was compared, with underscores for spaces, and whether it is the same.
    """
    for prompt, text in zip(prompts, results["off"].texts, strict=True):
        console.print(Text.assemble("\n", (prompt, "dim"), text))  # it may look like markup
    table = Table(title="\nOne row: what one draft token stores in every layer", caption=_CAPTION)
    table.add_column("")
    for policy in results:
        table.add_column(policy, justify="right")
    for name, values in table_rows(results):
        table.add_row(name, *values)
    console.print(table)
    for name, same in verdict.items():
        console.print(f"{name.replace('_', ' ')}: {'[green]yes' if same else '[bold red]NO'}")


def table_rows(results: dict[str, Result]) -> list[tuple[str, list[str]]]:
    """Return the table's lines: a name, and one value per run; "-" if a run has no such number."""

    def line(name: str, key: str) -> tuple[str, list[str]]:
        cells = [r.counters.get(key) for r in results.values()]
        return name, ["-" if cell is None else f"{cell:,.0f}" for cell in cells]

    runs = list(results.values())
    tokens = [sum(map(len, r.token_ids)) for r in runs]
    return [
        ("drafts proposed (vLLM)", [f"{r.drafted:,}" for r in runs]),
        ("drafts accepted (vLLM)", [f"{r.accepted:,}" for r in runs]),
        ("acceptance", [f"{r.accepted / max(r.drafted, 1):.1%}" for r in runs]),
        line("windows", "kvtxn_windows_total"),
        line("rows staged", "kvtxn_rows_staged_total"),
        line("rows committed", "kvtxn_rows_committed_total"),
        line("rows rejected", "kvtxn_rows_rejected_total"),
        ("rows never written", [_avoided(r.counters) for r in runs]),
        line("steps bypassed", "kvtxn_bypassed_windows_total"),
        line("fallbacks", "kvtxn_fallbacks_total"),
        ("seconds", [f"{r.seconds:.2f}" for r in runs]),
        ("tokens/s", [f"{n / r.seconds:,.0f}" for n, r in zip(tokens, runs, strict=True)]),
    ]


def _avoided(counters: dict[str, float]) -> str:
    """Return the number of rejected rows that never reached memory as text; or "-" if unknown."""
    if not counters:
        return "-"
    spared = counters["kvtxn_bytes_avoided_total"] > 0
    return f"{counters['kvtxn_rows_rejected_total'] if spared else 0:,.0f}"
