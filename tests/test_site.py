"""The documentation builds without a warning, needs nothing from elsewhere, and has every name."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest
import site_links
from building import ROOT

pytest.importorskip("material", reason="the extra docs is not installed")
pytest.importorskip("mkdocstrings")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return site_links.pages_of(site)


def test_links_lead_somewhere(site):
    """Within the site to a place; external ones have the form of an address."""
    assert not site_links.broken(site)


def test_a_broken_link_is_noticed(tmp_path):
    """A page that is not there, a place, and another scheme."""
    (tmp_path / "a.html").write_text('<p id="x"></p><a href="#x"></a><a href="https://a.org"></a>')
    assert not site_links.broken(tmp_path)
    for link in ("b.html", "a.html#y", "http://a.org", "https://nowhere"):
        (tmp_path / "b.html").unlink(missing_ok=True)
        (tmp_path / "c.html").write_text(f'<a href="{link}"></a>')
        assert site_links.broken(tmp_path) == [f"c.html: {link}"]


def test_nothing_comes_from_elsewhere(pages):
    """No font, script, style or picture."""
    fetched = {link for page in pages.values() for link in page.fetched}
    assert len(fetched) > 10
    assert not [link for link in fetched if site_links.external(link)]


def test_lists_and_tables_are_no_paragraphs(pages):
    """Markdown that only GitHub takes for a list or a table stands in a paragraph as it is."""
    for path, page in pages.items():
        lines = [line for text in page.paragraphs for line in text.splitlines()]
        assert not [line for line in lines if line.startswith(("| ", "- ", "::: "))], path


def test_the_search_finds_pages(site):
    """It is an index beside the pages."""
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert any("max_rows" in entry["text"] for entry in found)


@pytest.mark.parametrize(
    "module", ["kvtxn", "kvtxn.audit", "kvtxn.recurrent", "kvtxn.integrations.vllm_plugin"]
)
def test_every_public_name_has_an_entry(pages, module):
    """It can be linked by its full name."""
    places = set().union(*(page.places for page in pages.values()))
    names = {f"{module}.{name}" for name in import_module(module).__all__}
    assert names <= places, names - places
