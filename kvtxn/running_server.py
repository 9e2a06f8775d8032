"""The state of a running server, read from its ``/metrics`` page: ``kvtxn doctor URL``.

Neither torch nor an engine is imported, so that it runs wherever the page can be reached.
"""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import attrs
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from .errors import ConfigError

#: Beginning of the names of an engine's own metrics -> the engine, and how to ask it for kvtxn.
ENGINES: Final[Mapping[str, tuple[str, str]]] = {
    "vllm:": (
        "vLLM",
        "start vLLM with kvtxn installed beside it, without --disable-log-stats, and with "
        """--additional-config '{"kvtxn": {"policy": "auto", "audit": "ledger"}}'""",
    ),
    "sglang": (
        "SGLang",
        "start SGLang with kvtxn installed beside it, with --enable-metrics, and with "
        """KVTXN_SGLANG='{"audit": "ledger"}' in its environment""",
    ),
}


@attrs.frozen
class Concern:
    """A metric that somebody should look into if it is above 0.

    Attributes:
        metric: its name.
        step: a sentence with the next step.
        wrong: something is wrong; otherwise it is good to know.
    """

    metric: str
    step: str
    wrong: bool = True


CONCERNS: Final = (
    Concern(
        "kvtxn_audit_violations_total",
        "wrong rows were read: the server's log names them and their writers "
        "(kvtxn.audit_violation); `kvtxn audit --engine-args ...` looks for the same elsewhere",
    ),
    Concern(
        "kvtxn_audit_unjudged_total",
        "requests were not judged, so the audit is not whole: the log says why "
        "(kvtxn.audit_inactive); please report it with the reason",
    ),
    Concern(
        "kvtxn_audit_unwatched_groups",
        "some KV-cache groups are not watched: the log names them (kvtxn.audit_partial)",
    ),
    Concern(
        "kvtxn_fallbacks_total",
        "windows went on with direct writes after a failure: the log has each error "
        "(window.fell_back); please report the first one",
    ),
    Concern(
        "kvtxn_hook_errors_total",
        "a hook of yours or of a connector raised: the log has the error (hook.failed)",
    ),
    Concern(
        "kvtxn_windows_refused_total",
        "commits named slots outside the cache and wrote nothing: please report it with the log",
    ),
    Concern(
        "kvtxn_audit_restarts_without_token_total",
        "requests are begun again without a token in between: give the KV cache more memory, or "
        "the server fewer requests at once",
        wrong=False,
    ),
    Concern(
        "kvtxn_audit_rows_unverified_total",
        "nobody can vouch for rows that a connector brought, which is no alarm: "
        """"audit_store" lets processes vouch for each other's""",
        wrong=False,
    ),
    Concern(
        "kvtxn_audit_store_dropped_total",
        "the store of identities is too slow for all blocks, so some rows stay unverified",
        wrong=False,
    ),
    Concern(
        "kvtxn_bypassed_windows_total",
        "steps with drafts ran without a window, by the reasons above; stock's tokens all the same",
        wrong=False,
    ),
)


@attrs.frozen
class Series:
    """The samples of one engine's metrics.

    Attributes:
        samples: the samples, each with its labels.
    """

    samples: list[Sample] = attrs.Factory(list)

    def values(self, name: str) -> list[float]:
        """Return the values of a metric, one for each rank or label value; empty without any."""
        return [each.value for each in self.samples if each.name == name]

    def total(self, name: str) -> float:
        """Return the sum of a metric's values; 0 without any."""
        return sum(self.values(name))

    def counted(self, name: str) -> str:
        """Return a metric's sum, with its part of each label value: "3 (commit 2, stage 1)".

        Parts that are 0 are left out, and the labels of model, engine and rank.
        """
        parts: Counter[str] = Counter()
        for each in self.samples:
            own = each.labels.keys() - {"model_name", "engine", "rank"}
            if each.name == name and each.value:
                parts.update({each.labels[label]: int(each.value) for label in own})
        said = ", ".join(f"{label} {count:,}" for label, count in parts.most_common())
        return f"{self.total(name):,.0f}" + (f" ({said})" if said else "")


def examine(url: str) -> tuple[dict[str, Any], bool]:
    """Read a server's page, and say what it comes to.

    Args:
        url: the server's address or its page's; ``http://`` and ``/metrics`` may be left out.

    Returns:
        A section for the server, for each of its engines, and for the next steps, as ``doctor``
        prints them; and True if something is wrong.

    Raises:
        ConfigError: the address is no such one, nobody answers there, or not with such a page.
    """
    address = _address(url)
    shown = f"{address.scheme}://{address.netloc}{address.path}"  # a query may have a token
    try:
        families = list(text_string_to_metric_families(_page(address, shown)))
    except ValueError as error:
        raise ConfigError(
            "doctor", f"{shown} is no page of metrics: {error}", hint="name the server's /metrics"
        ) from None
    prefix = next((p for p in ENGINES for family in families if family.name.startswith(p)), None)
    kind, ask = ENGINES.get(prefix or "", ("not vLLM or SGLang", _ask_either()))
    engines: dict[tuple[str, str], Series] = {}
    for family in families:
        for sample in family.samples if family.name.startswith("kvtxn_") else ():
            key = sample.labels.get("model_name", ""), sample.labels.get("engine", "0")
            engines.setdefault(key, Series()).samples.append(sample)
    report: dict[str, Any] = {"server": {"page": shown, "engine": kind}}
    steps: dict[str, bool] = {}  # each once, in order
    if not engines:
        report["server"]["kvtxn"] = "no counters: it is not installed there, or not asked for"
        steps[ask] = True
    for (model, number), series in sorted(engines.items()):
        name = f"engine {number}"
        report[f"{name} of {model}" if name in report else name] = {
            "model": model,
            "windows": _windows(series),
            "audit": _audit(series),
            "counters": {c.metric: series.counted(c.metric) for c in CONCERNS if _has(series, c)},
        }
        steps |= dict(_steps(series, ask))
    report["next"] = {"step": list(steps) or ["nothing to do"]}
    return report, any(steps.values())


