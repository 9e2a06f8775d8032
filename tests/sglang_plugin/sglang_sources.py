"""SGLang's own classes without its kernels: stubs are imported for what a CPU lacks."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

#: What SGLang imports for kernels, other models, and its servers.
STUBS = (
    *("sglang.kernels", "sglang.srt.layers", "sgl_kernel", "torchvision", "gguf", "orjson"),
    "IPython",
)


class _Anything(type):
    """A class whose every attribute is a class, and which leaves what it decorates as it is."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args, **named):
        return args[0] if len(args) == 1 and callable(args[0]) else super().__call__()

    def __or__(cls, other):
        return cls

    __ror__ = __getitem__ = __or__


class _Stub(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if any(name == each or name.startswith(f"{each}.") for each in STUBS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        """Leave the module empty."""


def available() -> bool:
    """Tell whether SGLang's sources are on the path."""
    return importlib.util.find_spec("sglang") is not None


def modules(*names: str) -> list[ModuleType]:
    """Import modules of SGLang's, and take the stubs away again."""
    importlib.import_module("transformers.processing_utils")  # before torchvision is a stub
    importlib.import_module("transformers.loss.loss_utils")
    finder = _Stubs()
    sys.meta_path.insert(0, finder)
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.meta_path.remove(finder)
