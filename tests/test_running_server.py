"""``kvtxn doctor URL``: a server's state by its page of metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import prometheus_client
import pytest
from kvtxn.integrations.serving import metrics_page
from metrics_registry import own_registry

from kvtxn import running_server
from kvtxn.audit.findings import AUDIT_FAMILIES
from kvtxn.cli import main
from kvtxn.metrics import FAMILIES, Family

ACTIVE = Family("kvtxn_active", "1 while kvtxn is active in this worker.", per_rank=True)
EVERY = {family.name: family for family in (ACTIVE, *FAMILIES, *AUDIT_FAMILIES)}
HEALTHY = {
    "kvtxn_active": 1, "kvtxn_windows_total_committed": 40, "kvtxn_rows_staged_total": 200,
    "kvtxn_rows_committed_total": 150, "kvtxn_fallbacks_total_commit": 0, "kvtxn_audit_active": 1,
    "kvtxn_audit_steps_total": 60, "kvtxn_audit_rows_checked_total": 1234,
    "kvtxn_audit_states_checked_total": 0, "kvtxn_audit_violations_total_foreign": 0,
}  # fmt: skip


@pytest.fixture
def page(monkeypatch):
    """Makes the text of a page from the counters of each rank, as an engine's process does."""

    def make(*ranks, engine="vllm:num_requests_running"):
        registry = own_registry(monkeypatch)
        shown = metrics_page.MetricsPage("tiny")
        for rank, found in enumerate(ranks):
            for name, family in EVERY.items():
                if (rank == 0 or family.per_rank) and any(key.startswith(name) for key in found):
                    shown.show([family], 0, rank, found)
        metrics_page._metric.cache_clear()
        theirs = f"# TYPE {engine} gauge\n{engine} 0.0\n" if engine else ""
        return theirs + prometheus_client.generate_latest(registry).decode()

    return make


