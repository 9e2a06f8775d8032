"""The parts of the evidence: commands of minutes, and what of their results is kept.

In a command ``{out}`` is the part's folder, ``{here}`` that of these scripts. Seconds are those of
an H200 and its sixteen cores; engines that share a GPU are bound by the processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

#: Parts that share a GPU at most. The processor is what they wait for: more gain nothing.
PLACES: Final = 2


@attrs.frozen
class Part:
    """A part of the evidence.

    Attributes:
        name: also of its folder; parts of one kind begin alike.
        command: what runs.
        seconds: how long it takes, roughly and rather more.
        kept: pairs of what takes a result over (see ``evidence_record``), and the result's path in
            the part's folder.
        gpus: how many it needs; 0: a machine without any.
        engine: ``"vllm"``, ``"vllm-0.32.0"``, ``"sglang"``, or nothing.
        shares: it measures no times and takes little memory, so another such part may run on its
            GPU at the same time.
        environment: more variables.
    """

    name: str
    command: Sequence[str]
    seconds: int
    kept: Sequence[tuple[str, str]] = ()
    gpus: int = 1
    engine: str = "vllm"
    shares: bool = False
    environment: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def lanes(self) -> int:
        """How many of a machine's lanes it takes, one for each GPU."""
        return max(1, self.gpus)

    @property
    def places(self) -> int:
        """How many of a GPU's places it takes, of ``PLACES``."""
        return 1 if self.shares else PLACES


_PYTHON: Final = ("{python}",)
_KVTXN: Final = (*_PYTHON, "-m", "kvtxn")
#: Engines that are timed start in less than a minute with these, and decode in whole graphs.
_GRAPHS: Final[dict[str, Any]] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def _script(name: str, *words: str) -> Sequence[str]:
    return (*_PYTHON, f"{{here}}/{name}.py", *words)


