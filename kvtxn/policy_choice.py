"""The choice of a policy: the one named in the settings, or the first that is safe here."""

from __future__ import annotations

from collections.abc import Collection

from .errors import BackendUnavailableError
from .executor import Capabilities


def choose_policy(
    wanted: str,
    capabilities: Capabilities,
    kinds: Collection[str] = ("paged",),
    *,
    latent: bool = False,
) -> tuple[str, str]:
    """Return the policy to use and the reason; raise BackendUnavailableError if there is none.

    "auto" takes "deferred" if attention can read the window, or no layer has any; else "undo", else
    "direct", neither of them for recurrent layers.

    Args:
        wanted: a policy, or "auto".
        capabilities: the executor's capabilities.
        kinds: names of the kinds of the manager's layers.
        latent: True if a layer has latent rows, which ``Window.attend`` does not take.
    """
    stateful = "recurrent" in kinds
    if wanted == "direct" and "replayed" in kinds:
        raise BackendUnavailableError(
            "TransactionManager",
            "policy 'direct' cannot write a replayed state through: it would have taken in the "
            "rows of rejected drafts for good",
            expected="deferred",
            got="'direct'",
            hint="use policy='deferred', where a state takes rows in at commit",
        )
    if wanted == "undo" and stateful:
        raise BackendUnavailableError(
            "TransactionManager",
            "policy 'undo' cannot take a recurrent state back to the middle of a window, because "
            "the states in between were never in the cache",
            expected="deferred",
            got="'undo'",
            hint="use policy='deferred', where states wait for the commit",
        )
    if wanted != "auto":
        if wanted not in capabilities.policies:
            raise BackendUnavailableError(
                "TransactionManager",
                f"this backend cannot carry out policy {wanted!r}",
                expected=f"one of {sorted(capabilities.policies)}",
                got=repr(wanted),
                hint="choose another backend, or policy='auto'",
            )
        return wanted, "TxnConfig names it"
    if "deferred" in capabilities.policies:
        if set(kinds) <= {"recurrent", "replayed"}:
            return "deferred", "no layer has attention, and states wait for the commit"
        if capabilities.attention and not latent:
            return "deferred", "attention can read the window"
    rows = "staged latent rows" if latent else "staged rows"
    if stateful:
        raise BackendUnavailableError(
            "TransactionManager",
            "policy 'auto' found no safe policy: recurrent layers need 'deferred', but attention "
            f"of this backend cannot read {rows}",
            expected="deferred",
            got="'auto'",
            hint="use policy='deferred' if your own attention reads the staged rows, or give the "
            "recurrent layers a manager of their own",
        )
    if "undo" in capabilities.policies:
        return "undo", f"attention cannot read {rows}, so rows are written, then taken back"
    return "direct", "the backend can neither defer nor undo"
