"""``kvtxn bench vllm``: whole engines, stock against policies, taking turns.

One engine per policy, each in processes of its own, all up at once; every cell repeats in
rounds of one run per engine, so drift hits all alike. The order within a round rotates, and
ratios are taken within rounds. Results are written after every cell.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ..config import ACCEPTANCE_MODES, POLICIES
from ..errors import ConfigError
from . import machine, vllm_files
from .vllm_cell import measure
from .vllm_engine import Engine, EngineSpec, running
from .vllm_models import DRAFTERS, MODELS, Model
from .vllm_work import SCENARIOS, Point, make

help: Final = "whole vLLM engines: stock against deferred and undo"

_ABOUT: Final = """\
Start one vLLM engine per policy, side by side, and let them take turns at the same work.
Without options this is a smoke test: a tiny model with random weights, under a minute on two
CPU cores. What comes out is NAME.json, NAME.md and NAME.png (a plot, where matplotlib is
installed; `kvtxn bench report NAME.json` makes both again)."""

_SCENARIOS: Final = "scenarios:\n" + "\n".join(
    f"  {name:<6} {each.about}: {each.context} tokens of context, {each.tokens} to generate"
    for name, each in SCENARIOS.items()
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; those in the plural take several values, commas between."""
    parser.description, parser.epilog = _ABOUT, _SCENARIOS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_argument_group("engines")
    what.add_argument("--model", choices=sorted(MODELS), default="tiny", help="default: tiny")
    what.add_argument("--drafter", choices=sorted(DRAFTERS), default="ngram", help="default: ngram")
    what.add_argument("--drafts", type=_natural, default=4, help="draft tokens per request")
    what.add_argument(
        "--policies",
        type=_names("stock", *POLICIES),
        default="stock,deferred,undo",
        help="'stock' and kvtxn's policies, commas between; default: %(default)s. Twice the same, "
        "as in 'stock,stock', shows what is noise",
    )
    what.add_argument(
        "--mask-modes",
        type=_names(*ACCEPTANCE_MODES),
        metavar="MODES",
        help="how sampled ids become accepted counts (TxnConfig.acceptance): an engine for each "
        f"policy and mode; on CPUs alone. Of {', '.join(ACCEPTANCE_MODES)}",
    )
    what.add_argument("--batch", type=_natural, help="most requests that run at once; default: all")
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
    load = parser.add_argument_group("load: one cell for each combination, commas between values")
    load.add_argument("--scenario", type=_names(*SCENARIOS), default="short", help="see below")
    load.add_argument("--requests", type=_naturals, default="1,4", help="default: 1,4")
    load.add_argument("--context", type=_naturals, help="prompt tokens; default: the scenario's")
    load.add_argument("--tokens", type=_natural, help="tokens to generate per request; likewise")
    load.add_argument(
        "--acceptance",
        type=_rates,
        default="real",
        help="'real' (default), or shares of drafts that synthetic acceptance accepts",
    )
    load.add_argument(
        "--arrivals", type=_positive, metavar="RATE", help="requests per second, mixed; default: 16"
    )
    load.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    load.add_argument("--rounds", type=_natural, default=3, help="measured rounds; default: 3")
    out = parser.add_argument_group("result")
    out.add_argument("--output", metavar="NAME", help="default: vllm-MODEL-DRAFTER")
    out.add_argument(
        "--folder", type=Path, default=machine.RESULTS, help="where to; default: the package's own"
    )
    out.add_argument("--commit", help="of these sources, where there is no git and no file COMMIT")


