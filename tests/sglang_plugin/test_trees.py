"""The links of a tree of drafts, turned into the draft that each one follows."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.sglang_plugin.seam.steps import rows_before


def links(parents, order):
    """First children and next siblings, siblings in an order; the parents are of all but the root.

    Args:
        parents: by node behind the root, the node that it follows.
        order: sorts siblings.
    """
    width = len(parents) + 1
    children, siblings = [-1] * width, [-1] * width
    for node in range(width):
        family = order(child for child, parent in enumerate(parents, 1) if parent == node)
        if family:
            children[node] = family[0]
        for one, other in pairwise(family):
            siblings[one] = other
    return children, siblings


@pytest.mark.parametrize("order", [sorted, lambda each: sorted(each, reverse=True)])
@pytest.mark.parametrize("width", [2, 3, 8, 33])
def test_each_row_follows_its_parent(order, width):
    """Whatever the order of siblings: NGRAM's ascend, those of EAGLE's kernel may not."""
    chance = random.Random(width)
    trees = [[chance.randrange(node) for node in range(1, width)] for _ in range(4)]
    trees += [[0] * (width - 1), [*range(width - 1)]]  # a star, a chain
    found = torch.tensor([links(tree, order) for tree in trees])
    spec = SimpleNamespace(
        draft_token_num=width,
        retrieve_next_token=found[:, 0].contiguous(),
        retrieve_next_sibling=found[:, 1].contiguous(),
    )
    expected = [[-2, *(parent - 1 for parent in tree)] for tree in trees]
    assert rows_before(spec, len(trees)).tolist() == expected
