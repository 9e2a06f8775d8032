"""The choice of an implementation of the passes: torch, or one found by its entry point."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

import torch

from ..errors import BackendUnavailableError
from .passes import Passes
from .torch_passes import TorchPasses

#: The entry-point group: name -> ``module:Class``, a subclass of ``Passes``.
GROUP: Final = "kvtxn.audit"


def choose(backend: str | type[Passes], device: torch.device) -> type[Passes]:
    """Return the implementation called ``backend``; "auto" takes the quickest that can run.

    Args:
        backend: ``"torch"``, ``"auto"``, a name of the entry-point group, or a class, which is
            returned unchecked. "auto" is Triton's on a GPU; on a CPU it is numba's, or torch's
            where numba cannot run.
        device: the device of the books.

    Raises:
        BackendUnavailableError: no backend has the name, or it cannot run here; on a GPU "auto"
            raises so for Triton's.
    """
    if isinstance(backend, type) and issubclass(backend, Passes):
        return backend
    if backend == "auto":
        if device.type != "cpu":
            return choose("triton", device)
        try:
            return choose("numba", device)
        except BackendUnavailableError:
            return TorchPasses
    if backend == TorchPasses.name:
        return TorchPasses
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not isinstance(backend, str) or backend not in found:
        raise BackendUnavailableError(
            "Ledger", "no such backend", expected=("auto", "torch", *sorted(found)), got=backend
        )
    try:
        loaded: type[Passes] = found[backend].load()
        reason = loaded.unavailable(device)
    except ImportError as error:
        reason = f"it cannot be imported: {error}"
    if reason is not None:
        raise BackendUnavailableError("Ledger", f"{backend!r} cannot run on {device}: {reason}")
    return loaded
