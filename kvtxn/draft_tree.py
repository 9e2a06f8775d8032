"""Draft trees: several guesses for each position; commit keeps one path.

``accepted_forms`` checks the paths that callers give.

A draft row is a node of its request's tree. The parent of a node is another draft row of the same
request, or the last settled row. Draft row ``i`` of a request has the slot of row position ``i``,
as in any window. Commit moves the nodes of the accepted path ``n0, n1, ...`` to row positions 0, 1,
..., where the rows of a plain sequence of accepted tokens would lie. A node sees its ancestors and
itself (tree attention: Miao et al., 2024, arXiv:2305.09781; Cai et al., 2024, arXiv:2401.10774).

Each row position ``t`` is decided independently, without a loop over the path: it gets node
``path[t]`` if the path up to there is exactly that node's own way from the root. So an invalid
path is cut at the first node whose parent is not the node before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import attrs
import torch
from torch import Tensor

from .errors import TreeError
from .host_values import in_python, to_device

#: The parent of each draft row: one sequence for all requests alike, or one per request.
Parents = Sequence[int] | Sequence[Sequence[int]]

#: Parents after ``as_parents`` checked them: one tuple for all requests, or one per request.
KnownParents = tuple[int, ...] | tuple[tuple[int, ...], ...]


@attrs.frozen(eq=False)
class Tree:
    """The draft trees of a window, one per request, on the host and on the device.

    Attributes:
        parents: per request and draft row, the parent's draft row; -1 is the last settled row.
        depth: nodes on the longest path of any request.
        is_chain: True if every tree is a plain sequence, so that counts can say which rows to keep.
        table: int64 ``[num_rows, 1 + depth]``: the number of drafts of the row's request; then the
            way from the root to the node, itself included; -1 after its end, and for settled rows.
        order: int64 ``[num_rows]``, a row's position in its sequence: settled rows 0, 1, ...,
            a node as far behind them as it is deep.
        visible: bool ``[num_rows, longest]``, True for the rows of its request that a row sees.
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
        """Build the trees of ``len(parents)`` requests; parents come before their children."""
        ways = [ways_of(each) for each in parents]
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
        """``table`` without its first column, int64 ``[num_rows, depth]``."""
        return self.table[:, 1:]

    def sources(self, request: Tensor, place: Tensor, path: Tensor) -> Tensor:
        """Return, for each row position, the row that a commit along ``path`` moves there, or -1.

        Args:
            request: int64 ``[num_rows]``, the request of each row.
            place: int64 ``[num_rows]``, row positions: 0, 1, ... for drafts, -1 for settled rows.
            path: int ``[num_requests, columns]``, nodes from the root on; any other number
                ends the path.

        Returns:
            int64 ``[num_rows]``.
        """
        num_rows, columns = place.shape[0], min(path.shape[1], self.depth)
        if columns == 0 or num_rows == 0:
            return torch.full_like(place, -1)
        steps = path[:, :columns].to(torch.int64)[request]
        inside = (place >= 0) & (place < columns)
        node = steps.gather(1, place.clamp(0, columns - 1).unsqueeze(1)).squeeze(1)
        inside &= (node >= 0) & (node < self.table[:, 0])
        rows = torch.arange(num_rows, device=place.device)
        # From the row at this row position to the request's first draft row, and on to the node.
        source = torch.where(inside, rows - place + node, 0)
        beyond = torch.arange(columns, device=place.device) > place.unsqueeze(1)
        same = (steps == self.chain[source, :columns]) | beyond
        return torch.where(inside & same.all(1), source, -1)


def ways_of(parents: tuple[int, ...]) -> list[list[int]]:
    """Return, for each node of one request, the nodes from the root down to it."""
    ways: list[list[int]] = []
    for node, parent in enumerate(parents):
        ways.append([*(ways[parent] if parent >= 0 else ()), node])
    return ways


def per_request(parents: KnownParents, num_requests: int) -> tuple[tuple[int, ...], ...]:
    """Return the parents of each request; one tuple for all is repeated."""
    each = tuple(item for item in parents if isinstance(item, tuple))
    if each:
        return each
    return (tuple(item for item in parents if isinstance(item, int)),) * num_requests


def check_fit(parents: Sequence[tuple[int, ...]], draft_len: Sequence[int]) -> None:
    """Refuse, with a TreeError, trees that do not have one parent per draft row."""
    lengths = list(map(len, parents))
    if lengths != list(draft_len):
        raise TreeError(
            "window",
            "tree does not have one parent per draft row",
            expected=f"draft_len {list(draft_len)}",
            got=f"{lengths} parents",
            hint="pass one sequence if all requests are alike, else one per request",
        )


def as_parents(tree: object) -> KnownParents:
    """Check and return the ``tree`` argument of ``window``: each parent comes before its child.

    Arrays, tensors on the host, and their scalars count as lists and ints.

    Raises:
        TreeError: ``tree`` is not such a sequence, or a parent does not come before its child.
    """
    if isinstance(tree, Tensor) and tree.device.type != "cpu":
        _refuse_tree("tree is on a device", f"{tree.dtype} on {tree.device}")
    tree = in_python(tree)
    if not isinstance(tree, Sequence) or isinstance(tree, (str, bytes)):
        _refuse_tree("tree is not a sequence", type(tree).__name__)
    if any(isinstance(item, Sequence) for item in tree):
        return tuple(_parents(item, request) for request, item in enumerate(tree))
    return _parents(tree, None)


def _parents(tree: object, request: int | None) -> tuple[int, ...]:
    """Return the parents of one request as a tuple; ``request`` is its number, for messages.

    Raises:
        TreeError: they are no sequence of ints, or a parent does not come before its child.
    """
    where = "" if request is None else f" of request {request}"
    if not isinstance(tree, Sequence) or isinstance(tree, (str, bytes)):
        _refuse_tree(f"the tree{where} is not a sequence", repr(tree))
    for node, parent in enumerate(tree):
        if type(parent) is not int or not -1 <= parent < node:
            _refuse_tree(f"the parent of draft row {node}{where} does not come before it", parent)
    return tuple(tree)


def _refuse_tree(problem: str, got: object) -> NoReturn:
    """Raise the TreeError of a malformed tree."""
    raise TreeError(
        "window",
        problem,
        expected="per draft row the index of an earlier one, or -1",
        got=got,
    )
