"""Hooks into vLLM, each of which is undone: modules, classes of objects, methods, names in code.

``when_imported`` waits until vLLM imports a module: a process of vLLM's imports what it needs, and
a hook that imported its module would make every process pay for all of them. ``swap_class`` gives
an object a private subclass of its class; its own class stays as it is. ``with_globals`` lets names
in a function of vLLM's stand for other objects. A replaced name that the code no longer uses would
change nothing, and nobody would notice; so each is looked up in the code before anything is hooked.

Here and elsewhere in the plug-in, a function that hooks something returns one that undoes it.
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import Lock
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from ....errors import KVTxnError, LayerError, shown

T = TypeVar("T")


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
    """Tell whether the object has a class that ``swap_class`` made, or a subclass of one."""
    return hasattr(target, "kvtxn_own_class")


def swap_class(target: object, *mixins: type) -> None:
    """Put mixins before an object's own class in its method resolution order.

    The object gets a private subclass; objects of one class with the same mixins share it.

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


def give_back(target: object) -> None:
    """Call ``restore_class``, then delete the object's attributes that begin with ``kvtxn``.

    Raises:
        KVTxnError: as ``restore_class``; the object keeps what its hooks need.
    """
    restore_class(target)
    for name in [name for name in vars(target) if name.startswith("kvtxn")]:
        delattr(target, name)


def mix_in(target: object, *mixins: type, **own: object) -> Callable[[], None]:
    """Put mixins before an object's class, and set the attributes that they need.

    Returns:
        A function that undoes both: the attributes are deleted.

    Raises:
        KVTxnError: the object's class was swapped before.
    """
    swap_class(target, *mixins)
    vars(target).update(own)

    def undo() -> None:
        restore_class(target)
        for name in own:
            delattr(target, name)

    return undo


def kept_on(target: object, name: str, make: Callable[[], T]) -> T:
    """Return the object that ``target`` keeps in its attribute ``name``; made at the first call."""
    kept: T | None = vars(target).get(name)
    if kept is None:
        kept = vars(target)[name] = make()
    return kept


def shadow(target: Any, name: str, method: Callable[..., object]) -> Callable[[], None]:
    """Set a method on an object itself, in place of its class's; it gets no ``self``.

    Returns:
        A function that takes it away again, and puts back one that the object itself had before.
    """
    before = vars(target).get(name)
    setattr(target, name, method)

    def undo() -> None:
        if before is None:
            delattr(target, name)
        else:
            setattr(target, name, before)

    return undo


def follow(target: Any, name: str, after: Callable[[Any], None]) -> Callable[[], None]:
    """Call a function with each result of an object's method, whoever else has hooked it.

    The caller gets the result; it gets the error instead if the method or ``after`` raises.

    Returns:
        A function that undoes it.
    """
    own = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> object:
        result = own(*args, **kwargs)
        after(result)
        return result

    return shadow(target, name, call)


def follow_async(target: Any, name: str, after: Callable[[Any], None]) -> Callable[[], None]:
    """Call a function with each result of an object's coroutine method, once it is awaited.

    The caller gets the result, or the error if the method or ``after`` raises.

    Returns:
        A function that undoes it.
    """
    own = getattr(target, name)

    async def call(*args: Any, **kwargs: Any) -> object:
        result = await own(*args, **kwargs)
        after(result)
        return result

    return shadow(target, name, call)


def precede(target: Any, name: str, before: Callable[..., None]) -> Callable[[], None]:
    """Call a function before an object's method, with its arguments.

    The method is not called if ``before`` raises: the caller gets that error.

    Returns:
        A function that undoes it.
    """
    own = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> object:
        before(*args, **kwargs)
        return own(*args, **kwargs)

    return shadow(target, name, call)


def follow_end(target: Any, name: str, then: Callable[..., None]) -> Callable[[], None]:
    """Call a function after an object's method, with its arguments, even if the method raised.

    The caller gets the method's result or error, or an error of ``then`` instead.

    Returns:
        A function that undoes it.
    """
    own = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> object:
        try:
            return own(*args, **kwargs)
        finally:
            then(*args, **kwargs)

    return shadow(target, name, call)


def replace_method(
    owner: Any, name: str, make: Callable[[Any], Any], what: str
) -> Callable[[], None]:
    """Replace a method of one of vLLM's classes by what ``make`` makes of it.

    Args:
        owner: the class.
        name: the method's.
        make: gets the method, returns the new one.
        what: a plural that names the class's objects in the error.

    Returns:
        A function that undoes it.

    Raises:
        KVTxnError: kvtxn has replaced it already.
    """
    own = getattr(owner, name)
    if hasattr(own, "kvtxn_hook"):
        raise KVTxnError(f"hook_{what}", f"vLLM's {what} are hooked already", hint="unhook first")
    method: Any = wraps(own)(make(own))
    method.kvtxn_hook = True
    setattr(owner, name, method)
    return lambda: setattr(owner, name, own)


