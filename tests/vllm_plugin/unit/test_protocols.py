"""Protocols of vLLM's classes name attributes that these classes have in the installed release."""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec

import pytest
from kvtxn.integrations.vllm_plugin.seam import engine_protocols, runner_protocols, workers

PROTOCOLS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (engine_protocols, runner_protocols)
    for name, value in vars(module).items()
    if inspect.isclass(value) and value.__module__ == module.__name__
    if "``vllm." in value.__doc__
}

#: Attributes that vLLM gives a layer from outside of its class.
GIVEN = {"_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float"}


def stands_for(protocol):
    """The dotted name of vLLM's class, with which the docstring begins."""
    return inspect.getdoc(protocol).split("``")[1]


def read_by(protocol):
    """The attributes that a protocol names itself, but for those that kvtxn adds."""
    named = inspect.get_annotations(protocol)
    methods = {name for name, value in vars(protocol).items() if is_method(name, value)}
    return {name for name in {*named, *methods} if not name.startswith(("kvtxn", "__"))}


def is_method(name, value):
    """Whether it is a method or a property that the protocol's own source defines."""
    mine = inspect.isfunction(value) or isinstance(value, property)
    return mine and name not in ("__init__", "__subclasshook__")


def imported(tree):
    """What the names that a module imports stand for."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
        for alias in node.names
    }


def attributes(name, root):
    """The names that a class has, by itself and by its bases, as far as these are vLLM's."""
    module, _, last = name.rpartition(".")
    folder = root.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text())
    known = imported(tree)
    if last in known:
        return attributes(known[last], root)
    owners = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == last]
    found = set()
    for owner in owners:
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
        for base in owner.bases:
            plain = ast.unparse(base).partition("[")[0]
            found |= attributes(known.get(plain, f"{module}.{plain}"), root)
    return found


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("name", PROTOCOLS)
def test_vllms_class_has_what_is_read(name):
    protocol = PROTOCOLS[name]
    theirs = stands_for(protocol)
    found = attributes(theirs, workers.source_folder())
    assert found, f"there is no {theirs}"
    assert read_by(protocol) - found - GIVEN == set()
