"""Servers that were asked over HTTP: reduced to numbers, and drawn for ``SEEN.md``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtxn.benchmarks.common.markdown import table

HEAD: Final = """## Servers

`python tests/gpu/gpu_serve.py RECORD.json`: a real `vllm serve`, asked for completions by HTTP and
by curl, and its page at `/metrics`, read once it had caught up. The numbers are sums over all
engines and ranks: *drafts* and *kept* as vLLM counts them, *staged* and *committed* as kvtxn does,
for whom the drafts that were not kept are *rejected*. *Steps* are those with drafts, each of which
has a window. *Loaded* are prompt tokens that a connector brought back, after later requests had
pushed their rows out of the cache. *By curl* counts the tokens of a completion that curl asked for,
and the lines about rows on the page that it fetched.
"""

#: What is kept of each server's numbers, beside its options and what curl was told.
_NUMBERS: Final = (
    *("engines", "ranks", "active", "tokens", "drafted", "accepted", "staged", "committed"),
    *("rejected", "steps", "windows", "bypassed", "fallbacks", "loaded"),
)


def servers(reports: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce what ``gpu_serve.py`` wrote; a server that ended before its time is left out."""
    return {
        name: {
            "policy": found["policy"],
            "options": found["options"],
            **{key: int(found[key]) for key in _NUMBERS},
            "lost": found["lost"],
            "curl": found["curl"]
            and {"tokens": found["curl"]["tokens"], "lines": len(found["curl"]["page"])},
        }
        for name, found in reports.items()
        if "error" not in found
    }


def drawn(found: Mapping[str, Any]) -> str:
    """Tabulate servers."""
    rows = []
    for name, each in found.items():
        curl = each["curl"]
        row = [name, each["policy"], f"{each['engines']} x {each['ranks']}"]
        row += [
            f"{each['drafted']} / {each['staged']}",
            f"{each['accepted']} / {each['committed']}",
        ]
        row += [str(each[key]) for key in ("rejected", "steps", "windows", "bypassed", "fallbacks")]
        row += [str(each["loaded"] or "-")]
        rows.append([*row, "-" if curl is None else f"{curl['tokens']}, {curl['lines']}"])
    header = ["server", "policy", "engines x ranks", "drafts / staged", "kept / committed"]
    header += ["rejected", "steps", "windows", "bypassed", "fallbacks", "loaded", "by curl"]
    options = "\n".join(
        f"- {name}: `{each['options']}`" for name, each in found.items() if each["options"]
    )
    return f"{table(header, rows)}\n\nOptions beside the model's:\n\n{options}"
