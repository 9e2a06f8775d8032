"""A real ``vllm serve`` in processes of its own, and its ``/metrics`` page.

python api_server.py serve MODEL ...   is what ``vllm serve MODEL ...`` does: the command of the
CPU build looks its release up under a name that only the GPU build's package has.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import IO, Any

import commands
from folders import python_path
from model_files import VOCAB, write
from scenarios import NGRAM

OPTIONS = (
    *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
    *("--block-size", "32", "--num-gpu-blocks-override", "26", "--max-model-len", "288"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--host", "127.0.0.1"),
    *("--speculative-config", json.dumps(NGRAM)),
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


class Page:
    """One reading of ``/metrics``.

    Attributes:
        text: as it was read.
        samples: ``(name, labels, value)`` each.
        kinds: by family, ``counter``, ``gauge`` and so on.
        helps: by family, what it is.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        lines = text.splitlines()
        self.samples = []
        for line in lines:
            if found := _SAMPLE.fullmatch(line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', found["labels"] or ""))
                self.samples.append((found["name"], labels, float(found["value"])))
        about = [line.split(" ", 3) for line in lines if line.startswith("# ")]
        self.kinds = {name: text for _, what, name, text in about if what == "TYPE"}
        self.helps = {name: text for _, what, name, text in about if what == "HELP"}

    def sum(self, name: str, **labels: str) -> float:
        """Add up samples, as ``sum(name{labels})`` does in PromQL."""
        return sum(
            value
            for found, have, value in self.samples
            if found == name and have.items() >= labels.items()
        )

    def series(self, name: str) -> Counter[tuple[str, ...]]:
        """The label names of each series of a metric."""
        return Counter(tuple(sorted(have)) for found, have, _ in self.samples if found == name)


class Server:
    """A server that answers.

    Attributes:
        url: its address.
        model: the name to ask for.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        """The token ids after a prompt."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found

    def page(self) -> Page:
        """The metrics now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=300) as answer:
            return Page(answer.read().decode())

    def page_when(self, ready: Callable[[Page], bool], seconds: float = 120) -> Page:
        """The first page on which something holds; the last one where it never does."""
        until = time.monotonic() + seconds
        while not ready(page := self.page()) and time.monotonic() < until:
            time.sleep(0.5)
        return page


def requests(
    server: Server, count: int = 4, tokens: int = 48, shortest: int = 20
) -> list[list[int]]:
    """Requests of different lengths that repeat themselves, so that n-grams are found."""
    prompts = [
        [(7 * start + i % 5) % VOCAB for i in range(shortest + start)] for start in range(count)
    ]
    return [server.complete(prompt, tokens) for prompt in prompts]


def _start(words: list[str], folder: Path, environment: dict[str, str], log: IO[str]) -> Any:
    """Start ``vllm`` with these words as a user does."""
    return subprocess.Popen(
        [sys.executable, __file__, *words],
        cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _fork(words: list[str], folder: Path, environment: dict[str, str], log: IO[str]) -> Any:
    """Start it in a fork of this process, which has imported vLLM, and its API servers as well."""
    import forked_commands

    def begin() -> None:
        from prometheus_client import values
        from vllm.v1 import utils

        context = multiprocessing.get_context("fork")
        utils.multiprocessing = SimpleNamespace(
            **vars(multiprocessing) | {"get_context": lambda _: context}
        )
        os.environ.update(environment | {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")})
        (folder / "metrics").mkdir()
        values.ValueClass = values.get_value_class()  # chosen by the variable at the import
        sys.argv = ["vllm", *words]
        main()

    return forked_commands.Child(begin, log, log)


@contextmanager
def serving(
    folder: Path,
    kvtxn: dict[str, Any] | None,
    *options: str,
    model: str | None = None,
    always: tuple[str, ...] = OPTIONS,
    start: Callable[..., Any] = _start,
) -> Iterator[Server]:
    """A server on a free port; everything of it is gone afterwards.

    Args:
        folder: for its files, and its log.
        kvtxn: the settings; None leaves it out.
        options: of the command.
        model: what to serve; the tiny one if nothing is said.
        always: options that come first.
        start: starts the process, as ``_start`` does.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = model or write("llama", folder)
    asked = [] if kvtxn is None else ["--additional-config", json.dumps({"kvtxn": kvtxn})]
    # Where other engines run beside the server, it takes their facts of models over.
    environment = {"VLLM_CACHE_ROOT": str(folder / "cache")} | os.environ | ENVIRONMENT
    words = ["serve", model, *always, *asked, *options, "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = start(words, folder, environment | {"PYTHONPATH": python_path()}, log)
    try:
        server = Server(f"http://127.0.0.1:{port}", model)
        _wait_until_up(server, process, folder / "log")
        yield server
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.kill(process.pid, signal.SIGTERM)
            process.wait(30)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)  # its children notice
        process.wait()


def serve_one(folder: Path) -> dict[str, Any]:
    """Serve from one process: the pages before and after some requests."""
    return _served(folder, "undo", 1)


def serve_many(folder: Path) -> dict[str, Any]:
    """Serve with two API servers (Prometheus in several processes) and two ranks, in forks."""
    options = ("--api-server-count", "2", "--tensor-parallel-size", "2")
    return _served(folder, "deferred", 2, *options, start=_fork)


def _served(folder: Path, policy: str, ranks: int, *options: str, **how: Any) -> dict[str, Any]:
    with serving(folder, {"policy": policy}, *options, **how) as server:
        first = server.page_when(lambda page: page.sum("kvtxn_active") == ranks)
        tokens = requests(server)
        drafted = server.page_when(lambda page: page.sum(DRAFTED) > 0).sum(DRAFTED)
        last = server.page_when(lambda page: page.sum("kvtxn_rows_staged_total") >= drafted)
        doctor = commands.run(folder, "doctor", server.url)
    pages = {"first": first.text, "last": last.text}
    pages["model"] = server.model
    judged = {"code": doctor.code, "said": doctor.out + doctor.err}
    return pages | {"policy": policy, "ranks": ranks, "tokens": tokens, "doctor": judged}


def _wait_until_up(server: Server, process: Any, log: Path) -> None:
    until = time.monotonic() + 1200
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start ({process.poll()}):\n{log.read_text()[-6000:]}")


def _end_with_whoever_started_this() -> None:
    os.read(0, 1)  # returns when the other side is gone
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """``vllm`` with these arguments."""
    look_up = metadata.version
    with suppress(metadata.PackageNotFoundError):
        release = f"{look_up('vllm-cpu')}+cpu"
        metadata.version = lambda name: release if name == "vllm" else look_up(name)
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    Thread(target=_end_with_whoever_started_this, daemon=True).start()
    main()
