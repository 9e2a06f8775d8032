"""Identities of blocks that several processes share: the store, and its errors.

Processes that have one key (``key_from_file``) have one checksum for the same bytes, and one digest
for the same tokens. So a store can say of a block that came from another process whose rows it
holds. It has nothing of a user's text: keyed checksums and digests, positions, a hash of the
weights, and a label of who wrote the block.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import attrs

from ..errors import KVTxnError

#: Blocks that a store remembers; each takes about 256 bytes on disk, with its index.
MOST_BLOCKS: Final = 1 << 20

#: The store's format, as SQLite's ``user_version``.
_VERSION: Final = 1
#: Seconds for which SQLite waits for another process that writes.
_WAIT: Final = 5.0
#: Seconds between two tries where SQLite does not wait by itself.
_PAUSE: Final = 0.01
#: Bytes by which SQLite's write-ahead log may grow until a writer empties it. By itself SQLite
#: begins the log anew only while nobody else writes: that of busy processes grows without bound.
_MOST_LOG: Final = 16 << 20
#: Milliseconds for which a writer waits with that for readers, of which one may have stopped.
_LOG_WAIT: Final = 50
#: Contents that are asked for in one query.
_AT_ONCE: Final = 256

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS blocks (
    number INTEGER PRIMARY KEY,
    scope BLOB NOT NULL,
    content BLOB NOT NULL,
    digest INTEGER NOT NULL,
    weights INTEGER NOT NULL,
    position INTEGER NOT NULL,
    who TEXT NOT NULL,
    UNIQUE (scope, content, digest, weights)
);
"""
_COLUMNS: Final = ("number", "scope", "content", "digest", "weights", "position", "who")
#: SQLite's own tables, whose names begin so, are no other program's.
_TABLES: Final = (
    "SELECT name FROM sqlite_master WHERE type != 'index' AND substr(name, 1, 7) != 'sqlite_'"
)
_PUT: Final = (
    "INSERT OR IGNORE INTO blocks (scope, content, digest, weights, position, who)"
    " VALUES (?, ?, ?, ?, ?, ?)"
)
_GET: Final = (
    "SELECT content, digest, weights, position, who, number FROM blocks"
    " WHERE scope = ? AND content IN ({})"
)
#: A number says when a row was used last: written or read. Not each use is written down.
_LAST: Final = "SELECT coalesce(max(number), 0) FROM blocks"
_RENEW: Final = f"UPDATE blocks SET number = ({_LAST}) + 1 WHERE number = ?"
#: Bytes are forgotten with all that they were: those that are left would tell half of the truth.
_PRUNE: Final = (
    "DELETE FROM blocks WHERE (scope, content) IN (SELECT scope, content FROM blocks"
    " WHERE number <= (SELECT number FROM blocks ORDER BY number DESC LIMIT 1 OFFSET ?))"
)
_PRUNES_PREFIXES: Final = (
    "SELECT EXISTS (SELECT 1 FROM blocks AS one JOIN blocks AS other USING (scope, content)"
    " WHERE one.digest != other.digest"
    " AND one.number <= (SELECT number FROM blocks ORDER BY number DESC LIMIT 1 OFFSET ?))"
)
#: SQLite's ``application_id`` of a store that has forgotten bytes of several prefixes.
_LOST: Final = 1
#: Of so many parts of a store's room one is written before the store looks whether it is full, and
#: a row is used again before that is written down.
_FULL_PARTS: Final = 64
_USED_PARTS: Final = 4


#: A row of the table: the fields of a ``StoredBlock``, and the number.
Row: TypeAlias = tuple[bytes, int, int, int, str, int]


class StoreError(KVTxnError, RuntimeError):
    """A store of identities cannot be read or written."""

    default_hint = "rows that others bring count as unverified until it can be"


@attrs.frozen
class StoredBlock:
    """A full block as a store has it.

    Attributes:
        content: 16 bytes, the keyed checksum of the block's bytes.
        digest: the digest of the prefix up to the block's last row, extras included; an int64.
        weights: a hash of the weights that computed it; an int64.
        position: the position of the block's first row.
        who: the process and the request that wrote it, in words.
    """

    content: bytes
    digest: int
    weights: int
    position: int
    who: str


class IdentityStore(Protocol):
    """Identities of blocks that several processes read and write; used by one thread."""

    def put(self, scope: bytes, blocks: Iterable[StoredBlock]) -> None:
        """Remember blocks; those that were unused for longest are forgotten if there are too many.

        Args:
            scope: blocks of other scopes are never compared with these: the layout of the bytes.
            blocks: the blocks.

        Raises:
            StoreError: the store cannot be written.
        """

    def get(self, scope: bytes, contents: Sequence[bytes]) -> Mapping[bytes, list[StoredBlock]]:
        """Return what is known of blocks by their bytes; unknown ones are left out.

        Raises:
            StoreError: the store cannot be read.
        """

    @property
    def lost_prefixes(self) -> bool:
        """Tell whether bytes of several prefixes were forgotten, as known when last read.

        If one of these prefixes writes them again, the store knows half of the truth.
        """

    def close(self) -> None:
        """Let go of the store."""


