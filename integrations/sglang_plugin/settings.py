"""The user's settings, a JSON object in an environment variable, checked.

They have the names and values that they have in vLLM. A setting that does not work beside SGLang is
refused with a sentence: an audit that watches less than its user believes is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ...audit.byte_books import EVERY
from ...audit.weights import EVERY as WEIGHTS_EVERY
from ...errors import ConfigError, meant

#: Where the settings are, for messages.
WHERE: Final = "KVTXN_SGLANG"

AUDITS: Final = ("off", "ledger", "bytes")
ON_VIOLATION: Final = ("log", "raise", "contain")
STALE: Final = ("count", "alarm")
#: Numbers of steps are below this one.
_TOO_LARGE: Final = 1 << 31

#: Settings of the plug-in for vLLM that do not work here, and why.
ELSEWHERE: Final[Mapping[str, str]] = {
    "policy": "kvtxn opens no windows in SGLang; it only watches",
    "recurrent": "kvtxn holds no recurrent states in SGLang",
    "unchecked": "the hooks are compared with the installed release at each start",
    "poison": "it was not seen which of SGLang's attention kernels skip masked rows",
    "audit_store": "a storage of HiCache's keeps no identities of rows",
    "audit_key_file": "a storage of HiCache's keeps no identities of rows",
}
#: Values of settings that work in vLLM alone, and why.
_VALUES_ELSEWHERE: Final[Mapping[tuple[str, str], str]] = {
    ("stale", "contain"): "SGLang's radix tree cannot be told to drop one row",
}


@attrs.frozen
class Settings:
    """The checked settings.

    Attributes:
        audit: ``"off"``, ``"ledger"``, or ``"bytes"``: checksums of rows are compared, too.
        audit_every: audit "bytes" compares one slot in this many in each step.
        on_violation: ``"log"``; ``"raise"``: the scheduler ends with an error; or ``"contain"``:
            readers of wrong rows are computed again.
        stale: ``"count"``, or ``"alarm"``: rows of earlier weights that are read are violations.
        weights_every: a sample of each parameter is hashed every so many steps.
        record: keep the life of every slot; each step waits for the device.
        log_tokens: logged violations have the tokens of the rows; they are users'.
        required: an engine that cannot be watched does not start.
    """

    audit: str = "off"
    audit_every: int = EVERY
    on_violation: str = "log"
    stale: str = "count"
    weights_every: int = WEIGHTS_EVERY
    record: bool = False
    log_tokens: bool = False
    required: bool = False


def read_settings(text: str) -> Settings:
    """Read and check the settings.

    Args:
        text: a JSON object.

    Raises:
        ConfigError: it is none, or a setting does not exist, does not work beside SGLang, or cannot
            take its value.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        given = error
    if not isinstance(given, dict):
        raise ConfigError(
            WHERE, "the settings are not valid", expected="a JSON object", got=repr(text),
            hint="""write {"audit": "ledger"}, or leave the variable out""",
        )  # fmt: skip
    _check_names(given)
    if "audit_every" in given and given.get("audit") != "bytes":
        raise ConfigError(
            WHERE, "audit_every has no effect without an audit of bytes",
            got=repr(given["audit_every"]), hint='add "audit": "bytes", or leave audit_every out',
        )  # fmt: skip
    return Settings(
        audit=_one_of(given, "audit", AUDITS),
        audit_every=_steps(given, "audit_every", EVERY),
        on_violation=_one_of(given, "on_violation", ON_VIOLATION),
        stale=_one_of(given, "stale", STALE),
        weights_every=_steps(given, "weights_every", WEIGHTS_EVERY),
        record=_flag(given, "record"),
        log_tokens=_flag(given, "log_tokens"),
        required=_flag(given, "required"),
    )


def _check_names(given: Mapping[str, object]) -> None:
    """Raise ConfigError for a setting that does not exist or does not work here."""
    known = [field.name for field in attrs.fields(Settings)]
    for name in given:
        if name in known:
            continue
        why = f"does not work beside SGLang: {ELSEWHERE[name]}" if name in ELSEWHERE else None
        raise ConfigError(
            WHERE, f"{name} {why}" if why else f"there is no setting {name!r}",
            expected=f"one of {', '.join(known)}", got=repr(name),
            hint=(None if why else meant(name, known)) or "leave it out",
        )  # fmt: skip


def _one_of(given: Mapping[str, object], name: str, values: Sequence[str]) -> str:
    """Return a setting's value; without a setting the first of the possible ones."""
    value = given.get(name, values[0])
    if value in values:
        return str(value)
    why = _VALUES_ELSEWHERE.get((name, value)) if isinstance(value, str) else None
    raise ConfigError(
        WHERE, f"{name} {value!r} does not work: {why}" if why else f"{name} is not valid",
        expected=f"one of {', '.join(map(repr, values))}", got=repr(value),
        hint=(None if why else meant(value, values)) or f"leave {name} out for {values[0]!r}",
    )  # fmt: skip


def _flag(given: Mapping[str, object], name: str) -> bool:
    """Return a setting that is true or false; false if it is not there."""
    value = given.get(name, False)
    if isinstance(value, bool):
        return value
    raise ConfigError(
        WHERE, f"{name} is not valid", expected="true or false", got=repr(value),
        hint=f"leave {name} out for false",
    )  # fmt: skip


def _steps(given: Mapping[str, object], name: str, usual: int) -> int:
    """Return a setting that is a number of steps."""
    value = given.get(name, usual)
    if type(value) is int and 1 <= value < _TOO_LARGE:
        return value
    raise ConfigError(
        WHERE, f"{name} is not valid", expected=f"an int from 1 to {_TOO_LARGE - 1}",
        got=repr(value), hint=f"leave {name} out for {usual}",
    )  # fmt: skip
