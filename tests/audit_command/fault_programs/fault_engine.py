"""What the programs of this folder share: a tiny engine under the ledger, and what they print."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

# vLLM reads these when it is imported. An engine in this process makes the same steps each time.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)
sys.path.append(str(Path(__file__).resolve().parents[2] / "vllm_plugin" / "grid"))

#: Kinds of violations that are wrong reads.
_READ = ("unwritten", "foreign", "imported", "stale")
#: What vLLM appends to a request's name.
RANDOM = re.compile(r"-[0-9a-f]{8}$")


@attrs.frozen
class Played:
    """What the requests of an engine said, and what the ledger found.

    Attributes:
        said: token ids by the request's name.
        violations: as ``audit_report`` gives them, with the requests' own names.
    """

    said: dict[str, list[int]]
    violations: list[dict[str, Any]]


class SmallEngine:
    """A tiny model with random weights under the ledger. Nothing of vLLM's is changed.

    Args:
        folder: the model is written there.
        kvtxn: more settings of kvtxn.
        model: its name in ``model_files``.
        options: arguments of vLLM's ``LLM``.
    """

    def __init__(
        self,
        folder: Path,
        kvtxn: dict[str, Any] | None = None,
        model: str = "llama",
        **options: Any,
    ) -> None:
        import model_files
        from vllm import LLM

        self.llm = LLM(
            model_files.write(model, folder),
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=288,
            max_num_seqs=8,
            enable_prefix_caching=True,
            async_scheduling=False,
            skip_tokenizer_init=True,
            additional_config={"kvtxn": {"audit": "ledger", "required": True, **(kvtxn or {})}},
            **options,
        )
        self.engine = self.llm.llm_engine
        self.said: dict[str, list[int]] = {}

    def send(self, name: str, prompt: Sequence[int] | dict[str, Any], **more: Any) -> None:
        """Send a request for eight tokens, each the likeliest one; vLLM is told ``more`` of it."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        known = prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        self.engine.add_request(name, known, params, **more)

    def step(self) -> None:
        """Make one step."""
        for output in self.engine.step():
            if output.finished:
                self.said[output.request_id] = list(output.outputs[0].token_ids)

    def finish(self) -> None:
        """Make steps until no request is left."""
        while self.engine.has_unfinished_requests():
            self.step()

    def played(self) -> Played:
        """Return what was said, and what was found until now."""
        from kvtxn.integrations.vllm_plugin import audit_report

        (violations,) = audit_report(self.llm)
        for violation in violations:
            for key in ("request", "written_request"):
                violation[key] = violation[key] and RANDOM.sub("", violation[key])
        return Played(self.said, violations)


def tokens(count: int, seed: int) -> list[int]:
    """Return random tokens."""
    numbers = random.Random(seed)
    return [numbers.randrange(2, 128) for _ in range(count)]


def main(play: Callable[[Path, bool], Played], readers: Sequence[str], without: str) -> int:
    """Play a story with the cause of a fault and without it, and print what differs.

    Args:
        play: plays the story; it is given a folder of its own, and whether the cause is there.
        readers: the requests that read wrong rows, by name.
        without: the engine without the cause, in words.

    Returns:
        The exit code: 1 if a wrong row was read, as that of ``kvtxn audit``.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stories = [(Path(folder, "with"), True), (Path(folder, "without"), False)]
        # A process holds one engine of vLLM's, and each story has a fresh one.
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            faulty, right = pool.starmap(play, stories, chunksize=1)
    if right.violations:
        raise RuntimeError(f"wrong rows with {without}, too: {right.violations}")
    kinds = Counter(violation["kind"] for violation in faulty.violations)
    said, expected = ([played.said[name] for name in readers] for played in (faulty, right))
    if wanted.json:
        found = {"kinds": kinds, "violations": faulty.violations}
        print(json.dumps(found | {"said": said, "expected": expected}))
    else:
        print("\n".join(_lines(kinds, faulty, right, readers, without)))
    return int(bool(faulty.violations))


def _lines(
    kinds: Counter[str], faulty: Played, right: Played, readers: Sequence[str], without: str
) -> list[str]:
    """Tell of the kinds, the first wrong row that each reader read, and what it said."""
    from kvtxn.integrations.audit_command.verdict import MEANING, WIDTH, tell

    lines = [f"{kind}, {number}: {MEANING[kind]}." for kind, number in kinds.items()]
    for name in readers:
        own = [violation for violation in faulty.violations if violation["request"] == name]
        read = [violation for violation in own if violation["kind"] in _READ]
        lines += [
            textwrap.fill(f"- {tell(violation)}", WIDTH, subsequent_indent="  ")
            for violation in read[:1]
        ]
    for name in readers:
        lines.append(f"{name} said {faulty.said[name]};")
        lines.append(f"with {without} it says {right.said[name]}.")
    return lines
