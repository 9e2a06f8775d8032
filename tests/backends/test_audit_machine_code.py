"""Compiled passes on disk: later processes load them, and never those of another source."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kvtxn.backends
import numba
import numpy
import pytest
from folders import python_path
from kvtxn.backends import audit_numba
from kvtxn.backends.audit_numba import (
    byte_rows,
    compare_rows,
    engine_input,
    requests,
    words,
    write_rows,
)
from kvtxn.backends.audit_numba.machine_code import CodeFiles, cached, compiled
from numba.core.caching import CacheImpl
from numba.core.dispatcher import Dispatcher

import kvtxn

FACTOR = 3
LIMITS = (2, 5)
ARRAY = numpy.zeros(1, numpy.int64)


@compiled
def scaled(number):
    return number * FACTOR


def usual(number):
    return scaled(number) + min(LIMITS)


#: Is ready, waits for a line, and begins a request, by the function and the same in Python; prints
#: both results, and how often the function was loaded.
PROGRAM = """
import json, sys
import numpy
from kvtxn.audit import books
from kvtxn.backends.audit_numba.engine_input import AGAIN, COUNT, FIELDS, SEED, begin_requests
tokens, fields, key = [11, 12, 13], [0] * FIELDS, numpy.array([5, 6, 7])
fields[COUNT], fields[SEED], fields[AGAIN] = len(tokens), 17, 0
stride, found = int(sys.argv[1]), []
numpy.seterr(over="ignore")
packed = numpy.repeat(tokens + fields, stride)[::stride]
print("ready", flush=True)
sys.stdin.readline()
for function in begin_requests, begin_requests.py_func:
    own, facts = numpy.zeros((1, 4), numpy.int64), numpy.zeros((books.NUM_FACTS, 1), numpy.int64)
    function(packed, len(tokens), 1, key, own, facts)
    found.append(own.tolist())
