"""LoRA adapters, told apart by their weights.

vLLM's prefix cache knows an adapter by its name and path. Weights that were loaded anew from there
are other ones to the ledger, so rows of the old ones are wrong for whoever reads them now.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

#: The file of weights that vLLM loads is the first of these that an adapter's folder has.
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
#: What an adapter computes depends on these of its settings, and on no others.
_SETTINGS: Final = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "modules_to_save", "bias"),
)
#: Bytes of a file that are read at a time.
_CHUNK: Final = 1 << 24


@attrs.frozen(eq=False)
class _Known:
    """An adapter whose files were read.

    Attributes:
        name: its name and path.
        content: a hash of its files.
        loaded: refers to what vLLM has made of these files; None while that is not known.
    """

    name: tuple[str, str]
    content: bytes
    loaded: Callable[[], Any] | None

    def is_still(self, name: tuple[str, str], loaded: Any) -> bool:
        """Tell whether what vLLM has loaded was made of these files."""
        return self.name == name and (self.loaded is None or self.loaded() is loaded)


class Adapters:
    """The adapters that requests have named, by vLLM's number.

    An adapter's files are read when a request comes for which vLLM loads them: the first one with
    the adapter's number, one that comes after the adapter was pushed out, removed or loaded anew,
    and each one that wants it loaded in place. One that is loaded again from the same files is the
    same one, whatever its number.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def identity(self, lora: Any, runner: Any) -> int:
        """Return a hash of an adapter's name, path and weights.

        Args:
            lora: the ``LoRARequest`` of a request that comes.
            runner: the runner, which has not loaded the adapter for this request yet.
        """
        number, name = int(lora.lora_int_id), (str(lora.lora_name), str(lora.lora_path))
        loaded, known = _loaded(runner, number), self._known.get(number)
        if loaded is None or getattr(lora, "load_inplace", False):
            known = _Known(name, _content(name[1]), None)
        elif known is None or not known.is_still(name, loaded):
            known = _Known(name, _content(name[1]), weakref.ref(loaded))
        elif known.loaded is None:  # it was loaded for the last request that came
            known = attrs.evolve(known, loaded=weakref.ref(loaded))
        self._known[number] = known
        return hash_of(repr(name).encode() + known.content)


def _loaded(runner: Any, number: int) -> Any:
    """Return what vLLM has loaded under an adapter's number; None if it has to load the files."""
    return runner.lora_manager._adapter_manager.get_adapter(number)


def hash_of(content: bytes) -> int:
    """Return 64 bits that stand for some bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def _content(path: str) -> bytes:
    """Return a hash of an adapter's files; nothing where they cannot be read here."""
    found = hashlib.blake2b(digest_size=16)
    try:
        folder = Path(path).expanduser()
        weights = next(folder / name for name in _WEIGHTS if (folder / name).is_file())
        settings = json.loads((folder / "adapter_config.json").read_bytes())
        found.update(repr((weights.name, [settings.get(name) for name in _SETTINGS])).encode())
        with weights.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                found.update(chunk)
    except (OSError, ValueError, AttributeError, RuntimeError, StopIteration):
        return b""
    return found.digest()
