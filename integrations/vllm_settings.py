"""What a user asks of kvtxn in vLLM's ``additional_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import attrs

from ..config import POLICIES, TxnConfig
from ..errors import ConfigError


def is_asked(additional_config: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether the user asks for kvtxn at all."""
    return isinstance(additional_config, Mapping) and additional_config.get("kvtxn") is not None


def settings(additional_config: object, max_rows: int) -> TxnConfig | None:
    """What ``additional_config={"kvtxn": {...}}`` asks for; None where it asks for nothing.

    Args:
        additional_config: vLLM's, as the user gave it.
        max_rows: the default for ``max_rows``.

    Raises:
        ConfigError: a key or value is not valid.
        BackendUnavailableError: no backend of that name is registered.
    """
    if not is_asked(additional_config):
        return None
    given = additional_config["kvtxn"]
    known = [field.name for field in attrs.fields(TxnConfig)]
    if not isinstance(given, Mapping):
        raise ConfigError(
            "kvtxn", "additional_config['kvtxn'] is not valid", expected="a dict", got=repr(given)
        )
    unknown = sorted(map(str, given.keys() - set(known)))
    if unknown:
        raise ConfigError(
            "kvtxn",
            f"additional_config['kvtxn'] has no setting {unknown[0]!r}",
            expected=f"one of {', '.join(known)}",
            got=", ".join(unknown),
        )
    if given.get("policy") is None:
        raise ConfigError(
            "kvtxn",
            "additional_config['kvtxn'] names no policy",
            expected=f"policy: one of {', '.join(map(repr, POLICIES))}",
            got=dict(given),
        )
    return TxnConfig(**{"max_rows": max_rows, **given})


def surfaces_errors(additional_config: object) -> bool:
    """Whether ``on_error="raise"`` was asked for, even if other settings are invalid."""
    given = additional_config.get("kvtxn") if isinstance(additional_config, Mapping) else None
    return isinstance(given, Mapping) and given.get("on_error") == "raise"
