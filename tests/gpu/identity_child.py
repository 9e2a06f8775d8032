"""The process of one engine of ``gpu_identities``: rows leave, come back, and come back wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import gpu_audit_child
import identity_faults
import identity_pair
import long_life
from first_configs import take_first_configs
from gpu_models import write
from identity_jobs import BLOCK, OPTIONS, ROWS
from identity_oracle import Computed
from kvtxn.integrations.vllm_plugin import new_weights, snapshots
from planting import Rig, texts

#: Seconds until LMCache's server answers, and until an earlier engine has filled a store.
_PATIENCE: Final = 150.0
#: Tokens of each answer.
_OUTPUTS: Final = 4

#: Engines live until their process ends, with the report written: an engine's own end waits for
#: a server, which may be gone.
_ENGINES: Final[list[Any]] = []

#: The end of the names of weights that change.
_CHANGED: Final = "input_layernorm.weight"

#: Asks for prompts whose rows the connector has.
Ask = Callable[[list[list[int]]], list[list[int]]]


@attrs.frozen
class Brought:
    """Counts of rows that a connector has brought, and of rows whose bytes are unknown."""

    rows: int
    unverified: float


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the engine of a job; returns its report, kept in ``partial.json`` on the way."""
    begin, port = time.monotonic(), _free_port()
    (folder / "store").mkdir(exist_ok=True)
    where = {"{store}": str(folder / "store"), "{port}": str(port)}
    job = json.loads(_filled(json.dumps(job), where))
    os.environ.update(job.get("environment", {}))
    with ExitStack() as stack:
        if job.get("server"):
            stack.callback(_serve(port, job["server"], folder).kill)
        ask = pair = None
        if job.get("second"):
            _fill(job, folder)
        elif job.get("pair"):
            pair = stack.enter_context(identity_pair.another(job, folder, build))
        llm = build(job, folder, **job.get("then", {}))
        if pair is not None:
            ask = pair.asks(llm)
        report: dict[str, Any] = {}

        def keep() -> None:
            report["seconds"] = round(time.monotonic() - begin)
            (folder / "partial.json").write_text(json.dumps(report))

        run(llm, job, folder, ask, report, keep)
        keep()
    return report