def run(args: argparse.Namespace) -> int:
    """Start the engines, measure every cell, write the result and print it."""
    _check(args)
    begin = time.time()
    result: dict[str, Any] = {
        "format": vllm_files.FORMAT,
        "machine": machine.describe(args.commit),
        "settings": {key: value for key, value in vars(args).items() if key not in _NOT_SETTINGS},
        "conditions": {"started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begin))},
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = engine_arguments(args, MODELS[args.model], Path(folder))
        with running(specs(args, arguments)) as engines:
            result["conditions"] |= _conditions(engines)
            cells = result["cells"] = []
            for point in points(args):
                cells.append(_measure(args, engines, point))
                result["conditions"]["seconds"] = time.time() - begin
                path = vllm_files.write(args.folder, _name(args), result)
                print(vllm_files.line(cells[-1]), file=sys.stderr, flush=True)
    for made in vllm_files.publish(path):
        print(made)
    return 0


def _measure(args: argparse.Namespace, engines: Sequence[Engine], point: Point) -> dict[str, Any]:
    """One cell."""
    work = partial(
        make,
        point,
        text=MODELS[args.model].text(),
        drafts=args.drafts,
        temperature=args.temperature,
        arrivals=args.arrivals or _ARRIVALS,
    )
    return measure(engines, point, work, args.rounds)


def _conditions(engines: Sequence[Engine]) -> dict[str, Any]:
    """What else a reader has to know of the engines."""
    spec = engines[0].spec
    return {
        "engines": len(engines),
        "processors": os.cpu_count(),
        "announced": {engine.spec.label: engine.announced() for engine in engines},
        "arguments": {key: value for key, value in spec.arguments.items() if key != "model"},
        "environment": {
            **{name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
            **spec.environment,
        },
        "gpu": machine.gpu_state(),
    }


#: Requests per second, where nothing else is said.
_ARRIVALS: Final = 16.0

_NOT_SETTINGS: Final = ("log_level", "command", "suite", "folder", "commit")


def _check(args: argparse.Namespace) -> None:
    """Refuse what would have no effect, before an engine starts."""
    if args.arrivals is not None and not any(SCENARIOS[name].mixed for name in args.scenario):
        raise ConfigError(
            "bench vllm",
            "--arrivals has no effect without a scenario in which requests arrive over time",
            expected="--scenario mixed",
            got=",".join(args.scenario),
        )
    if args.acceptance != [None] and not torch.cuda.is_available():
        raise ConfigError(
            "bench vllm",
            "vLLM has no synthetic acceptance on CPUs",
            expected="--acceptance real",
            got=f"rates {args.acceptance}",
        )
    if args.mask_modes and torch.cuda.is_available():
        raise ConfigError(
            "bench vllm",
            "--mask-modes has no effect on a GPU: the commit's own launch counts there",
            hint="leave it out",
        )
    if args.mask_modes and set(args.policies) == {"stock"}:
        raise ConfigError("bench vllm", "--mask-modes has no effect on stock", hint="leave it out")


def _name(args: argparse.Namespace) -> str:
    return args.output or f"vllm-{args.model}-{args.drafter}"


def points(args: argparse.Namespace) -> list[Point]:
    """Every combination that was asked for."""
    return [
        Point(
            scenario=scenario,
            context=context or SCENARIOS[scenario].context,
            tokens=args.tokens or SCENARIOS[scenario].tokens,
            requests=requests,
            acceptance=rate,
        )
        for scenario, context, requests, rate in itertools.product(
            args.scenario, args.context or [None], args.requests, args.acceptance
        )
    ]


def specs(args: argparse.Namespace, arguments: Mapping[str, Any]) -> list[EngineSpec]:
    """An engine for each time that stock is named, and for each policy and acceptance mode."""
    found: list[EngineSpec] = []
    for policy in args.policies:
        modes = [None] if policy == "stock" else args.mask_modes or [None]
        for mode in modes:
            label = policy if mode is None else f"{policy}+{mode}"
            again = sum(spec.label.partition("#")[0] == label for spec in found)
            found.append(
                EngineSpec(
                    policy=policy,
                    arguments=arguments,
                    settings={} if mode is None else {"acceptance": mode},
                    environment=_environment(),
                    timeout=args.timeout,
                    label=f"{label}#{again + 1}" if again else label,
                )
            )
    return found


def _environment() -> dict[str, str]:
    """What every engine's process has set before vLLM is imported."""
    if torch.cuda.is_available():
        return {}
    # Several engines share the memory, and threads that wait for each other the processors.
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def engine_arguments(args: argparse.Namespace, model: Model, folder: Path) -> dict[str, Any]:
    """What ``vllm.LLM`` is given, the same for every policy.

    Args:
        args: the command's.
        model: what is served.
        folder: where configurations can be written.
    """
    loads = points(args)
    length = max(point.context + point.tokens for point in loads) + args.drafts + 8
    requests = max(point.requests for point in loads)
    speculation = DRAFTERS[args.drafter](folder, model, length) | {
        "method": args.drafter,
        "num_speculative_tokens": args.drafts,
    }
    if any(point.acceptance is not None for point in loads):
        speculation["rejection_sample_method"] = "synthetic"
        speculation["synthetic_acceptance_rates"] = [0.5] * args.drafts  # set before every run
    settings: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}
    if torch.cuda.is_available():
        # Engines that start together must not measure each other's memory: its size is given.
        cache = requests * (length + 64) * model.token_bytes + (256 << 20)
        settings = {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": 0.05}
        settings["dtype"] = "bfloat16"
    return {
        **model.arguments(folder, length),
        "skip_tokenizer_init": True,
        "max_model_len": length,
        "max_num_seqs": args.batch or requests,
        "speculative_config": speculation,
        "seed": 0,
        **settings,
        **args.engine_args,
    }


# -- values of arguments ------------------------------------------------------------


def _natural(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _naturals(text: str) -> list[int]:
    return [_natural(part) for part in text.split(",")]


def _names(*known: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return text.split(",")

    return parse


def _rates(text: str) -> list[float | None]:
    if text == "real":
        return [None]
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'real' nor shares") from None
    if not all(0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(f"shares lie between 0 and 1, not {text}")
    return list(rates)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return found
