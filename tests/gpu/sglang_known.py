"""Public faults of SGLang, tried with small models: are rows and states right that come back?

python tests/gpu/sglang_known.py OUT

Each engine answers the same prompts cold, from the GPU's cache, and once other prompts have driven
them out of it: from the host's cache, if there is one. It runs with the ledger, one also with
SGLang's KV canary. OUT gets ``known.json`` as engines end, which ``gpu_seen.py``
reads, and logs and results. The first engine runs alone, to compile kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import sglang_alarms
from sglang_child import engine_of
from sglang_engines import Job, add_options, only, play, prepare, summary
from sglang_machine import where
from sglang_models import KNOWN, VOCABULARY

#: Engines, and the kinds of their runs.
RUNS: Final = (
    ("hicache", "canary"),
    *((name, "ledger") for name in KNOWN),
)
PROMPTS: Final = (520, 640, 771, 900, 1024, 1111)
#: Prompts that nobody else asks, and that drive the others out of the GPU's cache.
CHURN: Final = (15, 900)
TOKENS: Final = 24
#: Of ``sglang_engines.summary``: how an engine ended, and what kvtxn logged.
PARTS: Final = (
    *("engine", "kind", "ok", "exit", "took", "load_s", "dropped", "failed", "wrong", "log"),
    *("active", "rows"),
)


class Asked:
    """An engine, and what it answered.

    Args:
        engine: SGLang's.
        path: of the result.
    """

    def __init__(self, engine: Any, path: Path) -> None:
        self.engine, self.path = engine, path
        self.result: dict[str, Any] = {"legs": {}}
        self.chance = random.Random(11)
        self.prompts = [self.some(length) for length in PROMPTS]

    def some(self, number: int) -> list[int]:
        return [self.chance.randrange(5, VOCABULARY) for _ in range(number)]

    def ask(self, prompt: list[int], tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
        """Ask one prompt; say how many of its tokens came from a cache, and from which."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        found = self.engine.generate(input_ids=prompt, sampling_params=parameters, **more)
        about = found["meta_info"]
        return {
            "cached": int(about["cached_tokens"]),
            "from": about.get("cached_tokens_details"),
        }

    def leg(self, name: str, prompts: Sequence[list[int]], tokens: int = TOKENS, **more) -> None:
        """Ask prompts one after the other. The log says where the leg begins."""
        print(f"planted {json.dumps({'fault': name})}", flush=True)
        self.result["legs"][name] = [self.ask(prompt, tokens, **more) for prompt in prompts]
        time.sleep(1.5)  # what is written to the host is there once the next leg begins
        self.save()

    def save(self) -> None:
        """Take the ledger's report over, and write."""
        state = self.engine.get_server_info()["internal_states"][0]
        found = state.get("kvtxn")
        self.result["report"] = found and {
            "counters": found["counters"],
            "violations": found["violations"][:400],
            "number": len(found["violations"]),
        }
        self.path.write_text(json.dumps(self.result))

    def evict(self) -> None:
        """Ask cold, from the GPU's cache, and twice after others drove the prompts out of it."""
        self.leg("cold", self.prompts)
        self.leg("cached", self.prompts)
        number, length = CHURN
        self.leg("others", [self.some(length) for _ in range(number)], tokens=1)
        self.leg("evicted", self.prompts)
        self.leg("again", self.prompts)

    def salts(self) -> None:
        """Ask with one client's salt, then, from storage alone, with another's and the first."""
        self.leg("cold", self.prompts, cache_salt="a")
        self.leg("cached", self.prompts, cache_salt="a")
        for name, salt in (("other salt", "b"), ("same salt", "a")):
            self.result.setdefault("flushed", []).append(str(self.engine.flush_cache()))
            self.leg(name, self.prompts, cache_salt=salt)


def play_legs(out: Path, name: str, kind: str, extra: Mapping[str, Any]) -> None:
    """Start an engine and play its legs; the process ends without waiting for its threads."""
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(out / "stored" / f"{name}.{kind}")
    engine, started = engine_of(name, out, extra)
    asked = Asked(engine, out / "results" / f"{name}.{kind}.json")
    asked.result |= started
    legs: Callable[[], None] = asked.salts if name == "salts" else asked.evict
    try:
        legs()
        asked.result["ok"] = True
    except BaseException:
        asked.result["failed"] = traceback.format_exc()[-1500:]
    asked.path.write_text(json.dumps(asked.result))
    os._exit(0)


# -- what was seen ------------------------------------------------------------------------


def sources(legs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, int]]:
    """Sum up each leg: its prompts, and their tokens from a cache, the host, and storage."""
    found = {}
    for name, answers in legs.items():
        row = {"asked": len(answers), "cached": sum(answer["cached"] for answer in answers)}
        places = [answer["from"] or {} for answer in answers]
        for part in ("host", "storage"):
            row[part] = sum(place.get(part) or 0 for place in places)
        found[name] = row
    return found


def alarms(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the canary's alarms of each leg."""
    found: dict[str, int] = {}
    name = "start"
    for event in events:
        name = event.get("fault", name)
        found[name] = found.get(name, 0) + ("fault" not in event)
    return found


def judged(job: Job) -> dict[str, Any]:
    """Say how an engine ended, what came from caches, and what kvtxn or the canary said."""
    row = {key: value for key, value in summary(job).items() if key in PARTS}
    path = job.out / "results" / f"{job.name}.{job.kind}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    row |= {"legs": sources(result.get("legs", {})), "flushed": result.get("flushed")}
    row["violations"] = (result.get("report") or {}).get("violations", [])[:20]
    if job.kind == "canary":
        with job.log.open(errors="replace") as lines:
            said = sglang_alarms.read(lines)
        events = said.pop("events")
        first = [event for event in events if "fault" not in event][:3]
        row |= {"canary": {**said, "legs": alarms(events), "first": first}}
    return row


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    parser.set_defaults(child="sglang_known.py", first_limit=200, limit=230, total=480)
    return only(parser, KNOWN, words)


def main() -> None:
    """Run the engines; write ``known.json`` as each ends, and print a line for each."""
    given = parsed()
    prepare(given)
    rows: list[dict[str, Any]] = []
    about = {**where(given.out), "extra": given.extra, "engines": rows}

    def ended(job: Job) -> None:
        row = judged(job)
        rows.append(row)
        (given.out / "known.json").write_text(json.dumps(about, indent=1) + "\n")
        shown = {key: value for key, value in row.items() if value not in (None, [], {})}
        print(json.dumps(shown)[:2500], flush=True)

    first, *queue = [each for each in RUNS if not given.engines or each[0] in given.engines]
    play(given, first, queue, ended)


if __name__ == "__main__":
    if len(sys.argv) > 4 and sys.argv[4].startswith("{"):
        out, name, kind, options = sys.argv[1:5]
        play_legs(Path(out), name, kind, json.loads(options)["extra"])
    else:
        main()
