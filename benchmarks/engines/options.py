"""The options of ``kvtxn bench vllm``: their definitions, and which go together."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ...cli import natural
from ...config import POLICIES
from ...errors import ConfigError
from ..common import machine
from .audits import AUDITS
from .hybrids import RECURRENT
from .load import SCENARIOS, Point
from .models import DRAFTERS, MODELS

_ABOUT: Final = """\
Start one vLLM engine per policy, side by side, and let them take turns at the same work.
'ledger' and 'bytes' are stock with kvtxn's audit alone; the exit code is 1 if it found a
violation, or could not judge every request.
Without options this is a smoke test: a tiny model with random weights, under a minute on two
CPU cores. What comes out is NAME.json and NAME.md (`kvtxn bench report NAME.json` makes it
again)."""

_LISTS: Final = "\n".join(
    [
        "scenarios:",
        *(
            f"  {name:<12}{each.about}: {each.context} tokens of context, {each.tokens} generated"
            for name, each in SCENARIOS.items()
        ),
        "models:",
        *(f"  {name:<12}{model.about}" for name, model in MODELS.items()),
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's arguments and its description to its parser.

    Plural ones take several values.
    """
    parser.description, parser.epilog = _ABOUT, _LISTS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_argument_group("engines")
    what.add_argument(
        "--model",
        choices=sorted(MODELS),
        default="tiny",
        metavar="MODEL",
        help="default: tiny; see below",
    )
    what.add_argument("--drafter", choices=sorted(DRAFTERS), default="ngram", help="default: ngram")
    what.add_argument("--drafts", type=natural, default=4, help="per request; default: 4")
    what.add_argument(
        "--policies",
        nargs="+",
        choices=["stock", *POLICIES, *AUDITS, *RECURRENT],
        default=["stock", "deferred", "undo"],
        metavar="POLICY",
        help="'stock', kvtxn's policies, its audits 'ledger' and 'bytes', and, for hybrids, how "
        "their states are held: 'exact' or 'fast'; default: stock deferred undo. A policy named "
        "twice, as in 'stock stock deferred', shows what is noise",
    )
    what.add_argument(
        "--equal-cache",
        type=natural,
        metavar="N",
        help="hybrids: every engine has the cache in which stock holds N requests of the longest "
        "cell, and where more come at once, the others wait; default: all requests fit",
    )
    what.add_argument(
        "--engine-args",
        type=_object,
        default={},
        metavar="JSON",
        help="more arguments of vllm.LLM, the same for all engines",
    )
    what.add_argument(
        "--timeout",
        type=_positive,
        default=600.0,
        metavar="SECONDS",
        help="most that an engine may take to start, or for one run; default: 600",
    )
    load = parser.add_argument_group("load: one cell for each combination of values")
    load.add_argument(
        "--scenario", nargs="+", choices=list(SCENARIOS), default=["short"], help="see below"
    )
    load.add_argument("--requests", type=natural, nargs="+", default=[1, 4], help="default: 1 4")
    load.add_argument(
        "--context", type=natural, nargs="+", help="prompt tokens; default: the scenario's"
    )
    load.add_argument("--tokens", type=natural, help="tokens to generate per request; likewise")
    load.add_argument(
        "--acceptance",
        type=_rate,
        nargs="+",
        default=[None],
        metavar="SHARE",
        help="shares of drafts that synthetic acceptance accepts, or 'real' (default)",
    )
    load.add_argument(
        "--cells",
        type=_cell,
        nargs="+",
        metavar="CELL",
        help="these cells in place of all combinations, each "
        "SCENARIO:CONTEXT:REQUESTS:ACCEPTANCE, as in 'short:8192:8:0.3 mixed:1024:48:0.6'",
    )
    load.add_argument(
        "--arrivals", type=_positive, metavar="RATE", help="requests per second, mixed; default: 16"
    )
    load.add_argument("--rounds", type=natural, default=3, help="measured rounds; default: 3")
    load.add_argument(
        "--first-token-rounds",
        type=natural,
        default=0,
        metavar="N",
        help="after the measured rounds, N more with new prompts and two tokens per request, for "
        "the time to first token; without, the prompts are in the prefix cache; not where "
        "requests arrive over time",
    )
    load.add_argument(
        "--clock",
        action="store_true",
        help="after the measured rounds, time what windows and audits do on the host in one more",
    )
    out = parser.add_argument_group("result")
    out.add_argument("--output", metavar="NAME", help="default: vllm-MODEL-DRAFTER")
    out.add_argument(
        "--folder",
        type=Path,
        default=machine.results_folder(),
        help="where to; default: benchmarks/results in a checkout, else the current folder",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse options that would have no effect, before an engine starts.

    Raises:
        ConfigError: there is one; the error names the first.
    """
    loads = points(args)
    hybrid, policies = MODELS[args.model].shape.states is not None, set(args.policies)
    if policies - {"stock", *RECURRENT} if hybrid else policies & set(RECURRENT):
        raise ConfigError(
            "bench vllm",
            "policies do not fit the model",
            expected=f"stock, {' and '.join(RECURRENT)} for models with recurrent states alone",
            got=f"{' '.join(args.policies)} for {args.model}",
        )
    if args.equal_cache is not None and not hybrid:
        raise ConfigError(
            "bench vllm",
            "--equal-cache has no effect on a model without recurrent states",
            expected="a hybrid",
            got=args.model,
        )
    if args.arrivals is not None and not any(SCENARIOS[load.scenario].mixed for load in loads):
        raise ConfigError(
            "bench vllm",
            "--arrivals has no effect without a scenario in which requests arrive over time",
            expected="--scenario mixed",
            got=" ".join(sorted({load.scenario for load in loads})),
        )
    rates = [load.acceptance for load in loads if load.acceptance is not None]
    if rates and not torch.cuda.is_available():
        raise ConfigError(
            "bench vllm",
            "vLLM has no synthetic acceptance on CPUs",
            expected="--acceptance real",
            got=f"rates {rates}",
        )
    if args.first_token_rounds and all(SCENARIOS[load.scenario].mixed for load in loads):
        raise ConfigError(
            "bench vllm",
            "--first-token-rounds has no effect where requests arrive over time",
            expected="a cell of another scenario than mixed",
            got=args.first_token_rounds,
        )
    if args.clock and set(args.policies) == {"stock"}:
        raise ConfigError("bench vllm", "--clock has no effect on stock", hint="leave it out")


def points(args: argparse.Namespace) -> list[Point]:
    """Return the cells that ``--cells`` names, or else every combination of the other options.

    Without ``--context`` or ``--tokens``, a cell has those of its scenario.
    """
    combinations = itertools.product(
        args.scenario, args.context or [None], args.requests, args.acceptance
    )
    return [
        Point(
            scenario=scenario,
            context=context or SCENARIOS[scenario].context,
            tokens=args.tokens or SCENARIOS[scenario].tokens,
            requests=requests,
            acceptance=rate,
        )
        for scenario, context, requests, rate in args.cells or combinations
    ]


def asked(settings: Mapping[str, Any]) -> list[Point]:
    """List the cells that a result was to have, from its settings, which may lack ``cells``."""
    return points(argparse.Namespace(**{"cells": None, **settings}))


# -- values of arguments ------------------------------------------------------------


def _positive(text: str) -> float:
    """Parse a positive finite number; refuse any other text."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _rate(text: str) -> float | None:
    """Parse a share from 0 to 1, or 'real', which is None; refuse any other text."""
    if text == "real":
        return None
    try:
        rate = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'real' nor a share") from None
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError(f"a share lies between 0 and 1, not {text}")
    return rate


def _cell(text: str) -> tuple[str, int, int, float | None]:
    """Parse SCENARIO:CONTEXT:REQUESTS:ACCEPTANCE; refuse any other text."""
    parts = text.split(":")
    if len(parts) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not SCENARIO:CONTEXT:REQUESTS:ACCEPTANCE")
    if parts[0] not in SCENARIOS:
        raise argparse.ArgumentTypeError(f"{parts[0]!r} is not one of {', '.join(SCENARIOS)}")
    return parts[0], natural(parts[1]), natural(parts[2]), _rate(parts[3])


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object; refuse any other text."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return found
