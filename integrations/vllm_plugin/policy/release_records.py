"""``releases.json``: the releases of vLLM that were checked, and the hook points of each.

Each line of the file is a hook point as its release has it, see ``internals.hook_points``. The
program ``policy.doctor.record_release`` writes the file; it reads hook points from a release's
source files, without importing them. What a release may have is decided by ``rules``.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, TypeAlias

import attrs

#: The things that can be checked with a release: the audit alone, in a release that is too old for
#: windows; windows over rows on a CPU, on one GPU and on
#: several, and there on pipeline stages before the last one; drafts that wait on a GPU under other
#: attention backends than FLASH_ATTN; and windows over recurrent states on a CPU and on a GPU.
CHECKS: Final = (
    *("audit", "cpu", "gpu", "gpus", "gpu-stages", "gpu-backends", "states", "gpu-states"),
)
FILE: Final = Path(__file__).with_name("releases.json")


@attrs.frozen
class Release:
    """A release of vLLM.

    Attributes:
        version: its number.
        checked: which of ``CHECKS`` were made; empty if the release was only recorded.
        hooks: its hook points by dotted name; missing ones are left out.
        left_out: the omissions of the release's checks, and why, a part of a sentence: methods of
            speculation, such as "mtp", none of whose engines was run on a GPU, and attention
            backends in capitals, such as "FLASH_ATTN_MLA", of which something was not measured.
    """

    version: str
    checked: tuple[str, ...]
    hooks: Mapping[str, Found]
    left_out: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Move:
    """A hook point that is not as a checked release has it.

    Attributes:
        name: its dotted name.
        kind: "gone", "parameters changed", or "source changed".
        was: parameters or fields in the checked release.
        now: parameters or fields in the other release; empty if it is gone.
    """

    name: str
    kind: str
    was: tuple[str, ...]
    now: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Describe a change; for parameters or fields, name the added and the removed ones."""
        added = [f"+{each}" for each in self.now if each not in self.was]
        left = [f"-{each}" for each in self.was if each not in self.now]
        changes = " ".join(left + added) or "in another order"
        return f"{self.kind}: {self.name}" + (
            f" ({changes})" if self.kind == "parameters changed" else ""
        )


def load(file: Path = FILE) -> tuple[Release, ...]:
    """Return the releases of a file, oldest first."""
    return tuple(
        Release(
            each["version"],
            tuple(each["checked"]),
            {
                name: Found(tuple(hook["takes"]), hook["source"])
                for name, hook in each["hooks"].items()
            },
            each.get("left_out", {}),
        )
        for each in json.loads(file.read_text("utf-8"))["releases"]
    )


def save(releases: Iterable[Release], file: Path = FILE) -> None:
    """Write the list of releases, oldest first, one hook point a line."""
    ordered = sorted(releases, key=lambda release: number(release.version))
    file.write_text('{"releases": [\n' + ",\n".join(map(_text, ordered)) + "\n]}\n", "utf-8")


def _text(release: Release) -> str:
    hooks = [
        f"  {json.dumps(name)}: {json.dumps({'takes': found.takes, 'source': found.source})}"
        for name, found in release.hooks.items()
    ]
    head = f'{{"version": {json.dumps(release.version)}, "checked": {json.dumps(release.checked)}, '
    if release.left_out:
        head += f'"left_out": {json.dumps(dict(release.left_out))}, '
    head += '"hooks": {'
    return head + "\n" + ",\n".join(hooks) + "\n}}"


