"""``AuditSettings``: a user's settings of an audit, which have the same names in any engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

from ...audit.byte_books import EVERY
from ...audit.weights import EVERY as WEIGHTS_EVERY
from .given_settings import GivenSettings

AUDITS: Final = ("off", "ledger", "bytes")
ON_VIOLATION: Final = ("log", "raise", "contain")
#: What becomes of rows of earlier weights that are read.
STALE: Final = ("count", "alarm", "contain")
#: Settings that have no effect without an audit.
OF_AUDITS: Final = ("on_violation", "record", "log_tokens", "stale", "weights_every")


@attrs.frozen(kw_only=True)
class AuditSettings:
    """The checked settings.

    Attributes:
        audit: ``"off"``, ``"ledger"``, or ``"bytes"``: checksums of rows are compared, too.
        audit_every: audit "bytes" compares one slot in this many in each step.
        on_violation: ``"log"``; ``"raise"``: the engine ends with an error; or ``"contain"``:
            readers of wrong rows are computed again.
        stale: ``"count"``; ``"alarm"``: rows of earlier weights that are read are violations; or
            ``"contain"``: their readers are computed again.
        weights_every: a sample of each parameter is hashed every so many steps, to find weights
            that have changed although nobody said so.
        record: keep the life of every slot, as ``kvtxn audit`` does for its page; each step waits
            for the device.
        log_tokens: logged violations have the tokens of the rows; they are users'.
        required: an engine that cannot have what is asked for does not start.
    """

    audit: str = "off"
    audit_every: int = EVERY
    on_violation: str = "log"
    stale: str = "count"
    weights_every: int = WEIGHTS_EVERY
    record: bool = False
    log_tokens: bool = False
    required: bool = False

    @property
    def evicts(self) -> bool:
        """True if the engine has to take blocks out of its prefix cache."""
        return "contain" in (self.on_violation, self.stale)


def idle_settings(audit: str, of_audits: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield names of settings that have no effect if they are given, why, and the next step.

    Args:
        audit: the setting of this name.
        of_audits: the settings that have no effect without an audit.
    """
    if audit != "bytes":
        hint = 'add "audit": "bytes", or leave audit_every out'
        yield "audit_every", "without an audit of bytes", hint
    for name in of_audits if audit == "off" else ():
        yield name, "without an audit", f'add "audit": "ledger", or leave {name} out'


def read_audit(found: GivenSettings, stale: Sequence[str] = STALE) -> dict[str, Any]:
    """Return the fields of ``AuditSettings`` by name; ``stale`` lists the values of that one.

    Raises:
        ConfigError: a setting cannot take its value.
    """
    every_slot = "; 1 compares every slot in each step"
    return {
        "audit": found.one_of("audit", AUDITS),
        "audit_every": found.number("audit_every", EVERY, every_slot),
        "on_violation": found.one_of("on_violation", ON_VIOLATION),
        "stale": found.one_of("stale", stale),
        "weights_every": found.number("weights_every", WEIGHTS_EVERY),
        **{name: found.flag(name) for name in ("record", "log_tokens", "required")},
    }
