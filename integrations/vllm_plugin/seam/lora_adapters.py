"""LoRA adapters, told apart by their weights.

vLLM's prefix cache knows an adapter by its name and path. Weights that were loaded anew from there
are other ones to the ledger, so rows of the old ones are wrong for whoever reads them now.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import attrs

from .engine_protocols import LoRARequest
from .hooks import follow, precede
from .runner_protocols import Runner, WorkerAdapters

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
class _Read:
    """An adapter's files, as they were read.

    Attributes:
        name: the adapter's name and path.
        stamps: what tells, without reading them, that the files were replaced.
        identity: a hash of them; where they cannot be read, of name and path.
    """

    name: tuple[str, str]
    stamps: Stamps
    identity: int


class Adapters:
    """The adapters of requests, known by the files that vLLM has loaded for them.

    vLLM goes by an adapter's number alone. What is loaded under it is used, whatever name and path
    a request gives, and whatever lies there by now. So files are read when vLLM loads them, or
    just before, for a request that comes first. Files that stay are read once.
    """

    def __init__(self) -> None:
        #: By what vLLM has made of the files.
        self._loaded: Final[WeakKeyDictionary[object, int]] = WeakKeyDictionary()
        #: By number, the adapters that vLLM loads for requests of the coming step.
        self._awaited: Final[dict[int, _Read]] = {}
        self._contents: Final[dict[str, tuple[Stamps, bytes]]] = {}
        self._loading = 0

    def follow(self, manager: WorkerAdapters) -> Callable[[], None]:
        """Hash each adapter that a worker loads, for a request or not; return the undo."""
        undo = ExitStack()
        undo.callback(precede(manager, "_load_adapter", self._begin_load))
        undo.callback(follow(manager, "_load_adapter", self._end_load))
        return undo.close

    def _begin_load(self, lora_request: LoRARequest) -> None:
        """Hash the files that vLLM is about to load, and await them no longer."""
        self._loading = self._read(lora_request).identity
        self._awaited.pop(int(lora_request.lora_int_id), None)

    def _end_load(self, loaded: object) -> None:
        """Note the hash of the files of which vLLM has made ``loaded``."""
        self._loaded[loaded] = self._loading

    def identity(self, lora: LoRARequest, runner: Runner) -> int:
        """Return 64 bits that stand for an adapter's weights, as vLLM has or will have loaded them.

        Of files that cannot be read, they stand for the adapter's name and path. Files are read now
        of an adapter that is not loaded, is to be loaded in place, or was loaded before the audit.
        """
        if getattr(lora, "load_inplace", False):
            return self._read(lora).identity
        number = int(lora.lora_int_id)
        loaded = runner.lora_manager._adapter_manager.get_adapter(number)
        if loaded is None:
            return self._read(lora).identity
        if loaded not in self._loaded:  # it was there before the audit
            self._loaded[loaded] = self._read(lora).identity
            self._awaited.pop(number, None)
        return self._loaded[loaded]

    def _read(self, lora: LoRARequest) -> _Read:
        """Return what an adapter's files are now; remembered by its number until they are loaded.

        The files are read again only if their stamps, or the adapter's name or path, are new.
        """
        number, name = int(lora.lora_int_id), (str(lora.lora_name), str(lora.lora_path))
        known, stamps = self._awaited.get(number), _stamps(name[1])
        if known is None or (known.name, known.stamps) != (name, stamps):
            content = self._content(name[1], stamps)
            known = _Read(name, stamps, hash_of(content or repr(name).encode()))
            self._awaited[number] = known
        return known

    def _content(self, path: str, stamps: Stamps) -> bytes:
        """Return a hash of an adapter's files, which are read if their stamps are new.

        It is remembered unless the files changed in the last seconds; of too many, the oldest goes.
        """
        known = self._contents.pop(path, None)
        if known is None or known[0] != stamps:
            known = stamps, _content(path)
        changed = max((max(at) for _, *at, _, _ in stamps), default=time.time_ns())
        if time.time_ns() - changed > _SETTLED:  # or else another change could go unnoticed
            self._contents[path] = known
        if len(self._contents) > _REMEMBERED:
            del self._contents[next(iter(self._contents))]
        return known[1]


def hash_of(content: bytes | memoryview) -> int:
    """Return 64 bits that stand for some bytes, equal in every process."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def _files(path: str) -> tuple[Path, Path]:
    """Return the paths of the weights and of the settings that vLLM loads of an adapter.

    Raises:
        LookupError: the folder has no weights.
    """
    folder = Path(path).expanduser()
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name, folder / "adapter_config.json"
    raise LookupError(f"no weights in {path!r}")


def _stamps(path: str) -> Stamps:
    """Return the stamps of an adapter's two files, by which changes show; [] if one is missing."""
    try:
        facts = [(file.name, file.stat()) for file in _files(path)]
    except (OSError, ValueError, RuntimeError, LookupError):
        return []
    return [
        (name, fact.st_mtime_ns, fact.st_ctime_ns, fact.st_size, fact.st_ino)
        for name, fact in facts
    ]


def _content(path: str) -> bytes:
    """Return a hash of an adapter's weights and of the settings that matter.

    Empty where the files cannot be read here.
    """
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
