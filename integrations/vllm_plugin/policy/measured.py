"""``measured.json``: the measurements that rules decide by, and that their sentences quote.

Each entry has the result file in ``benchmarks/results`` that it is from, the commit of that
result, and a share of stock's time, or several by number of requests; of requests that fit, by
their tokens. Tests compare them with the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MEASURED: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("measured.json").read_text()
)


def of_stock(name: str) -> dict[int, float]:
    """Return shares of stock's time by requests, or multiples of its requests by tokens."""
    return {int(count): share for count, share in MEASURED[name]["of_stock"].items()}
