"""pyproject.toml asks for the packages that the code imports, and for no others."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from building import ROOT, sources
from kvtxn.integrations.vllm_plugin.policy.supported import AUDIT_RELEASES, RELEASES
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Modules whose distribution has another name.
DISTRIBUTIONS = {
    **{"PIL": "pillow", "cpuinfo": "py-cpuinfo", "pynvml": "nvidia-ml-py"},
    "xdist": "pytest-xdist",
}
#: Folder -> the extras that its files may import from; the longest path counts.
EXTRAS = {
    "kvtxn": (),
    "kvtxn/audit/redis_store.py": ("redis",),
    "kvtxn/completion.py": ("completion",),
    "kvtxn/running_server.py": ("doctor",),
    "kvtxn/testing": ("testing",),
    "backends": ("triton",),
    "backends/audit_numba": ("numba",),
    "integrations": (),
    "integrations/audit_command": ("vllm",),
    "integrations/pytest_audit": ("testing",),
    "integrations/serving": ("vllm",),  # an engine brings numpy along
    "integrations/sglang_plugin": ("sglang",),
    "integrations/transformers_cache": ("transformers",),
    "integrations/vllm_plugin": ("vllm",),
    "integrations/demo": ("vllm",),
    "benchmarks": ("bench", "testing", "triton", "vllm"),
}


@cache
def declared(*extras: str) -> set[str]:
    """Names that the core and these extras ask for."""
    optional = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in optional[extra])]
    return {canonicalize_name(Requirement(text).name) for text in texts} - {"kvtxn"}


@cache
def imported(path: Path) -> set[str]:
    """Distributions that a file imports from, anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(node.module or "")
    tops = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)
    return {canonicalize_name(DISTRIBUTIONS.get(top, top)) for top in tops} - {"kvtxn"}


def area(path: Path) -> str:
    """The folder of ``EXTRAS`` that a file belongs to, or the file itself."""
    name = path.relative_to(ROOT).as_posix()
    return max((folder for folder in EXTRAS if f"{name}/".startswith(f"{folder}/")), key=len)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_file_imports_is_declared(path):
    """For the core, or for an extra that its folder is used with."""
    assert imported(path) <= declared(*EXTRAS[area(path)])


@pytest.mark.parametrize("extra", ["", *sorted({e for names in EXTRAS.values() for e in names})])
def test_what_is_declared_is_imported(extra):
    """A package that nobody imports any more is not asked for."""
    files = [path for path in sources() if not extra or extra in EXTRAS[area(path)]]
    own = declared(extra) - declared() if extra else declared()
    assert own <= {name for path in files for name in imported(path)}


TESTS = sorted((ROOT / "tests").rglob("*.py"))
#: Modules and folders of the tests.
HELPERS = {canonicalize_name(name) for path in TESTS for name in (path.stem, path.parent.name)}
#: Extras that the tests are run with; "dev" asks for some of them itself.
TESTED_WITH = (
    *("dev", "bench", "completion", "doctor", "numba", "redis", "testing", "transformers"),
    *("triton", "vllm"),
    "sglang",  # scripts on a GPU
)
#: What "dev" brings and no test imports: commands, plug-ins of theirs, and stubs.
TOOLS = {
    *("build", "check-jsonschema", "mypy", "pip", "pytest-timeout", "ruff", "setuptools", "twine"),
    "types-cachetools",
}


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_test_imports_is_declared(path):
    """For "dev", or for an extra that the tests are run with."""
    assert imported(path) - HELPERS <= declared(*TESTED_WITH)


def test_what_is_declared_for_the_tests_is_imported():
    """Besides the tools, which are no modules of the tests."""
    called = "\n".join(path.read_text() for path in TESTS)
    named = set(map(canonicalize_name, re.findall(r"""importorskip\(["'](\w+)""", called)))
    found = named.union(*map(imported, TESTS))
    assert declared("dev") - declared() - TOOLS <= found


@pytest.mark.parametrize("extra", ["", "vllm"])
def test_no_release_of_anything_is_too_new(extra):
    """`pip install kvtxn[vllm]` holds nobody back to an older vLLM, nor anything vLLM brings."""
    texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    found = {r.name: {bound.operator for bound in r.specifier} for r in map(Requirement, texts)}
    assert ("vllm" in found) == (extra == "vllm")
    assert set().union(*found.values()) == {">="}


def test_every_release_since_the_oldest_checked_one_is_let_in():
    """One that was not checked too: it runs stock, or with ``unchecked`` after a self-test."""
    texts = PROJECT["optional-dependencies"]["vllm"]
    (bounds,) = (r.specifier for r in map(Requirement, texts) if r.name == "vllm")
    assert str(bounds) == f">={AUDIT_RELEASES[0]}"
    assert all(
        bounds.contains(version)
        for version in (*AUDIT_RELEASES, *RELEASES, "0.30.0", "0.33.0", "1.0")
    )
