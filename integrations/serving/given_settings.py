"""``GivenSettings``: reads an engine's settings for kvtxn, and refuses what no setting takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ...errors import ConfigError, KVTxnError, meant

#: Numbers of steps and slots are below this one.
_TOO_LARGE: Final = 1 << 31


class RequiredError(KVTxnError, RuntimeError):
    """The user requires kvtxn, and this engine cannot have it."""

    default_hint = "leave 'required' out to run this engine without kvtxn"


@attrs.frozen
class GivenSettings:
    """The settings that a user gave. Each method raises ``ConfigError`` for one that is not valid.

    Attributes:
        where: the place of the settings, for messages.
        given: the settings by name.
        elsewhere: settings, and values of settings as in ``"stale 'contain'"``, that work beside
            another engine alone; and why, behind "does not work beside".
    """

    where: str
    given: Mapping[str, object]
    elsewhere: Mapping[str, str] = attrs.field(factory=dict)

    def check_names(self, known: Sequence[str]) -> None:
        """Refuse settings that do not exist; the error names the one spelled most alike."""
        unknown = sorted(str(name) for name in self.given if name not in known)
        if unknown:
            self._refuse_elsewhere(unknown[0], known)
            what, near = f"there is no setting {unknown[0]!r}", meant(unknown[0], known)
            got = ", ".join(map(repr, unknown))
            raise self._error(what, f"one of {', '.join(known)}", got, near or "leave it out")

    def one_of(self, name: str, values: Sequence[str], hint: str | None = None) -> str:
        """Return a setting's value, one of ``values``; the first of them without the setting.

        Another value is refused; the error's next step is the value spelled most alike, else
        ``hint``.
        """
        value = self.given.get(name, values[0])
        if value not in values:
            self._refuse_elsewhere(f"{name} {value!r}", values)
            hint = meant(value, values) or hint or f"leave {name} out for {values[0]!r}"
            raise self.not_valid(name, f"one of {', '.join(map(repr, values))}", hint)
        return str(value)

    def flag(self, name: str) -> bool:
        """Return a setting that is true or false; false without it."""
        value = self.given.get(name, False)
        if not isinstance(value, bool):
            raise self.not_valid(name, "true or false", f"leave {name} out for false")
        return value

    def number(self, name: str, default: int, hint: str = "") -> int:
        """Return a setting that is an int from 1 to 2^31 - 1; ``default`` without it.

        ``hint`` is added to the error's next step.
        """
        value = self.given.get(name, default)
        if type(value) is not int or not 1 <= value < _TOO_LARGE:
            expected = f"an int from 1 to {_TOO_LARGE - 1}"
            raise self.not_valid(name, expected, f"leave {name} out for {default}{hint}")
        return value

    def not_valid(self, name: str, expected: str, hint: str) -> ConfigError:
        """Return, without raising it, the error of a setting that cannot take its value."""
        return self._error(f"{name} is not valid", expected, repr(self.given.get(name)), hint)

    def _refuse_elsewhere(self, what: str, known: Sequence[str]) -> None:
        """Refuse a setting or value that works beside another engine alone; else do nothing."""
        if what in self.elsewhere:
            why = f"{what} does not work beside {self.elsewhere[what]}"
            raise self._error(why, f"one of {', '.join(known)}", what, "leave it out")

    def _error(self, what: str, expected: str, got: str, hint: str) -> ConfigError:
        """Return an error about these settings."""
        return ConfigError(self.where, what, expected=expected, got=got, hint=hint)
