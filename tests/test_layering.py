"""Imports point inwards; the surface is a list; the house's rules hold in the source."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from house import PLUGIN, Source, circles, measure, packages, slices

import kvtxn

ROOT = Path(__file__).parent.parent
FOLDERS = ("kvtxn", "backends", "benchmarks", "integrations")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    """The module's name as it is installed; a package's own is ``package.__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "kvtxn" else ("kvtxn", *parts))


def imported(module: str, source: str) -> set[str]:
    """Absolute names of everything a module imports, wherever it does; ``TYPE_CHECKING`` too."""
    base, found = module.split("."), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(base[: len(base) - node.level]) if node.level else ""
            from_module = ".".join(filter(None, (parent, node.module)))
            found |= {f"{from_module}.{alias.name}" for alias in node.names}
    return found


@cache
def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports."""
    return imported(module_of(path), path.read_text())


def circle(sources: dict[str, str]) -> list[str]:
    """The first import circle among modules, by name; empty if there is none."""
    graph = {}
    for module, source in sources.items():
        names = imported(module, source)
        # What is no module is a name in one: ``from .module import name``.
        names = {name if name in sources else name.rpartition(".")[0] for name in names}
        graph[module] = {name if name in sources else f"{name}.__init__" for name in names}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


PLANTED = {
    "at the top": ("from .b import two", "from . import a"),
    "for types alone": ("if TYPE_CHECKING:\n    from .b import Two", "from .a import one"),
    "in a function": ("def one():\n    from kvtxn import b", "from .a import one"),
    "with oneself": ("from .a import one", ""),
    "through the package": ("from . import __version__", ""),
}


@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_circle_is_found(how):
    """Whichever way modules import each other."""
    one, two = PLANTED[how]
    package = "from .a import one" if how == "through the package" else ""
    assert circle({"kvtxn.a": one, "kvtxn.b": two, "kvtxn.__init__": package})
    assert not circle({"kvtxn.a": "from . import b", "kvtxn.b": "import kvtxn.c"})


def test_no_import_circle():
    """Each module knows only what lies below it: a reader can go from the leaves up."""
    assert not circle({module_of(path): path.read_text() for path in FILES})


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


OUTER = [path for path in FILES if path.relative_to(ROOT).parts[0] in FOLDERS[1:]]


@pytest.mark.parametrize("path", OUTER, ids=lambda p: str(p.relative_to(ROOT)))
def test_one_package_imports_vllms_modules(path):
    """Attributes of its objects likewise: see ``test_foreign_access``.

    The demo and the benchmarks use vLLM's public API alone.
    """
    inner = {n for n in imports(path) if n.startswith("vllm.")}
    if path.parent.name == "seam":
        return
    public = {"vllm.LLM", "vllm.SamplingParams", "vllm.TokensPrompt"}
    assert inner <= public | {"vllm.sampling_params.RequestOutputKind"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_one_package_imports_sglangs_modules(path):
    """Its protocols have what of its objects is read."""
    seam = ROOT / "integrations" / "sglang_plugin" / "seam"
    found = {name for name in imports(path) if name.split(".")[0] == "sglang"}
    assert not found or path.parent == seam


SERVING = sorted((ROOT / "integrations" / "serving").rglob("*.py"))


@pytest.mark.parametrize("path", SERVING, ids=lambda p: str(p.relative_to(ROOT)))
def test_parts_of_any_engine_know_none(path):
    """Of the integrations they import each other alone."""
    ours = {name for name in imports(path) if name.startswith("kvtxn.integrations.")}
    assert {name for name in ours if not name.startswith("kvtxn.integrations.serving.")} == set()
    assert not {name for name in imports(path) if name.split(".")[0] in ("vllm", "sglang")}


@pytest.mark.parametrize("folder", ["kvtxn", "backends"])
def test_no_environment_is_read(folder):
    """Settings come in through arguments."""
    for path in (ROOT / folder).rglob("*.py"):
        assert not re.search(r"os\.(environ|getenv|putenv)", path.read_text()), path


@pytest.mark.parametrize("folder", ["kvtxn", "backends"])
def test_one_package_uses_ctypes(folder):
    """What the driver and Python are given by address is in ``backends/launching``."""
    users = {path for path in (ROOT / folder).rglob("*.py") if "ctypes" in imports(path)}
    assert {path.parent for path in users} <= {ROOT / "backends" / "launching"}


#: Why a file of more than 600 lines is one subject, and not two; by its path.
LONG = {
    "integrations/serving/ledger/watch.py": "all that a worker's hooks tell; its parts do the work",
    "kvtxn/audit/ledger.py": "the documented calls of one public class; its parts do the work",
}


def test_long_files_say_why():
    """A file holds one subject; above 600 lines its line in ``LONG`` says which."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    lengths = {path: len(path.read_text().splitlines()) for path in (*FILES, *tests)}
    long = {str(path.relative_to(ROOT)) for path, length in lengths.items() if length > 600}
    assert long == LONG.keys()


@pytest.fixture(scope="module")
def source():
    """All modules of the product, read once."""
    return Source(ROOT)


def test_no_class_is_cut_by_inheritance(source):
    """No class has one subclass alone, in another file, unless it is a class without it, too."""
    found = slices(source)
    print(f"{len(found)} classes are slices:", *sorted(found), sep="\n")
    assert not found


