"""Draft trees: several guesses for each position, of which commit keeps one path.

A draft row is a node; its parent is another draft of the same request, or the last settled
row. Draft row ``i`` of a request has the slot of place ``i``, as in any window. Commit moves
the nodes of the accepted path ``n0, n1, ...`` to places 0, 1, ...: there they lie where a
sequence of only accepted tokens would lie. A node sees its ancestors and itself (tree
attention: Miao et al., 2024, arXiv:2305.09781; Cai et al., 2024, arXiv:2401.10774).

Each place ``t`` is decided independently, without a loop over the path: it gets node ``path[t]``
if the path up to there is exactly that node's own way from the root. So an invalid path is cut at
the first node whose parent is not the node before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import attrs
import torch
from torch import Tensor

from .errors import AcceptanceError, BackendUnavailableError, ConfigError, TreeError
from .executor import Executor, SampledIds
from .layout import SIGNED, RowLayout, as_accepted, to_device

#: The parent of each draft row: one sequence for all requests alike, or one per request.
Parents = Sequence[int] | Sequence[Sequence[int]]

#: The same, checked: one tuple for all, or one per request.
KnownParents = tuple[int, ...] | tuple[tuple[int, ...], ...]


@attrs.frozen(eq=False)
class Tree:
    """The draft trees of a window, one per request, on the host and on the device.

    Attributes:
        parents: per request and draft row, the draft row it continues; -1 is the last settled row.
        depth: nodes on the longest path of any request.
        is_chain: every tree is a plain sequence, so that counts say what is accepted, too.
        table: int64 ``[num_rows, 1 + depth]``: how many drafts the row's request has; then the
            way from the root to the node, itself included; -1 after its end, and for settled rows.
        order: int64 ``[num_rows]``, a row's place in its sequence: settled rows 0, 1, ...,
            a node as far behind them as it is deep.
        visible: bool ``[num_rows, longest]``, which rows of its request a row sees.
    """

    parents: tuple[tuple[int, ...], ...]
    depth: int
    is_chain: bool
    table: Tensor
    order: Tensor
    visible: Tensor

    @classmethod
    def build(
        cls,
        settled: tuple[int, ...],
        parents: tuple[tuple[int, ...], ...],
        device: torch.device,
    ) -> Tree:
        """The trees of ``len(parents)`` requests; parents come before their children."""
        ways = [_ways(each) for each in parents]
        depth = max((len(way) for each in ways for way in each), default=0)
        longest = max(map(sum, zip(settled, map(len, parents), strict=True)), default=0)
        table, order, visible = [], [], []
        for known, each in zip(settled, ways, strict=True):
            for row in range(known):
                table.append([len(each)] + [-1] * depth)
                order.append(row)
                visible.append([other <= row for other in range(longest)])
            for way in each:
                table.append([len(each), *way] + [-1] * (depth - len(way)))
                order.append(known + len(way) - 1)
                seen = {known + node for node in way}
                visible.append([other < known or other in seen for other in range(longest)])
        rows = len(order)
        return cls(
            parents,
            depth,
            all(each == tuple(range(-1, len(each) - 1)) for each in parents),
            to_device(torch.tensor(table, device="cpu").view(rows, 1 + depth), device, torch.int64),
            to_device(order, device, torch.int64),
            to_device(torch.tensor(visible, device="cpu").view(rows, longest), device, torch.bool),
        )

    @property
    def chain(self) -> Tensor:
        """int64 ``[num_rows, depth]``, the ways of ``table`` alone."""
        return self.table[:, 1:]

    def sources(self, layout: RowLayout, path: Tensor) -> Tensor:
        """By place, the row that a commit along ``path`` puts there, or -1.

        Args:
            layout: the rows of the window.
            path: int ``[num_requests, columns]``, nodes from the root on; anything else in it
                ends it.

        Returns:
            int64 ``[num_rows]``.
        """
        place = layout.position
        columns = min(path.shape[1], self.depth)
        if columns == 0 or layout.num_rows == 0:
            return torch.full_like(place, -1)
        steps = path[:, :columns].to(torch.int64)[layout.request]
        inside = (place >= 0) & (place < columns)
        node = steps.gather(1, place.clamp(0, columns - 1).unsqueeze(1)).squeeze(1)
        inside &= (node >= 0) & (node < self.table[:, 0])
        rows = torch.arange(layout.num_rows, device=place.device)
        # From the row of this place to the request's first draft row, and on to the node.
        source = torch.where(inside, rows - place + node, 0)
        beyond = torch.arange(columns, device=place.device) > place.unsqueeze(1)
        same = (steps == self.chain[source, :columns]) | beyond
        return torch.where(inside & same.all(1), source, -1)


def _ways(parents: tuple[int, ...]) -> list[list[int]]:
    """For each node of one request, the nodes from the root down to it."""
    ways: list[list[int]] = []
    for node, parent in enumerate(parents):
        ways.append([*(ways[parent] if parent >= 0 else ()), node])
    return ways


def build_layout(
    draft_len: tuple[int, ...],
    settled: tuple[int, ...],
    parents: KnownParents | None,
    device: torch.device,
) -> RowLayout:
    """The layout of a window, with its tree if it has one; ``parents`` come from ``known_tree``.

    Raises:
        TreeError: not one parent per draft row.
    """
    layout = RowLayout.build(draft_len, settled, device)
    if parents is None:
        return layout
    each = [p for p in parents if isinstance(p, tuple)]
    if not each:
        each = [tuple(p for p in parents if isinstance(p, int))] * layout.num_requests
    _check_lengths(each, list(draft_len))
    return attrs.evolve(layout, tree=Tree.build(settled, tuple(each), device))


def _check_lengths(parents: Sequence[tuple[int, ...]], draft_len: list[int]) -> None:
    lengths = list(map(len, parents))
    if lengths != draft_len:
        raise TreeError(
            "window",
            "tree does not have one parent per draft row",
            expected=f"draft_len {draft_len}",
            got=f"{lengths} parents",
            hint="pass one sequence if all requests are alike, else one per request",
        )


def known_tree(tree: Parents, draft_len: object, executor: Executor, rows: str) -> KnownParents:
    """What ``window`` was given as ``tree``, checked.

    Args:
        tree: the parents.
        draft_len: draft rows per request; compared here if it is an int, else with the layout.
        executor: who has to carry it out.
        rows: where rows come from: ``"window"`` where they are staged.

    Raises:
        BackendUnavailableError: the executor cannot do trees.
        ConfigError: the rows are not staged one by one.
        TreeError: the tree is malformed, or does not fit ``draft_len``.
    """
    if not executor.capabilities.trees:
        raise BackendUnavailableError(
            "window",
            f"the {executor.name} executor cannot do draft trees",
            hint="choose another backend, or draft plain sequences",
        )
    if rows != "window":
        raise ConfigError(
            "window",
            "a draft tree does not go with rows that are captured or written by the caller",
            expected="rows that are staged",
            got=rows,
            hint="stage the rows: commit moves them, and has to have them for that",
        )
    known = as_parents(tree)
    if isinstance(draft_len, int):
        each = [p for p in known if isinstance(p, tuple)]
        each = each or [tuple(p for p in known if isinstance(p, int))]
        _check_lengths(each, [draft_len] * len(each))
    return known


def as_parents(tree: object) -> KnownParents:
    """What ``window`` was given as ``tree``: every parent comes before its child.

    Raises:
        TreeError: it is not such a sequence.
    """
    if isinstance(tree, Tensor) and tree.device.type != "cpu":
        _refuse_tree("tree is on a device", f"{tree.dtype} on {tree.device}")
    if hasattr(tree, "tolist"):
        tree = tree.tolist()
    if not isinstance(tree, Sequence) or isinstance(tree, (str, bytes)):
        _refuse_tree("tree is not a sequence", type(tree).__name__)
    if any(isinstance(item, Sequence) or hasattr(item, "tolist") for item in tree):
        return tuple(_parents(item, request) for request, item in enumerate(tree))
    return _parents(tree, None)


def _parents(tree: object, request: int | None) -> tuple[int, ...]:
    where = "" if request is None else f" of request {request}"
    if hasattr(tree, "tolist"):
        tree = tree.tolist()
    if not isinstance(tree, Sequence) or isinstance(tree, (str, bytes)):
        _refuse_tree(f"the tree{where} is not a sequence", repr(tree))
    for node, parent in enumerate(tree):
        if type(parent) is not int or not -1 <= parent < node:
            _refuse_tree(f"the parent of draft row {node}{where} does not come before it", parent)
    return tuple(tree)


def _refuse_tree(problem: str, got: object) -> NoReturn:
    raise TreeError(
        "window",
        problem,
        expected="per draft row the index of an earlier one, or -1",
        got=got,
    )


def as_path(accepted: object, layout: RowLayout, device: torch.device) -> Tensor:
    """What ``commit`` of a tree window was given, as int ``[num_requests, columns]``.

    Host values (nested sequences, CPU tensors) must be paths, -1 only at their ends. Device
    tensors pass unread, and are cut where they stop being a path.

    Raises:
        AcceptanceError: wrong shape, dtype or, on the host, no path of the tree.
    """
    if hasattr(accepted, "__array__") and not isinstance(accepted, Tensor):
        accepted = torch.as_tensor(accepted, device="cpu")
    if isinstance(accepted, Tensor):
        fits = accepted.ndim == 2 and accepted.shape[0] == layout.num_requests
        if not fits or accepted.dtype not in SIGNED:
            _refuse_path(layout, f"{accepted.dtype} {list(accepted.shape)}")
        if accepted.device == device and device.type != "cpu":
            return accepted
        if accepted.device.type != "cpu":
            raise AcceptanceError(
                "commit", "accepted is on another device", expected=device, got=accepted.device
            )
        accepted = accepted.tolist()
    if not isinstance(accepted, Sequence) or len(accepted) != layout.num_requests:
        _refuse_path(layout, repr(accepted))
    paths = []
    for request, path in enumerate(accepted):
        if not isinstance(path, Sequence) or any(type(node) is not int for node in path):
            _refuse_path(layout, repr(accepted))
        paths.append(_checked_path(layout, request, list(path)))
    columns = max(map(len, paths), default=0)
    padded = torch.tensor([path + [-1] * (columns - len(path)) for path in paths], device="cpu")
    return to_device(padded.view(len(paths), columns), device, torch.int64)


def _checked_path(layout: RowLayout, request: int, path: list[int]) -> list[int]:
    """One request's path without its padding."""
    assert layout.tree is not None
    parents = layout.tree.parents[request]
    while path and path[-1] == -1:
        path.pop()
    before = -1
    for node in path:
        if not 0 <= node < len(parents) or parents[node] != before:
            start = "a root" if before == -1 else f"a child of draft row {before}"
            raise AcceptanceError(
                "commit",
                f"the accepted path of request {request} leaves its tree",
                expected=f"{start}, or -1 to end it",
                got=node,
                hint="name draft rows from the root on, each the child of the one before",
            )
        before = node
    return path


