"""``StoreUrl``: which store of identities the user names, checked before anything is opened."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs

from ..errors import ConfigError
from .identity_store import IdentityStore, SqliteStore

_SQLITE: Final = "sqlite:///"
_REDIS: Final = ("redis", "rediss")
#: The options that a server's URL may have: certificates of ``rediss://``.
_OPTIONS: Final = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


@attrs.frozen
class StoreUrl:
    """A store that is not open yet.

    Attributes:
        url: what the user has written; it may have a password.
        where: the same without anything secret.
        path: the file of a store of one machine; None of a store on a server.
    """

    url: str = attrs.field(repr=False)
    where: str
    path: Path | None

    def open(self) -> IdentityStore:
        """Open the store; a server is not reached before it is used.

        Raises:
            StoreError: it cannot be opened.
        """
        if self.path is not None:
            return SqliteStore(self.path)
        from .redis_store import RedisStore

        return RedisStore.at(self.url, self.where)


def store_url(url: object) -> StoreUrl:
    """Return the store that a URL names.

    Args:
        url: ``sqlite:///`` and a path: ``sqlite:////data/kvtxn.db`` is ``/data/kvtxn.db``. Or
            ``redis://``, with TLS ``rediss://``, and a server:
            ``redis://USER:PASSWORD@HOST:PORT/DATABASE``, of which only the host is needed.

    Raises:
        ConfigError: the URL is of another kind, or the package for it is not installed.
    """
    text = url if isinstance(url, str) else ""
    path = unquote(text.removeprefix(_SQLITE)) if text.startswith(_SQLITE) else ""
    if path:
        return StoreUrl(text, path, Path(path))
    where = _server(text)
    if where is None:
        got = repr(url) if "@" not in text else "another URL, with a user or a password"
        raise ConfigError(
            "audit_store", "audit_store is not valid",
            expected="sqlite:///PATH, such as sqlite:////data/kvtxn.db, or redis://HOST:PORT/DATABASE",
            got=got, hint="name a file on a disk of this machine, or a server of Redis",
        )  # fmt: skip
    if find_spec("redis") is None:
        raise ConfigError(
            "audit_store", "a store on a server needs the package redis", got="it is not installed",
            hint="pip install 'kvtxn[redis]', or name a file: sqlite:///PATH",
        )  # fmt: skip
    return StoreUrl(text, where, None)


def _server(url: str) -> str | None:
    """Return the server of a URL, its port and its database, without user, password or options.

    None for a URL that is not valid, or has an option that is unknown.
    """
    try:
        found = urlsplit(url)
        port = found.port or 6379
        options = [name for name, _ in parse_qsl(found.query, strict_parsing=bool(found.query))]
    except ValueError:
        return None
    database = found.path.strip("/") or "0"
    right = found.scheme in _REDIS and found.hostname and not found.fragment
    if not right or not (database.isascii() and database.isdigit()):
        return None
    if any(name not in _OPTIONS for name in options) or (options and found.scheme != "rediss"):
        return None
    return f"{found.scheme}://{found.hostname}:{port}/{database}"
