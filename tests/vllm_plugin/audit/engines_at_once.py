"""Two engines that run at one time, with one directory of a connector and one store of identities.

Each begins with prompts of its own. Then both read the other's, right ones and wrong ones, and in
the end one of them is killed. Prompts begin with different tokens, and no prefix cache is kept.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import stale_engines
import watched_engines
from kvtxn.integrations.vllm_plugin import snapshots
from model_files import VOCAB
from planting import Rig

ENGINE: dict[str, Any] = {
    "model": "llama",
    "connector": "example",
    "shares": True,
    "kvtxn": {"weights_every": 1},
    "options": {**watched_engines.WHOLE_PROMPTS, "enable_lora": True, "max_lora_rank": 8},
}
#: Prompts of an engine in a round, and the whole blocks of each that a connector brings.
PROMPTS, BLOCKS = 3, 3


def prompts(owner: int, turn: int) -> list[list[int]]:
    """Return prompts of an engine, of which a round's differ from each other's in each token."""
    first = 1 + PROMPTS * (2 * turn + owner)
    return [
        [(first + one + 37 * at) % (VOCAB - 1) + 1 for at in range(32 * BLOCKS + 9)]
        for one in range(PROMPTS)
    ]


class Side:
    """An engine, and what it is asked to do."""

    def __init__(self, llm: Any, folder: Path) -> None:
        self._llm, self._rig, self._folder, self._told = llm, Rig(llm), folder, 0

    def ask(self, some: list[list[int]], adapter: bool = False) -> dict[str, Any]:
        """Ask for prompts with an empty prefix cache; returns what was brought and found.

        Of each violation: the kind, what differs, the position, and the process that has written.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        assert self._llm.reset_prefix_cache()
        before = self._unverified()
        tuned = LoRARequest("tuned", 1, str(self._folder / "adapter")) if adapter else None
        outputs = self._llm.generate(
            [{"prompt_token_ids": each} for each in some],
            SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False),
            lora_request=tuned,
            use_tqdm=False,
        )
        assert self._rig.watch.transfers._shared._thread.wait(60)
        unverified = self._unverified() - before
        old, self._told = self._told, len(self._rig.found())
        found = [
            [
                v["kind"],
                v["differs"],
                v["position"],
                " ".join(str(v["written_request"]).split()[:2]),
            ]
            for v in self._rig.found()[old:]
        ]
        brought = sum(output.num_cached_tokens for output in outputs)
        return {"brought": brought, "unverified": unverified, "found": found}

    def _unverified(self) -> float:
        return float(snapshots(self._llm)[0]["kvtxn_audit_rows_unverified_total"])

    def change(self) -> None:
        """Change the weights, and tell of it."""
        stale_engines.told(self._llm, self._rig)


def _serve(theirs: Connection, folder: Path) -> None:
    side = Side(watched_engines.build(ENGINE, folder), folder)
    theirs.send(f"process {os.getpid()}")
    while True:
        name, *given = theirs.recv()
        theirs.send(getattr(side, name)(*given))


def run(folder: Path) -> dict[str, Any]:
    """Run both engines; returns by round what each of them has brought and found."""
    _write_adapter(folder / "adapter")
    watched_engines.write(ENGINE["model"], folder)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    other = fork.Process(target=_serve, args=(theirs, folder))
    other.start()
    theirs.close()
    try:
        return _rounds(Side(watched_engines.build(ENGINE, folder), folder), ours, other, folder)
    finally:
        other.kill()
        other.join()


def _rounds(mine: Side, ours: Connection, other: Any, folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"me": f"process {os.getpid()}", "other": ours.recv()}

    def both(name: str, here: Callable[[], Any], *there: Any) -> None:
        ours.send(there)
        report[name] = {"mine": here(), "other": ours.recv()}

    for turn in range(2):
        own, others = prompts(0, turn), prompts(1, turn)
        both(f"computed {turn}", lambda own=own: mine.ask(own), "ask", others)
        both(f"right {turn}", lambda others=others: mine.ask(others), "ask", own)
    (first, second, third), others = prompts(0, 0), prompts(1, 0)
    _swap(folder / "stored", mine, first, second)
    both("swapped", lambda: mine.ask([third]), "ask", [first, second, third])
    _swap(folder / "stored", mine, first, second)
    both("adapter", lambda: mine.ask(others), "ask", [first], True)
    both("weights", lambda: mine.ask(others), "change")
    both("other weights", lambda: mine.ask(others), "ask", [first, second])
    ours.send(("ask", prompts(1, 2)))
    report["killed"] = mine.ask(prompts(0, 2))
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    report["after"] = mine.ask([*prompts(0, 2), *prompts(1, 1)])
    return report


def _swap(stored: Path, mine: Side, one: list[int], other: list[int]) -> None:
    """Let the connector's files of two prompts change places."""
    places = [_place(stored, mine, each) for each in (one, other)]
    shutil.move(places[0], stored / "aside")
    shutil.move(places[1], places[0])
    shutil.move(stored / "aside", places[1])


def _place(stored: Path, mine: Side, prompt: list[int]) -> Path:
    """Return the folder in which the connector keeps a prompt's rows."""
    import torch

    tokens = torch.tensor(prompt[: 32 * BLOCKS])
    found = mine._rig.scheduler.connector._generate_foldername_debug(tokens, [])
    assert Path(found).parent == stored
    assert Path(found).is_dir()
    return Path(found)


def _write_adapter(folder: Path) -> None:
    """Write weights of an adapter for the queries and values of the tiny Llama."""
    import json

    import torch
    from safetensors.torch import save_file

    chance, weights = torch.Generator().manual_seed(1), {}
    for layer in range(3):
        for name, size in (("q_proj", 128), ("v_proj", 64)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, 64, generator=chance) * 0.3
            weights[f"{place}.lora_B.weight"] = torch.randn(size, 8, generator=chance) * 0.3
    folder.mkdir()
    save_file(weights, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    settings |= {"target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