def slices(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """Deal names out to ``count`` lists, one after the other, so that neighbours part."""
    ordered = list(names)
    yield from (ordered[first::count] for first in range(count))


# -- every executor ------------------------------------------------------------------------------


def _kit() -> Iterator[Part]:
    from seen_kit import KITS, OTHERS

    for number, (paths, left_out) in enumerate(((KITS, ()), (OTHERS, KITS))):
        words = [f"{{here}}/../{path}" for path in paths]
        words += [f"--ignore={{here}}/../{path}" for path in left_out]
        words += ["-q", "--numprocesses", "12", "--junitxml", "{out}/kit.xml"]
        yield Part(
            f"kit-{number}",
            (*_PYTHON, "-m", "pytest", *words),
            seconds=360,
            kept=[("kit", ".")],
            engine="",
            shares=True,
        )


# -- engines beside stock: rows, states, audits ------------------------------------------------


def _grid() -> Iterator[Part]:
    from gpu_jobs import JOBS

    single = [name for name, job in JOBS.items() if job.get("gpus", 1) == 1]
    several = [name for name in JOBS if name not in single]
    found = {f"grid-{number}": names for number, names in enumerate(slices(single, 2))}
    for part, names in {**found, "grid-several": several, "core-0.32.0": _CORE}.items():
        asked = " or ".join(f"[{name}-" for name in names)
        words = ("-m", "pytest", "{here}/test_gpu_grid.py", "-q", "-s", "-k", asked)
        yield Part(
            part,
            (*_PYTHON, *words, "--gpu-jobs", "16", "--gpu-record", "{out}/grid.json"),
            seconds=320,
            kept=[("grid", "grid.json")],
            gpus=2 if names is several else 1,
            engine="vllm-0.32.0" if names is _CORE else "vllm",
            shares=True,
        )


#: The core of the grid: both model runners, EAGLE, MTP, latents, windows.
_CORE: Final = ("flash", "eagle", "gemma3", "triton_mla", "v1_flash", "mtp")


def _states() -> Iterator[Part]:
    from state_models import KINDS

    for number, names in enumerate(slices(KINDS, 4)):
        only = [f"{name}." for name in names]
        yield Part(
            f"states-{number}",
            _script("try_states", "--out", "{out}", "--jobs", "16", "--only", *only),
            seconds=250,
            kept=[("states", "reports.json"), ("fast", "reports.json")],
            shares=True,
        )


def _audits() -> Iterator[Part]:
    from audit_jobs import ENGINES

    several = [name for name, job in ENGINES.items() if job.get("gpus", 1) > 1]
    alone = [name for name, job in ENGINES.items() if job.get("alone")]
    others = [name for name in ENGINES if name not in (*several, *alone)]
    found = {f"audit-{number}": names for number, names in enumerate(slices(others, 3))}
    for part, names in {**found, "audit-alone": alone, "audit-several": several}.items():
        yield Part(
            part,
            _script("gpu_audit", "--out", "{out}", *names),
            seconds=300 if part in found else 150,
            kept=[("audit", ".")],
            gpus=2 if names is several else 1,
            shares=part in found,
        )


_CONNECTORS: Final = (
    Part(
        "connectors",
        (
            *(*_PYTHON, "-m", "pytest", "{here}", "-q", "-s", "-k", "connectors"),
            *("--gpu-connected", "{out}/reports.json"),
        ),
        seconds=300,
        kept=[("connectors", "reports.json")],
        shares=True,
    ),
    Part(
        "identities",
        _script("gpu_identities", "--out", "{out}"),
        seconds=420,
        kept=[("identities", ".")],
        shares=True,
    ),
)
_RANKS: Final = (
    Part(
        "stages",
        _script("try_stages", "--out", "{out}", "--several"),
        seconds=330,
        kept=[("stages", ".")],
        gpus=2,
    ),
    Part("ranks", _script("try_ranks", "--out", "{out}"), seconds=330, gpus=2),
    Part(
        "servers",
        _script("gpu_serve", "{out}/servers.json"),
        seconds=240,
        kept=[("servers", "servers.json")],
        shares=True,
    ),
)

# -- kernels and captured launches ---------------------------------------------------------------


def _sanitizer() -> Iterator[Part]:
    import sanitize

    for number, families in enumerate(slices(sanitize.FAMILIES, 3)):
        words = ("--tools", "memcheck", "racecheck", "--families", *families)
        yield Part(
            f"sanitizer-{number}",
            _script("sanitize", *words, "--output", "{out}/h200-sanitizer.json"),
            seconds=300,
            kept=[("bench", "h200-sanitizer.json")],
            engine="",
            shares=True,
        )


def _bench(what: str, name: str, seconds: int, *words: str, engine: str = "") -> Part:
    """Return the part of a bench that writes its result by ``--save``."""
    return Part(
        f"bench-{name}",
        (*_KVTXN, "bench", what, *words, "--save", f"{{out}}/h200-{name}"),
        seconds,
        kept=[("bench", f"h200-{name}.json")],
        engine=engine,
    )


_KERNELS: Final = (
    Part("graph-bounds", _script("graph_bounds"), seconds=40, engine=""),
    _bench("kernels", "kernels", 180, engine="vllm"),
    _bench(
        *("kernels", "models", 150, "--models", "llama3-70b-tp8", "qwen3-32b-tp2", "llama3-1b"),
        *("deepseek-v3-mla", "--requests", "1", "16", "64", "128", "--accepted", "0.3", "1"),
        engine="vllm",
    ),
    _bench("attention", "attention", 120, engine="vllm"),
    _bench("steps", "steps", 30),
    _bench("backends", "backends", 240, "--rounds", "21", engine="vllm"),
    _bench(
        *("backends", "backends-blocks", 150, "--backends", "FLASH_ATTN_MLA", "--blocks", "32"),
        *("64", "128", "--requests", "1", "8", "64", "--context", "1024", "8192", "--rounds", "15"),
        engine="vllm",
    ),
    *(
        _bench(
            *("recurrent", name, 75 * len(dtypes), "--models", model, "--dtypes", *dtypes),
            *("--drafts", "4"),
            engine="vllm",
        )
        for name, model, dtypes in (
            ("recurrent", "qwen3.5-9b", ["float32"]),
            ("recurrent-bfloat16", "qwen3.5-9b", ["bfloat16"]),
            ("recurrent-mamba2", "nemotron-h-8b", ["float32", "bfloat16"]),
        )
    ),
    _bench(
        *("recurrent", "recurrent-k7", 120, "--models", "qwen3.5-9b", "--dtypes", "float32"),
        *("--requests", "32", "128", "--drafts", "7"),
        engine="vllm",
    ),
    *(
        _bench(
            *("host", f"host-{backend}", 20, "--policies", "deferred", "--backend", backend),
            *("--requests", "1", "16"),
        )
        for backend in ("triton", "cudagraph")
    ),
)

# -- engines by turns, and for long --------------------------------------------------------------


def _turns(name: str, seconds: int, *words: str, sizes: Sequence[int] = (), **more: Any) -> Part:
    """Return the part of a ``kvtxn bench vllm`` with captured graphs for decoding alone.

    Args:
        name: of the part; a number at its end is not in the result's.
        seconds: as of a part.
        words: of the command.
        sizes: of the graphs, in rows; vLLM's own if there are none.
        more: arguments of the engines.
    """
    graphs = _GRAPHS | ({"cudagraph_capture_sizes": sizes} if sizes else {})
    result = f"h200-vllm-{name.rstrip('-0123456789') if name[-2] == '-' else name}"
    fixed = ("--folder", "{out}", "--output", result, "--timeout", "300")
    own = json.dumps({"compilation_config": graphs, **more}).replace("{", "{{").replace("}", "}}")
    return Part(
        f"turns-{name}",
        (*_KVTXN, "bench", "vllm", *words, *fixed, "--engine-args", own),
        seconds,
        kept=[("bench", f"{result}.json")],
    )


_LLAMA: Final = ("--model", "llama3-8b", "--drafter", "eagle", "--tokens", "128", "--clock")
_HYBRID: Final = ("--drafts", "4", "--rounds", "5", "--clock")
_EAGLE_CELLS: Final = ("1024:64:0.6", "1024:32:0.3", "1024:8:0.6", "1024:1:0.3", "8192:8:0.6")

#: Brings blocks back from the host, so that the ledger keeps its table of identities.
_CONNECTOR: Final = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 4 << 30},
}

