"""Hooks of MkDocs: pages that lie outside ``docs/``, and the package as it is installed.

A page is on the site at its place in the repository. So a link from one page to another is the
same on the site as in a checkout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
#: Files that pages link to, beside other pages.
LINKED = ("integrations/dashboard.json",)
#: Goes with the process.
INSTALLED = TemporaryDirectory()


@event_priority(100)  # before mkdocstrings' own
def on_config(config: MkDocsConfig) -> None:
    """Let mkdocstrings find ``kvtxn`` with the packages whose folders lie beside it."""
    package = Path(INSTALLED.name, "kvtxn")
    package.mkdir(exist_ok=True)
    beside = (ROOT / name for name in ("backends", "integrations"))
    for path in (*(ROOT / "kvtxn").iterdir(), *beside):
        link = package / path.name
        if not link.exists():
            link.symlink_to(path)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [INSTALLED.name]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the files of ``docs/`` under that name, and the other pages beside them."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
        if not file.src_uri.endswith(".py"):
            assert file.abs_src_path is not None
            files.append(_page(config, Path(file.abs_src_path), f"docs/{file.src_uri}"))
    for name in (*_named(config.nav), *LINKED):
        if not name.startswith("docs/"):
            files.append(_page(config, ROOT / name, name))
    return files


def _named(nav: Any) -> Iterator[str]:
    """Yield the paths that the navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(part)


def _page(config: MkDocsConfig, path: Path, name: str) -> File:
    """Return the file of a page, by its name on the site."""
    return File.generated(config, name, abs_src_path=str(path))
