"""The compilation of functions, and the files from which later processes load their machine code.

numba's own cache compares the time and size of the file that a function is in. It would load old
code after a change in another file, of a function or constant that is compiled in. Its index can
also mix up the signatures of processes that write at once. Here a file's name has a digest of all
that the code was made of, so a file never has other code than its name says.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any, Final
from uuid import uuid4

import numba
import numpy
from numba.core.caching import CompileResultCacheImpl
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps

#: Compiles a function when it is first called; a division by zero is no case here. For functions
#: that only compiled ones call: their code becomes part of the callers'.
compiled: Final[Any] = numba.njit(error_model="numpy")

#: Values that a ``repr`` tells from all others of their type.
_PLAIN: Final = (bool, int, float, str)


def cached(function: Any) -> Any:
    """Compile a function that Python calls, or load what an earlier process compiled.

    Nothing is compiled before the first call, and never where a variable of numba's forbids it.
    """
    found = compiled(function)
    if isinstance(found, Dispatcher):  # a variable of numba's turns compilation off
        found._cache = CodeFiles(found)
    return found


class CodeFiles:
    """The machine code of one function on disk, a file per signature, in place of numba's cache.

    The folder is the one that numba's cache would take: ``NUMBA_CACHE_DIR``, the ``__pycache__``
    beside the source, or the user's cache. The function is compiled, without a warning, if none of
    them can be written or a file is damaged.

    Args:
        dispatcher: the compiled function.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher: Final = dispatcher

    @cached_property
    def _numba_files(self) -> Any:
        """The part of numba's cache that finds the folder and packs code; None without a folder."""
        with suppress(RuntimeError):
            Path.home()  # raises where there is no home: numba would make a folder called "~"
            return CompileResultCacheImpl(self._dispatcher.py_func)
        return None

    @property
    def cache_path(self) -> str | None:
        """The folder, for numba's statistics; None without one."""
        return self._numba_files and str(self._numba_files.locator.get_cache_path())

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the compiled function for a signature; None if it has to be compiled.

        A file that is damaged, or cannot be read, counts as none.
        """
        target.refresh()
        path = self._path(signature, target.codegen())
        if path is None:
            return None
        with suppress(Exception):  # there may be no file, or anything in it
            digest, _, code = path.read_bytes().partition(b"\n")
            if digest == _digest(code).encode():
                return self._numba_files.rebuild(target, pickle.loads(code))
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write the code for a signature, and remove the function's files of other sources.

        Whatever fails is ignored: the function is then compiled again in the next process.
        """
        path = self._path(signature, result.codegen)
        if path is None or not self._numba_files.check_cachable(result):
            return
        with suppress(Exception):  # the disk may be full, and numba may fail to pack its result
            code = dumps(self._numba_files.reduce(result))
            _write_at_once(path, _digest(code).encode() + b"\n" + code)
            name, source, _ = path.name.split("-")
            for other in path.parent.glob(f"{name}-*"):
                if not other.name.startswith(f"{name}-{source}-"):
                    other.unlink(missing_ok=True)

    def _path(self, signature: Any, codegen: Any) -> Path | None:
        """Return the file for a signature; None without a folder or a digest of the source.

        Its name has digests of the source, and of compilers, options and processor. It may not
        exist.
        """
        if self.cache_path is None:
            return None
        try:
            source = _digest(*_parts(self._dispatcher, set()))
        except TypeError:
            return None
        compilers = numba.__version__, version("llvmlite"), numpy.__version__
        options = numba.config.OPT, numba.config.BOUNDSCHECK
        made_for = _digest(compilers, options, codegen.magic_tuple(), str(signature))
        function = self._dispatcher.py_func
        module = function.__module__.rpartition(".")[2]
        python = str(sys.implementation.cache_tag).replace("-", "")
        name = f"{module}.{function.__name__}.{python}-{source}-{made_for}.nbc"
        return Path(self.cache_path, name)


def _parts(dispatcher: Any, seen: set[str]) -> Iterator[object]:
    """Yield the code of a function and of all that it calls, and the constants that they use.

    Raises:
        TypeError: a value is in use that its ``repr`` may not tell from another one.
    """
    function = dispatcher.py_func
    name = f"{function.__module__}.{function.__qualname__}"
    yield name
    if name in seen:
        return
    seen.add(name)
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        raise TypeError(f"{name} uses more than globals")
    yield sorted(dispatcher.targetoptions.items())
    for code in _code_objects(function.__code__):
        yield code.co_code, code.co_exceptiontable, code.co_varnames, code.co_names, code.co_flags
        yield [value for value in code.co_consts if not isinstance(value, CodeType)]
        for used in code.co_names:
            value = function.__globals__.get(used, numpy)  # a builtin's, or an attribute's name
            if isinstance(value, Dispatcher):
                yield from _parts(value, seen)
            elif value is not numpy:
                yield _plain(value)


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all within it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code_objects(value)


def _plain(value: object) -> object:
    """Return the value of a global if it is a number, a text, a bool, or a tuple of such.

    Raises:
        TypeError: it is anything else.
    """
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if type(value) not in _PLAIN:
        raise TypeError(f"{value!r} may have the repr of another value")
    return value


def _digest(*parts: object) -> str:
    """Return 128 bits of the digest of some values, as hexadecimal digits."""
    return sha256(repr(parts).encode()).hexdigest()[:32]


def _write_at_once(path: Path, data: bytes) -> None:
    """Write a file that no reader sees in part, in place of any file of that name."""
    part = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
