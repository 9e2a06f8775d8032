"""The size of the house: ``python tests/house.py [REVISION]``, or ``make house``.

Prints a few numbers of the source beside those at 99a3f46 and beside what they shall become
(``house.json``). All of them are read from the source of one revision, or of the working tree;
nothing is imported, so that any revision can be measured by the same script. They are symptoms,
never the aim: a class that is cut in two to make a number smaller is worse than before.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("kvtxn", "backends", "benchmarks", "integrations")
PLUGIN = "kvtxn.integrations.vllm_plugin"

#: The classes that the plug-in puts before each of vLLM's runners, whatever parts it has. Names
#: that a revision lacks are an error.
RUNNERS = {
    "V1": ("AdapterV1",),
    "V2": ("AdapterV2",),
}


class Source:
    """The modules below some folders, and the classes in them, by their full names.

    Attributes:
        files: path of each module.
        trees: syntax tree of each module.
        names: what each name that a module imports stands for, by module.
        classes: syntax tree of each class.
        bases: full names of each class's bases, as written.
    """

    def __init__(self, root: Path, folders: tuple[str, ...] = PRODUCT) -> None:
        """Read ``root``'s folders."""
        self.files = {
            module_name(path.relative_to(root)): path
            for folder in folders
            for path in sorted((root / folder).rglob("*.py"))
        }
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.files.items()}
        self.names = {
            name: dict(imported_names(self.package(name), tree))
            for name, tree in self.trees.items()
        }
        self.classes = {
            f"{name}.{node.name}": node
            for name, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }
        self.bases = {
            name: [self.full_name(self.module_of(name), base) for base in node.bases]
            for name, node in self.classes.items()
        }

    def package(self, module: str) -> str:
        """Return the package that a module lies in; a package lies in itself."""
        is_package = self.files[module].name == "__init__.py"
        return module if is_package else module.rpartition(".")[0]

    def module_of(self, name: str) -> str:
        """Return the module that a class is in."""
        while name not in self.files:
            name = name.rpartition(".")[0]
        return name

    def full_name(self, module: str, node: ast.expr) -> str:
        """Return what an expression like ``layers.Layer[int]`` in a module names."""
        if isinstance(node, ast.Subscript):
            node = node.value
        first, _, rest = ast.unparse(node).partition(".")
        name = self.names[module].get(first, f"{module}.{first}")
        name = f"{name}.{rest}" if rest else name
        while name not in self.classes:
            owner, _, last = name.rpartition(".")
            if last not in self.names.get(owner, {}):
                break
            name = self.names[owner][last]  # handed on by a package
        return name

    def before(self, name: str) -> list[str]:
        """Return a class and every base of it that the source has, a base before its own."""
        found = [name]
        for base in self.bases[name]:
            if base in self.classes:
                found += [each for each in self.before(base) if each not in found]
        return found


def module_name(path: Path) -> str:
    """Return a module's name as it is installed, from its path below the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts if parts[0] == "kvtxn" else ("kvtxn", *parts)).removesuffix(".__init__")


def imported_names(package: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that a module imports from somewhere, and what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            origin = ".".join([*(up if node.level else ()), *filter(None, [node.module])])
            for alias in node.names:
                yield alias.asname or alias.name, f"{origin}.{alias.name}"


def lines(root: Path, *folders: str) -> int:
    """Count the lines of the Python files below some folders."""
    paths = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sum(len(path.read_text().splitlines()) for path in paths)


def code_lines(source: Source) -> int:
    """Count the lines that have code: neither blank nor comments nor docstrings alone."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}
    skipped |= {tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found = 0
    for name, tree in source.trees.items():
        with source.files[name].open() as file:
            tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type not in skipped]
        lines = {line for t in tokens for line in range(t.start[0], t.end[0] + 1)}
        for node in ast.walk(tree):
            described = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(node, described) and ast.get_docstring(node, clean=False) is not None:
                text = node.body[0]
                lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        found += len(lines)
    return found


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Return a class's own methods, by name."""
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def hooked(source: Source) -> dict[str, list[ast.ClassDef]]:
    """Return the classes that stand before vLLM's own in each runner."""
    found = {}
    for runner, mixins in RUNNERS.items():
        names = [each for each in source.classes if each.rpartition(".")[2] in mixins]
        if len(names) != len(mixins):
            raise LookupError(f"RUNNERS names {mixins}, and {names} are there: mend RUNNERS")
        every = dict.fromkeys(each for name in names for each in source.before(name))
        found[runner] = [source.classes[each] for each in every]
    return found


def overriding(classes: list[ast.ClassDef]) -> Counter[str]:
    """Count the classes that define each method of vLLM's: one that is reached by ``super()``.

    A method that kvtxn gives the runner ends in one of these classes, which calls no ``super()``.
    """
    count: Counter[str] = Counter()
    ends = set()
    for node in classes:
        for name, method in methods(node).items():
            count[name] += 1
            if f"super().{name}(" not in ast.unparse(method):
                ends.add(name)
    return Counter({name: number for name, number in count.items() if name not in ends})


