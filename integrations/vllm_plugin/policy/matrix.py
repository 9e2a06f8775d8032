"""The matrix of ``kvtxn doctor --matrix``: the policy for every kind of engine.

Nothing is decided here: every row asks ``policy.rules.decide``, as the plug-in does. ``SEEN`` has
the engines that the tests ran next to stock; a test compares it with the tests' own records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from .decision import Decision
from .engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA, OTHER_STATES, SHORT_CONV, EngineFacts
from .rules import decide
from .state_rules import TAKEN

Changes = Mapping[str, object]

PLAIN: Final = "Llama, Qwen3, Mistral, Gemma2, Gemma3"
LATENT: Final = "DeepSeek-V2, -V3 (latent)"
ALIBI: Final = "Bloom, MPT (ALiBi)"
SINKS: Final = "gpt-oss (sinks)"
STATES: Final = 'Qwen3-Next, Qwen3.5 with "recurrent": "exact"'
FAST: Final = 'Qwen3-Next, Qwen3.5 with "recurrent": "fast"'
CHOSEN: Final = 'Qwen3.5 with "recurrent": "auto" where its rule takes "exact"'
OLMO: Final = 'OLMo hybrid with "recurrent": "exact"'
MIXED: Final = 'Nemotron-H, Granite 4, Falcon-H1, Mamba-2 with "recurrent": "exact"'
MIXED_FAST: Final = 'Nemotron-H, Granite 4, Falcon-H1, Mamba-2 with "recurrent": "fast"'
CONVOLVED: Final = 'LFM2 with "recurrent": "exact"'
SHARED: Final = "Gemma3n (layers share rows)"

#: For each family of models, the facts in which it differs from a plain model.
FAMILIES: Final[Mapping[str, Changes]] = {
    PLAIN: {},
    LATENT: {"mla": True},
    ALIBI: {"alibi": True},
    SINKS: {"sinks": True},
    SHARED: {"kv_sharing": True},
    STATES: {"recurrent": GATED_DELTA, "states": "exact", "dtype": "bfloat16"},  # over fp8, too
    FAST: {"recurrent": GATED_DELTA, "states": "fast", "dtype": "bfloat16"},
    CHOSEN: {name: fact for name, fact in TAKEN.items() if name not in ("device", "runner")},
    OLMO: {"recurrent": OLMO_DELTA, "states": "exact"},
    MIXED: {"recurrent": MAMBA2, "states": "exact"},
    MIXED_FAST: {"recurrent": MAMBA2, "states": "fast"},
    CONVOLVED: {"recurrent": SHORT_CONV, "states": "exact"},
    "Jamba, Kimi (recurrent)": {"recurrent": OTHER_STATES},
}

FORMATS: Final[Mapping[str, Changes]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "scales per row (int8_per_token_head)": {"kv_cache_dtype": "int8_per_token_head"},
}

PARALLELISM: Final[Mapping[str, Changes]] = {
    "one worker": {},
    "tensor": {"tensor_parallel": 2},
    "pipeline (last stage)": {"pipeline_parallel": 2},
    "pipeline (other stages)": {"pipeline_parallel": 2, "last_stage": False},
    "context": {"context_parallel": 2},
}

#: Attention backends of a device: for rows of keys and values, and for latent rows.
BACKENDS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "cpu": (("CPU_ATTN",), ("CPU_MLA", "AMX_MLA")),
    "cuda": (
        ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
        ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA"),
    ),
}

ANY: Final = "any"
POLICIES: Final = ("deferred", "undo", "direct")

#: A family, an attention backend, a format, and the parallelism.
Kind = tuple[str, str, str, str]

_UNDO: Final = ("undo",)
_BOTH: Final = ("deferred", "undo")
_ONE: Final = "one worker"

#: By device, the releases with which the tests ran the engines of ``SEEN``, the newest first.
RELEASES: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("0.32.0",), "cuda": ("0.33.0", "0.32.0")}

#: By release, attention backends that the tests could not run with it.
WITHOUT: Final[Mapping[str, tuple[str, ...]]] = {"0.33.0": ("FLASHINFER", "FLASHMLA")}

#: By device and runner: kinds of engines that the tests ran next to stock, and under what.
SEEN: Final[Mapping[tuple[str, str], Mapping[Kind, tuple[str, ...]]]] = {
    ("cpu", "v1"): {
        (PLAIN, "CPU_ATTN", "float32", _ONE): _BOTH,
        (PLAIN, "CPU_ATTN", "float32", "tensor"): _BOTH,
        (PLAIN, "CPU_ATTN", "fp8", _ONE): _BOTH,
        (LATENT, "CPU_MLA", "float32", _ONE): _BOTH,
        (LATENT, "AMX_MLA", "bfloat16", _ONE): _BOTH,
        (PLAIN, "CPU_ATTN", "bfloat16", _ONE): _BOTH,
        (ALIBI, "CPU_ATTN", "float32", _ONE): _BOTH,
        (SINKS, "CPU_ATTN", "float32", _ONE): _BOTH,
        (SHARED, "CPU_ATTN", "float32", _ONE): _UNDO,
        (STATES, "CPU_ATTN", "bfloat16", _ONE): ("deferred",),
        (STATES, "CPU_ATTN", "bfloat16", "tensor"): ("deferred",),
        (MIXED, "CPU_ATTN", "bfloat16", _ONE): ("deferred",),
        (MIXED, "CPU_ATTN", "float32", _ONE): ("deferred",),
        (CONVOLVED, "CPU_ATTN", "bfloat16", _ONE): ("deferred",),
    },
    ("cuda", "v1"): {
        (PLAIN, "FLASH_ATTN", "bfloat16", _ONE): _BOTH,
        (PLAIN, "TRITON_ATTN", "bfloat16", _ONE): _BOTH,
        (PLAIN, "FLASHINFER", "bfloat16", _ONE): _UNDO,
        (LATENT, "TRITON_MLA", "bfloat16", _ONE): _UNDO,
        (STATES, "FLASH_ATTN", "bfloat16", _ONE): _BOTH,
        (FAST, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
        (OLMO, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
        (MIXED, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
        (MIXED_FAST, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
        (CONVOLVED, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
    },
    ("cuda", "v2"): {
        (PLAIN, "FLASH_ATTN", "bfloat16", _ONE): _BOTH,
        (PLAIN, "FLASH_ATTN", "bfloat16", "tensor"): _BOTH,
        (PLAIN, "FLASH_ATTN", "bfloat16", "pipeline (last stage)"): _BOTH,
        (PLAIN, "FLASH_ATTN", "bfloat16", "pipeline (other stages)"): _UNDO,
        (PLAIN, "TRITON_ATTN", "float32", "tensor"): _BOTH,
        (PLAIN, "TRITON_ATTN", "float32", "pipeline (last stage)"): ("deferred",),
        (PLAIN, "TRITON_ATTN", "float32", "pipeline (other stages)"): _UNDO,
        (LATENT, "TRITON_MLA", "bfloat16", "pipeline (last stage)"): ("deferred",),
        (LATENT, "TRITON_MLA", "bfloat16", "pipeline (other stages)"): _UNDO,
        (PLAIN, "FLASH_ATTN", "fp8", _ONE): _BOTH,
        (PLAIN, "TRITON_ATTN", "bfloat16", _ONE): _BOTH,
        (PLAIN, "TRITON_ATTN", "fp8", _ONE): _BOTH,
        (PLAIN, "FLASHINFER", "bfloat16", _ONE): _UNDO,
        (PLAIN, "FLASHINFER", "fp8", _ONE): _UNDO,
        (PLAIN, "FLEX_ATTENTION", "bfloat16", _ONE): _UNDO,
        (LATENT, "TRITON_MLA", "bfloat16", _ONE): _BOTH,
        (LATENT, "TRITON_MLA", "fp8", _ONE): _BOTH,
        (LATENT, "FLASHMLA", "bfloat16", _ONE): _UNDO,
        (LATENT, "FLASH_ATTN_MLA", "bfloat16", _ONE): _BOTH,
        (STATES, "FLASH_ATTN", "bfloat16", _ONE): _BOTH,
        (STATES, "FLASH_ATTN", "bfloat16", "tensor"): ("deferred",),
        (FAST, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
        (FAST, "FLASH_ATTN", "bfloat16", "tensor"): ("deferred",),
        (OLMO, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
        (CHOSEN, "FLASH_ATTN", "bfloat16", _ONE): _BOTH,  # it is "exact", which was seen
        (MIXED, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
        (MIXED_FAST, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
        (CONVOLVED, "FLASH_ATTN", "bfloat16", _ONE): ("deferred",),
    },
}

#: By device and runner, family and parallelism: the only engines that were seen, with the newest
#: of ``RELEASES`` unless another one is named.
ONLY: Final[Mapping[tuple[str, str], Mapping[tuple[str, str], str]]] = {
    ("cuda", "v1"): {
        (STATES, _ONE): "Qwen3.5",
        (FAST, _ONE): "Qwen3.5",
        (MIXED, _ONE): "Nemotron-H and Granite 4",
        (MIXED_FAST, _ONE): "Nemotron-H and Granite 4",
    },
    ("cuda", "v2"): {
        (STATES, _ONE): "Qwen3.5, and with vLLM 0.32.0 Qwen3-Next",
        (FAST, _ONE): "Qwen3.5, and with vLLM 0.32.0 Qwen3-Next",
        (STATES, "tensor"): "Qwen3.5 with enforce_eager=True, and with vLLM 0.32.0 Qwen3.5",
        (FAST, "tensor"): "Qwen3.5 with enforce_eager=True, and with vLLM 0.32.0 Qwen3.5",
        (CHOSEN, _ONE): 'Qwen3.5, with "exact"',
        (MIXED, _ONE): "Nemotron-H, Granite 4 and Falcon-H1",
        (MIXED_FAST, _ONE): "Nemotron-H, Granite 4 and Falcon-H1",
    },
}


#: How to read a row; printed above the matrix.
LEGEND: Final = (
    "a row: models on attention backends | dtypes, or formats of the KV cache | workers: what "
    "policy 'auto' becomes, and the others that can be had 'by name' (why)",
    f"'{ANY}': the column makes no difference. 'off': the engine runs stock, whatever policy is "
    "named. Policy 'direct', the control, is left out",
    "'seen running': tests compared such engines with stock. Where they ran only some of what the "
    "row says, those policies stand before these words, and the release and the models after them",
    "'not seen running': decided from vLLM's source, and run by no test",
)


@attrs.frozen
class Row:
    """A line of the matrix: all engines with the same outcome.

    Attributes:
        kinds: pairs of a family and an attention backend.
        formats: keys of ``FORMATS``.
        parallelism: keys of ``PARALLELISM``.
        auto: the decision for policy "auto".
        named: policies that the user may name.
        seen: those of ``named``, except "direct", that the tests ran.
        release: the release with which they ran them; empty if they ran none.
        only: the engines that they ran, where these do not stand for the whole family.
        facts: the facts of each engine that the row stands for.
    """

    kinds: tuple[tuple[str, str], ...]
    formats: tuple[str, ...]
    parallelism: tuple[str, ...]
    auto: Decision
    named: tuple[str, ...]
    seen: tuple[str, ...]
    release: str
    only: str
    facts: tuple[EngineFacts, ...] = attrs.field(repr=False)

    def __str__(self) -> str:
        """Return one line of text, with "any" for a column that makes no difference."""
        families: dict[str, list[str]] = {}
        for family, backend in self.kinds:
            families.setdefault(family, []).append(backend)
        kinds = [f"{family} on {', '.join(found)}" for family, found in families.items()]
        columns = (
            ANY if len(families) == len(FAMILIES) else "; ".join(kinds),
            ANY if len(self.formats) == len(FORMATS) else ", ".join(self.formats),
            ANY if len(self.parallelism) == len(PARALLELISM) else ", ".join(self.parallelism),
        )
        also = [name for name in self.named if name not in (self.auto.policy, "direct")]
        by_name = f", {', '.join(also)} by name" if also else ""
        says = f"{' | '.join(columns)}: {self.auto.policy}{by_name} ({self.auto.reason})"
        windows = tuple(name for name in self.named if name != "direct")
        if not windows:
            return says
        if not self.seen:
            return f"{says}; not seen running"
        seen = "" if self.seen == windows else f"{', '.join(self.seen)} "
        other = any(facts.version != self.release for facts in self.facts)
        release = f" with vLLM {self.release}" if other else ""
        return f"{says}; {seen}seen running{release}" + (f": {self.only}" if self.only else "")


def matrix(facts: EngineFacts) -> list[Row]:
    """Decide for every kind of engine on this machine and with this vLLM.

    Args:
        facts: the plainest speculating engine here. Only its version, device, runner and version of
            FlashAttention are used.

    Returns:
        Rows that together name every kind of engine once; kinds with the same outcome share one.
    """
    dtype = "float32" if facts.device == "cpu" else "bfloat16"  # over a cache of another format
    here = EngineFacts(version=facts.version, device=facts.device, runner=facts.runner, dtype=dtype)
    flash = facts.flash
    attention, latent = BACKENDS.get(here.device, ((ANY,), (ANY,)))
    rows = [
        _row(
            attrs.evolve(here, flash=flash if backend == "FLASH_ATTN" else None),
            *((family, backend), number, parallelism),
        )
        for parallelism in PARALLELISM
        for family, changes in FAMILIES.items()
        for backend in (latent if "mla" in changes else attention)
        for number in FORMATS
    ]
    for column in ("formats", "kinds", "parallelism"):
        rows = _drawn_together(rows, column)
    return rows


def _row(here: EngineFacts, kind: tuple[str, str], number: str, parallelism: str) -> Row:
    """Decide for one kind of engine, and say which policies the tests ran with it.

    Args:
        here: the facts of this machine and vLLM.
        kind: a family, and an attention backend or ``ANY``.
        number: a key of ``FORMATS``.
        parallelism: a key of ``PARALLELISM``.
    """
    family, backend = kind
    changes: dict[str, Any] = {
        **PARALLELISM[parallelism],
        **FAMILIES[family],
        **FORMATS[number],
        "attention": None if backend == ANY else backend,
    }
    facts = attrs.evolve(here, **changes)
    named = tuple(policy for policy in POLICIES if decide(policy, facts).policy == policy)
    known = SEEN.get((here.device, here.runner), {}).get((*kind, number, parallelism), ())
    seen = tuple(policy for policy in named if policy in known)
    only = ONLY.get((here.device, here.runner), {}).get((family, parallelism), "") if seen else ""
    auto, release = decide("auto", facts), _release(facts) if seen else ""
    columns = ((kind,), (number,), (parallelism,))
    return Row(*columns, auto, named, seen, release, only, (facts,))


def _release(facts: EngineFacts) -> str:
    """Return the release with which an engine of ``SEEN`` was seen running: its own, or the newest.

    Releases in which the tests could not run its attention are left out.
    """
    ran = [
        release
        for release in RELEASES[facts.device]
        if facts.attention not in WITHOUT.get(release, ())
    ]
    return facts.version if facts.version in ran else ran[0]


def _drawn_together(rows: list[Row], column: str) -> list[Row]:
    """Merge rows that differ in one column only, in the order of the first of each.

    Args:
        rows: the rows.
        column: the name of a field with a tuple; the merged row has all of its values.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        same = {**attrs.asdict(row, recurse=False), column: None, "facts": None}
        groups.setdefault(tuple(same.values()), []).append(row)
    drawn = []
    for group in groups.values():
        together: dict[str, Any] = {
            name: tuple(value for row in group for value in getattr(row, name))
            for name in (column, "facts")
        }
        drawn.append(attrs.evolve(group[0], **together))
    return drawn