def _refuse_path(layout: RowLayout, got: object) -> NoReturn:
    raise AcceptanceError(
        "commit",
        "accepted is no path of a tree window",
        expected=f"int [{layout.num_requests}, depth]",
        got=got,
        hint="pass the accepted draft rows of each request from the root on, padded with -1; "
        "counts and masks do not say which branch",
    )


#: What ``Window.commit`` takes; see there.
Accepted = int | Sequence[int] | Sequence[bool] | Sequence[Sequence[int]] | Tensor | SampledIds


def as_acceptance(accepted: object, layout: RowLayout, device: torch.device) -> Tensor:
    """What ``commit`` was given, for any window: a path, or counts or a mask.

    A tree that is a plain sequence in every request takes all of them.

    Raises:
        AcceptanceError: it does not fit the window.
    """
    tree = layout.tree
    if tree is None or (tree.is_chain and not _is_nested(accepted)):
        return as_accepted(accepted, layout, device)
    if isinstance(accepted, SampledIds):
        _refuse_path(layout, "SampledIds")
    return as_path(accepted, layout, device)


def _is_nested(accepted: object) -> bool:
    if hasattr(accepted, "ndim"):
        return bool(accepted.ndim == 2)
    if not isinstance(accepted, Sequence) or isinstance(accepted, str):
        return False
    return any(isinstance(item, Sequence) or hasattr(item, "ndim") for item in accepted)
