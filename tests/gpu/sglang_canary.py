"""SGLang's KV canary and the ledger on the same planted faults, and the canary on sound engines.

python tests/gpu/sglang_canary.py OUT

Engines with faults run three times: with the ledger, with ``--kv-canary log``, and with all that
the canary can check. Others run with the canary alone: which of them start, and what it says where
nothing is planted. OUT gets ``canary.json`` as engines end, which ``gpu_seen.py`` reads, and
logs and results. The first engine runs alone, to compile kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, Final

import sglang_alarms
from sglang_engines import Job, add_options, only, play, prepare, summary
from sglang_machine import where
from sglang_models import ENGINES

FIRST: Final = ("radix", "canary")
WITH_FAULTS: Final = tuple(name for name, (_, _, more) in ENGINES.items() if "FAULTS" in more)
SOUND: Final = (
    *("eagle", "eagle-tree", "ngram", "mla", "qwen3-next", "chunked", "retract", "page16"),
    *("eager", "sync"),
)
STRICT: Final = ("radix", "eagle", "chunked")
#: Of ``sglang_engines.summary``: how an engine ended.
PARTS: Final = (
    *("engine", "kind", "ok", "exit", "took", "failed", "errors", "wrong", "faults", "dropped"),
)


def queue_of(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Name the engines and kinds of a run, without the first."""
    kinds = ("canary", "strict", "ledger")
    found = [(name, kind) for name in WITH_FAULTS for kind in kinds]
    found += [(name, "canary") for name in SOUND] + [(name, "strict") for name in STRICT]
    return [each for each in found if not given.engines or each[0] in given.engines]


def judged(job: Job) -> dict[str, Any]:
    """Say how an engine ended, and what its auditor said."""
    row = {key: value for key, value in summary(job).items() if key in PARTS}
    if job.kind == "ledger":
        return row
    with job.log.open(errors="replace") as lines:
        said = sglang_alarms.read(lines)
    events = said.pop("events")
    alarms = [event for event in events if "fault" not in event]
    faults = sglang_alarms.judged(events)
    return {**row, "canary": {**said, "first": alarms[:3], "faults": faults}}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    parser.set_defaults(first_limit=200, limit=150, parallel=11)
    return only(parser, ENGINES, words)


def main() -> None:
    """Run the engines; write ``canary.json`` as each ends, and print a line for each."""
    given = parsed()
    prepare(given)
    rows: list[dict[str, Any]] = []
    about = {**where(given.out), "extra": given.extra, "engines": rows}

    def ended(job: Job) -> None:
        row = judged(job)
        rows.append(row)
        (given.out / "canary.json").write_text(json.dumps(about, indent=1) + "\n")
        canary = row.get("canary", {})
        faults = canary.get("faults", row.get("faults") or [])
        short = [each["fault"] for each in faults if each.get("heard", each.get("exact"))]
        shown = {key: canary.get(key) for key in ("alarms", "before", "rows", "refused")}
        ends = {key: row.get(key) for key in ("engine", "kind", "ok", "took", "failed", "wrong")}
        print(json.dumps({**ends, **shown, "found": short, "of": len(faults)})[:1500], flush=True)

    play(given, FIRST, queue_of(given), ended)


if __name__ == "__main__":
    main()
