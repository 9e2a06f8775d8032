"""``StoreThread``: reads and writes a store of identities while an engine's steps go on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from ..log import get_logger
from .identity_store import IdentityStore, StoredBlock, StoreError

log = get_logger()

#: Blocks that may wait to be written, and to be asked for.
WAITING: Final = 1 << 14
#: Seconds until a store that has failed is tried again.
_AGAIN: Final = 5.0
#: Requests to the store that are taken together.
_AT_ONCE: Final = 64


@attrs.define(eq=False)
class Question:
    """A question about some blocks, and its answer.

    Attributes:
        scope: as for ``IdentityStore.get``.
        contents: the checksums of the blocks' bytes.
        answer: for each block what the store has of it, none if that is unknown or the store cannot
            be read; None until the store has answered.
        lost_prefixes: the store's, when it has answered.
    """

    scope: bytes
    contents: Sequence[bytes]
    answer: Sequence[Sequence[StoredBlock]] | None = None
    lost_prefixes: bool = False


@attrs.frozen(eq=False)
class _Write:
    """Blocks that are to be written."""

    scope: bytes
    contents: Sequence[StoredBlock]


class StoreThread:
    """A thread that reads and writes a store; no call but ``close`` and ``wait`` waits for it.

    A store that cannot be reached is said once in the log, and tried again some seconds later;
    until then each question is answered with nothing, and what is to be written is dropped.

    Args:
        open_store: opens the store; called in the thread.
        waiting: blocks that may wait; what is written or asked beyond is dropped.
        again: seconds until a store that has failed is tried again.
    """

    def __init__(
        self,
        open_store: Callable[[], IdentityStore],
        *,
        waiting: int = WAITING,
        again: float = _AGAIN,
    ) -> None:
        self._open: Final = open_store
        self._room: Final = waiting
        self._again: Final = again
        self._queue: Final[deque[Question | _Write]] = deque()
        self._changed: Final = threading.Condition()
        self._waiting = self._dropped = 0
        self._fails = False
        self._store: IdentityStore | None = None
        self._failed_at: float | None = None
        self._says, self._closes = True, False
        self._thread: Final = threading.Thread(
            target=self._run, name="kvtxn audit store", daemon=True
        )
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of blocks that were neither written nor asked for."""
        return self._dropped

    @property
    def fails(self) -> bool:
        """Tell whether the store has done nothing since it failed."""
        return self._fails

    def put(self, scope: bytes, blocks: Sequence[StoredBlock]) -> None:
        """Have the thread write blocks; they are dropped if too many wait, or the store fails.

        They are dropped as well once the thread is closed.
        """
        self._enqueue(_Write(scope, blocks))

    def ask(self, scope: bytes, contents: Sequence[bytes]) -> Question:
        """Ask about blocks; the answer comes later, also of blocks that were put before.

        If too many wait, or the thread is closed, the answer is there at once: nothing is known.
        """
        question = Question(scope, contents)
        if not self._enqueue(question):
            question.answer = [()] * len(contents)
        return question

    def _enqueue(self, entry: Question | _Write) -> bool:
        """Append to the queue, and return True; False if it is closed or has no room.

        The entry's blocks are counted as dropped then.
        """
        with self._changed:
            if self._closes or self._waiting + len(entry.contents) > self._room:
                self._dropped += len(entry.contents)
                return False
            self._queue.append(entry)
            self._waiting += len(entry.contents)
            self._changed.notify_all()
            return True

    def wait(self, seconds: float) -> bool:
        """Wait until all that was put and asked is done, so long at most; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self, seconds: float = 1.0) -> None:
        """Write what waits, for so long at most, and end the thread; later calls are dropped.

        A thread that is not done by then goes on in the background.
        """
        with self._changed:
            self._closes = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _run(self) -> None:
        """Do what comes into the queue until it is closed and empty; then close the store."""
        while (batch := self._next_batch()) is not None:
            for entry in batch:
                self._do(entry)
            with self._changed:
                self._waiting -= sum(len(entry.contents) for entry in batch)
                self._changed.notify_all()
        if self._store is not None:
            self._store.close()

    def _next_batch(self) -> list[Question | _Write] | None:
        """Wait for entries, and take the first ones; None once the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closes)
            number = min(len(self._queue), _AT_ONCE)
            return [self._queue.popleft() for _ in range(number)] or None

    def _do(self, entry: Question | _Write) -> None:
        """Write or answer one entry; log an error of any kind, and count its blocks as dropped.

        So are they while a store that failed is not tried again. The answer is nothing then.
        """
        answer: list[Sequence[StoredBlock]] = [()] * len(entry.contents)
        try:
            store = self._opened()
            if store is None:
                self._dropped += len(entry.contents)
            elif isinstance(entry, _Write):
                store.put(entry.scope, entry.contents)
                self._fails = False
            else:
                found = store.get(entry.scope, entry.contents)
                answer = [found.get(content, ()) for content in entry.contents]
                entry.lost_prefixes = store.lost_prefixes
                self._fails = False
        except Exception as error:  # no error of a store's may end an engine
            self._fail(error)
            self._dropped += len(entry.contents)
        if isinstance(entry, Question):
            entry.answer = answer

    def _opened(self) -> IdentityStore | None:
        """Return the store, opened if need be; None if it failed a short time ago.

        An error of opening the store is raised as it is.
        """
        now = time.monotonic()
        if self._store is None and (
            self._failed_at is None or now >= self._failed_at + self._again
        ):
            self._store = self._open()
        return self._store

    def _fail(self, error: Exception) -> None:
        """Let go of a store that has failed; log a warning the first time. No error is raised."""
        store, self._store, self._failed_at = self._store, None, time.monotonic()
        self._fails = True
        if self._says:
            why = str(error) if isinstance(error, StoreError) else repr(error)
            effect = "rows that others bring count as unverified"
            log.warning("kvtxn.audit_store_failed", why=why, effect=effect)
            self._says = False
        if store is not None:
            try:
                store.close()
            except Exception as closing:
                log.debug("kvtxn.audit_store_not_closed", why=repr(closing))