print(json.dumps([*found, sum(begin_requests.stats.cache_hits.values())]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The only folder that machine code is written to."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def run(function, number=7):
    """Call a function as a new process does; its result, and how often it was loaded."""
    again = cached(function)
    return again(number), sum(again.stats.cache_hits.values())


def test_a_compiled_function_is_loaded_again(folder):
    assert run(usual) == (23, 0)
    assert run(usual) == (23, 1)
    assert len(files(folder)) == 1


def test_each_signature_has_a_file(folder):
    run(usual)
    assert run(usual, 0.5) == (3.5, 0)
    assert run(usual) == (23, 1)
    assert run(usual, 0.5) == (3.5, 1)
    assert len(files(folder)) == 2


def test_code_of_another_constant_is_not_loaded(folder, monkeypatch):
    run(usual)
    monkeypatch.setitem(globals(), "LIMITS", (1, 5))
    assert run(usual) == (22, 0)
    assert run(usual) == (22, 1)
    assert len(files(folder)) == 1  # old code goes


def test_code_of_another_constant_of_an_inlined_function_is_not_loaded(monkeypatch):
    run(usual)
    monkeypatch.setitem(globals(), "FACTOR", 4)
    monkeypatch.setitem(globals(), "scaled", compiled(scaled.py_func))
    assert run(usual) == (30, 0)


def test_code_of_another_inlined_function_is_not_loaded(monkeypatch):
    run(usual)

    def scaled(number):
        return number + FACTOR

    scaled.__qualname__ = "scaled"
    monkeypatch.setitem(globals(), "scaled", compiled(scaled))
    assert run(usual) == (12, 0)


ELSEWHERE = {
    "numba.__version__": "0.1",
    "numpy.__version__": "0.1",
    "kvtxn.backends.audit_numba.machine_code.version": {"llvmlite": "0.1"}.__getitem__,
    "numba.config.OPT": 1,
    "numba.config.BOUNDSCHECK": 1,
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_code_of_another_compiler_is_not_loaded(what, monkeypatch):
    run(usual)
    monkeypatch.setattr(what, ELSEWHERE[what])
    assert run(usual) == (23, 0)


def test_code_of_another_processor_is_not_loaded(monkeypatch):
    run(usual)
    codegen = cached(usual).targetctx.codegen()
    monkeypatch.setattr(type(codegen), "magic_tuple", lambda _: ("x86_64", "another", "+avx"))
    assert run(usual) == (23, 0)


def of_array(number):
    return number + ARRAY[0]


def of_module(number):
    return number + os.EX_OK


@pytest.mark.parametrize("function", [of_array, of_module])
def test_code_of_values_without_a_digest_is_not_stored(function, folder):
    """They may change unseen."""
    assert run(function) == (7, 0)
    assert not files(folder)


DAMAGES = {
    "empty": lambda _: b"",
    "other": lambda _: b"no machine code",
    "short": lambda whole: whole[:-200],
    "zeros": lambda whole: whole[:-200] + bytes(200),
    "long": lambda whole: whole + b"more",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_replaced(damage, folder):
    run(usual)
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert run(usual) == (23, 0)
    assert run(usual) == (23, 1)


def test_without_a_folder_functions_are_compiled(monkeypatch, recwarn):
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert run(usual) == (23, 0)
    assert run(usual) == (23, 0)
    assert not recwarn


def test_without_a_home_nothing_is_stored(folder, monkeypatch):
    """numba would make a folder of the name "~" where the process runs."""

    def lost():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", lost)
    assert run(usual) == (23, 0)
    assert not files(folder)


def test_a_full_disk_stops_nobody(folder, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert run(usual) == (23, 0)
    assert not files(folder)


MODULES = (byte_rows, compare_rows, engine_input, requests, words, write_rows)


def test_every_function_that_python_calls_is_stored():
    """And has a digest; the others are inlined into them."""
    called = {"numba_byte_passes", "numba_passes", "step_arrays", "step_input"}
    sources = [Path(audit_numba.__file__).with_name(f"{name}.py").read_text() for name in called]
    for module in MODULES:
        for name, found in vars(module).items():
            if isinstance(found, Dispatcher) and found.py_func.__module__ == module.__name__:
                imported = any(re.search(rf"import .*\b{name}\b", text) for text in sources)
                assert isinstance(found._cache, CodeFiles) == imported, name
                if imported:
                    assert found._cache._path((), found.targetctx.codegen())


def start(package, home, stride=1):
    """Start a process that uses a copy of the package; its home is a folder, or none."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(stride)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": python_path(package), "HOME": str(home)},
        cwd=package,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*processes):
    """Let processes go on at once when all are ready: each looks for files before one is compiled.

    For each process the digests of a request, and how often the function that made them was loaded.
    """
    ready = [process.stdout.readline() for process in processes]
    for process in processes:
        process.stdin.close()
    outcomes = []
    for process, line in zip(processes, ready, strict=True):
        process.stdin = None
        out, err = process.communicate()
        assert (process.returncode, err, line) == (0, "", "ready\n")
        found, wanted, loaded = json.loads(out)
        assert found == wanted
        outcomes.append((found, loaded))
    return outcomes


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_processes_load_what_is_compiled_of_their_source_alone(tmp_path):
    """Some that start at once, one more, and others after changes in files of what is inlined."""
    for package in (kvtxn, kvtxn.backends):
        source = Path(str(package.__file__)).parent
        target = tmp_path.joinpath(*package.__name__.split("."))
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    passes = tmp_path / "kvtxn" / "backends" / "audit_numba"
    several = ended(*(start(tmp_path, tmp_path, stride) for stride in (1, 2, 1)))
    digests = several[0][0]
    assert several == [(digests, 0)] * 3
    names = files(passes / "__pycache__")
    assert sum(name.endswith(".nbc") for name in names) == 2
    assert not [name for name in names if ".nbc." in name]
    assert ended(start(tmp_path, tmp_path, 2)) == [(digests, 1)]

    edit(passes / "words.py", "TOKEN_BITS) | token, key)", "TOKEN_BITS) | token + 1, key)")
    (second,) = ended(start(tmp_path, tmp_path))
    assert second[0] != digests
    edit(tmp_path / "kvtxn" / "audit" / "digest.py", "LAST_SHIFT: Final = 31", "LAST_SHIFT = 30")
    (third,) = ended(start(tmp_path, tmp_path))
    assert third[0] != second[0]
    assert (second[1], third[1]) == (0, 0)
    assert ended(start(tmp_path, tmp_path)) == [(third[0], 1)]

    shutil.rmtree(passes / "__pycache__")
    (passes / "__pycache__").write_text("no folder")
    assert ended(start(tmp_path, "/dev/null")) == [(third[0], 0)]
