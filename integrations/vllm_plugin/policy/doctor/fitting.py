"""Settings that an engine could never use: the user's mistake, which stops the start.

``settings`` checks what can be said without the engine; here stands what takes its facts.
"""

from __future__ import annotations

from typing import Final

import attrs

from .....errors import ConfigError
from ...internals import config as engine_config
from ...internals import workers
from ...internals.protocols.engine import VllmConfig
from .. import supported
from ..engine import EngineFacts
from ..settings import PluginSettings, asked_rows
from ..state_rules import NO_FAST_FORM, without_fast_form

_WHERE: Final = "additional_config['kvtxn']"


def check_fit(wanted: PluginSettings | None, facts: EngineFacts, config: VllmConfig) -> None:
    """Refuse settings that do not fit the engine.

    Nothing is read of a release of vLLM that was not checked, unless the user sets ``unchecked``.

    Args:
        wanted: the user's settings; None without any.
        facts: the facts of the engine.
        config: its ``VllmConfig``.

    Raises:
        ConfigError: ``max_rows`` is less than the rows of one request with drafts, or
            ``recurrent`` does not go with the model.
    """
    if wanted is None or not (supported.is_listed(facts.version) or facts.unchecked):
        return
    check_rows(asked_rows(workers.additional_config(config)), engine_config.drafts(config))
    check_states(wanted, facts)


def check_rows(max_rows: int | None, drafts: int) -> None:
    """Refuse a ``max_rows`` with which no request could ever have a window.

    Args:
        max_rows: the user's setting; None without it.
        drafts: the drafts that the engine verifies of each request; 0 if it does not speculate.

    Raises:
        ConfigError: one request has more rows.
    """
    rows = drafts + 1
    if drafts and max_rows is not None and max_rows < rows:
        raise ConfigError(
            _WHERE,
            f"max_rows={max_rows} leaves no room for one request, so no window could ever open",
            expected=f"at least {rows} ({drafts} drafts, and the token before them)",
            got=max_rows,
            hint="leave max_rows out",
        )


def check_states(wanted: PluginSettings, facts: EngineFacts) -> None:
    """Refuse the setting ``recurrent`` for a model whose layers it does not concern.

    Args:
        wanted: the user's settings.
        facts: the facts of the engine.

    Raises:
        ConfigError: the model has no recurrent layers, or none with a fast form.
    """
    if wanted.recurrent not in ("off", "auto") and facts.recurrent is None:
        raise ConfigError(
            _WHERE,
            "recurrent has no effect: the model has no recurrent layers",
            got=repr(wanted.recurrent),
            hint="leave recurrent out",
        )
    if wanted.recurrent == "fast" and without_fast_form(facts):
        raise ConfigError(
            _WHERE,
            f"recurrent has no effect: {NO_FAST_FORM.format(recurrent=facts.recurrent)}",
            got=repr(wanted.recurrent),
            hint='use "exact"',
        )


def bounded(wanted: PluginSettings, config: VllmConfig) -> PluginSettings:
    """Return the settings with no more ``max_rows`` than a step can have, which sizes buffers.

    Args:
        wanted: the user's settings.
        config: the engine's ``VllmConfig``.
    """
    if not (wanted.windows and engine_config.drafts(config)):
        return wanted
    most = engine_config.most_window_rows(config)
    txn = attrs.evolve(wanted.txn, max_rows=min(wanted.txn.max_rows, most))
    return attrs.evolve(wanted, txn=txn)