def _filled(text: str, where: dict[str, str]) -> str:
    for name, value in where.items():
        text = text.replace(name, value)
    return text


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _serve(port: int, modes: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start LMCache's server, and wait until it listens."""
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--chunk-size", os.environ["LMCACHE_CHUNK_SIZE"]]
    command += ["--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
    command += ["--supported-transfer-mode", *modes, "--disable-metrics"]  # all at one port
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    begin = time.monotonic()
    while time.monotonic() < begin + _PATIENCE:
        if server.poll() is not None:
            break
        with socket.socket() as there:
            if there.connect_ex(("127.0.0.1", port)) == 0:
                return server
        time.sleep(0.2)
    server.kill()
    said = (folder / "server.log").read_text()[-1500:]
    raise RuntimeError(f"LMCache's server does not answer: {said}")


def build(job: dict[str, Any], folder: Path, **more: Any) -> Any:
    """Build the engine of a job; all engines of a job share a store of identities."""
    from vllm import LLM

    take_first_configs()
    asked = {"audit": "bytes", "stale": "alarm", **job.get("asked", {})}
    asked["audit_store"] = f"sqlite:///{folder / 'identities.db'}"
    llm = LLM(
        model=write(job["model"], folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        disable_log_stats=False,
        gpu_memory_utilization=0.03,
        kv_cache_memory_bytes=64 << 20,
        attention_config={"backend": "FLASH_ATTN"},
        kv_transfer_config=job["transfer"],
        additional_config={"kvtxn": asked},
        worker_extension_cls="gpu_audit_child.AuditWorker",
        **{**OPTIONS, **job.get("options", {}), **more},
    )
    _ENGINES.append(llm)
    return llm


def _fill(job: dict[str, Any], folder: Path) -> None:
    """Let an engine in a process of its own store the prompts' rows, and end without a goodbye."""
    child = multiprocessing.get_context("fork").Process(target=_first, args=(job, folder))
    child.start()
    child.join(2 * _PATIENCE)
    if child.exitcode:
        child.kill()
        raise RuntimeError(f"the first engine's process ended with {child.exitcode}")


def _first(job: dict[str, Any], folder: Path) -> None:
    try:
        llm = build(job, folder)
        rig = Rig(llm)
        llm.collective_rpc("audit_switch", args=(True,))
        computed = Computed(rig, ROWS)
        with computed.watching():
            rig.run([*_prompts(job), *_later()], _OUTPUTS)
        computed.save(folder / "computed.pt")
        _stored(llm, rig)
        assert rig.watch.transfers._shared._thread.wait(60)
        assert rig.found() == [], rig.found()[:3]
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _prompts(job: dict[str, Any]) -> list[list[int]]:
    """Distinct prompts of some blocks each; none begins as another one does."""
    number = job.get("sessions", 3)
    return [texts(70 + index, 1, ROWS + 1)[0] for index in range(number)]


def _later() -> list[list[int]]:
    """Prompts whose rows come back once the weights have changed."""
    return [texts(170 + index, 1, ROWS + 1)[0] for index in range(2)]


def _stored(llm: Any, rig: Rig) -> None:
    """Let other requests run until the connector has stored what it stores, and empty the cache."""
    for number in range(4):
        rig.run(texts(40 + number, 1, 20), 6)
        time.sleep(0.3)
    gpu_audit_child.empty(llm)


# -- what is looked at -----------------------------------------------------------------------


def run(
    llm: Any,
    job: dict[str, Any],
    folder: Path,
    ask: Ask | None,
    report: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Let rows come back: right, wrong in each way, and of earlier weights."""
    rig, prompts = Rig(llm), _prompts(job)
    llm.collective_rpc("audit_switch", args=(True,))
    if job.get("long"):
        report["long"] = long_life.live(llm, **job["long"])
        return
    computed = Computed(rig, ROWS, folder / "computed.pt" if job.get("second") else None)
    if ask is None:

        def ask(wanted: list[list[int]]) -> list[list[int]]:
            gpu_audit_child.empty(llm)
            return rig.run(wanted, _OUTPUTS)

        if not job.get("second"):
            with computed.watching():
                rig.run([*prompts, *_later()], _OUTPUTS)
            _stored(llm, rig)
    # Of a prompt that another engine hands over the last block is in part: nobody knows it.
    report["partial"] = len(prompts) * 32 if job.get("pair") else 0
    with computed.watching() as came:
        said = _look(llm, rig, ask, prompts, report.setdefault("healthy", {}))
    report["healthy"] |= attrs.asdict(came)
    keep()
    faults: dict[str, Any] = report.setdefault("found", {})
    for name in job["faults"]:
        faults[name] = _faulted(llm, rig, ask, prompts, name)
        keep()
    if job["faults"]:
        with computed.watching() as came:
            _look(llm, rig, ask, prompts, report.setdefault("again", {}))
        report["again"] |= attrs.asdict(came)
    if not job.get("pair"):
        with _other_weights(llm, rig):
            _look(llm, rig, ask, _later(), report.setdefault("stale", {}))
        keep()
        with _other_weights(llm, rig):
            gpu_audit_child.empty(llm)
            found = report.setdefault("reset", {})
            found["said"] = llm.reset_prefix_cache(reset_connector=True)
            _look(llm, rig, ask, prompts, found)
        keep()
    report["same_texts"] = _unwatched(llm, rig, ask, prompts) == said
    keep()
    if job.get("files") and job.get("second"):
        llm.collective_rpc("audit_switch", args=(True,))
        llm.reset_prefix_cache(reset_connector=True)
        faults["swapped_files"] = _with_files(llm, rig, ask, prompts, folder / "store")
        keep()


def _unwatched(llm: Any, rig: Rig, ask: Ask, prompts: list[list[int]]) -> list[list[int]]:
    """Return what the engine says without the audit, of rows that come back."""
    llm.collective_rpc("audit_switch", args=(False,))
    if llm.reset_prefix_cache(reset_connector=True):  # or else rows of other weights are there
        ask(prompts)
        _stored(llm, rig)
    return ask(prompts)


def _counted(llm: Any) -> Brought:
    facts, counts = llm.collective_rpc("audit_facts")[-1], snapshots(llm)[-1]
    return Brought(facts["brought"], counts.get("kvtxn_audit_rows_unverified_total", 0.0))


def _look(
    llm: Any, rig: Rig, ask: Ask, prompts: list[list[int]], found: dict[str, Any]
) -> list[list[int]]:
    """Ask for prompts; puts what was found and counted into ``found``."""
    before, old = _counted(llm), len(rig.found())
    said = ask(prompts)
    violations = rig.found()[old:]
    after, counts = _counted(llm), snapshots(llm)[-1]
    found |= {
        "active": bool(counts.get("kvtxn_audit_active")),
        "brought": after.rows - before.rows,
        "rows": int(counts.get("kvtxn_audit_rows_checked_total", 0)),
        "unverified": after.unverified - before.unverified,
        "told": len({(each["request"], each["position"] // BLOCK) for each in violations}),
        "violations": violations[:6],
    }
    return said


def _faulted(llm: Any, rig: Rig, ask: Ask, prompts: list[list[int]], name: str) -> dict[str, Any]:
    """Let rows come back with a fault; returns where it struck, and what was found of it."""
    found: dict[str, Any] = {}
    rig.struck = None
    try:
        with identity_faults.brought(rig, identity_faults.BROUGHT[name]()):
            _look(llm, rig, ask, prompts, found)
    except Exception as error:
        traceback.print_exc()
        return {"error": repr(error)}
    return found | {"struck": None if rig.struck is None else attrs.asdict(rig.struck)}


def _with_files(
    llm: Any, rig: Rig, ask: Ask, prompts: list[list[int]], store: Path
) -> dict[str, Any]:
    """Let files change places; whose rows come then is told by the findings alone."""
    files, found = identity_faults.swap_files(store), dict[str, Any]()
    _look(llm, rig, ask, prompts, found)
    first = min((each for each in found["violations"]), key=lambda v: v["position"], default=None)
    struck = None if not files else {"request": first and first["request"], "position": 0}
    if first is not None:
        struck = {"request": first["request"], "position": first["position"]}
    return found | {"files": len(files), "struck": struck}


@contextmanager
def _other_weights(llm: Any, rig: Rig) -> Iterator[None]:
    """Change the weights in place, and tell of it, and put the old ones back."""
    named = dict(rig.runner.get_model().named_parameters())
    kept = {name: each.data.clone() for name, each in named.items() if name.endswith(_CHANGED)}
    for name in kept:
        named[name].data.mul_(1.5)
    new_weights(llm)
    try:
        yield
    finally:
        for name, before in kept.items():
            named[name].data.copy_(before)
        new_weights(llm)
