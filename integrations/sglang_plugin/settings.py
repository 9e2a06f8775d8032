"""The user's settings, a JSON object in an environment variable, checked.

They have the names and values that they have in vLLM. A setting that does not work beside SGLang is
refused with a sentence: an audit that watches less than its user believes is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import attrs

from ...errors import ConfigError
from ..serving.audit_settings import OF_AUDITS, STALE, AuditSettings, idle_settings, read_audit
from ..serving.given_settings import GivenSettings

#: Where the settings are, for messages.
WHERE: Final = "KVTXN_SGLANG"

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


def given_settings(text: str) -> dict[str, object]:
    """Return the settings as they are given, by name; nothing is checked but their form.

    Args:
        text: a JSON object.

    Raises:
        ConfigError: it is none.
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
    return given


def read_settings(text: str) -> AuditSettings:
    """Read and check the settings.

    Args:
        text: a JSON object.

    Raises:
        ConfigError: it is none, or a setting does not exist, does not work beside SGLang, or cannot
            take its value; or it has no effect without an audit, or without one of bytes.
    """
    given = given_settings(text)
    found = GivenSettings(WHERE, given, {**ELSEWHERE, **_VALUES_ELSEWHERE})
    found.check_names([field.name for field in attrs.fields(AuditSettings)])
    settings = AuditSettings(**read_audit(found, STALE[:2]))
    for name, why, hint in idle_settings(settings.audit, OF_AUDITS):
        if name in given:
            raise ConfigError(
                WHERE, f"{name} has no effect {why}", got=repr(given[name]), hint=hint
            )
    return settings
