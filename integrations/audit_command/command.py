"""``kvtxn audit``: run an engine under the ledger, and print and draw the violations."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...cli import WIDTH, natural, require
from ...errors import ConfigError
from ..demo.engine import MODEL
from .engine import run as run_engine
from .jobs import Found, Job, Refused
from .progress import Progress
from .prompts import read
from .shown_arguments import shown
from .workloads import WORKLOADS

if TYPE_CHECKING:
    from .verdict import Verdict

help: Final = "run an engine under the ledger, say what was found, and draw it"
NEEDS: Final = ("rich", "vllm")

#: The engine without ``--engine-args``: the demo's tiny model, speculating, on any machine.
PLAIN: Final[Mapping[str, Any]] = {
    "model": str(MODEL),
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 128,
    "enable_prefix_caching": True,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--engine", choices=("vllm", "sglang"), default="vllm", help="the kind of engine (vllm)"
    )
    parser.add_argument(
        "--engine-args",
        metavar="JSON",
        type=_json,
        help="arguments of the engine, as for vLLM's LLM(...), such as "
        """'{"model": "DIR", "speculative_config": {"method": "ngram", ...}}' """
        "(a tiny model that comes with kvtxn), or as for sglang.Engine(...)",
    )
    names = "; ".join(f"{name}: {workload.help}" for name, workload in WORKLOADS.items())
    parser.add_argument(
        "--workload",
        default="chat",
        metavar="NAME[,NAME...]|FILE",
        help=f"{names}; all: these, in turn, in one engine; or a file of prompts, a JSON value per "
        "line (chat)",
    )
    parser.add_argument(
        "--requests", type=natural, default=100, help="requests to make, at least (100)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the workload's random numbers (0)")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page to look at")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _json(text: str) -> Any:
    """Return the JSON value of an argument; refuse other text, as argparse wants it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # the text may have a token for a model hub
        raise argparse.ArgumentTypeError(f"expected JSON: {error}") from None


def _kind(value: Any) -> str:
    """Return the type of an unexpected JSON value in words, and of an object its keys alone."""
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(repr, value)) or 'nothing'}"
    return type(value).__name__


def run(args: argparse.Namespace) -> int:
    """Audit an engine: print the verdict as text or JSON, then write the page of ``--html``.

    Returns:
        The exit code: 0 healthy, 1 violations, 2 if a request failed, nothing could be judged, or
        the audit was interrupted before a violation was found; also if the engine cannot be
        audited, which is told on stderr.

    Raises:
        ConfigError: an argument is not valid, or a file cannot be written; no engine is started.
    """
    require(args.engine)
    from .page import write  # brings torch, for which the command's help must not wait
    from .verdict import judge_found

    job = job_of(args)
    check_writable("--html", args.html)
    found = play(job, "kvtxn audit")
    if isinstance(found, Refused):
        print(textwrap.fill(f"kvtxn audit: {found.why}", WIDTH), file=sys.stderr)
        return 2
    verdict = judge_found(found)
    if args.json:
        print(json.dumps(as_json(verdict, found), indent=2))
    else:
        print(as_text(verdict, found, args.html))
    if args.html is not None:  # after the verdict, which a full disk must not cost
        write(args.html, title="kvtxn audit", verdict=verdict, found=found, command=_command(args))
    return verdict.exit_code


def job_of(args: argparse.Namespace) -> Job:
    """Check the arguments and make a job of them; no engine is started.

    Raises:
        ConfigError: the engine's arguments, the workload or its file are not valid.
    """
    from .sglang_engine import NOT_PLAYED

    sglang = args.engine == "sglang"
    every = [name for name in WORKLOADS if not (sglang and name in NOT_PLAYED)]
    names = tuple(every) if args.workload == "all" else tuple(args.workload.split(","))
    named = all(name in WORKLOADS for name in names)
    if not named and not (args.workload and Path(args.workload).exists()):
        raise ConfigError(
            "audit",
            "there is no such workload, and no such file",
            expected=f"one or more of {', '.join(WORKLOADS)}, or all, or a file of prompts",
            got=repr(args.workload),
            hint="`kvtxn audit --help` says what each workload does",
        )
    if sglang:
        given = {"engine": "sglang", **watched_sglang(args.engine_args)}
    else:
        given = {"engine_args": watched(PLAIN if args.engine_args is None else args.engine_args)}
    return Job(
        **given,
        workloads=names if named else (),
        prompts=() if named else read(Path(args.workload)),
        requests=args.requests,
        seed=args.seed,
        log_level="debug" if args.log_level == "debug" else "error",
    )


