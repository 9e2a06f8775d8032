"""Draft trees to test with, and commits along their paths in plain Python.

Independent of the library: paths are followed node by node, rows are moved one by one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..window_transitions import WindowState
from .batches import Batch
from .rig import Rig

#: Settled rows and parents per request, by a name for the special feature of the trees.
FORESTS: Final[dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]] = {
    "one": ((1,), ((-1, -1, 0, 0, 1, 4),)),
    "uneven": ((1, 1, 1), ((-1, 0, 0, 1), (-1, -1, -1), (-1, 0, 1, 2, 2))),
    "no-drafts": ((1, 0, 2), ((-1, -1, 1), (), ())),
    "only-roots": ((0, 1), ((-1, -1, -1), (-1, -1))),
    "chains": ((1, 2), ((-1, 0, 1), (-1, 0))),
    "late-branch": ((2, 1), ((-1, 0, 1, 2, 2, 4), (-1, -1, 1, 2, 0, 4))),
    "nothing": ((1, 1), ((), ())),
    "no-requests": ((), ()),
}

#: Per request, nodes of the accepted path.
Paths = Sequence[Sequence[int]]


def lengths(settled: Sequence[int], forest: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the shape of a window with these trees, as ``Rig.batch`` takes it."""
    return list(settled), [len(parents) for parents in forest]


def random_path(parents: Sequence[int], rng: random.Random) -> list[int]:
    """Draw a path from a root down to some node; it is empty for one in four, or without nodes."""
    path: list[int] = []
    node = -1
    while children := [child for child, parent in enumerate(parents) if parent == node]:
        if rng.random() < 0.25:
            break
        node = rng.choice(children)
        path.append(node)
    return path


def cut(parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """Cut a path at its first node that leaves the tree, or at padding."""
    good: list[int] = []
    for node in path:
        if not 0 <= node < len(parents) or parents[node] != (good[-1] if good else -1):
            break
        good.append(node)
    return good


def padded(paths: Paths, device: torch.device, columns: int = 0) -> Tensor:
    """Return each request's path as int64 ``[num_requests, depth]``, shorter ones padded with -1.

    Args:
        paths: by request, the accepted nodes of its draft tree, root first.
        device: where the tensor is made.
        columns: the least depth.
    """
    width = max([columns, *map(len, paths)])
    lines = [[*path, *[-1] * (width - len(path))] for path in paths]
    return torch.tensor(lines, dtype=torch.int64).view(len(paths), width).to(device)


def moved(batch: Batch, paths: Paths) -> list[int | None]:
    """Return, by row position, the row that a commit along ``paths`` moves there; None for none."""
    rows: list[int | None] = [None] * batch.num_rows
    first = 0
    for known, drafts, path in zip(batch.settled, batch.draft_len, paths, strict=True):
        for place, node in enumerate(path):
            rows[first + known + place] = first + known + node
        first += known + drafts
    return rows


def run_tree(
    rig: Rig,
    batch: Batch,
    forest: Sequence[Sequence[int]],
    paths: Paths,
    given: Tensor | None = None,
    *,
    check_staged: bool = False,
) -> None:
    """Run a whole tree window, and compare it with the oracle and the counters.

    Raises an AssertionError if they differ, or if the window does not end in COMMITTED.

    Args:
        rig: the layers.
        batch: the rows.
        forest: parents of each request's drafts.
        paths: the accepted nodes of each request.
        given: what the commit is given; None: the paths.
        check_staged: compare before the commit, too.
    """
    before = rig.rows()
    with rig.open(batch, forest) as window:
        rig.stage(window, batch)
        rig.expect_staged(batch)
        if check_staged:
            rig.check("staged")
        window.commit(padded(paths, rig.device) if given is None else given)
    assert window.state is WindowState.COMMITTED
    expect_moved(rig, batch, paths)
    rig.check(f"trees {forest}, paths {paths}")
    rig.check_rows(batch.count([row is not None for row in moved(batch, paths)]), before)


def expect_moved(rig: Rig, batch: Batch, paths: Paths) -> None:
    """Write into the oracle the rows that a commit leaves.

    Settled rows, and each path in its place. A path lies at its request's first draft positions.
    """
    rig.expect_committed(batch, [False] * batch.num_rows, range(len(rig.caches)))
    write_moved(rig, batch, paths)


def write_moved(rig: Rig, batch: Batch, paths: Paths) -> None:
    """Write, in the oracle, the rows of the paths to the slots that a commit moves them to.

    States take them in, too.
    """
    taken = batch.taken_in([False] * batch.num_rows)
    for (request, _), row in zip(batch.owners, moved(batch, paths), strict=True):
        taken[request] += [] if row is None else [row]
    rig.expect_taken_in(batch, taken)
    for cache in rig.caches:
        slots, rows = batch.slots[cache.spec.group], batch.rows[cache.name]
        for slot, row in zip(slots, moved(batch, paths), strict=True):
            if row is not None:
                rig.truth.write(cache.name, slot, rows[row])
