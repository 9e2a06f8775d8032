"""``TxnConfig``: the settings of a manager, checked when they are built."""

from __future__ import annotations

from typing import Any, Final, Literal, Self, get_args

import attrs

from .backend_names import names
from .errors import BackendUnavailableError, ConfigError, UnknownSettingError, meant

Policy = Literal["auto", "deferred", "undo", "direct"]
AcceptanceMode = Literal["auto", "loop", "vectorized", "graph"]
OnError = Literal["fallback", "raise"]
Staging = Literal["auto", "reference", "copy"]

POLICIES: Final[tuple[str, ...]] = get_args(Policy)
ACCEPTANCE_MODES: Final[tuple[str, ...]] = get_args(AcceptanceMode)
ON_ERROR: Final[tuple[str, ...]] = get_args(OnError)
STAGING: Final[tuple[str, ...]] = get_args(Staging)

#: Kernels count the rows of a window in 32 bits.
MOST_ROWS: Final = (1 << 31) - 1


def _one_of(choices: tuple[str, ...]) -> Any:
    """Return a validator that raises a ConfigError for all but the given texts."""

    def check(_: object, attribute: attrs.Attribute[str], value: object) -> None:
        """Refuse a value that is none of the choices, and name the one that was probably meant."""
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(
                "TxnConfig",
                f"{attribute.name} is not valid",
                expected=f"one of {', '.join(map(repr, choices))}",
                got=repr(value),
                hint=meant(value, choices) or f"choose one of them, or leave {attribute.name} out",
            )

    return check


def _positive(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    """Refuse, with a ConfigError, what is no int from 1 to ``MOST_ROWS``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_ROWS:
        raise ConfigError(
            "TxnConfig",
            f"{attribute.name} is not valid",
            expected=f"a positive int of at most {MOST_ROWS}",
            got=repr(value),
            hint="pass the largest number of rows in a verify pass: requests x (drafts + 1)",
        )


def _boolean(_: object, attribute: attrs.Attribute[bool], value: object) -> None:
    """Refuse, with a ConfigError, what is no bool."""
    if not isinstance(value, bool):
        raise ConfigError(
            "TxnConfig", f"{attribute.name} is not valid", expected="a bool", got=repr(value)
        )


def _registered(_: object, __: attrs.Attribute[str], value: object) -> None:
    """Refuse, with a BackendUnavailableError, what is neither "auto" nor a backend's name."""
    known = names()
    if not isinstance(value, str) or (value != "auto" and value not in known):
        raise BackendUnavailableError(
            "TxnConfig",
            f"no backend is registered as {value!r}",
            expected=f"'auto' or one of {', '.join(map(repr, known))}",
            got=repr(value),
            hint=meant(value, ("auto", *known))
            or "install the package that provides it, or call kvtxn.registry.register",
        )


@attrs.frozen(kw_only=True)
class TxnConfig:
    """The settings of a ``TransactionManager``.

    Attributes:
        policy: ``"deferred"``, ``"undo"``, ``"direct"``, or ``"auto"`` (deferred if
            attention can read the window, else undo, else direct).
        backend: a registered executor's name, or ``"auto"`` for the fastest that runs here.
        max_rows: the most rows that one window may have, below 2^31; sizes every fixed buffer.
        acceptance: the way token ids are turned into accepted counts; see ``kvtxn.acceptance``.
        on_error: the effect of an executor's own failure. ``"fallback"``: the window goes on
            with direct writes and no accepted row is lost. ``"raise"``: the caches are restored
            (not under ``direct``, which holds nothing back) and the error surfaces. Misuse of the
            library raises under both. An error in a hook is logged and counted, and under
            ``"raise"`` surfaces; the window ends all the same.
        staging: the way rows wait for a deferred commit. ``"reference"``: the caller's tensors
            are held, and the caller promises not to write into them. ``"copy"``: rows are copied
            into a fixed buffer. ``"auto"``: by reference if torch's version counter would reveal
            an in-place write before commit, else by copy: in inference mode, and in graphs of
            ``torch.compile``.
        debug: compare the caches with the reference after every commit, row by row. Slow, and it
            waits for the device: for hunting a bug, not for serving.

    Raises:
        ConfigError: a setting has a value that it may not take, or does not exist.
        BackendUnavailableError: no backend of that name is registered.
    """

    def __new__(cls, *_: object, **settings: object) -> Self:
        """Refuse settings that do not exist, and name the one that was probably meant.

        Raises:
            UnknownSettingError: one does not exist.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name in settings:
            if name not in known:
                raise UnknownSettingError(
                    "TxnConfig",
                    f"there is no setting {name!r}",
                    expected=f"settings among {', '.join(known)}",
                    got=repr(name),
                    hint=meant(name, known) or "leave it out, or see TxnConfig for its settings",
                )
        return object.__new__(cls)

    policy: Policy = attrs.field(default="auto", validator=_one_of(POLICIES))
    backend: str = attrs.field(default="auto", validator=_registered)
    max_rows: int = attrs.field(default=512, validator=_positive)
    acceptance: AcceptanceMode = attrs.field(default="auto", validator=_one_of(ACCEPTANCE_MODES))
    on_error: OnError = attrs.field(default="fallback", validator=_one_of(ON_ERROR))
    staging: Staging = attrs.field(default="auto", validator=_one_of(STAGING))
    debug: bool = attrs.field(default=False, validator=_boolean)
