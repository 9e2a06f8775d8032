"""Decisions: the policy of an engine, and the reason; and whether its user asks for kvtxn at all.

Every process of vLLM looks here, whether its engine asks for kvtxn or not: nothing else is
imported. ``policy.settings`` checks the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeGuard

from ....errors import BackendUnavailableError, ConfigError
from ...serving.given_settings import RequiredError as RequiredError

#: Errors that stop an engine's start: a setting is wrong, or cannot be had and is required. After
#: any other the engine runs stock.
STOPS_THE_START: Final = (BackendUnavailableError, ConfigError, RequiredError)


def is_asked(additional_config: object) -> TypeGuard[Mapping[str, object]]:
    """Tell whether ``additional_config`` has the key ``kvtxn``, whatever is under it."""
    return isinstance(additional_config, Mapping) and "kvtxn" in additional_config


def wants(additional_config: object, name: str, value: object) -> bool:
    """Tell whether the user gave a setting this value, even if other settings are not valid."""
    given = additional_config.get("kvtxn") if isinstance(additional_config, Mapping) else None
    return isinstance(given, Mapping) and given.get(name) == value