def slices(source: Source) -> set[str]:
    """Return the classes that are cut off their only subclass, which is in another file.

    Not among them are protocols, classes that a package lists as public, classes that some code
    uses for more than a base or an annotation, and the bases of a class that is a mere list of
    several.
    """
    subclasses: dict[str, list[str]] = {}
    for name, bases in source.bases.items():
        for base in bases:
            subclasses.setdefault(base, []).append(name)
    used = {
        source.full_name(module, node)
        for module, tree in source.trees.items()
        for node in used_names(tree)
    }
    found = set()
    for base, subs in subclasses.items():
        if len(subs) > 1 or base not in source.classes or base in used:
            continue
        apart = source.module_of(base) != source.module_of(subs[0])
        protocol = any(each.rpartition(".")[2] == "Protocol" for each in source.bases[base])
        is_list = len(source.bases[subs[0]]) > 1 and len(source.classes[subs[0]].body) == 1
        if apart and not protocol and not is_list:
            found.add(base)
    return found


def used_names(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what a module uses other than as a base or an annotation; what it lists as public."""
    besides = list(annotations(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            besides += node.bases
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from (ast.Name(name) for name in ast.literal_eval(node.value))
    skipped = {id(part) for node in besides for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in skipped:
            yield node


def packages(source: Source) -> dict[str, set[str]]:
    """Return the packages that each package imports from, in functions and for types too."""
    graph: dict[str, set[str]] = {}
    for module, names in source.names.items():
        here = graph.setdefault(source.package(module), set())
        for name in names.values():
            target = name if name in source.files else name.rpartition(".")[0]
            if target in source.files:
                here.add(source.package(target))
    return {package: used - {package} for package, used in graph.items()}


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the sets of packages that import each other, the largest first."""
    graph = {package: set(used) for package, used in graph.items()}
    joined = {package: {package} for package in graph}
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            first, *others = set(error.args[1])
            for other in others:  # becomes one with the first
                joined[first] |= joined.pop(other)
                graph[first] |= graph.pop(other)
            for package, used in graph.items():
                graph[package] = {first if each in others else each for each in used} - {package}
        else:
            return sorted((each for each in joined.values() if len(each) > 1), key=len)[::-1]


def annotations(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the annotations of parameters, but for ``*args`` and ``**kwargs``, results, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield from (each.annotation for each in parameters if each.annotation)
            if node.returns:
                yield node.returns
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation


def untyped(source: Source) -> int:
    """Count the annotations in integrations with ``Any`` or ``Foreign`` in them."""
    return sum(
        any(isinstance(each, ast.Name) and each.id in ("Any", "Foreign") for each in ast.walk(node))
        for module, tree in source.trees.items()
        if module.startswith("kvtxn.integrations.")
        for node in annotations(tree)
    )


def hook_points(root: Path) -> int:
    """Count the hook points on record for the newest release of vLLM."""
    path = root / "integrations" / "vllm_plugin" / "policy" / "releases.json"
    return len(json.loads(path.read_text())["releases"][-1]["hooks"])


def measure(root: Path, source: Source) -> dict[str, str]:
    """Measure the source below ``root``: each row of ``house.json`` that has a number, by name."""
    before = hooked(source).values()
    passes = methods(source.classes["kvtxn.audit.passes.Passes"])
    numbers = {
        "product lines": lines(root, *PRODUCT),
        "of these with code, not text alone": code_lines(source),
        "test lines": lines(root, "tests"),
        "files of the plug-in": sum(
            name == PLUGIN or name.startswith(f"{PLUGIN}.") for name in source.files
        ),
        "classes before vLLM's own in a hooked runner": max(map(len, before)),
        "classes that override one vLLM method, per runner": max(
            max(overriding(each).values()) for each in before
        ),
        "packages in each package circle": ", ".join(
            str(len(each)) for each in circles(packages(source))
        )
        or 0,
        "methods of the ledger's passes": len(passes),
        "hook points in the newest vLLM on record": hook_points(root),
        "annotations with Any or Foreign in integrations": untyped(source),
    }
    return {name: str(number) for name, number in numbers.items()}


def archived(revision: str, folder: Path) -> None:
    """Write the files of a revision below ``folder``."""
    command = ["git", "-C", str(ROOT), "archive", revision]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def report(revision: str | None = None) -> str:
    """Return the table for a revision, or for the working tree."""
    if revision is None:
        found = measure(ROOT, Source(ROOT))
    else:
        with tempfile.TemporaryDirectory() as folder:
            archived(revision, Path(folder))
            found = measure(Path(folder), Source(Path(folder)))
    rows = json.loads((ROOT / "tests" / "house.json").read_text())
    assert found.keys() <= rows.keys(), found.keys() - rows.keys()
    lines = [f"{'':52}{'99a3f46':>12}{'must':>8}{'aim':>8}{revision or 'now':>12}"]
    for name, row in rows.items():
        cells = f"{row['99a3f46']:>12}{row['must']:>8}{row['aim']:>8}"
        lines.append(f"{name:52}{cells}{found.get(name, '-'):>12}")
    lines += [f"{name}: {row['how']}" for name, row in rows.items() if name not in found]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(*sys.argv[1:2]))