def check_methods(owner: type, methods: Mapping[str, Sequence[str]]) -> str | None:
    """Say in a sentence how a class's methods differ from the expected ones; None if they do not.

    The first difference counts: a method that is missing, or has other parameters or another order.

    Args:
        owner: the class.
        methods: each method's parameters after ``self``, by the method's name; "?" after a name
            marks a parameter that some releases lack, all of them together.
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


def method_of(layer: object, name: str) -> Callable[..., object]:
    """Return a method as a layer's class has it, as a plain function that takes the layer first.

    Hooks on the layer itself do not count.
    """
    method: Callable[..., object] = getattr(type(layer), name)
    return method


def with_globals(function: Any, **own: object) -> FunctionType:
    """Copy a function; in the copy, some global names stand for other objects.

    Its other globals are those of the moment of the copy.

    Raises:
        LayerError: the function's code does not use one of the names.
    """
    for name in own:
        wrong = not_used(function, name)
        if wrong is not None:
            raise LayerError(
                "with_globals",
                wrong,
                expected=f"a use of the global name {name!r}",
                got="none",
                hint="report this with the version of vLLM: its function has changed",
            )
    names = {**function.__globals__, **own}
    parts = function.__name__, function.__defaults__, function.__closure__
    made = FunctionType(function.__code__, names, *parts)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def not_used(function: object, name: str) -> str | None:
    """Say in a sentence that a function's code does not use a global name; None if it does."""
    code = getattr(function, "__code__", None)
    if code is not None and name in _globals_of(code):
        return None
    return f"{getattr(function, '__qualname__', function)} does not use {name}"


@cache
def _globals_of(code: CodeType) -> frozenset[str]:
    """Return the global names that a function reads, by itself or in functions inside of it.

    ``co_names`` has the names of attributes as well, which are not looked up in the globals.
    """
    return frozenset(
        each.argval
        for part in _parts(code)
        for each in dis.get_instructions(part)
        if each.opname == "LOAD_GLOBAL"
    )


def _parts(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of all functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def not_called(function: Any) -> str | None:
    """Say in a sentence that a function's own module never uses its name; None if it does."""
    if function.__name__ in _used_in(function.__module__):
        return None
    return f"nothing in {function.__module__} uses {function.__qualname__}"


@cache
def _used_in(module: str) -> frozenset[str]:
    """Return the names and attributes that an imported module's source reads."""
    return frozenset(
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module])))
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)
    )


def when_imported(name: str, hook: Callable[[Any], Callable[[], None]]) -> Callable[[], None]:
    """Call a function with a module once it is imported: at once, if it is.

    Args:
        name: the module's.
        hook: gets the module, and returns a function that undoes what it did. If it raises when
            the module is imported later, that is logged, and the import goes on.

    Returns:
        A function that undoes the hook, or lets it wait no longer.

    Raises:
        Exception: whatever the hook raises, if the module is imported already.
    """
    waiting = _Waiting(name, hook)
    sys.meta_path.insert(0, waiting)
    try:
        if name in sys.modules:
            waiting.run(import_module(name))  # waits for a thread that is importing it
    except BaseException:
        waiting.stop()
        raise
    return waiting.stop


class _Waiting(MetaPathFinder):
    """Waits for the import of one module.

    It finds the module by the finders after itself, and has the hook follow its execution.
    """

    def __init__(self, name: str, hook: Callable[[Any], Callable[[], None]]) -> None:
        self._name = name
        self._hook = hook
        self._lock = Lock()
        self._waits = True
        self._undo: Callable[[], None] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, with the hook to follow its execution; None of other modules.

        Also None once nothing waits any more, and if no other finder knows the module.
        """
        if fullname != self._name or not self._waits:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        ask = [finder.find_spec for finder in others if hasattr(finder, "find_spec")]
        specs = (find(fullname, path, target) for find in ask)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        """Let a loader run the hook after the module's execution; an error of it is logged."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ != self._name:  # a loader may serve several modules
                return
            try:
                self.run(module)
            except Exception as error:
                from ....log import get_logger

                why = f"{self._name} cannot be hooked: {shown(error)}"
                get_logger().warning("kvtxn.inactive", why=why)

        loader.exec_module = exec_module

    def run(self, module: ModuleType) -> None:
        """Call the hook with the module, unless it was called or stopped before; wait no longer."""
        with self._lock:
            if not self._waits:
                return
            self._leave()
        self._undo = self._hook(module)

    def stop(self) -> None:
        """Undo the hook; if it waits still, it waits no longer."""
        with self._lock:
            if self._waits:
                self._leave()
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _leave(self) -> None:
        """Wait no longer: leave the list of finders."""
        self._waits = False
        sys.meta_path.remove(self)
