"""What a manager settles once, when it is made: its layers, its groups, its policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from .errors import BackendUnavailableError, LayerError
from .executor import Capabilities
from .layers import Kind, LayerRef, Plane
from .overlaps import begin, end, overlap


def choose_policy(
    wanted: str,
    capabilities: Capabilities,
    kinds: Collection[str] = ("paged",),
    *,
    latent: bool = False,
) -> tuple[str, str]:
    """The policy to use and the reason; raises BackendUnavailableError where it cannot be.

    Args:
        wanted: a policy, or "auto".
        capabilities: of the executor.
        kinds: names of the kinds of layers it is for.
        latent: whether a layer has latent rows, which ``Window.attend`` does not take.
    """
    stateful = "recurrent" in kinds
    if wanted == "undo" and stateful:
        raise BackendUnavailableError(
            "TransactionManager",
            "policy 'undo' cannot take a recurrent state back to the middle of a window: the "
            "states in between were never in the cache",
            expected="deferred",
            got="'undo'",
            hint="use policy='deferred', where commit selects among the staged states",
        )
    if wanted != "auto":
        if wanted not in capabilities.policies:
            raise BackendUnavailableError(
                "TransactionManager",
                f"this backend cannot carry out policy {wanted!r}",
                expected=f"one of {sorted(capabilities.policies)}",
                got=repr(wanted),
                hint="choose another backend, or policy='auto'",
            )
        return wanted, "asked for"
    if "deferred" in capabilities.policies:
        if set(kinds) == {"recurrent"}:
            return "deferred", "no layer has attention, and commit selects among the states"
        if capabilities.attention and not latent:
            return "deferred", "attention can read the window"
    rows = "a window's latent rows" if latent else "the window"
    if stateful:
        raise BackendUnavailableError(
            "TransactionManager",
            "policy 'auto' has none to take: attention cannot read "
            f"{rows}, and a recurrent state that is written before its commit is lost",
            expected="deferred",
            got="'auto'",
            hint="use policy='deferred' where an attention of your own reads the window, or a "
            "manager of their own for the states",
        )
    if "undo" in capabilities.policies:
        return "undo", f"attention cannot read {rows}, so rows are written and taken back"
    return "direct", "the backend can neither defer nor undo"


def by_name(layers: Iterable[LayerRef]) -> dict[str, LayerRef]:
    """The layers by name; raises LayerError where they do not go together."""
    by_name: dict[str, LayerRef] = {}
    if not isinstance(layers, Iterable) or isinstance(layers, Tensor):
        raise LayerError(
            "TransactionManager", "layers is not an iterable", got=type(layers).__name__
        )
    for ref in layers:
        if not isinstance(ref, LayerRef):
            raise LayerError(
                "TransactionManager", "layers must be LayerRef objects", got=type(ref).__name__
            )
        if ref.name in by_name:
            raise LayerError(
                "TransactionManager", f"two layers are named {ref.name!r}", hint="names are keys"
            )
        by_name[ref.name] = ref
    _check_apart(by_name.values())
    if not by_name:
        raise LayerError("TransactionManager", "no layers", expected="at least one", got=0)
    devices = {ref.device for ref in by_name.values()}
    if len(devices) > 1:
        raise LayerError(
            "TransactionManager",
            "layers are on several devices",
            expected="one device",
            got=sorted(map(str, devices)),
            hint="make one manager per device",
        )
    return by_name


def _check_apart(refs: Iterable[LayerRef]) -> None:
    """Refuse layers of one group whose caches overlap.

    Groups may share memory: an engine's allocator gives each block to one of them.
    """
    places = [(ref, plane) for ref in refs for plane in ref.planes]
    places.sort(key=lambda place: begin(place[1].cells))
    near: list[tuple[LayerRef, Plane]] = []
    for ref, plane in places:
        near = [place for place in near if end(place[1].cells) > begin(plane.cells)]
        for other, theirs in near:
            if other is not ref and other.group == ref.group and _share(theirs, plane):
                raise LayerError(
                    "TransactionManager",
                    f"layers {other.name!r} and {ref.name!r} share one cache, or overlap",
                    expected="distinct memory for every layer of a group",
                    got=f"{begin(plane.cells) - begin(theirs.cells)} bytes from one to the other",
                    hint="list a shared cache once, under the layer that writes it",
                )
        near.append((ref, plane))


def _share(one: Plane, other: Plane) -> bool:
    """Whether two layers' planes have memory in common; of blocks with offsets, equal parts do."""
    if one.offsets is None and other.offsets is None:
        return overlap(one.cells, other.cells)
    return one.part == other.part and begin(one.cells) == begin(other.cells)


def limits_of(refs: Sequence[LayerRef]) -> dict[str, int]:
    """Slots that every cache of a group has."""
    limits: dict[str, int] = {}
    block_sizes: dict[str, int] = {}
    kinds: dict[str, Kind] = {}
    for ref in refs:
        limits[ref.group] = min(ref.num_slots, limits.get(ref.group, ref.num_slots))
        kind = kinds.setdefault(ref.group, ref.kind)
        if kind != ref.kind:
            raise LayerError(
                "TransactionManager",
                f"kinds of layers differ within group {ref.group!r}",
                expected=kind,
                got=f"{ref.kind} in {ref.name!r}",
                hint="rings of one size, states, and paged rows belong in groups of their own",
            )
        size = ref.planes[0].block_size
        if block_sizes.setdefault(ref.group, size) != size:
            raise LayerError(
                "TransactionManager",
                f"block sizes differ within group {ref.group!r}",
                expected=block_sizes[ref.group],
                got=f"{size} in {ref.name!r}",
                hint="a slot number means block x block_size + offset: use one group per size",
            )
    return limits
