"""Finds, in source code, code that looks into an object of vLLM's.

An expression is *foreign* if it is

- a parameter that is annotated as ``Foreign`` or ``Any`` or as a protocol of a class of vLLM's, or
  that has no annotation and a name that objects of vLLM's have (``NAMES``);
- a name that was bound to a foreign expression, or to an element of a container of them;
- the result of a function of ``seam`` that returns ``Foreign``, or of ``super().method()``;
- an attribute that one of the plug-in's own classes annotates as ``Foreign``.

Of a foreign expression only attributes that start with "kvtxn" may be used, and Python's own, such
as ``__name__``; by dot or by ``getattr`` and its like; and no item. A class may only use attributes
of ``self`` that it or a base in the same files defines, and of ``super()`` those that it overrides.

Programs that use vLLM may use its public API: ``looks(public=...)``. There, ``Any`` says nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

NAMES = frozenset(
    (
        *("attn_metadata", "batch", "builder", "client", "config", "engine", "impl"),
        *("input_batch", "kv_cache_config", "layer", "llm", "metadata", "model_runner"),
        *("module", "runner", "sampler", "scheduler_output", "vllm_config", "worker", "wrapper"),
    )
)
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
_OPAQUE = ("Foreign", "Any")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _is_protocol(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    """Tell whether it is a protocol that stands for a class of vLLM's, as its docstring says."""
    return isinstance(node, ast.ClassDef) and (ast.get_docstring(node) or "").startswith("``vllm.")


def _ours(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a file, without such protocols."""
    for child in ast.iter_child_nodes(tree):
        if not _is_protocol(child):
            yield child
            yield from _ours(child)


class Sources:
    """Several files, as far as the rule has to know them all.

    Args:
        seam: the sources of the package that may touch vLLM.
        ours: the sources that may not.
    """

    def __init__(self, seam: Iterable[str], ours: Iterable[str]) -> None:
        trees = [ast.parse(text) for text in seam]
        functions = [n for tree in trees for n in _ours(tree) if isinstance(n, ast.FunctionDef)]
        self.protocols = {node.name for tree in trees for node in tree.body if _is_protocol(node)}
        self.returns_foreign = {f.name for f in functions if self.is_opaque(f.returns)}
        self.returns_many = {f.name for f in functions if self.holds_foreign(f.returns)}
        self.fields: set[str] = set()
        self.classes: dict[str, ast.ClassDef] = {}
        for tree in [*trees, *map(ast.parse, ours)]:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and node.name not in self.protocols:
                    self.classes[node.name] = node
                    self.fields |= {
                        line.target.id
                        for line in node.body
                        if isinstance(line, ast.AnnAssign)
                        and isinstance(line.target, ast.Name)
                        and self.holds_foreign(line.annotation)
                    }

    def is_opaque(self, annotation: ast.expr | None) -> bool:
        """Tell whether it is ``Foreign``, ``Any`` or a protocol, or one of these or None."""
        if isinstance(annotation, ast.BinOp):
            return self.is_opaque(annotation.left) or self.is_opaque(annotation.right)
        names = {*_OPAQUE, *self.protocols}
        return isinstance(annotation, ast.Name) and annotation.id in names

    def holds_foreign(self, annotation: ast.expr | None) -> bool:
        """Tell whether it is a container of ``Foreign``, or of a protocol."""
        names = {"Foreign", *self.protocols}
        return annotation is not None and any(
            isinstance(node, ast.Name) and node.id in names for node in ast.walk(annotation)
        )

    def defined(self, owner: ast.ClassDef) -> set[str]:
        """Names that a class defines, and its bases as far as they are in these files."""
        found: set[str] = set()
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if _is(node.value, "self") else set()
        for line in owner.body:
            if isinstance(line, ast.AnnAssign | ast.Assign):
                targets = [line.target] if isinstance(line, ast.AnnAssign) else line.targets
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
        for base in owner.bases:
            base = base.value if isinstance(base, ast.Subscript) else base  # ``Base[Kind]``
            if isinstance(base, ast.Name) and base.id in self.classes:
                found |= self.defined(self.classes[base.id])
        return found


def _is(node: ast.expr | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _is(node.func, "super")


class _Function:
    """One function's foreign names, those of the functions around it included."""

    def __init__(
        self,
        sources: Sources,
        public: frozenset[str] | None,
        node: ast.AST,
        outer: _Function | None,
        owner: set[str] | None,
    ) -> None:
        self.sources, self.owner, self.public = sources, owner, public or frozenset()
        self.foreign: set[str] = set() if outer is None else set(outer.foreign)
        self.many: set[str] = set() if outer is None else set(outer.many)
        arguments = node.args  # type: ignore[attr-defined]
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in every:
            known = sources.is_opaque(argument.annotation)
            if public is not None and _is(argument.annotation, "Any"):
                known = argument.arg in NAMES
            (self.foreign.discard if not known else self.foreign.add)(argument.arg)
            if argument.annotation is None and argument.arg in NAMES:
                self.foreign.add(argument.arg)
            if not known and sources.holds_foreign(argument.annotation):
                self.many.add(argument.arg)
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None and sources.is_opaque(rest.annotation):
                self.many.add(rest.arg)

    def is_foreign(self, node: ast.expr) -> bool:
        """Tell whether an expression is an object of vLLM's."""
        if isinstance(node, ast.Name):
            return node.id in self.foreign
        if isinstance(node, ast.Await | ast.Starred | ast.NamedExpr):
            return self.is_foreign(node.value)
        if isinstance(node, ast.IfExp):
            return self.is_foreign(node.body) or self.is_foreign(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(self.is_foreign, node.values))
        if isinstance(node, ast.Attribute):
            ours = node.attr.startswith(("kvtxn", "__"))
            return node.attr in self.sources.fields or (not ours and self.is_foreign(node.value))
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Name) and node.value.id in self.many
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            above = isinstance(node.func, ast.Attribute) and _is_super(node.func.value)
            return above or name in self.sources.returns_foreign
        return False

    def are_foreign(self, node: ast.expr) -> bool:
        """Tell whether an expression is a container of objects of vLLM's."""
        if isinstance(node, ast.Name):
            return node.id in self.many
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            inner = any(self.are_foreign(each) for each in node.args)
            return name in self.sources.returns_many or (name in ("list", "tuple", "zip") and inner)
        if isinstance(node, ast.Tuple | ast.List):
            return any(self.is_foreign(e) or self.are_foreign(e) for e in node.elts)
        if isinstance(node, ast.GeneratorExp | ast.ListComp):
            return self.is_foreign(node.elt)
        return isinstance(node, ast.Starred) and self.are_foreign(node.value)

    def bind(self, node: ast.AST) -> None:
        """Learn from an assignment, a loop or a comprehension."""
        pairs: list[tuple[ast.expr, bool, bool]] = []
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value
            pairs = [(each, self.is_foreign(value), self.are_foreign(value)) for each in targets]
        elif isinstance(node, ast.For | ast.comprehension):
            pairs = [(node.target, self.are_foreign(node.iter), False)]
        for target, one, several in pairs:
            if isinstance(target, ast.Name):
                self.foreign |= {target.id} if one else set()
                self.many |= {target.id} if several else set()

    def wrong(self, node: ast.AST) -> str | None:
        """Say what an expression does with an object of vLLM's that it must not do."""
        if isinstance(node, ast.Attribute):
            allowed = node.attr.startswith(("kvtxn", "__")) or node.attr in self.public
            if self.is_foreign(node.value) and not allowed:
                return ast.unparse(node)
            if self.owner is not None and not self.public and not node.attr.startswith("__"):
                mine = _is(node.value, "self") or _is_super(node.value)
                return ast.unparse(node) if mine and node.attr not in self.owner else None
        if isinstance(node, ast.Subscript) and self.is_foreign(node.value):
            return ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            ours = isinstance(name, ast.Constant) and str(name.value).startswith("kvtxn")
            if node.func.id in _BY_NAME and self.is_foreign(node.args[0]) and not ours:
                listed = isinstance(name, ast.Name)  # a name of ``vars``, compared before
                return None if listed else ast.unparse(node)
        return None


