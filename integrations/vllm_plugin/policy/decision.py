"""The type of a row of the table of rules, and of the outcome; the rows are in ``policy.rules``.

``measured.json`` has the measurements that rules decide by, and that their sentences quote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import attrs

from . import supported
from .engine_facts import EngineFacts


class Decision(NamedTuple):
    """The policy of an engine, or ``"off"`` for stock vLLM, and the reason for it."""

    policy: str
    reason: str


#: Ends a reason where nothing but a check on a GPU, or on several, is missing.
_TRIAL: Final = '; "unchecked": true lets "recurrent": "exact" start'


#: Releases in the examples. There are none of these numbers: the tests list the first as checked on
#: a CPU and on one GPU and for nothing else, the second as checked for all but "gpu-stages", the
#: third not at all. So no example depends on the listed releases.
ON_ONE_GPU: Final = "0.97.0"
WITHOUT_STAGES: Final = "0.98.0"
UNLISTED: Final = "0.99.0"


@attrs.frozen
class Rule:
    """A row of the table of rules.

    Attributes:
        name: a short name, unique in the table.
        forbids: ``"windows"``: kvtxn stays out altogether. ``"deferred"``: the attention cannot
            read the window, so drafts have to be in the cache. ``"others"``: every policy but
            ``deferred``. ``"auto"``: the user may name ``deferred``, but "auto", which promises
            stock's tokens in stock's time, does not choose it.
        applies: tells whether the rule concerns an engine.
        reason: one sentence; ``{names}`` are facts, ``{lacking}`` is the result of ``lacking``, and
            ``{connector}`` that of ``connector``. ``{attends}`` names the attention, ``{or_flash}``
            one over which drafts wait in more releases, and ``{no_rows}`` says why it does not read
            blocks of one row. ``{state_releases}`` are the releases whose recurrent layers were
            checked on the engine's device, ``{or_auto}`` is another value of the setting
            ``recurrent`` there, and ``{trial}`` the setting that lets states start there all the
            same. ``{left_out}`` says why the method of speculation was left out with this release,
            and ``{backend_left_out}`` why the attention backend was. ``{over_bits}`` names a cache
            format that is not "auto". States of no known dtype,
            before the model is loaded, are "recurrent".
        example: facts of an engine that the rule concerns; all its other facts are the defaults of
            ``EngineFacts``.
    """

    name: str
    forbids: Literal["windows", "deferred", "others", "auto"]
    applies: Callable[[EngineFacts], bool]
    reason: str
    example: Mapping[str, object]

    def says(self, facts: EngineFacts) -> str:
        """Return the rule's reason, a sentence in which the facts of this engine are filled in."""
        left_out = supported.LEFT_OUT.get(facts.version, {})
        found = {
            "lacking": lacking(facts),
            "attends": facts.attention or ("latent attention" if facts.mla else "any attention"),
            "or_flash": "" if facts.mla else "attention backend FLASH_ATTN, ",
            "connector": connector(facts),
            "state_releases": ", ".join(supported.state_releases_for(facts.device)) or "none",
            "no_rows": supported.reads_no_rows(facts.attention, facts.flash),
            "state_dtype": facts.state_dtype or "recurrent",
            "or_auto": ' or "auto"' if facts.device == "cuda" else "",
            "left_out": left_out.get(facts.method or "", ""),
            "backend_left_out": left_out.get(facts.attention or "", ""),
            "over_bits": "" if facts.kv_cache_dtype == "auto" else f" over {facts.kv_cache_dtype}",
            "trial": _TRIAL if facts.device == "cuda" else "",
        }
        return self.reason.format_map(attrs.asdict(facts) | found)


def lacking(facts: EngineFacts) -> str:
    """Name the first feature that the engine wants and vLLM's attention backend lacks.

    "" without any, and on other devices than GPUs.
    """
    asked = {"ALiBi": facts.alibi, "attention sinks": facts.sinks, "shared rows": facts.kv_sharing}
    wanted = [facts.dtype, facts.kv_cache_dtype, *(name for name, has in asked.items() if has)]
    return supported.lacking(facts.attention, wanted) if facts.device == "cuda" else ""


def connector(facts: EngineFacts) -> str:
    """Name the engine's first KV connector that was not checked on its device; "" without any."""
    return supported.unchecked_connector(facts.device, facts.connectors)


#: By entry: the result file in ``benchmarks/results`` that it is from, the commit of that result,
#: and a share of stock's time, or several by number of requests; of requests that fit, by their
#: tokens. Tests compare them with the files.
MEASURED: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("measured.json").read_text()
)


def of_stock(name: str) -> dict[int, float]:
    """Return an entry of ``MEASURED``: shares of stock's time by number of requests.

    Of entries on requests that fit: multiples of stock's number by tokens of a request.
    """
    return {int(count): share for count, share in MEASURED[name]["of_stock"].items()}
