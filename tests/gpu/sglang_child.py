"""One engine of SGLang: batches, steady decoding, and a fuzzed load; started by ``sglang_engines``.

python tests/gpu/sglang_child.py OUT NAME KIND JSON

KIND names the result, ``OUT/results/NAME.KIND.json``, which is written after each part. The JSON
has the number of *fuzz* requests, of *rounds*, and *extra* arguments of the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sglang_models import ENGINES, VOCABULARY, arguments

#: Violations of an engine that its result has.
MOST: Final = 5000


class Load:
    """An engine, what it is asked for, and what it answers.

    Args:
        name: of ``sglang_models.ENGINES``.
        engine: SGLang's.
        path: of the result.
    """

    def __init__(self, name: str, engine: Any, path: Path) -> None:
        self.name, self.engine, self.path = name, engine, path
        self.result: dict[str, Any] = {"engine": name, "tokens": [], "errors": []}
        self.chance = random.Random(7)
        self.shared = [self.some(70) for _ in range(3)]
        self.batches = [[self.prompt() for _ in range(12)] for _ in range(3)]

    def some(self, number: int) -> list[int]:
        return [self.chance.randrange(5, VOCABULARY) for _ in range(number)]

    def prompt(self) -> list[int]:
        """Return a prompt that shares its beginning with others."""
        head = self.chance.choice(self.shared)[: self.chance.randrange(3, 70)]
        return head + self.some(self.chance.randrange(1, 60))

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int] | None]:
        """Return the tokens of each prompt; None of a request that the ledger has ended."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        if "contain" not in self.name:
            found = self.engine.generate(input_ids=prompts, sampling_params=parameters)
            return [self.keep(each) for each in found]
        return self.engine.loop.run_until_complete(self.each_of(prompts, parameters))

    async def each_of(self, prompts: list[list[int]], parameters: Any) -> list[list[int] | None]:
        """Ask for each prompt alone: SGLang gives up a batch with the first request that ends."""
        found = await asyncio.gather(
            *(
                self.engine.async_generate(input_ids=each, sampling_params=parameters)
                for each in prompts
            ),
            return_exceptions=True,
        )
        ended = [repr(each) for each in found if isinstance(each, BaseException)]
        if unknown := [each for each in ended if "did not help" not in each]:
            raise RuntimeError(unknown[0])
        self.result["given_up"] = self.result.get("given_up", 0) + len(ended)
        return [None if isinstance(each, BaseException) else self.keep(each) for each in found]

    def keep(self, each: Mapping[str, Any]) -> list[int]:
        """Count HiCache's hits on the host, where the release tells them; return the tokens."""
        hits = each["meta_info"].get("cached_tokens_details") or {}
        self.result["from_host"] = self.result.get("from_host", 0) + (hits.get("host") or 0)
        return list(each.get("output_ids") or each.get("token_ids"))

    def report(self) -> None:
        """Take the ledger's report over, and write."""
        state = self.engine.get_server_info()["internal_states"][0]
        found = state.get("kvtxn")
        self.result["report"] = found and {
            "counters": found["counters"],
            "violations": found["violations"][:MOST],
            "number": len(found["violations"]),
        }
        self.result["accept"] = state.get("avg_spec_accept_length")
        self.path.write_text(json.dumps(self.result))

    # -- parts -------------------------------------------------------------------------------

    def compare(self) -> None:
        """Generate batches whose tokens are compared with those of the engine without kvtxn."""
        begun = time.time()
        self.result["tokens"] += [self.generate(prompts, 40) for prompts in self.batches]
        self.result["batch_s"] = round(time.time() - begun, 2)
        self.report()

    def decode(self) -> None:
        """Time decode steps: the same batch, three times after a first one.

        Of a recorded engine the first batch comes again instead, whose prompts are in the tree.
        """
        if os.environ.get("RECORD_FILE"):
            self.generate(self.batches[0], 20)
            return
        seconds = []
        for _ in range(0 if os.environ.get("SGLANG_TEST_RETRACT") else 4):
            begun = time.time()
            self.generate([prompt[:20] for prompt in self.batches[0]], 300)
            seconds.append(round(time.time() - begun, 3))
        self.result["steady_s"] = seconds[1:]
        self.report()

    def fuzz(self, requests: int, rounds: int) -> None:
        """Abort, share prefixes, flush, and sample half of the requests at temperature 1."""
        drafts = "speculative_algorithm" in ENGINES[self.name][1]
        begun, self.result["ended"] = time.time(), 0
        plan = [[self.job(f"{r}-{n}", drafts) for n in range(requests)] for r in range(rounds)]
        for jobs in plan:
            for found in self.engine.loop.run_until_complete(self.all_of(jobs)):
                if isinstance(found, BaseException):
                    self.result["errors"].append(repr(found)[:200])
            try:
                flushed = self.engine.flush_cache()
                done = bool(getattr(flushed, "success", flushed))
                self.result.setdefault("flushed", []).append(done)
            except Exception as error:
                self.result["errors"].append(f"flush: {error!r}"[:200])
            self.report()
        self.result["fuzz_s"] = round(time.time() - begun, 2)

    def job(self, number: str, drafts: bool) -> dict[str, Any]:
        chance = self.chance
        return {
            "rid": f"{self.name}-{number}",
            "prompt": self.prompt(),
            "tokens": chance.randrange(1, 60),
            "wait": chance.random() * 1.5,
            "warm": chance.random() < 0.5 and not drafts,
            "abort": chance.random() * 0.6 if chance.random() < 0.2 else None,
        }

    async def all_of(self, jobs: list[dict[str, Any]]) -> list[Any]:
        each = (asyncio.wait_for(self.one(job), 40) for job in jobs)
        return await asyncio.gather(*each, return_exceptions=True)

    async def one(self, job: Mapping[str, Any]) -> None:
        """Send a request, and abort it if its job says when."""
        await asyncio.sleep(job["wait"])
        parameters = {"temperature": float(job["warm"]), "max_new_tokens": job["tokens"]}
        parameters["ignore_eos"] = True
        stream = await self.engine.async_generate(
            input_ids=job["prompt"], sampling_params=parameters, rid=job["rid"], stream=True
        )
        begun = time.time()
        async for _ in stream:
            if job["abort"] is not None and time.time() - begun > job["abort"]:
                self.engine.tokenizer_manager.abort_request(rid=job["rid"])
        self.result["ended"] += 1

    def run(self, fuzz: int, rounds: int) -> None:
        """Play all parts, and the first batch once more."""
        try:
            self.report()
            self.compare()
            self.decode()
            self.fuzz(fuzz, rounds)
            self.result["tokens"].append(self.generate(self.batches[0], 40))
            self.report()
            self.result["ok"] = True
        except BaseException:
            self.result["failed"] = traceback.format_exc()[-1500:]
        self.path.write_text(json.dumps(self.result))


def engine_of(name: str, out: Path, extra: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Start an engine; say how long that took, and which arguments its release does not have."""
    import sglang
    from sglang.srt.server_args import ServerArgs

    fields = ("__struct_fields__", "__dataclass_fields__")
    known = {one for each in fields for one in getattr(ServerArgs, each, None) or ()}
    given = {**arguments(name, out / "models"), **extra}
    dropped = sorted(set(given) - known) if known else []
    begun = time.time()
    engine = sglang.Engine(**{key: given[key] for key in given if key not in dropped})
    return engine, {"load_s": round(time.time() - begun, 1), "dropped": dropped}


def main() -> None:
    """Start an engine and play its load; the process ends without waiting for SGLang's threads."""
    out, name, kind, options = Path(sys.argv[1]), *sys.argv[2:4], json.loads(sys.argv[4])
    engine, started = engine_of(name, out, options["extra"])
    load = Load(name, engine, out / "results" / f"{name}.{kind}.json")
    load.result |= {"kind": kind, **started}
    load.run(options["fuzz"], options["rounds"])
    try:
        engine.shutdown()
    finally:
        os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
