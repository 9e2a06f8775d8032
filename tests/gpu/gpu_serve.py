"""Starts a real ``vllm serve`` on GPUs and reads its ``/metrics`` page after some requests.

python gpu_serve.py RECORD.json [SERVER ...]   needs a GPU; writes after each server

Without names all servers run that the machine has GPUs for. Exit code: 1 if one did not serve.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
for folder in (".", "..", "../vllm_plugin/grid", "../vllm_plugin/serve"):
    sys.path.insert(0, str(HERE / folder))

import gpu_models  # noqa: E402
from api_server import DRAFTED, OPTIONS, Page, Server, requests, serving  # noqa: E402
from connected_jobs import OFFLOAD, transfer  # noqa: E402

#: The CPU's, but for what is compiled and captured here.
ALWAYS = (
    *(word for word in OPTIONS if word not in ("--enforce-eager", "--dtype", "float32")),
    *("--dtype", "bfloat16", "--gpu-memory-utilization", "0.03"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
STEPS = "vllm:spec_decode_num_drafts_total"
LOADED = "vllm:external_prefix_cache_hits_total"
THEIRS = (DRAFTED, ACCEPTED, STEPS, "vllm:num_requests_running", "vllm:generation_tokens_total")

#: By name: the policy, engines, ranks of each, and options.
SERVERS: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    "one": ("undo", 1, 1, ()),
    "many": ("deferred", 1, 1, ("--api-server-count", "2")),
    "tp2": (
        *("deferred", 1, 2),
        ("--tensor-parallel-size", "2", "--disable-custom-all-reduce"),
    ),
    "dp2": ("undo", 2, 1, ("--data-parallel-size", "2")),
    "connected": (
        *("auto", 1, 1),
        (
            *("--api-server-count", "2"),
            *("--kv-transfer-config", json.dumps(transfer([OFFLOAD], Path()))),
        ),
    ),
}
#: Requests that push the rows of earlier ones out of the cache, which has room for five of them,
#: and tokens of their prompts: a connector brings whole blocks, which are of 32 tokens.
MANY, LONG = 24, 100


def gpus(name: str) -> int:
    """Count the GPUs that a server needs."""
    _, engines, ranks, _ = SERVERS[name]
    return engines * ranks


def serve(name: str, folder: Path) -> dict[str, Any]:
    """Start a server, send it requests, and read its page."""
    policy, engines, ranks, options = SERVERS[name]
    model = gpu_models.write("llama", folder)
    with serving(folder, {"policy": policy}, *options, model=model, always=ALWAYS) as server:
        return {
            "policy": policy,
            "engines": engines,
            "ranks": ranks,
            "options": " ".join(options),
            **_asked(server, engines * ranks, "--kv-transfer-config" in options),
        }


def _asked(server: Server, active: int, connected: bool) -> dict[str, Any]:
    """Read the page once it has caught up with these requests."""
    server.page_when(lambda page: page.sum("kvtxn_active") == active)
    if connected:  # the first ones' rows come back
        tokens = requests(server, count=MANY, shortest=LONG)
        tokens += requests(server, count=8, shortest=LONG)
    else:
        tokens = requests(server, count=8)
    drafted = server.page_when(lambda page: page.sum(DRAFTED) > 0).sum(DRAFTED)
    page = server.page_when(lambda page: page.sum("kvtxn_rows_staged_total") >= drafted)
    return {"tokens": sum(map(len, tokens)), **numbers(page), "curl": curled(server)}


def curled(server: Server) -> dict[str, Any] | None:
    """Ask the server by curl as well: a completion, and the page; None without curl."""
    curl = shutil.which("curl")
    if curl is None:
        return None

    def call(path: str, *options: str) -> str:
        command = [curl, "--silent", "--show-error", "--fail", f"{server.url}/{path}", *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    body = {"model": server.model, "prompt": [5, 6, 7] * 8, "max_tokens": 8, "ignore_eos": True}
    body |= {"detokenize": False, "return_token_ids": True}
    said = call(
        "v1/completions", "--header", "content-type: application/json", "--data", json.dumps(body)
    )
    lines = call("metrics").splitlines()
    return {
        "tokens": len(json.loads(said)["choices"][0]["token_ids"]),
        "page": [line for line in lines if line.startswith("kvtxn_rows_")],
    }


def numbers(page: Page) -> dict[str, Any]:
    """Pick the numbers that are compared."""
    own = {
        kind: page.sum(f"kvtxn_rows_{kind}_total") for kind in ("staged", "committed", "rejected")
    }
    return own | {
        "drafted": page.sum(DRAFTED),
        "accepted": page.sum(ACCEPTED),
        "active": page.sum("kvtxn_active"),
        "windows": page.sum("kvtxn_windows_total", outcome="committed"),
        "steps": page.sum(STEPS),
        "bypassed": page.sum("kvtxn_bypassed_windows_total"),
        "fallbacks": page.sum("kvtxn_fallbacks_total"),
        "loaded": page.sum(LOADED),
        "by_engine": [
            page.sum("kvtxn_rows_staged_total", engine=str(number)) for number in range(2)
        ],
        "lost": [name for name in THEIRS if not page.series(name)],
    }


def main(path: Path, names: list[str], count: int) -> int:
    """Run some servers at once, or those for so many GPUs; returns 1 if one did not serve."""
    names = names or [name for name in SERVERS if gpus(name) <= count]
    found: dict[str, Any] = {}
    writing = threading.Lock()
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def one(name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = serve(name, Path(folder))
            except Exception:
                log = Path(folder, "log")
                last = log.read_text(errors="replace")[-4000:] if log.exists() else ""
                found[name] = {"error": traceback.format_exc()[-2000:], "log": last}
        with writing:  # a thread that was overtaken would write what it knew before
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(name, found[name], flush=True)

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(one, names))
    return int(any("error" in each for each in found.values()))


if __name__ == "__main__":
    import torch

    sys.exit(main(Path(sys.argv[1]), sys.argv[2:], torch.cuda.device_count()))