def test_an_adapter_is_one_class_that_knows_parts_alone(source):
    """It has no base, so each of vLLM's methods is overridden once; parts hear of it by a list.

    What they hear is of the step's record, which readers in ``seam`` make.
    """
    runners = f"{PLUGIN}.runners"
    adapters = {name for name in source.classes if name.startswith(f"{runners}.runner_")}
    assert adapters == {f"{runners}.runner_v1.AdapterV1", f"{runners}.runner_v2.AdapterV2"}
    for name in adapters:
        assert source.before(name) == [name]
        known = imports(source.files[source.module_of(name)])
        ours = {each for each in known if each.startswith("kvtxn.integrations.")}
        readers = (f"{PLUGIN}.seam.", "kvtxn.integrations.serving.")
        assert {each for each in ours if not each.startswith(readers)} <= {f"{PLUGIN}.seam"}
        assert "kvtxn.integrations.serving.parts.Parts" in ours


def test_the_packages_of_the_plug_in_import_inwards(source):
    """None of them imports one that imports it, over others either."""
    found = [each for each in circles(packages(source)) if PLUGIN in " ".join(each)]
    assert found == []


def test_parts_do_not_know_each_other():
    """The list of parts knows them all; of the caches the ledger knows where rows lie."""
    plugin = ROOT / "integrations" / "vllm_plugin"
    below = "kvtxn.integrations.vllm_plugin"
    known = {
        path.relative_to(plugin).as_posix(): {
            name.removeprefix(f"{below}.") for name in imports(path) if name.startswith(below)
        }
        for path in plugin.rglob("*.py")
    }
    for path, names in known.items():
        if path.startswith("audit/"):
            others = {name for name in names if name.startswith(("cpu.", "gpu."))}
            assert others <= {"cpu.cache_layout"}, path
        if path.startswith(("cpu/", "gpu/")):
            assert not {name for name in names if name.startswith("audit.")}, path
    assert not {name for name in known["gpu/windows.py"] if name.startswith("gpu.states")}
    assert not {name for name in known["gpu/states.py"] if name.startswith("gpu.windows")}


BASE = "class Base:\n    def one(self): pass\n"
NO_SLICES = {
    "used by itself": (BASE + "first = Base()", "from .a import Base\nclass Sub(Base): x = 1"),
    "in the same file": (BASE + "class Sub(Base): x = 1", ""),
    "with two subclasses": (
        BASE,
        "from .a import Base\nclass Sub(Base): x = 1\nclass Other(Base): x = 2",
    ),
    "a protocol": (
        "class Base(Protocol):\n    def one(self): pass",
        "from .a import Base\nclass Sub(Base): x = 1",
    ),
    "public": ('__all__ = ["Base"]\n' + BASE, "from .a import Base\nclass Sub(Base): x = 1"),
    "of a list of bases": (
        BASE + "class More: x = 1",
        'from . import a\nclass Sub(a.Base, a.More):\n    """Both."""',
    ),
}


@pytest.fixture
def source_of(tmp_path):
    """Makes the source of a package of two modules."""

    def make(one, two):
        (tmp_path / "kvtxn").mkdir()
        for name, text in {"__init__": "", "a": one, "b": two}.items():
            (tmp_path / "kvtxn" / f"{name}.py").write_text(text)
        return Source(tmp_path, ("kvtxn",))

    return make


@pytest.mark.parametrize("how", NO_SLICES)
def test_what_is_no_slice(source_of, how):
    """A class of its own, or an interface."""
    assert not slices(source_of(*NO_SLICES[how]))


def test_a_planted_slice_is_found(source_of):
    """By annotations alone nobody uses it."""
    sub = "from .a import Base as B\nclass Sub(B):\n    def two(self, other: B): pass"
    assert slices(source_of(BASE, sub)) == {"kvtxn.a.Base"}


def test_packages_that_import_each_other_are_one_circle():
    """Over others, too; whoever imports them alone is not in it."""
    graph = {"a": {"b", "e"}, "b": {"c"}, "c": {"a", "b"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert circles(graph) == [{"a", "b", "c"}, {"e", "f"}]


def test_the_house_is_measured(source):
    """By ``make house``; each number has its row beside it."""
    rows = json.loads((ROOT / "tests" / "house.json").read_text())
    found = measure(ROOT, source)
    assert found.keys() == {name for name, row in rows.items() if "how" not in row}
    assert int(found["product lines"]) > 10_000


def test_state_table_knows_no_torch():
    """Pure data."""
    assert imports(ROOT / "kvtxn" / "window_transitions.py") <= {
        "__future__.annotations", "collections.abc.Mapping",
        "enum.Enum", "types.MappingProxyType", "typing.Final",
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


KERNELS = [path for path in FILES if "triton.language" in path.read_text()]
#: Tables whose columns have numbers for names: the factors of the audit's key.
NUMBERED = {"key"}


def bare_columns(source: str) -> list[str]:
    """Loads and stores at ``table + 2`` or beyond: a column that is named by its number alone.

    ``table + 1`` may be the neighbour of ``table``, and is let pass.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called not in ("tl.load", "tl.store") or not isinstance(node.args[0], ast.BinOp):
            continue
        table, column = node.args[0].left, node.args[0].right
        number = column.value if isinstance(column, ast.Constant) else 0
        if number > 1 and ast.unparse(table) not in NUMBERED:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_name_the_columns_of_their_tables(path):
    """By a constant: ``tl.load(line + AT_GROUP)``."""
    assert bare_columns(path.read_text()) == []


def test_a_planted_column_is_found():
    assert len(KERNELS) > 20
    assert bare_columns("x = tl.load(line + AT_GROUP) + tl.load(key + 2) + tl.load(at + 1)") == []
    for planted in ("tl.load(part + 4)", "tl.store(record + 7, code)", "tl.load(t + n * 3 + 2)"):
        assert bare_columns(f"f({planted} + 1)") == [planted]