@contextmanager
def serving(text: str | bytes, status: int = 200) -> Iterator[str]:
    """A server on this machine with this page; yields its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path.partition("?")[0] == "/metrics"
            self.send_response(status if found else 404)
            self.end_headers()
            self.wfile.write(text if isinstance(text, bytes) else text.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def doctor(capsys, text, *more, path=""):
    """The exit code, and the page for people as one line."""
    with serving(text) as address:
        code = main(["doctor", address + path, *more])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert len(printed.splitlines()) <= 24
    return code, " ".join(printed.split())


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/metrics/", "/metrics?token=s3cret"])
def test_a_healthy_server(capsys, page, path):
    """Both are active in both ranks; a secret of the address is not shown."""
    code, said = doctor(capsys, page(HEALTHY, HEALTHY), path=path)
    assert code == 0
    assert re.search(r"server page: http://127\.0\.0\.1:\d+/metrics server engine: vLLM", said)
    assert "engine 0 model: tiny" in said
    assert (
        "windows: active in 2 of 2 ranks; windows that ended: 40 (committed 40); "
        "draft rows: 200, 75.0% accepted"
    ) in said
    assert (
        "audit: active in 2 of 2 ranks; steps watched: 120; compared: 2,468 rows, 0 states" in said
    )
    assert "kvtxn_fallbacks_total: 0, " in said or "kvtxn_fallbacks_total: 0 " in said
    assert said.endswith("step: nothing to do")
    assert "s3cret" not in said


@pytest.mark.parametrize("concern", running_server.CONCERNS, ids=lambda c: c.metric)
def test_each_counter_that_matters(capsys, page, concern):
    """Above zero it is named with its parts, and with its next step, alone."""
    label = EVERY[concern.metric].label
    name = f"{concern.metric}_some_reason" if label else concern.metric
    code, said = doctor(capsys, page(HEALTHY | {name: 3}))
    assert code == (1 if concern.wrong else 0)
    parts = " (some_reason 3)" if label else ""
    assert f"{concern.metric}: 3{parts}" in said
    assert [c for c in running_server.CONCERNS if " ".join(c.step.split()) in said] == [concern]


@pytest.mark.parametrize(
    ("gauge", "event"),
    [("kvtxn_active", "kvtxn.inactive"), ("kvtxn_audit_active", "kvtxn.audit_inactive")],
)
def test_one_rank_is_left_out(capsys, page, gauge, event):
    """The engine as a whole is not what was asked for."""
    code, said = doctor(capsys, page(HEALTHY, HEALTHY | {gauge: 0}))
    assert code == 1
    assert "INACTIVE, active in 1 of 2 ranks" in said
    assert f"({event})" in said


def test_an_audit_alone_of_sglang(capsys, page):
    """It has no windows, and none are missed."""
    audit = {name: value for name, value in HEALTHY.items() if "audit" in name}
    code, said = doctor(capsys, page(audit, engine="sglang:num_running_reqs"))
    assert code == 0
    assert "server engine: SGLang" in said
    assert "windows: not asked for" in said


def test_a_server_that_was_just_started(capsys, page):
    """Active, and nothing to judge yet."""
    names = dict.fromkeys(HEALTHY, 0) | {"kvtxn_active": 1, "kvtxn_audit_active": 1}
    code, said = doctor(capsys, page(names))
    assert code == 0
    assert "no window has ended: send requests" in said
    assert "no row was compared yet: send requests" in said


def test_windows_without_an_audit(capsys, page):
    windows = {name: value for name, value in HEALTHY.items() if "audit" not in name}
    code, said = doctor(capsys, page(windows))
    assert (code, "audit: not asked for" in said) == (0, True)
    assert "next step: for the audit, start vLLM with" in said


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        ("vllm:num_requests_running", ["--additional-config"]),
        ("sglang:num_running_reqs", ["KVTXN_SGLANG="]),
        ("", ["--additional-config", "KVTXN_SGLANG="]),
    ],
)
def test_a_server_without_kvtxn(capsys, page, engine, asked):
    """The next step is how to ask for it."""
    code, said = doctor(capsys, page(engine=engine) + "other 1\n")
    assert code == 1
    assert "kvtxn: no counters: it is not installed there, or not asked for" in said
    assert [word for word in ("--additional-config", "KVTXN_SGLANG=") if word in said] == asked


def test_json(capsys, page):
    """For programs."""
    with serving(page(HEALTHY | {"kvtxn_fallbacks_total_stage": 2})) as address:
        assert main(["doctor", address, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["engine 0"]["counters"]["kvtxn_fallbacks_total"] == "2 (stage 2)"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ftp://host/metrics", "no address of a server's metrics"),
        ("http://[::1", "no address of a server's metrics"),
        ("http://", "no address of a server's metrics"),
        ("http://me:s3cret@host/metrics", "no address of a server's metrics"),
        ("127.0.0.1:1", "http://127.0.0.1:1/metrics cannot be read"),
        ("127.0.0.1:port", "cannot be read"),
    ],
)
def test_an_address_that_is_none(capsys, address, says):
    """One sentence with a next step; no password in it."""
    assert main(["doctor", address]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("kvtxn doctor: ")
    assert says in said
    assert "s3cret" not in said


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("<html>hello", 200, "is no page of metrics"),
        (b"\xff\xfe", 200, "is no page of metrics"),
        ("", 404, "--enable-metrics"),
    ],
)
def test_an_answer_that_is_no_page(capsys, text, status, says):
    with serving(text, status) as address:
        assert main(["doctor", address]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_options_for_this_machine_are_refused_with_an_address(capsys):
    assert main(["doctor", "localhost", "--matrix"]) == 2
    assert "a URL is about a running server" in " ".join(capsys.readouterr().err.split())


def test_two_models_on_one_page(capsys, page):
    """Each engine has a section, whatever its number."""
    text = page(HEALTHY)
    other = "".join(
        line.replace('"tiny"', '"other"').replace(" 40.0", " 41.0") + "\n"
        for line in text.splitlines()
        if line.startswith("kvtxn_")
    )
    _, said = doctor(capsys, text + other)
    assert all(f"(committed {count})" in said for count in (40, 41))


def test_every_metric_that_it_names_exists():
    """Those of its source as well as those of its table."""
    source = Path(running_server.__file__).read_text()
    assert set(re.findall(r'"(kvtxn_[a-z_]+[a-z])"', source)) <= EVERY.keys()
    assert {concern.metric for concern in running_server.CONCERNS} <= EVERY.keys()


def test_it_needs_no_torch(page):
    """A page can be read where nothing else of kvtxn's can run."""
    code = (
        "import sys; from kvtxn.cli import main; main(['doctor', sys.argv[1]]); "
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    with serving(page(HEALTHY)) as address:
        done = subprocess.run(
            [sys.executable, "-c", code, address], capture_output=True, text=True, check=True
        )
    assert done.stdout.splitlines()[-1] == "[]"
