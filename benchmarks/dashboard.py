"""The Grafana dashboard beside the alerts: a panel for each of them, and for each metric.

``python -m kvtxn.benchmarks.documents`` writes it, and the alerts' part of the guide.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ..audit.findings import AUDIT_FAMILIES
from ..audit.repeated_work import REPEATED
from ..metrics import FAMILIES, Family

FILE: Final = Path("integrations/dashboard.json")

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 24


@attrs.frozen
class Query:
    """A query of the guide.

    Attributes:
        about: a line of comment; one that begins with "alert: " has values only if it alarms.
        expression: PromQL.
    """

    about: str
    expression: str


QUERIES: Final = (
    Query(
        "acceptance over the last five minutes",
        "rate(kvtxn_rows_committed_total[5m]) / rate(kvtxn_rows_staged_total[5m])",
    ),
    Query(
        "bytes of rejected rows that never reached memory, per second, over all ranks (0 under "
        "`undo`, and on a GPU)",
        "sum by (model_name) (rate(kvtxn_bytes_avoided_total[5m]))",
    ),
    Query(
        "alert: an engine was asked to use kvtxn and stays out, or windows fall back to direct "
        "writes",
        "max by (model_name, engine) (kvtxn_active) == 0 "
        "or increase(kvtxn_fallbacks_total[15m]) > 0",
    ),
    Query(
        "alert: the ledger found wrong rows; the log and `audit_report` say which, and who wrote "
        "them",
        "sum by (model_name, engine, kind) (increase(kvtxn_audit_violations_total[15m])) > 0",
    ),
    Query(
        "alert: an engine was asked to have an audit and is not watched, in a rank at least, or "
        "could not be judged whole",
        "min by (model_name, engine) (kvtxn_audit_active) == 0 "
        "or sum by (model_name, engine) (increase(kvtxn_audit_unjudged_total[15m])) > 0",
    ),
    Query(
        "alert: rows or states of some KV-cache groups are not compared; the log's "
        "kvtxn.audit_partial names them",
        "max by (model_name, engine) (kvtxn_audit_unwatched_groups) > 0",
    ),
    Query(
        "alert: requests are begun again and again, and no token comes; the cache is too small "
        "for them",
        "max by (model_name, engine) (increase(kvtxn_audit_restarts_without_token_total[15m])) "
        "> 20",
    ),
    Query(
        "for a panel: rows compared per second, over all ranks",
        "sum by (model_name, engine) (rate(kvtxn_audit_rows_checked_total[5m]))",
    ),
)


def as_promql() -> str:
    """Return the queries as a Markdown code block for the guide, each after its comment."""
    lines = [f"# {query.about}\n{query.expression}" for query in QUERIES]
    return "\n".join(["```promql", *lines, "```"])


def as_json(active: Family) -> str:
    """Return the dashboard as JSON that Grafana imports; ``active`` is the engine's own metric.

    It has a row of panels for the queries, one for windows and one for the audit.
    """
    panels: list[dict[str, Any]] = []
    _add(panels, "Look here first", map(_of_query, QUERIES))
    _add(panels, "Windows", map(_of_family, (active, *FAMILIES)))
    _add(panels, "Audit", map(_of_family, AUDIT_FAMILIES))
    models = "label_values({__name__=~`kvtxn_(audit_)?active`}, model_name)"
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "model",
            "type": "query",
            "label": "model",
            "datasource": _SOURCE,
            "query": models,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
        },
    ]
    dashboard = {
        "uid": "kvtxn",
        "title": "kvtxn",
        "description": "Windows over the KV cache, and the audit of its rows",
        "tags": ["kvtxn"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _add(panels: list[dict[str, Any]], title: str, more: Iterable[Mapping[str, Any]]) -> None:
    """Append a row's title and its panels to ``panels``, below the panels so far."""
    top = max((each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels), default=0)
    place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
    panels.append(
        {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place}
    )
    for number, panel in enumerate(more):
        line, column = divmod(number * _WIDTH, _COLUMNS)
        place = {"x": column, "y": top + 1 + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
        panels.append({"id": len(panels) + 1, **panel, "datasource": _SOURCE, "gridPos": place})


def _of_query(query: Query) -> dict[str, Any]:
    """Return a panel for a query, without its place; an alert has a red tile for what alarms.

    The comment's first part is the title, the rest the description.
    """
    kind, _, about = query.about.rpartition(": ")
    short, _, more = about.partition(", " if kind != "alert" else "; ")
    panel = _panel(short[:1].upper() + short[1:], query.expression, more)
    if kind == "alert":
        panel["type"] = "stat"
        red = {"mode": "absolute", "steps": [{"value": None, "color": "red"}]}
        panel["fieldConfig"]["defaults"] |= {"noValue": "quiet", "thresholds": red}
        panel["options"] = {"colorMode": "background", "textMode": "value_and_name"}
    return panel


def _of_family(family: Family) -> dict[str, Any]:
    """Return a panel for a metric: a counter's rate, or a gauge's value, by model and engine.

    Over ranks counters are summed, or the greatest is taken where each rank counts the same.
    """
    labels = ", ".join(["model_name", "engine", *([family.label] if family.label else [])])
    series = f'{family.name}{{model_name=~"$model"}}'
    if family.is_counter:
        # Every rank counts the same repeated requests; of other counters each has a part.
        way, series = "max" if family in REPEATED else "sum", f"rate({series}[$__rate_interval])"
    else:
        way = "min" if family.name.endswith("_active") else "sum" if family.label else "max"
    title = family.name.removeprefix("kvtxn_").removesuffix("_total").replace("_", " ")
    panel = _panel(title, f"{way} by ({labels}) ({series})", family.help, family.label)
    if family.name.startswith("kvtxn_bytes_"):
        panel["fieldConfig"]["defaults"]["unit"] = "Bps"
    if family.name.endswith("_rate"):
        panel["fieldConfig"]["defaults"] |= {"unit": "percentunit", "min": 0, "max": 1}
    return panel


def _panel(title: str, expression: str, about: str, label: str | None = None) -> dict[str, Any]:
    """Return a panel of lines for a query, without its place.

    ``label`` is the legend's third part.
    """
    legend = " ".join(f"{{{{{name}}}}}" for name in ("model_name", "engine", label or "kind"))
    return {
        "type": "timeseries",
        "title": title,
        "description": about,
        "fieldConfig": {"defaults": {}, "overrides": []},
        "targets": [
            {"refId": "A", "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
        ],
    }
