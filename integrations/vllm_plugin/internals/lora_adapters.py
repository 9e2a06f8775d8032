"""LoRA adapters, told apart by their weights.

vLLM's prefix cache knows an adapter by its name and path. Weights that were loaded anew from there
are other ones to the ledger, so rows of the old ones are wrong for whoever reads them now.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from .engine_protocols import LoRARequest
from .runner_protocols import Runner

#: The file of weights that vLLM loads is the first of these that an adapter's folder has.
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
#: What an adapter computes depends on these of its settings, and on no others.
_SETTINGS: Final = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "modules_to_save", "bias"),
)
#: Bytes of a file that are read at a time.
_CHUNK: Final = 1 << 24
#: Adapters whose files' hashes are remembered; the ones that were read first are forgotten.
_REMEMBERED: Final = 256
#: Nanoseconds after which a file that changes again has another time of change, on any file system.
_SETTLED: Final = 2_000_000_000

#: By file: its name, time of change of its content and of its entry, size, and number.
Stamps = list[tuple[str, int, int, int, int]]


@attrs.frozen(eq=False)
class _Known:
    """An adapter whose files were read.

    Attributes:
        name: its name and path.
        stamps: what tells, without reading them, that its files were replaced.
        content: a hash of its files.
        loaded: refers to what vLLM has made of these files; None while that is not known.
    """

    name: tuple[str, str]
    stamps: Stamps
    content: bytes
    loaded: Callable[[], object] | None

    def is_still(self, name: tuple[str, str], loaded: object) -> bool:
        """Tell whether the files need not be read again for a request.

        Args:
            name: the adapter's name and path.
            loaded: what vLLM has loaded; None if it loads the files for the request. It does so
                once for all requests of a step.
        """
        if self.name != name or (loaded is None and self.loaded is not None):
            return False
        if loaded is None:
            return self.stamps == _stamps(name[1])
        return self.loaded is None or self.loaded() is loaded


class Adapters:
    """The adapters that requests have named, by vLLM's number.

    An adapter's files are looked at when a request comes for which vLLM loads them: the first one
    with the adapter's number, one that comes after the adapter was pushed out, removed or loaded
    anew, and each one that wants it loaded in place. They are read if they have changed since they
    were read last. One that is loaded again from the same files is the same one, whatever its
    number.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._read: dict[str, tuple[Stamps, bytes]] = {}

    def identity(self, lora: LoRARequest, runner: Runner) -> int:
        """Return a hash of an adapter's weights; where they cannot be read, of name and path."""
        number, name = int(lora.lora_int_id), (str(lora.lora_name), str(lora.lora_path))
        loaded = None if getattr(lora, "load_inplace", False) else _loaded(runner, number)
        known = self._known.get(number)
        if known is None or not known.is_still(name, loaded):
            known = _Known(name, *self._content(name[1]), None)
        if loaded is not None and known.loaded is None:  # for this request, or the one before
            known = attrs.evolve(known, loaded=weakref.ref(loaded))
        self._known[number] = known
        return hash_of(known.content or repr(name).encode())

    def _content(self, path: str) -> tuple[Stamps, bytes]:
        """Return the stamps and a hash of an adapter's files, which are read if they are new."""
        stamps = _stamps(path)
        known = self._read.pop(path, None)
        if known is None or known[0] != stamps:
            known = stamps, _content(path)
        changed = max((max(at) for _, *at, _, _ in stamps), default=time.time_ns())
        if time.time_ns() - changed > _SETTLED:  # or else another change could go unnoticed
            self._read[path] = known
        if len(self._read) > _REMEMBERED:
            del self._read[next(iter(self._read))]
        return known


def _loaded(runner: Runner, number: int) -> object:
    """Return what vLLM has loaded under an adapter's number; None if it has to load the files."""
    return runner.lora_manager._adapter_manager.get_adapter(number)


def hash_of(content: bytes | memoryview) -> int:
    """Return 64 bits that stand for some bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def _files(path: str) -> tuple[Path, Path]:
    """Return the weights and the settings that vLLM loads of an adapter."""
    folder = Path(path).expanduser()
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name, folder / "adapter_config.json"
    raise LookupError(f"no weights in {path!r}")


def _stamps(path: str) -> Stamps:
    """Return what tells, without reading them, that an adapter's files change; [] without any."""
    try:
        facts = [(file.name, file.stat()) for file in _files(path)]
    except (OSError, ValueError, RuntimeError, LookupError):
        return []
    return [
        (name, fact.st_mtime_ns, fact.st_ctime_ns, fact.st_size, fact.st_ino)
        for name, fact in facts
    ]


def _content(path: str) -> bytes:
    """Return a hash of an adapter's files; nothing where they cannot be read here."""
    found = hashlib.blake2b(digest_size=16)
    try:
        weights, settings = _files(path)
        given = json.loads(settings.read_bytes())
        found.update(repr((weights.name, [given.get(name) for name in _SETTINGS])).encode())
        with weights.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                found.update(chunk)
    except (OSError, ValueError, AttributeError, RuntimeError, LookupError):
        return b""
    return found.digest()
