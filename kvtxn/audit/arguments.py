"""Checks of what a ledger and a scrub are made of, and of numbers that come from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from ..errors import AcceptanceError, CapacityError, ConfigError, KVTxnError
from ..host_values import described
from .books import Books, Sizes
from .digest import MAX_POSITION, Key
from .groups import Group, Layout


def listed(operation: str, name: str, values: Any, expected: str) -> tuple[Any, ...]:
    """Return the elements of an argument, as Python numbers those of a tensor or array.

    Args:
        operation: the call, for the message.
        name: the argument's name, for the message.
        values: the argument: a tensor, an array, or anything else to iterate over, but no text,
            bytes, set or mapping.
        expected: what the argument has to be, for the message.

    Raises:
        ConfigError: it is something else, or a tensor without dimensions or values.
    """
    if isinstance(values, (Tensor, Iterable)) and not isinstance(
        values, (str, bytes, Set, Mapping)
    ):
        try:
            return tuple(values.tolist() if hasattr(values, "tolist") else values)
        except (TypeError, RuntimeError):  # a tensor without dimensions, or without values
            pass
    raise invalid(operation, name, expected, _short(values))


def mapped(operation: str, name: str, values: Any, expected: str) -> Mapping[Any, Any]:
    """Return an argument that has to be a mapping; an empty one for None.

    Raises:
        ConfigError: it is something else.
    """
    if values is None or isinstance(values, Mapping):
        return values or {}
    raise invalid(operation, name, expected, _short(values))


def invalid(
    operation: str, name: str, expected: str, got: object, error: type[KVTxnError] = ConfigError
) -> KVTxnError:
    """Return, not raise, the error of an argument that is something else than expected.

    The error is of class ``error``; its hint says that nothing was changed.
    """
    hint = "nothing was changed"
    return error(operation, f"{name} is not valid", expected=expected, got=got, hint=hint)


def tokens_besides(operation: str, besides: Any) -> int:
    """Return ``besides`` as a plain int: the tokens that counts of accepted drafts have besides.

    See ``Ledger.resolve``.

    Raises:
        AcceptanceError: it is no int from 0 to ``MAX_POSITION - 1``; a bool or tensor is none.
    """
    if type(besides) is int and 0 <= besides < MAX_POSITION:
        return besides  # the usual case, told quickly
    if hasattr(besides, "__index__") and not isinstance(besides, (bool, int, Tensor)):
        return tokens_besides(operation, besides.__index__())
    got = described(besides) if isinstance(besides, Tensor) else _short(besides)
    raise AcceptanceError(
        operation, "besides is not valid", expected=f"an int from 0 to {MAX_POSITION - 1}", got=got,
        hint="pass 1 where accepted counts the token sampled after the drafts; nothing was changed",
    )  # fmt: skip


def new_books(key: Any, groups: Any, sizes: Sizes, device: Any) -> Books:
    """Allocate a ledger's books; without a key they get a new random one.

    Raises:
        ConfigError: the key, the groups or the device are not valid.
        CapacityError: the device has no memory for them.
    """
    if key is not None and not isinstance(key, Key):
        raise ConfigError(
            "Ledger", "key is not valid", expected="a Key, or None", got=type(key).__name__,
            hint="make one by Key.new() or Key.derived(secret)",
        )  # fmt: skip
    there = _device(device)
    every: tuple[Group, ...] = listed("Ledger", "groups", groups, "a list of groups")
    Layout.of(every)
    try:
        return Books.new(Key.new() if key is None else key, every, sizes, there)
    except RuntimeError as error:
        raise CapacityError(
            "Ledger", f"there is no memory for the books on {there}",
            expected=f"{sizes.num_bytes(every)} bytes", got=str(error).partition("\n")[0],
            hint="lower max_requests, max_length, journal or the groups' num_blocks; "
            "Sizes.num_bytes says what they take",
        ) from error  # fmt: skip


def _device(device: Any) -> torch.device:
    """Return the device that an argument names.

    Raises:
        ConfigError: torch cannot make a tensor there.
    """
    try:
        there = torch.device(device)
        torch.empty(0, device=there)
    except (TypeError, ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            "Ledger", f"device {device!r} cannot be used",
            expected="a device of torch, such as 'cpu' or 'cuda:0'",
            got=str(error).partition("\n")[0], hint="name the device of the engine's tensors",
        ) from None  # fmt: skip
    return there


def prints_of(prints: Any) -> dict[int, dict[str, int]]:
    """Return a rank's fingerprints anew: by step, an int, and by name of the group, a word.

    Steps may be text, as JSON makes them.

    Raises:
        ConfigError: they are no fingerprints.
    """
    if isinstance(prints, Mapping):
        try:
            return {_step(step): _words(words) for step, words in prints.items()}
        except (TypeError, ValueError):
            pass
    raise ConfigError(
        "compare_ranks", "these are no fingerprints",
        expected="by step, by name of the group, an int", got=_short(prints),
        hint="pass what Ledger.fingerprints() of each rank returned, as it is or through JSON",
    )  # fmt: skip


def _step(step: Any) -> int:
    """Return the number of a step, given as an int or decimal text; else raise a TypeError."""
    if type(step) is int or (isinstance(step, str) and step.isdecimal()):
        return int(step)
    raise TypeError("a step is a number")


def _words(words: Any) -> dict[str, int]:
    """Return a copy of one step's fingerprints; a TypeError unless ints by name of the group."""
    if not isinstance(words, Mapping):
        raise TypeError("fingerprints of a step are by group")
    if not all(isinstance(name, str) and type(word) is int for name, word in words.items()):
        raise TypeError("a group has a name and a word")
    return dict(words)


def _short(value: Any) -> str:
    """Return a value's ``repr`` if that has at most 60 characters, else the name of its type."""
    text = repr(value)
    return text if len(text) <= 60 else type(value).__name__
