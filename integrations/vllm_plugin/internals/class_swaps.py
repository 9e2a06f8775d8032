"""Giving an object of vLLM's another class, or one of its methods a companion, and undoing it.

An object that kvtxn hooks changes its class for a private subclass of it (``swap_class``); its own
class stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from ....errors import KVTxnError


@cache
def _subclass(own: Any, mixins: tuple[Any, ...]) -> Any:
    """Return the subclass that objects of class ``own`` share once they have these mixins.

    Python lets an object change its class only where both have one layout, and a class has that of
    its first base. So the first base is an empty subclass of ``own``; then come the mixins, with
    all their bases, and ``own`` is last.
    """
    layout = type(own.__name__, (own,), {})
    before = type("Mixins", mixins, {}).__mro__[1:-1]
    return type(f"Window{own.__name__}", (layout, *before, own), {"kvtxn_own_class": own})


def is_swapped(target: object) -> bool:
    """Tell whether the object has a class that ``swap_class`` made."""
    return hasattr(target, "kvtxn_own_class")


def swap_class(target: object, *mixins: type) -> None:
    """Put mixins before an object's own class in its method resolution order.

    Args:
        target: an object of a class with ``__dict__``; its class itself stays as it is.
        *mixins: plain classes, the first one first; they reach the object's own methods by
            ``super()``.

    Raises:
        KVTxnError: the object's class was swapped before.
    """
    if is_swapped(target):
        raise KVTxnError(
            "swap_class",
            f"this object's class, {type(target).__name__}, was swapped before",
            hint="call restore_class first",
        )
    own: Any = type(target)
    target.__class__ = _subclass(own, mixins)


def restore_class(target: object) -> None:
    """Give an object the class that it had before ``swap_class``.

    Raises:
        KVTxnError: the class was not swapped, or somebody else has subclassed it since.
    """
    own = vars(type(target)).get("kvtxn_own_class")
    if own is None:
        raise KVTxnError(
            "restore_class",
            f"{type(target).__name__} is not a class that swap_class made",
            hint="undo later changes of the object's class first",
        )
    target.__class__ = own


def mix_in(target: object, *mixins: type, **own: object) -> Callable[[], None]:
    """Put mixins before an object's class, and give the object what they need.

    Args:
        target: as for ``swap_class``.
        *mixins: as for ``swap_class``.
        **own: attributes of the object, by name.

    Returns:
        A function that takes mixins and attributes away again.

    Raises:
        KVTxnError: as ``swap_class``.
    """
    swap_class(target, *mixins)
    vars(target).update(own)

    def undo() -> None:
        restore_class(target)
        for name in own:
            delattr(target, name)

    return undo


def follow(target: Any, name: str, after: Callable[[Any], None]) -> Callable[[], None]:
    """Call a function with each result of an object's method, whoever else has hooked it.

    Args:
        target: the object.
        name: the method's name.
        after: gets the result.

    Returns:
        A function that undoes it.
    """
    own = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        after(result)
        return result

    setattr(target, name, call)
    return lambda: delattr(target, name)


def precede(target: Any, name: str, before: Callable[..., None]) -> Callable[[], None]:
    """Call a function with the arguments of an object's method, before the method.

    Args:
        target: the object.
        name: the method's name.
        before: gets the arguments.

    Returns:
        A function that undoes it.
    """
    own = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return own(*args, **kwargs)

    setattr(target, name, call)
    return lambda: delattr(target, name)


def check_methods(owner: type, methods: Mapping[str, Sequence[str]]) -> str | None:
    """Compare a class's methods with the expected ones.

    Args:
        owner: the class.
        methods: each method's parameters after ``self``, by the method's name; "?" after a name
            marks a parameter or method that some releases lack.

    Returns:
        One sentence about the first difference; None without any.
    """
    for name, parameters in methods.items():
        method = inspect.getattr_static(owner, name, None)
        if not inspect.isfunction(method):
            return f"{owner.__name__}.{name} is not there"
        found = tuple(inspect.signature(method).parameters)[1:]
        everything = tuple(parameter.rstrip("?") for parameter in parameters)
        needed = tuple(parameter for parameter in parameters if not parameter.endswith("?"))
        if found not in (everything, needed):
            return f"{owner.__name__}.{name} takes {found}, not {everything}"
    return None