_TURNS: Final = (
    *(
        _turns(
            *(f"llama3-8b-eagle-joint-{number}", 420, *_LLAMA, "--policies", "stock", "deferred"),
            *("undo", "--cells", *(f"short:{cell}" for cell in cells)),
            *("--rounds", "11", "--first-token-rounds", "8"),
        )
        for number, cells in enumerate((_EAGLE_CELLS[:3], _EAGLE_CELLS[3:]))
    ),
    *(
        _turns(
            *(f"llama3-8b-audit-{number}", 420, *_LLAMA, "--policies", "stock", "ledger"),
            *("bytes", "--cells", *(f"short:{cell}" for cell in cells)),
            *("--rounds", "16", "--first-token-rounds", "8"),
        )
        for number, cells in enumerate(
            (("1024:8:0.6", "1024:64:0.6"), ("8192:8:0.6", "1024:1:0.6"))
        )
    ),
    _turns(
        *("llama3-8b-audit-connector", 420, *_LLAMA, "--policies", "stock", "ledger", "bytes"),
        *("--cells", "short:1024:8:0.6", "short:1024:64:0.6", "--rounds", "16"),
        kv_transfer_config=_CONNECTOR,
    ),
    _turns(
        *("host-bound-ngram", 330, "--model", "host-bound", "--drafter", "ngram", "--policies"),
        *("stock", "deferred", "undo", "--requests", "1", "8", "32", "64", "--context", "1024"),
        *("--tokens", "256", "--rounds", "11", "--acceptance", "0.3", "--clock"),
    ),
    _turns(
        *("qwen3.5-9b", 540, "--model", "qwen3.5-9b", "--policies", "stock", "exact", "fast"),
        *(*_HYBRID, "--tokens", "96", "--cells", "short:64:1:0.5", "short:64:32:0.5"),
        *("short:64:128:0.5", "short:64:8:0.5"),
        sizes=[5, 40, 160, 640],
    ),
    _turns(
        *("qwen3.5-9b-equal-memory", 330, "--model", "qwen3.5-9b", "--policies", "stock", "fast"),
        *("exact", *_HYBRID, "--equal-cache", "32", "--cells", "short:64:128:0.5"),
        *("--tokens", "96"),
        sizes=[5, 40, 160, 640],
    ),
    _turns(
        *("nemotron-h-8b", 420, "--model", "nemotron-h-8b", "--policies", "stock", "exact"),
        *("fast", *_HYBRID, "--tokens", "64", "--cells", "short:64:32:0.5", "short:64:8:0.5"),
        *("short:64:1:0.5", "short:64:64:0.5"),
        sizes=[5, 40, 160, 320],
    ),
    _bench("capacity", "capacity", 200, "--policies", "stock", "exact", engine="vllm"),
    *(
        Part(
            f"soak-{number}",
            (
                *(*_KVTXN, "bench", "soak", "--seconds", "310", "--seed", str(number)),
                *("--save", "{out}/h200-soak-ngram"),
            ),
            seconds=420,
            kept=[("bench", "h200-soak-ngram.json")],
        )
        for number in range(2)
    ),
)

