"""LoRA adapters, told apart by their weights.

vLLM's prefix cache knows an adapter by its name and path. Weights that were loaded anew from there
are other ones to the ledger, so rows of the old ones are wrong for whoever reads them now.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

#: The files of an adapter's folder that vLLM loads.
_LOADED: Final = ("*.safetensors", "*.bin", "*.pt", "adapter_config.json")
#: Bytes of a file that are read at a time.
_CHUNK: Final = 1 << 24


class Adapters:
    """The adapters that requests have named, by vLLM's number.

    An adapter's files are read when its number is seen first, and whenever a request wants it
    loaded in place of what was loaded before. One that is loaded again from the same files is the
    same one, whatever its number.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[str, str], bytes]] = {}

    def identity(self, lora: Any) -> int:
        """Return a hash of an adapter's name, path and weights.

        Args:
            lora: the request's ``LoRARequest``.
        """
        number, name = int(lora.lora_int_id), (str(lora.lora_name), str(lora.lora_path))
        known = self._known.get(number)
        if known is None or known[0] != name or getattr(lora, "load_inplace", False):
            known = self._known[number] = name, _content(name[1])
        return hash_of(repr(name).encode() + known[1])


def hash_of(content: bytes) -> int:
    """Return 64 bits that stand for some bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def _content(path: str) -> bytes:
    """Return a hash of an adapter's files; nothing where they cannot be read here."""
    found = hashlib.blake2b(digest_size=16)
    try:
        folder = Path(path)
        files = sorted({file for pattern in _LOADED for file in folder.glob(pattern)})
        for file in files:
            found.update(repr((file.name, file.stat().st_size)).encode())
            with file.open("rb") as opened:
                while chunk := opened.read(_CHUNK):
                    found.update(chunk)
    except (OSError, ValueError):
        return b""
    return found.digest() if files else b""
