"""The Grafana dashboard: whole, current, and in the schema that Grafana publishes."""

from __future__ import annotations

import json
import re

import promql_parser
import pytest
from building import ROOT
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from kvtxn.benchmarks import dashboard, documents

from kvtxn.audit.findings import AUDIT_FAMILIES
from kvtxn.metrics import FAMILIES

#: Label names of every metric, beside its own.
LABELS = {"model_name", "engine", "rank"}
EVERY = {family.name: family for family in (*FAMILIES, *AUDIT_FAMILIES)}
TEXT = (ROOT / dashboard.FILE).read_text()
PANELS = [panel for panel in json.loads(TEXT)["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def metrics_of(expression: str) -> set[str]:
    """The metrics that a query asks for."""
    return set(re.findall(r"\bkvtxn_\w+", expression))


def missing(sent: object, read: object, where: str = "") -> list[str]:
    """The places of what is not in ``read`` as it is in ``sent``."""
    if isinstance(sent, dict) and isinstance(read, dict):
        pairs = [(key, value, read.get(key, "nothing")) for key, value in sent.items()]
    elif isinstance(sent, list) and isinstance(read, list) and len(sent) == len(read):
        pairs = [(index, *both) for index, both in enumerate(zip(sent, read, strict=True))]
    else:
        return [] if sent == read else [where]
    return [place for key, one, other in pairs for place in missing(one, other, f"{where}/{key}")]


@pytest.fixture
def needs_vllm():
    pytest.importorskip("vllm")  # one metric is the plug-in's


def test_it_is_current(needs_vllm):
    """``python -m kvtxn.benchmarks.documents`` would write the same."""
    assert documents.panels() == TEXT


def test_every_metric_has_a_panel():
    """One that is new shows up by itself."""
    alone = [metrics_of(each) for each in EXPRESSIONS[len(dashboard.QUERIES) :]]
    assert all(len(found) == 1 for found in alone)
    assert set.union(*alone) == {*EVERY, "kvtxn_active"}
    assert all(panel["title"] and panel["description"] for panel in PANELS[-len(alone) :])


def test_every_metric_that_it_asks_for_exists():
    """Of the alerts, too."""
    assert set().union(*map(metrics_of, EXPRESSIONS)) <= {*EVERY, "kvtxn_active"}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_query_is_promql(expression):
    """It parses, it counts rates of counters alone, and its labels are those of its metrics."""
    plain = expression.replace("$__rate_interval", "5m").replace("$model", ".*")
    promql_parser.parse(plain)
    families = [EVERY[name] for name in metrics_of(plain) - {"kvtxn_active"}]
    rates = re.findall(r"(?:rate|increase)\((kvtxn_\w+)", plain)
    assert {family.name for family in families if family.is_counter} == set(rates)
    named = {
        label for labels in re.findall(r"by \(([^)]*)\)", plain) for label in labels.split(", ")
    }
    assert named <= LABELS | {family.label for family in families}


def test_grafanas_own_model_reads_all_of_it():
    """What its published schema does not know would be lost."""
    plugins.register_default_plugins()
    sent = json.loads(TEXT)
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(sent)))
    assert missing(sent, read) == []
    sent["panels"][1]["fieldConfig"]["defaults"]["nonsense"] = 1
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(sent)))
    assert missing(sent, read) == ["/panels/1/fieldConfig/defaults/nonsense"]


def test_panels_do_not_overlap():
    """Each square of the grid has one; ids are unique."""
    panels = json.loads(TEXT)["panels"]
    squares = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(squares) == len(set(squares))
    assert max(x for x, _ in squares) == 23
    assert len({panel["id"] for panel in panels}) == len(panels)
