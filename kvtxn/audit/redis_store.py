"""``RedisStore``: a store of identities on a server, for the processes of several machines."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from redis import Redis, RedisError
from redis import exceptions as redis_exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from .identity_store import MOST_BLOCKS, StoredBlock, StoreError

#: Seconds for which a block is kept that nobody writes or reads.
KEPT: Final = 7 * 24 * 3600
#: Seconds for which a server is waited for.
_WAIT: Final = 2.0
#: Contents of one round trip.
_AT_ONCE: Final = 256

#: The names of all that this format has in a database; another format has another number.
_PREFIX: Final = b"kvtxn:1:"
#: A sorted set: the scope and content of each hash, by the time of its last use.
_USED: Final = b"kvtxn:used:1"
#: Is there once bytes of several prefixes were forgotten.
_LOST: Final = b"kvtxn:lost:1"
#: An identity: the digest and the weights.
_IDENTITY: Final = struct.Struct(">qq")
_POSITION: Final = struct.Struct(">q")


class RedisStore:
    """A store on a server of Redis, or of what speaks its protocol, such as Valkey.

    What is known of one content is a hash: digest and weights lead to the position and the writer.
    A block takes about 640 bytes of the server's memory.
    Blocks that nobody has used for ``KEPT`` seconds expire, and beyond ``most_blocks`` the one that
    was unused for longest is forgotten. Nothing is locked, and a batch is written whole or not at
    all, so a process that is killed leaves the store as it was.

    Args:
        client: of the server.
        where: names the server in errors.
        most_blocks: the most blocks of all processes together; those of the same bytes are one.
    """

    def __init__(self, client: Redis, where: str, most_blocks: int = MOST_BLOCKS) -> None:
        self._client: Final = client
        self._where: Final = where
        self._most: Final = most_blocks
        self._lost_prefixes = False

    @classmethod
    def at(cls, url: str, where: str) -> RedisStore:
        """Return the store at a URL; the server is reached for when the store is used.

        Args:
            url: as ``redis.Redis.from_url`` reads it.
            where: names the server in errors, without what is secret in the URL.

        Raises:
            StoreError: an option of the URL is unknown.
        """
        once_more = Retry(NoBackoff(), 1, (redis_exceptions.ConnectionError,))
        client = Redis.from_url(
            url, socket_timeout=_WAIT, socket_connect_timeout=_WAIT, retry=once_more
        )
        return cls(client, where)

    def put(self, scope: bytes, blocks: Iterable[StoredBlock]) -> None:
        """Remember blocks until they are unused for ``KEPT`` seconds, or there are too many.

        A block that is there already stays, and counts as used now.

        Raises:
            StoreError: the server cannot be reached, or refuses.
        """
        known = list(blocks)
        with self._errors("written"):
            for at in range(0, len(known), _AT_ONCE):
                self._put(scope, known[at : at + _AT_ONCE])

    def _put(self, scope: bytes, blocks: Sequence[StoredBlock]) -> None:
        """Write blocks, and forget as many as are too many then, but at most two per block."""
        uses: dict[bytes, float] = {}
        with self._client.pipeline() as batch:
            for each in blocks:
                name, identity = scope + each.content, _IDENTITY.pack(each.digest, each.weights)
                said = _POSITION.pack(each.position) + each.who.encode()
                batch.hsetnx(_PREFIX + name, identity, said)
                batch.expire(_PREFIX + name, KEPT)
                uses[name] = time.time()
            batch.zadd(_USED, uses)
            batch.expire(_USED, KEPT)
            batch.zcard(_USED)
            excess = batch.execute()[-1] - self._most
        # More than were written, where there is room for less than there was.
        self._forget(min(excess, 2 * len(blocks)))

    def _forget(self, number: int) -> None:
        """Forget the contents that were unused for longest, with all identities of each.

        Nothing is done for a number of 0 or less.
        """
        if number <= 0:
            return
        with self._client.pipeline() as batch:
            batch.zpopmin(_USED, number)
            (oldest,) = batch.execute()
            names = [_PREFIX + name for name, _ in oldest]
            if not names:
                return
            for name in names:
                batch.hkeys(name)
            if any(len({_IDENTITY.unpack(each)[0] for each in had}) > 1 for had in batch.execute()):
                batch.set(_LOST, b"")
            batch.unlink(*names)
            batch.execute()

    @property
    def lost_prefixes(self) -> bool:
        """Tell whether bytes of several prefixes were forgotten, as known when last read.

        Those that expired are not counted: nobody has used them for ``KEPT`` seconds.
        """
        return self._lost_prefixes

    def get(self, scope: bytes, contents: Sequence[bytes]) -> Mapping[bytes, list[StoredBlock]]:
        """Return what is known of blocks by their bytes; unknown ones are left out.

        Those that are found count as used now: they expire ``KEPT`` seconds later, and are
        forgotten after blocks that were used before.

        Raises:
            StoreError: the server cannot be reached, or another program has written there.
        """
        found: dict[bytes, list[StoredBlock]] = {}
        with self._errors("read"):
            for at in range(0, len(contents), _AT_ONCE):
                found |= self._get(scope, contents[at : at + _AT_ONCE])
        return found

    def _get(self, scope: bytes, contents: Sequence[bytes]) -> dict[bytes, list[StoredBlock]]:
        """Return the blocks of some contents in one round trip; those found count as used now."""
        with self._client.pipeline(transaction=False) as batch:
            for content in contents:
                batch.hgetall(_PREFIX + scope + content)
            batch.exists(_LOST)  # afterwards: whoever forgets says so before
            *every, lost = batch.execute()
            answers = zip(contents, every, strict=True)
        self._lost_prefixes = bool(lost)
        found = {content: _blocks(content, known) for content, known in answers if known}
        if found:
            now = time.time()
            with self._client.pipeline(transaction=False) as batch:
                uses = {scope + content: now for content in found}
                batch.zadd(_USED, uses, xx=True)  # one that is being forgotten stays so
                batch.expire(_USED, KEPT)
                for content in found:
                    batch.expire(_PREFIX + scope + content, KEPT)
                batch.execute()
        return found

    def close(self) -> None:
        """Let go of the server."""
        self._client.close()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raise errors of the server, and of what it stores, as StoreError.

        Args:
            what: "read" or "written", for the message.
        """
        try:
            yield
        except (RedisError, OSError, ValueError, TypeError, struct.error) as error:
            raise StoreError(
                "audit_store",
                f"{self._where} cannot be {what}",
                got=f"{type(error).__name__}: {_cause(error)}",
            ) from error


def _cause(error: Exception) -> str:
    """Return what a server says, without the command of a batch, which is not text."""
    return str(error).rpartition("caused error: ")[2]


def _blocks(content: bytes, known: Mapping[bytes, bytes]) -> list[StoredBlock]:
    """Return the blocks of one content.

    Raises:
        ValueError: another program has written there.
        struct.error: another program has written there.
    """
    found = []
    for identity, said in known.items():
        (position,) = _POSITION.unpack_from(said)
        digest, weights = _IDENTITY.unpack(identity)
        who = said[_POSITION.size :].decode()
        found.append(StoredBlock(content, digest, weights, position, who))
    return found
