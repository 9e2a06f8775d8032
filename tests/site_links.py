"""Links of the built site: ``python tests/site_links.py site`` checks and lists them.

A link within the site leads to a file and to a place in it. Of an external link only the form is
checked: nothing is fetched.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import attrs

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
    """The links of a page, the places that links can name, and its paragraphs and cells."""

    links: list[str] = attrs.field(factory=list)
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
            if (tag, name) == ("a", "href") and value:
                self.links.append(value)
            elif (tag, name) in FETCHED and value and given.get("rel") not in NAMES:
                self.fetched.append(value)

    def handle_endtag(self, tag):
        self._inside = self._inside and tag not in ("p", "td")

    def handle_data(self, data):
        if self._inside:
            self.paragraphs[-1] += data


def pages_of(site: Path) -> dict[Path, Page]:
    """Read every page of a built site."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = page = Page()
        page.feed(path.read_text())
    return pages


def external(link: str) -> bool:
    """Return True for a link that leaves the site."""
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


def broken(site: Path) -> list[str]:
    """Name each link that leads nowhere, and each external one whose form is wrong."""
    pages, found = pages_of(site), []
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in [*page.links, *page.fetched]:
            parts = urlsplit(link)
            if external(link):
                right = parts.scheme == "https" and "." in parts.netloc and " " not in link
            else:
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                target = target / "index.html" if target.is_dir() else target
                right = target.is_file() and (
                    parts.fragment in ("", "__codelineno")
                    or target.suffix != ".html"
                    or unquote(parts.fragment) in pages[target].places
                )
            if not right:
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


def main() -> int:
    """Print external links and broken ones; returns 1 if there are any of these."""
    site = Path(sys.argv[1])
    everywhere = {link for page in pages_of(site).values() for link in page.links}
    print(*sorted(filter(external, everywhere)), sep="\n")
    wrong = broken(site)
    print(*(f"broken: {each}" for each in wrong), sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
