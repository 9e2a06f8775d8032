"""Functions and classes of an engine's release, as its source files have them.

The engine need not be installed, nor run on this machine.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import attrs

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
    """The source files of one release of an engine; nothing is imported.

    Args:
        root: the folder that has the engine's package in it.
    """

    root: Path
    _modules: dict[str, _Module | None] = attrs.field(factory=dict, init=False)

    def version_of(self, package: str) -> str:
        """Return a package's release by its ``_version.py``, without a local part; or ""."""
        module = self._module(f"{package}._version")
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
        """Return a module's parsed file, read once; None without one that this Python parses."""
        if name not in self._modules:
            path = self.root.joinpath(*name.split("."))
            files = [path.with_suffix(".py"), path / "__init__.py"]
            file = next((each for each in files if each.is_file()), None)
            self._modules[name] = None
            if file is not None:
                with suppress(SyntaxError):
                    tree = ast.parse(file.read_text("utf-8"))
                    self._modules[name] = _Module(name, tree, file.name == "__init__.py")
        return self._modules[name]

    def _node(self, name: str, depth: int) -> tuple[_Function | ast.ClassDef, _Module] | None:
        """Return the definition of a dotted name, and the module that it is in; None without one.

        The longest part of the name that is a module is searched, through imports and base classes.
        """
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module = self._module(".".join(parts[:cut]))
            if module is not None:
                return self._inside(module, parts[cut:], depth)
        return None

    def _inside(
        self, module: _Module, parts: list[str], depth: int
    ) -> tuple[_Function | ast.ClassDef, _Module] | None:
        """Return a definition that a module has or imports, and its module; None without one.

        Imports and base classes are followed at most eight deep.
        """
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
        """Return a method of a class or of its bases, and its module; the class without ``parts``.

        None if there is none, or the name goes deeper.
        """
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
    """Yield statements, in place of ``if`` and ``try`` those within, and no ``@overload``."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)
        elif not (isinstance(node, _Function) and any(map(_overloads, node.decorator_list))):
            yield node


def _overloads(decorator: ast.expr) -> bool:
    """Tell whether a decorator is ``overload``, of any module."""
    return ast.unparse(decorator).rpartition(".")[2] == "overload"


def _target(node: ast.stmt) -> ast.expr:
    """Return the target of an assignment; of several targets the first."""
    assert isinstance(node, ast.AnnAssign | ast.Assign)
    return node.target if isinstance(node, ast.AnnAssign) else node.targets[0]


def _parameters(node: _Function) -> tuple[str, ...]:
    """Return the names of a function's parameters, without a leading ``self`` or ``cls``."""
    given = node.args
    named = [*given.posonlyargs, *given.args, *filter(None, [given.vararg])]
    names = [each.arg for each in (*named, *given.kwonlyargs, *filter(None, [given.kwarg]))]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def _hash(nodes: Sequence[ast.stmt]) -> str:
    """Return 12 hexadecimal digits of a hash over syntax trees, see ``_plain``."""
    text = "\n".join(map(_plain, nodes))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(node: object) -> str:
    """Return a syntax tree as text, the same in every version of Python that parses it.

    Docstrings, comments and positions are left out.
    """
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
