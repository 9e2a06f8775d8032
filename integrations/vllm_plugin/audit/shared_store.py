"""Opens the store of identities that a worker shares with other processes."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from functools import partial
from typing import Final

from ....audit import Key
from ....audit.identity_store import SqliteStore, store_path
from ....audit.key_file import key_from_file
from ....audit.store_thread import StoreThread
from ....errors import ConfigError
from ....log import get_logger
from ...serving.ledger.shared_identities import SharedIdentities
from ...serving.ledger.watch import Watch
from ..internals import connectors, ranks, workers
from ..internals import weights as engine_weights
from ..policy.settings import PluginSettings
from ..seam.hooked_runner import HookedRunner

log = get_logger()

#: The version of what a scope is made of.
_SCOPES: Final = 1
#: The bits of a word.
_WORD: Final = (1 << 64) - 1


def store_key(settings: PluginSettings) -> Key | None:
    """Return the key of the processes that share a store; None without a store.

    All ranks have the first one's, and call this. A file that has no key is said in the log, and
    then nothing is shared.
    """
    if settings.audit_key_file is None:
        return None
    key = None
    try:
        key = key_from_file(settings.audit_key_file)
    except ConfigError as error:
        effect = "rows that others bring count as unverified"
        log.warning("kvtxn.audit_store_failed", why=str(error), effect=effect)
    return ranks.from_first(key) if ranks.number_of_ranks() > 1 else key


def open_shared(runner: HookedRunner, watch: Watch) -> SharedIdentities | None:
    """Open the store that a worker shares, if there is a KV connector; None without one.

    Args:
        runner: the hooked runner.
        watch: its watch.
    """
    url = runner.kvtxn_settings.audit_store
    key = None if url is None else watch.shared_key
    if url is None or key is None or connectors.connector() is None:
        return None
    thread = StoreThread(partial(SqliteStore, store_path(url)))
    runner.kvtxn_undo.callback(thread.close)
    place = f"process {os.getpid()} on {socket.gethostname()}, rank {runner.kvtxn_rank}"

    def weights() -> int | None:
        if watch.weights is None:
            return None
        return watch.weights.content(engine_weights.rotary_positions(runner))

    def written_by(request: str) -> str:
        name = request if watch.found.log_tokens else f"#{key.salt(request) & _WORD:016x}"
        return f"{place}, request {name}"

    scopes = {name: _scope(runner, name) for name in watch.groups}
    return SharedIdentities(watch.ledger, thread, scopes, weights, written_by)


def _scope(runner: HookedRunner, group: str) -> bytes:
    """Return what the bytes of a block depend on besides its rows; 16 bytes.

    Blocks of another number of ranks, another cache or another release are never compared.
    """
    facts = [
        *(_SCOPES, workers.version(), ranks.number_of_ranks(), ranks.own_number()),
        *(ranks.number_of_stages(), runner.kvtxn_rank, connectors.block_layout(runner, group)),
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).digest()