# -- SGLang ----------------------------------------------------------------------------------------


def _sglang() -> Iterator[Part]:
    from sglang_models import ENGINES

    planted = [name for name, (_, _, more) in ENGINES.items() if "FAULTS" in more]
    sound = [name for name in ENGINES if name not in planted]
    for number, names in enumerate([*slices(sound, 2), planted]):
        yield Part(
            f"sglang-engines-{number}",
            _script("sglang_engines", "{out}", *names),
            seconds=560,
            kept=[("sglang", "engines.json")],
            engine="sglang",
            shares=True,
        )
    for name, seconds, words in (
        ("canary", 560, ()),
        ("known", 500, ()),
        ("cost", 420, ("--rounds", "12")),
        ("rings", 120, ("--seconds", "75")),
        ("mamba", 60, ()),
    ):
        yield Part(
            f"sglang-{name}",
            _script(f"sglang_{name}", "{out}", *words),
            seconds,
            kept=[(f"sglang_{name}", f"{name}.json")],
            engine="sglang",
            shares=name in ("canary", "known"),
        )
    yield Part(
        "sglang-audit",
        _script("sglang_audit", "{out}"),
        seconds=560,
        engine="sglang",
        shares=True,
    )


# -- a machine without a GPU -----------------------------------------------------------------------


def _cpu(name: str, seconds: int, *words: str) -> Part:
    """Return a part that runs without a GPU."""
    return Part(
        name,
        (*_KVTXN, "bench", *words),
        seconds,
        kept=[("bench", f"{name}.json")],
        gpus=0,
    )


_CPU: Final = (
    _cpu("host-cpu", 60, "host", "--windows", "60", "--save", "{out}/host-cpu"),
    _cpu(
        "capacity-scheduler",
        120,
        "capacity",
        "--scheduler-alone",
        "--save",
        "{out}/capacity-scheduler",
    ),
    _cpu(
        *("cpu-vllm-smol", 1200, "vllm", "--model", "smol", "--policies", "stock", "undo"),
        *("deferred", "--scenario", "short", "--requests", "1", "--context", "256"),
        *("--tokens", "192", "--rounds", "31", "--folder", "{out}", "--output", "cpu-vllm-smol"),
    ),
    _cpu(
        *("cpu-vllm-ledger", 1200, "vllm", "--policies", "stock", "ledger", "--requests", "1"),
        *("4", "8", "--clock", "--rounds", "41", "--folder", "{out}"),
        *("--output", "cpu-vllm-ledger"),
    ),
    _cpu(
        *("cpu-soak", 1800, "soak", "--seconds", "780", "--pieces", "2", "--seed", "60"),
        *("--every", "20", "--save", "{out}/cpu-soak"),
    ),
)

#: All parts, in the order in which they run.
PARTS: Final[Sequence[Part]] = (
    *_RANKS,
    *_kit(),
    *_grid(),
    *_states(),
    *_audits(),
    *_CONNECTORS,
    *_sanitizer(),
    *_sglang(),
    *_KERNELS,
    *_TURNS,
    *_CPU,
)