def looks(sources: Sources, text: str, public: frozenset[str] | None = None) -> list[str]:
    """Find the places in a file that look into an object of vLLM's, as ``line: expression``.

    Args:
        sources: all files.
        text: the file's.
        public: names of vLLM's public API, for a program that uses it; there a parameter that is
            annotated as ``Any`` is foreign only by its name.
    """
    found: list[str] = []

    def inner(node: ast.AST) -> Iterator[ast.AST]:
        """Nodes of a function, without functions and classes within it; names first."""
        for child in ast.iter_child_nodes(node):
            yield child
            if not isinstance(child, _SCOPES):
                yield from inner(child)

    def visit(node: ast.AST, around: _Function | None, owner: set[str] | None) -> None:
        if isinstance(node, ast.ClassDef):
            owner = sources.defined(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            around = _Function(sources, public, node, around, owner)
            body = list(inner(node))
            for _ in range(3):  # a name may be bound to one that is bound further down
                for each in body:
                    around.bind(each)
            for each in body:
                if (what := around.wrong(each)) is not None:
                    found.append(f"{getattr(each, 'lineno', 0)}: {what}")
        for child in ast.iter_child_nodes(node):
            visit_below(child, around, owner)

    def visit_below(node: ast.AST, around: _Function | None, owner: set[str] | None) -> None:
        if isinstance(node, _SCOPES):
            visit(node, around, owner)
        else:
            for child in ast.iter_child_nodes(node):
                visit_below(child, around, owner)

    visit(ast.parse(text), None, None)
    return found


def read(paths: Iterable[Path]) -> list[str]:
    """Read files."""
    return [path.read_text() for path in paths]
