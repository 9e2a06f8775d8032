"""Hook points of the vLLM that is installed, compared with the nearest release that was checked."""

from __future__ import annotations

import attrs

from ...internals import workers
from ...internals.hook_points import HOOK_POINTS, places_of
from .. import releases, supported
from ..engine import EngineFacts
from ..release_rules import on_trial
from ..releases import Move
from ..sources import Sources


@attrs.frozen
class Comparison:
    """The outcome.

    Attributes:
        version: the checked release.
        compared: number of hook points that were compared.
        moves: the hook points that differ.
    """

    version: str
    compared: int
    moves: tuple[Move, ...]

    @property
    def gone(self) -> str | None:
        """Name the first hook point that is gone; None without any."""
        return next((move.name for move in self.moves if move.kind == "gone"), None)


def is_checked(version: str, device: str) -> bool:
    """Return whether a release was checked on a device."""
    return version in supported.releases_for(device)


def compare(version: str, device: str) -> Comparison:
    """Compare the installed vLLM with the nearest release that was checked on a device.

    Args:
        version: the number of the installed release.
        device: type of the device, such as ``"cuda"``; it says which hook points matter.

    Raises:
        KVTxnError: vLLM is not installed.
    """
    check = "gpu" if device == "cuda" else "cpu"
    before = releases.nearest(version, check, releases.load())
    names = [name for place in places_of(device) for name in HOOK_POINTS[place]]
    known = [name for name in names if name in before.hooks]
    now = releases.read_hooks(Sources(workers.source_folder()), known)
    found = releases.moves(before.hooks, now, known)
    return Comparison(before.version, len(known), tuple(found))


def hook_gone(facts: EngineFacts) -> str | None:
    """Say which hook point a release that was not checked lacks; None without any.

    Args:
        facts: the facts of an engine that is on trial, or of any other, which lacks none.
    """
    if not on_trial(facts):
        return None
    gone = compare(facts.version, facts.device).gone
    return gone and f"vLLM {facts.version} was not checked, and lacks {gone}"
