"""The cases of the conformance kit that run without a GPU.

A GPU runs all of them, and so does the CPU under ``--interpret-all``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations_with_replacement

import pytest
from kernels_here import ON_GPU


def take_some(
    config: pytest.Config,
    items: list[pytest.Item],
    sparse: Mapping[str, int],
    whole: Collection[str] = (),
) -> None:
    """Take every test of some kits, in a few cases each: interpreted, all take many hours.

    The cases taken differ from test to test, so that policies, layouts and formats all have their
    turn.

    Args:
        config: pytest's.
        items: the collected tests, of which those taken stay.
        sparse: by the name of a kit's class: one case in so many is taken of each test; of tests
            with fewer cases one.
        whole: tests of which all cases are taken.
    """
    if ON_GPU or config.getoption("--interpret-all"):
        return
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        kit = getattr(item, "cls", None)
        if isinstance(item, pytest.Function) and kit is not None and kit.__name__ in sparse:
            cases.setdefault((kit.__name__, item.originalname), []).append(item)
    left_out = set()
    for number, ((kit_name, name), each) in enumerate(sorted(cases.items())):
        if name not in whole:
            every = sparse[kit_name]
            taken = range(number % min(len(each), every), len(each), every)
            left_out |= {id(item) for index, item in enumerate(each) if index not in taken}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def take_pairs(config: pytest.Config, items: list[pytest.Item], kit: str) -> None:
    """Take of each test of a kit the cases with a value, or two together, that none before has.

    Args:
        config: pytest's.
        items: the collected tests, of which those taken stay.
        kit: the name of the kit's class.
    """
    if ON_GPU or config.getoption("--interpret-all"):
        return
    seen, left_out = set[object](), []
    for item in items:
        if getattr(getattr(item, "cls", None), "__name__", None) != kit:
            continue
        assert isinstance(item, pytest.Function)
        given = item.callspec.params.items() if hasattr(item, "callspec") else ()
        params = [(name, id(value)) for name, value in given]
        pairs = {(item.originalname, each) for each in combinations_with_replacement(params, 2)}
        if params and pairs <= seen:
            left_out.append(item)
        seen |= pairs
    config.hook.pytest_deselected(items=left_out)
    dropped = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in dropped]
