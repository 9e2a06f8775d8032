"""The documentation builds without a warning, needs nothing from elsewhere, and has every name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from urllib.parse import urlsplit

import attrs
import pytest
from building import ROOT

pytest.importorskip("material", reason="the extra docs is not installed")
pytest.importorskip("mkdocstrings")

#: Attributes of elements whose target a browser fetches by itself.
FETCHED = {
    ("link", "href"),
    ("script", "src"),
    ("img", "src"),
    ("source", "src"),
    ("iframe", "src"),
}
#: Relations of a ``link`` that only name a page.
NAMES = {"canonical", "next", "prev"}


@attrs.define
class Page(HTMLParser):
    """What a page fetches, the places that links can name, and its paragraphs and cells."""

    fetched: list[str] = attrs.field(factory=list)
    places: set[str] = attrs.field(factory=set)
    paragraphs: list[str] = attrs.field(factory=list)
    _inside: bool = False

    def __attrs_post_init__(self):
        super().__init__()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.places |= {value for name, value in attributes if name in ("id", "name") and value}
        if tag in ("p", "td"):
            self.paragraphs.append("")
        self._inside = tag in ("p", "td") or (self._inside and tag != "code")
        for name, value in attributes:
            if (tag, name) in FETCHED and value and given.get("rel") not in NAMES:
                self.fetched.append(value)

    def handle_endtag(self, tag):
        self._inside = self._inside and tag not in ("p", "td")

    def handle_data(self, data):
        if self._inside:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` does: a link that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """Every page of the site."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = page = Page()
        page.feed(path.read_text())
    return pages


def test_nothing_comes_from_elsewhere(pages):
    """No font, script, style or picture."""
    fetched = {link for page in pages.values() for link in page.fetched}
    assert len(fetched) > 10
    assert not [link for link in fetched if urlsplit(link).netloc]


def test_lists_and_tables_are_no_paragraphs(pages):
    """Markdown that only GitHub takes for a list or a table stands in a paragraph as it is."""
    for path, page in pages.items():
        lines = [line for text in page.paragraphs for line in text.splitlines()]
        assert not [line for line in lines if line.startswith(("| ", "- ", "::: "))], path


def test_the_search_finds_pages(site):
    """It is an index beside the pages."""
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert any("max_rows" in entry["text"] for entry in found)


def attributes(site, page, owner):
    """The attributes that a page of the API lists of a class, and the types that it shows."""
    text = (site / "docs" / "api" / page).read_text()
    entry = rf'<span title="{re.escape(owner)}\.(\w+)">\1</span></code></b>([^\u2013]*)'
    found = re.findall(entry, text)
    return {name: re.sub(r"<[^>]*>|\s", "", shown).strip("()") for name, shown in found}


def test_attributes_have_their_own_types(site):
    """griffe gives one whose assignment it cannot read the type of the attribute before it."""
    found = attributes(site, "windows.html", "kvtxn.TransactionManager")
    assert {name: found[name] for name in ("kinds", "policy", "executor")} == {
        "kinds": "Mapping[str,SlotKind]",
        "policy": "str",
        "executor": "",
    }


def test_what_an_executor_writes_with_has_entries(site, pages):
    """The guide names them."""
    places = pages[site / "docs" / "api" / "executors.html"].places
    assert {"kvtxn.cache_planes.Plane.index", "kvtxn.formats.words"} <= places
    found = attributes(site, "executors.html", "kvtxn.cache_planes.Plane")
    assert found["cells"] == "Tensor"


@pytest.mark.parametrize(
    "module", ["kvtxn", "kvtxn.audit", "kvtxn.recurrent", "kvtxn.integrations.vllm_plugin"]
)
def test_every_public_name_has_an_entry(pages, module):
    """It can be linked by its full name."""
    places = set().union(*(page.places for page in pages.values()))
    names = {f"{module}.{name}" for name in import_module(module).__all__}
    assert names <= places, names - places
