"""``TxnConfig``: everything a user can choose, checked when it is built."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import attrs

from .errors import BackendUnavailableError, ConfigError

Policy = Literal["auto", "deferred", "undo", "direct"]
AcceptanceMode = Literal["auto", "loop", "vectorized", "graph"]
OnError = Literal["fallback", "raise"]
Staging = Literal["auto", "reference", "copy"]

POLICIES: Final[tuple[str, ...]] = get_args(Policy)
ACCEPTANCE_MODES: Final[tuple[str, ...]] = get_args(AcceptanceMode)
ON_ERROR: Final[tuple[str, ...]] = get_args(OnError)
STAGING: Final[tuple[str, ...]] = get_args(Staging)


def _one_of(choices: tuple[str, ...]) -> Any:
    def check(_: object, attribute: attrs.Attribute[str], value: object) -> None:
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(
                "TxnConfig",
                f"{attribute.name} is not valid",
                expected=f"one of {', '.join(map(repr, choices))}",
                got=repr(value),
                hint=f"choose one of them, or leave {attribute.name} out",
            )

    return check


def _positive(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            "TxnConfig",
            f"{attribute.name} is not valid",
            expected="a positive int",
            got=repr(value),
            hint="use the most rows one verify pass can have: requests x (drafts + 1)",
        )


def _boolean(_: object, attribute: attrs.Attribute[bool], value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(
            "TxnConfig", f"{attribute.name} is not valid", expected="a bool", got=repr(value)
        )


def _registered(_: object, __: attrs.Attribute[str], value: object) -> None:
    from . import registry

    names = registry.names()
    if not isinstance(value, str) or (value != "auto" and value not in names):
        raise BackendUnavailableError(
            "TxnConfig",
            f"no backend is registered as {value!r}",
            expected=f"'auto' or one of {', '.join(map(repr, names))}",
            got=repr(value),
            hint="install the package that provides it, or call kvtxn.registry.register",
        )


@attrs.frozen(kw_only=True)
class TxnConfig:
    """How a manager keeps its promises.

    Attributes:
        policy: ``"deferred"``, ``"undo"``, ``"direct"``, or ``"auto"`` (deferred where
            attention can read the window, else undo, else direct).
        backend: a registered executor's name, or ``"auto"`` for the fastest that runs here.
        max_rows: most rows one window may have; sizes every fixed buffer.
        acceptance: how token ids become accepted counts; see ``kvtxn.acceptance``.
        on_error: what an executor's own failure does. ``"fallback"``: the window goes on
            with direct writes and nothing is lost. ``"raise"``: the caches are restored
            and the error surfaces. Misuse raises either way. A hook's error is logged
            and counted, or surfaces likewise; the window it was told of stands.
        staging: how rows wait for a deferred commit. ``"reference"``: the caller's tensors
            are held, and the caller promises not to write into them. ``"copy"``: into a
            fixed buffer. ``"auto"``: by reference where torch's version counter would notice
            an in-place write by commit, else by copy: in inference mode, and from within a
            graph of ``torch.compile``.
        debug: check every commit against the reference, row by row. Slow, and it
            waits for the device; for hunting a bug, not for serving.

    Raises:
        ConfigError: a value is not one it may take.
        BackendUnavailableError: no backend of that name is registered.
    """

    policy: Policy = attrs.field(default="auto", validator=_one_of(POLICIES))
    backend: str = attrs.field(default="auto", validator=_registered)
    max_rows: int = attrs.field(default=512, validator=_positive)
    acceptance: AcceptanceMode = attrs.field(default="auto", validator=_one_of(ACCEPTANCE_MODES))
    on_error: OnError = attrs.field(default="fallback", validator=_one_of(ON_ERROR))
    staging: Staging = attrs.field(default="auto", validator=_one_of(STAGING))
    debug: bool = attrs.field(default=False, validator=_boolean)