def watched(engine_args: Any) -> dict[str, Any]:
    """Return engine arguments that ask for an audit with a recording, and check kvtxn's settings.

    The audit is the user's, or "ledger". The arguments given stay as they are.

    Raises:
        ConfigError: they are no JSON object, name no model, or ask kvtxn for something it has not;
            or they turn the audit off, or let it raise.
    """
    import torch

    from ..serving.audit_settings import AUDITS
    from ..vllm_plugin.policy.settings import settings

    if not isinstance(engine_args, Mapping) or not isinstance(engine_args.get("model"), str):
        raise ConfigError(
            "audit",
            "--engine-args is not a JSON object with a model",
            got=_kind(engine_args),
            hint="""pass an object, such as '{"model": "DIR"}'""",
        )
    additional = engine_args.get("additional_config", {})
    given = additional.get("kvtxn", {}) if isinstance(additional, Mapping) else None
    if not isinstance(given, Mapping):
        raise ConfigError(
            "audit",
            "additional_config is not an object of objects",
            got=_kind(additional if given is None else given),
            hint="""pass an object, such as '{"kvtxn": {"policy": "auto"}}', or leave it out""",
        )
    if given.get("on_violation", "log") == "raise":
        raise _ends_early("leave on_violation out")
    audit = given.get("audit", "ledger")
    if audit not in AUDITS[1:]:
        raise ConfigError(
            "audit",
            "audit is not valid" if audit != "off" else "an audit that is off finds nothing",
            expected=f"one of {', '.join(map(repr, AUDITS[1:]))}",
            got=repr(audit),
            hint="leave audit out for 'ledger'",
        )
    wanted = {**given, "audit": audit, "record": True}
    # The one that vLLM would choose; the engine checks again, for the one that it has.
    settings({"kvtxn": wanted}, 1, "cuda" if torch.cuda.is_available() else "cpu")
    return {**engine_args, "additional_config": {**additional, "kvtxn": wanted}}


def watched_sglang(engine_args: Any) -> dict[str, Any]:
    """Return ``engine_args`` and ``settings`` of a job for SGLang; the settings ask for an audit.

    The settings are those of the environment, if there are any, with a recording, and with audit
    "ledger" if they have none or one that is off.

    Args:
        engine_args: as for ``sglang.Engine``.

    Raises:
        ConfigError: they are no JSON object, name no model, or ask for something kvtxn has not; or
            the settings let the audit raise.
    """
    from ..sglang_plugin.settings import WHERE, given_settings, read_settings

    if not isinstance(engine_args, Mapping) or not isinstance(engine_args.get("model_path"), str):
        raise ConfigError(
            "audit",
            "--engine-args is not a JSON object with a model_path, which SGLang needs",
            got="nothing" if engine_args is None else _kind(engine_args),
            hint="""pass an object, such as '{"model_path": "DIR"}'""",
        )
    given = given_settings(os.environ.get(WHERE, "{}"))
    audit = given.get("audit", "off")
    wanted = json.dumps({**given, "audit": "ledger" if audit == "off" else audit, "record": True})
    if read_settings(wanted).on_violation == "raise":
        raise _ends_early(f"leave on_violation out of {WHERE}")
    return {"engine_args": dict(engine_args), "settings": wanted}


def _ends_early(hint: str) -> ConfigError:
    """Return the error of settings under which the engine would end before it reports."""
    what = "on_violation 'raise' would end the engine before it can report"
    return ConfigError("audit", what, hint=hint)


def check_writable(option: str, path: Path | None) -> None:
    """Check that an option's file can be written, before an engine takes its time; None is fine.

    Raises:
        ConfigError: its folder is not there, it is a folder, or it may not be written to.
    """
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(
            option,
            f"there is no folder {str(folder)!r} for {path.name!r}",
            hint="make the folder",
        )
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(option, f"{str(path)!r} cannot be written", hint="name another file")


def play(job: Job, command: str) -> Found | Refused:
    """Play a job, show on stderr how far it is, and return what it found or why it was refused.

    Args:
        job: the job.
        command: the command's name, for people.

    Raises:
        KVTxnError: the engine's process failed.
    """
    with Progress(command, len(job.prompts) or job.requests) as progress:
        return run_engine(job, progress)


def as_text(verdict: Verdict, found: Found, html: Path | None) -> str:
    """Return the verdict, the first three failed requests, and the page's path, for people."""
    lines = [str(verdict)]
    lines += [textwrap.fill(f"- failed: {each}", WIDTH) for each in found.failed[:3]]
    if len(found.failed) > 3:
        lines.append(f"- failed: {len(found.failed) - 3} more requests")
    if html is not None:
        lines.append(f"The page: {html}")
    return "\n".join(lines)


def as_json(verdict: Verdict, found: Found) -> dict[str, Any]:
    """Return the verdict and all that it stands on as data for JSON, with the run's seconds."""
    return {
        "verdict": verdict.word,
        "headline": verdict.headline,
        "sentences": verdict.sentences,
        "kinds": verdict.kinds,
        "engine": found.engine,
        "requests": found.requests,
        "interrupted": found.interrupted,
        "aborted": found.aborted,
        "failed": found.failed,
        "seconds": round(found.seconds, 3),
        "counters": found.counters,
        "violations": found.violations,
    }


def _command(args: argparse.Namespace) -> str:
    """Return the command line that makes this audit again, for the page.

    Values of ``--engine-args`` that may be secrets are "...".
    """
    words = ["kvtxn", "audit", "--workload", args.workload]
    words += ["--engine", args.engine] if args.engine != "vllm" else []
    if args.engine_args is not None:
        words += ["--engine-args", json.dumps(shown(args.engine_args))]
    words += ["--requests", str(args.requests), "--seed", str(args.seed)]
    return shlex.join(words)