def number(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, by which releases are ordered.

    The last one is -1 for a version before the release of that number, such as ``0.33.0rc1`` or
    ``0.33.0.dev12``, and 0 for others.
    """
    public = version.partition("+")[0]
    found = (re.match(r"\d*", part) for part in public.split("."))
    numbers = (int(digits[0]) for digits in found if digits is not None and digits[0])
    return (*numbers, -1 if re.search(r"(a|b|rc|dev)\d*(\.|$)", public) else 0)


def checked_for(check: str, releases: Iterable[Release]) -> tuple[str, ...]:
    """Return the versions that were checked for something, oldest first; see ``CHECKS``."""
    return tuple(release.version for release in releases if check in release.checked)


def nearest(version: str, check: str, releases: Sequence[Release]) -> Release:
    """Return the newest checked release that is not newer than a version, else the oldest one."""
    known = [release for release in releases if check in release.checked]
    older = [release for release in known if number(release.version) <= number(version)]
    return older[-1] if older else known[0]


def read_hooks(sources: Sources, names: Iterable[str]) -> dict[str, Found]:
    """Read hook points from a release's source files; missing ones are left out."""
    found = {name: sources.find(name) for name in names}
    return {name: hook for name, hook in found.items() if hook is not None}


def moves(
    before: Mapping[str, Found], now: Mapping[str, Found], names: Iterable[str]
) -> list[Move]:
    """Return the hook points that differ between two releases, in the order of ``names``.

    Args:
        before: the hook points of the earlier release; one that it lacks counts as no move.
        now: those of the later one.
        names: the hook points to compare.
    """
    found = []
    for name in names:
        was, new = before.get(name), now.get(name)
        if was is None or was == new:
            continue
        if new is None:
            found.append(Move(name, "gone", was.takes))
        elif was.takes != new.takes:
            found.append(Move(name, "parameters changed", was.takes, new.takes))
        else:
            found.append(Move(name, "source changed", was.takes, new.takes))
    return found


_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
#: Fields of syntax trees that differ between versions of Python, or say nothing.
_LEFT_OUT: Final = ("type_params", "type_comment", "kind", "ctx")
_DEEPEST: Final = 8


@attrs.frozen
class Found:
    """A function or class as its release has it.

    Attributes:
        takes: names of parameters, without ``self``; of a class, names of its own fields.
        source: 12 hexadecimal digits, the hash of the syntax tree; for a class, only of its fields.
    """

    takes: tuple[str, ...]
    source: str


@attrs.frozen
class _Module:
    """A module's syntax tree."""

    name: str
    tree: ast.Module
    package: bool

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that a statement imports from."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - node.level + self.package]
        return ".".join([*base, *filter(None, [node.module])])


@attrs.define(eq=False, slots=False)
class Sources:
    """The source files of one release of vLLM."""

    root: Path
    _modules: dict[str, _Module | None] = attrs.field(factory=dict, init=False)

    @cached_property
    def version(self) -> str:
        """The release, as its file ``_version.py`` says; "" if it does not say."""
        module = self._module("vllm._version")
        for node in [] if module is None else ast.walk(module.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                if "version" in names:
                    return str(node.value.value).partition("+")[0]
        return ""

    def find(self, name: str) -> Found | None:
        """Read a function, method or class by its dotted name; None if it is not there."""
        found = self._node(name, 0)
        if found is None:
            return None
        node = found[0]
        if isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign | ast.Assign)]
            names = [ast.unparse(_target(each)) for each in fields]
            return Found(tuple(names), _hash(fields))
        return Found(_parameters(node), _hash([node]))

    def _module(self, name: str) -> _Module | None:
        """Parse a module; None if there is no such file."""
        if name not in self._modules:
            path = self.root.joinpath(*name.split("."))
            files = [path.with_suffix(".py"), path / "__init__.py"]
            file = next((each for each in files if each.is_file()), None)
            self._modules[name] = None
            if file is not None:
                tree = ast.parse(file.read_text("utf-8"))
                self._modules[name] = _Module(name, tree, file.name == "__init__.py")
        return self._modules[name]

    def _node(self, name: str, depth: int) -> tuple[_Function | ast.ClassDef, _Module] | None:
        """Find a definition, through imports and base classes, and the module it is in."""
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module = self._module(".".join(parts[:cut]))
            if module is not None:
                return self._inside(module, parts[cut:], depth)
        return None

    def _inside(
        self, module: _Module, parts: list[str], depth: int
    ) -> tuple[_Function | ast.ClassDef, _Module] | None:
        """Find a definition that is in a module or imported there."""
        if depth > _DEEPEST:
            return None
        for node in _statements(module.tree.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == parts[0]:
                        target = ".".join([module.absolute(node), alias.name, *parts[1:]])
                        found = self._node(target, depth + 1)
                        if found is not None:
                            return found
            elif isinstance(node, _Function) and node.name == parts[0] and len(parts) == 1:
                return node, module
            elif isinstance(node, ast.ClassDef) and node.name == parts[0]:
                return self._member(node, module, parts[1:], depth)
        return None

    def _member(
        self, owner: ast.ClassDef, module: _Module, parts: list[str], depth: int
    ) -> tuple[_Function | ast.ClassDef, _Module] | None:
        """Find a method in a class or in its base classes; the class itself without ``parts``."""
        if not parts:
            return owner, module
        if len(parts) > 1:
            return None
        for node in _statements(owner.body):
            if isinstance(node, _Function) and node.name == parts[0]:
                return node, module
        for base in owner.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            found = self._inside(module, [*ast.unparse(plain).split("."), *parts], depth + 1)
            if found is not None:
                return found
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those within ``if`` and ``try`` too, and no ``@overload``."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)
        elif not (isinstance(node, _Function) and any(map(_overloads, node.decorator_list))):
            yield node


def _overloads(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).rpartition(".")[2] == "overload"


def _target(node: ast.stmt) -> ast.expr:
    assert isinstance(node, ast.AnnAssign | ast.Assign)
    return node.target if isinstance(node, ast.AnnAssign) else node.targets[0]


def _parameters(node: _Function) -> tuple[str, ...]:
    given = node.args
    named = [*given.posonlyargs, *given.args, *filter(None, [given.vararg])]
    names = [each.arg for each in (*named, *given.kwonlyargs, *filter(None, [given.kwarg]))]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def _hash(nodes: Sequence[ast.stmt]) -> str:
    text = "\n".join(map(_plain, nodes))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(node: object) -> str:
    """Write a syntax tree down; the same text for every version of Python that parses it."""
    if isinstance(node, list):
        return "[" + ",".join(map(_plain, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    body = fields.get("body")
    if isinstance(node, _Function | ast.ClassDef) and ast.get_docstring(node, clean=False):
        fields["body"] = body[1:] if isinstance(body, list) else body
    said = [
        f"{name}={_plain(value)}"
        for name, value in fields.items()
        if name not in _LEFT_OUT and value is not None and value != []
    ]
    return f"{type(node).__name__}({','.join(said)})"