class SqliteStore:
    """A store in a file of SQLite, for the processes of one machine.

    A process that is killed in the middle of a write leaves what was there before. The file must
    lie on a disk of the machine: SQLite cannot share it over a network.

    Args:
        path: the file; made if it does not exist, readable by its owner alone.
        most_blocks: of about so many, those that were unused for longest are forgotten.

    Raises:
        StoreError: the file cannot be opened, or is no store of this version.
    """

    def __init__(self, path: str | os.PathLike[str], most_blocks: int = MOST_BLOCKS) -> None:
        self._path: Final = Path(path)
        self._log: Final = Path(f"{self._path}-wal")
        self._log_end = _MOST_LOG  # the size at which it is emptied
        self._most: Final = most_blocks
        self._lost_prefixes = False
        self._unpruned = most_blocks  # another process may have left the file full
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            self._file: Final = sqlite3.connect(self._path, timeout=_WAIT)
        except (OSError, sqlite3.Error) as error:
            raise self._failed("opened", error) from error
        try:
            self._prepare_in_turn()
        except (sqlite3.Error, StoreError) as error:
            self._file.close()
            if isinstance(error, StoreError):
                raise
            raise self._failed("opened", error) from error

    def _prepare_in_turn(self) -> None:
        """Prepare the file; wait while other processes do so.

        Raises:
            StoreError: as for ``_prepare``.
        """
        until = time.monotonic() + _WAIT
        while True:
            try:
                return self._prepare()
            except sqlite3.OperationalError as error:
                # SQLite fails at once where one process changes the journal that others use.
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > until:
                    raise
            time.sleep(_PAUSE)

    def _prepare(self) -> None:
        """Make the table of a new file, and set how SQLite writes the file.

        Raises:
            StoreError: the file is of another program or version; it stays as it is.
        """
        (version,) = self._file.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise StoreError(
                "audit_store", f"{self._path} is of another version", expected=str(_VERSION),
                got=str(version), hint="name another file",
            )  # fmt: skip
        # The table is there before the version: another process may be making them now.
        tables = {name for (name,) in self._file.execute(_TABLES)}
        columns = [row[1] for row in self._file.execute("PRAGMA table_info(blocks)")]
        if tables and (tables != {"blocks"} or columns != [*_COLUMNS]):
            raise StoreError(
                "audit_store", f"{self._path} is another program's", expected="a store, or no file",
                got=f"the tables {', '.join(sorted(tables))}", hint="name another file",
            )  # fmt: skip
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")
        if version == 0:
            with self._file:
                self._file.execute(_CREATE)
                self._file.execute(f"PRAGMA user_version={_VERSION}")

    def put(self, scope: bytes, blocks: Iterable[StoredBlock]) -> None:
        """Write blocks into the store, and now and then delete the ones unused for longest.

        A block that is there already stays, and counts as used now.

        Raises:
            StoreError: the file cannot be written.
        """
        rows = [(scope, *attrs.astuple(each)) for each in blocks]
        try:
            with self._file:
                self._file.executemany(_PUT, rows)
                self._use(self._rows(scope, [content for _, content, *_ in rows]))
                self._unpruned += len(rows)
                if self._unpruned >= self._most // _FULL_PARTS:
                    self._prune()
            self._empty_log()
        except sqlite3.Error as error:
            raise self._failed("written", error) from error

    def _prune(self) -> None:
        """Delete the blocks unused for longest, if there are too many."""
        ((loses,),) = self._file.execute(_PRUNES_PREFIXES, (self._most,)).fetchall()
        if loses:
            self._file.execute(f"PRAGMA application_id={_LOST}")
        self._file.execute(_PRUNE, (self._most,))
        self._unpruned = 0

    @property
    def lost_prefixes(self) -> bool:
        """Tell whether bytes of several prefixes were forgotten, as known when last read."""
        return self._lost_prefixes

    def _empty_log(self) -> None:
        """Empty a write-ahead log that has grown; if others are in the way, try again later."""
        try:
            size = self._log.stat().st_size
        except FileNotFoundError:  # not under this name, where the path is a link
            return
        if size < self._log_end:
            return
        self._file.execute(f"PRAGMA busy_timeout={_LOG_WAIT}")
        try:
            ((fails, *_),) = self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._file.execute(f"PRAGMA busy_timeout={round(_WAIT * 1000)}")
        self._log_end = size + _MOST_LOG if fails else _MOST_LOG

    def get(self, scope: bytes, contents: Sequence[bytes]) -> Mapping[bytes, list[StoredBlock]]:
        """Return what the store knows of blocks, by content; unknown ones are left out.

        A block that is found counts as used now.

        Raises:
            StoreError: the file cannot be read, or the use not be written.
        """
        found: dict[bytes, list[StoredBlock]] = {}
        try:
            rows = self._rows(scope, contents)
            # Afterwards: whoever forgets says so in the same transaction.
            ((mark,),) = self._file.execute("PRAGMA application_id").fetchall()
            self._lost_prefixes = mark == _LOST
            with self._file:
                self._use(rows)
        except sqlite3.Error as error:
            raise self._failed("read", error) from error
        for content, digest, weights, position, who, _ in rows:
            block = StoredBlock(content, digest, weights, position, who)
            found.setdefault(content, []).append(block)
        return found

    def _rows(self, scope: bytes, contents: Sequence[bytes]) -> list[Row]:
        """Return the stored rows of contents, ``number`` last; several, one or none for each."""
        found: list[Row] = []
        for at in range(0, len(contents), _AT_ONCE):
            some = contents[at : at + _AT_ONCE]
            query = _GET.format(", ".join("?" * len(some)))
            with closing(self._file.execute(query, (scope, *some))) as rows:
                found += rows
        return found

    def _use(self, rows: Sequence[Row]) -> None:
        """Write down that rows are used now; rows that were used lately stay as they are.

        Lately is among the last quarter of the store's room.
        """
        if rows:
            ((last,),) = self._file.execute(_LAST).fetchall()
            old = last - self._most // _USED_PARTS
            self._file.executemany(_RENEW, [(row[-1],) for row in rows if row[-1] < old])

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _failed(self, what: str, error: Exception) -> StoreError:
        """Return the error of a file that cannot be opened, read or written, as ``what`` says."""
        return StoreError("audit_store", f"{self._path} cannot be {what}", got=repr(error))
