"""Reading Markdown, however wide its tables are."""

from __future__ import annotations


def narrow(text: str) -> str:
    """Replace each run of spaces within the lines by one space."""
    return "\n".join(" ".join(line.split()) for line in text.splitlines())