def _ask_either() -> str:
    """Return how to ask for kvtxn in each engine, as one sentence."""
    return "; or ".join(ask for _, ask in ENGINES.values())


def _address(url: str) -> SplitResult:
    """Complete an address: by ``http://`` and ``/metrics`` where they are left out.

    Raises:
        ConfigError: it is none of a page that can be read, or has a user or a password.
    """
    try:
        address = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError:  # such as half of an IPv6 address
        address = urlsplit("")
    if address.scheme not in ("http", "https") or not address.hostname or "@" in address.netloc:
        raise ConfigError(
            "doctor",
            "this is no address of a server's metrics",
            hint="name the host and port that the server listens on, without a user or a password: "
            "http://localhost:8000",
        )
    return address._replace(path=address.path.rstrip("/") or "/metrics")


def _page(address: SplitResult, shown: str) -> str:
    """Read a page, for at most some seconds; ``shown`` is its address for messages.

    Raises:
        ConfigError: nobody answers, or not with a page.
        ValueError: the page is no text.
    """
    try:
        with urllib.request.urlopen(address.geturl(), timeout=10) as answer:
            found: bytes = answer.read(64 << 20)
        return found.decode()
    except UnicodeDecodeError as error:
        raise ValueError(error.reason) from None
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(
            "doctor",
            f"{shown} cannot be read",
            got=str(error),
            hint="check the host and the port, and that the server has started; SGLang has the "
            "page with --enable-metrics alone",
        ) from None


def _has(series: Series, concern: Concern) -> bool:
    """Tell whether to show a metric: it is there, and is above 0 or would be something wrong."""
    return bool(series.values(concern.metric)) and (
        concern.wrong or series.total(concern.metric) > 0
    )


def _active(series: Series, gauge: str) -> str:
    """Say in how many ranks a gauge is 1, with "INACTIVE" if not in all; or "not asked for"."""
    ranks = series.values(gauge)
    if not ranks:
        return "not asked for"
    number = f"in {sum(ranks):.0f} of {len(ranks)} ranks"
    return f"active {number}" if all(ranks) else f"INACTIVE, active {number}"


def _windows(series: Series) -> str:
    """Say whether windows are active, and what came of them."""
    said = _active(series, "kvtxn_active")
    staged = series.total("kvtxn_rows_staged_total")
    if not series.values("kvtxn_windows_total"):
        return said
    rate = f", {series.total('kvtxn_rows_committed_total') / staged:.1%} accepted" if staged else ""
    ended = series.counted("kvtxn_windows_total")
    return f"{said}; windows that ended: {ended}; draft rows: {staged:,.0f}{rate}"


def _audit(series: Series) -> str:
    """Say whether the audit is active, and what it has compared."""
    said = _active(series, "kvtxn_audit_active")
    if not series.values("kvtxn_audit_steps_total"):
        return said
    steps, rows, states = (
        series.total(f"kvtxn_audit_{name}_total")
        for name in ("steps", "rows_checked", "states_checked")
    )
    return f"{said}; steps watched: {steps:,.0f}; compared: {rows:,.0f} rows, {states:,.0f} states"


def _steps(series: Series, ask: str) -> Iterator[tuple[str, bool]]:
    """Yield the next steps of an engine, and True with each that something wrong asks for."""
    for gauge, name, event in (
        ("kvtxn_active", "windows", "kvtxn.inactive"),
        ("kvtxn_audit_active", "the audit", "kvtxn.audit_inactive"),
    ):
        ranks = series.values(gauge)
        if ranks and not all(ranks):
            yield (
                f"{name} asked for and inactive: the server's log says why ({event}), and `kvtxn "
                "doctor --engine-args ...` on its machine",
                True,
            )
    for concern in CONCERNS:
        if series.total(concern.metric) > 0:
            yield concern.step, concern.wrong
    if series.values("kvtxn_windows_total") and not series.total("kvtxn_windows_total"):
        yield "no window has ended: send requests; a server without drafts has none", False
    if not series.values("kvtxn_audit_active"):
        yield f"for the audit, {ask}", False
    elif not series.total("kvtxn_audit_rows_checked_total"):
        yield "no row was compared yet: send requests", False
