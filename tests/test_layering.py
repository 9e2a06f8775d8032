"""Imports point inwards; the surface is a list; the house's rules hold in the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvtxn

ROOT = Path(__file__).parent.parent
FOLDERS = ("kvtxn", "backends", "benchmarks", "integrations")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever it does."""
    package = path.relative_to(ROOT).with_suffix("").parts
    base = package if package[0] == "kvtxn" else ("kvtxn", *package)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(base[: len(base) - node.level]) if node.level else ""
            module = ".".join(filter(None, (parent, node.module)))
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def test_everything_is_looked_at():
    """The rules below would hold of an empty list."""
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_inwards(path):
    """The library knows no backend and no engine; a backend knows no engine."""
    names, folder = imports(path), path.relative_to(ROOT).parts[0]
    forbidden = {
        "kvtxn": ("kvtxn.backends", "kvtxn.benchmarks", "kvtxn.integrations", "triton", "vllm"),
        "backends": ("kvtxn.integrations", "kvtxn.benchmarks", "vllm", "backends"),
        "benchmarks": ("integrations", "backends", "benchmarks"),
        "integrations": ("integrations", "backends", "benchmarks"),
    }[folder]
    bad = {n for n in names for f in forbidden if n == f or n.startswith(f + ".")}
    assert not bad


INTEGRATIONS = sorted((ROOT / "integrations").rglob("*.py"))


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda p: str(p.relative_to(ROOT)))
def test_two_files_touch_vllms_internals(path):
    """What is taken from vLLM stands in one file for its workers, in another for its front end.

    The demo uses its public API alone.
    """
    inner = {n for n in imports(path) if n.startswith("vllm.")}
    if path.name in ("vllm_internals.py", "vllm_internals_front.py"):
        assert inner
        return
    assert inner <= {"vllm.LLM", "vllm.SamplingParams", "vllm.TokensPrompt"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_small_and_read_no_environment(path):
    """400 lines at most; settings come in through arguments."""
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    if path.relative_to(ROOT).parts[0] in ("kvtxn", "backends"):
        assert not re.search(r"os\.(environ|getenv|putenv)", text)


def test_state_table_knows_no_torch():
    """Pure data."""
    assert imports(ROOT / "kvtxn" / "states.py") <= {
        "__future__", "__future__.annotations", "collections.abc", "collections.abc.Mapping",
        "enum", "enum.Enum", "types", "types.MappingProxyType", "typing", "typing.Final",
    }  # fmt: skip


def test_public_surface_is_a_list():
    """Nothing becomes public by accident."""
    assert sorted(kvtxn.__all__) == [
        "AcceptanceError",
        "BackendUnavailableError",
        "CapacityError",
        "CapturedRows",
        "ConfigError",
        "EndedWindow",
        "IncompleteWindowError",
        "KVTxnError",
        "LayerError",
        "LayerRef",
        "SampledIds",
        "SlotMappingError",
        "StagedTwiceError",
        "TransactionManager",
        "TreeError",
        "TxnConfig",
        "UnresolvedWindowError",
        "Window",
        "WindowState",
        "WindowStateError",
        "kv_window",
    ]
    assert all(hasattr(kvtxn, name) for name in kvtxn.__all__)
