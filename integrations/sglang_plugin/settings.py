"""The user's settings, a JSON object in an environment variable, checked.

They have the names and values that they have in vLLM. A setting that does not work beside SGLang is
refused with a sentence: an audit that watches less than its user believes is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import attrs

from ...audit.byte_books import EVERY
from ...audit.weights import EVERY as WEIGHTS_EVERY
from ...errors import ConfigError
from ..serving.given_settings import GivenSettings

#: Where the settings are, for messages.
WHERE: Final = "KVTXN_SGLANG"

AUDITS: Final = ("off", "ledger", "bytes")
ON_VIOLATION: Final = ("log", "raise", "contain")
STALE: Final = ("count", "alarm")
_NO_IDENTITIES: Final = "SGLang: a storage of HiCache's keeps no identities of rows"
#: Settings of the plug-in for vLLM that do not work here, and why.
ELSEWHERE: Final[Mapping[str, str]] = {
    "policy": "SGLang: kvtxn opens no windows in it; it only watches",
    "recurrent": "SGLang: kvtxn holds no recurrent states in it",
    "unchecked": "SGLang: the hooks are compared with the installed release at each start",
    "poison": "SGLang: it was not seen which of its attention kernels skip masked rows",
    "audit_store": _NO_IDENTITIES,
    "audit_key_file": _NO_IDENTITIES,
}
#: Values of settings that work in vLLM alone, and why.
_VALUES_ELSEWHERE: Final[Mapping[str, str]] = {
    "stale 'contain'": "SGLang: its radix tree cannot be told to drop one row",
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
    """Read the settings, check them, and fill in the defaults of those left out.

    Args:
        text: a JSON object.

    Raises:
        ConfigError: it is none, or a setting does not exist, does not work beside SGLang, or cannot
            take its value; or ``audit_every`` stands without audit "bytes".
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
    found = GivenSettings(WHERE, given, {**ELSEWHERE, **_VALUES_ELSEWHERE})
    found.check_names([field.name for field in attrs.fields(Settings)])
    if "audit_every" in given and given.get("audit") != "bytes":
        raise ConfigError(
            WHERE, "audit_every has no effect without an audit of bytes",
            got=repr(given["audit_every"]), hint='add "audit": "bytes", or leave audit_every out',
        )  # fmt: skip
    return Settings(
        audit=found.one_of("audit", AUDITS),
        audit_every=found.number("audit_every", EVERY),
        on_violation=found.one_of("on_violation", ON_VIOLATION),
        stale=found.one_of("stale", STALE),
        weights_every=found.number("weights_every", WEIGHTS_EVERY),
        record=found.flag("record"),
        log_tokens=found.flag("log_tokens"),
        required=found.flag("required"),
    )
