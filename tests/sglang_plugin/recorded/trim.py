"""Shortens a recording of an SGLang engine for the tests: python trim.py IN OUT STEPS.

Requests get short names, and of the table only the places that changed stay.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator

#: What the replay of a request reads.
OF_REQUESTS = ("rid", "prompt", "output")


def read(path: str) -> Iterator[dict]:
    """The events of a recording; its last line may be cut."""
    with open(path) as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def main(source: str, target: str, steps: int) -> None:
    """Write the beginning of a recording."""
    names: dict[str, str] = {}
    table: dict[int, list[int]] = {}
    kept: list[dict] = []

    def short(rid: str) -> str:
        return names.setdefault(rid, f"r{len(names)}")

    for event in read(source):
        if event["event"] == "error":
            sys.exit(str(event))
        if event["event"] == "run_batch":
            if not steps:
                break
            steps -= 1
            event = {"event": "run_batch"}
        if event["event"] == "forward":
            event["rids"] = list(map(short, event["rids"]))
            known = [{name: req[name] for name in OF_REQUESTS} for req in event["reqs"]]
            event["reqs"] = [{**req, "rid": short(req["rid"])} for req in known]
            event["table"] = []
            for line, now in zip(event["req_pool_indices"], event.pop("slots"), strict=True):
                before = table.get(line, [])
                same = (n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b)
                at = next(same, min(len(before), len(now)))
                event["table"].append([at, now[at:]])
                table[line] = now
        if event["event"] == "released":
            event["rid"] = short(event["rid"])
        kept.append({name: value for name, value in event.items() if value is not None})
    text = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in kept)
    with lzma.open(target, "wb", preset=9) as out:
        out.write(text.encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
