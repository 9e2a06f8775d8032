"""``SharedIdentities``: what other processes know of blocks that a connector brings.

An answer comes some steps after its block. Until then the rows are taken for right ones; then they
stay right, or a violation is found, or they count as rows that nobody can vouch for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ....audit import Key, Ledger, RowGroup, Violation
from ....audit.digest import signed
from ....audit.identity_store import StoredBlock
from ....audit.key_file import key_from_file
from ....audit.store_thread import Question, StoreThread
from ....audit.store_url import store_url
from ....errors import ConfigError
from ....log import get_logger

log = get_logger()

#: The version of what a scope is made of.
_SCOPES: Final = 2
#: The bits of a word.
_WORD: Final = (1 << 64) - 1
#: Seconds for which a call for counters or a report waits for answers; no step waits.
_PATIENCE: Final = 1.0
#: Characters of a request's name that a store has at most.
_LONGEST: Final = 200


@attrs.frozen(eq=False)
class _Asked:
    """A block of which the store was asked.

    Attributes:
        question: with the answer, once it is there.
        request: the request that the block was brought for.
        group: the block's group.
        block: the block.
        first: the position of its first row.
        rows: the rows that were brought.
        digest: the digest of the request's own prefix up to the block's end.
        weights: the hash of the weights of now.
        step: the step that the rows were brought for.
    """

    question: Question
    request: str
    group: str
    block: int
    first: int
    rows: int
    digest: int
    weights: int
    step: int


class SharedIdentities:
    """Writes the identities of full blocks for other processes, and asks for those of others.

    Args:
        ledger: the worker's ledger; its key is the one of all processes.
        thread: reads and writes the store.
        scopes: by name of a group, what the layout of a block's bytes depends on.
        weights: returns a hash of the content of the weights, the drafter's included or not; None
            if it cannot be known.
        written_by: returns who writes a block, in words, given the request.
    """

    def __init__(
        self,
        ledger: Ledger,
        thread: StoreThread,
        scopes: Mapping[str, bytes],
        weights: Callable[[bool], int | None],
        written_by: Callable[[str], str],
    ) -> None:
        self._ledger: Final = ledger
        self._thread: Final = thread
        self._scopes: Final = scopes
        self._weights_now: Final = weights
        self._written_by: Final = written_by
        rows = [group for group in ledger.groups if isinstance(group, RowGroup)]
        self._sizes: Final = {group.name: group.block_size for group in rows}
        self._drafters: Final = {group.name: group.drafter for group in rows}
        self._context_free: Final = {group.name for group in rows if group.context_free}
        self._weights: dict[bool, tuple[int, int | None]] = {}  # with the epoch
        self._asked: list[_Asked] = []
        self._hangs = False

    def close(self) -> None:
        """Write what waits, for a second at most, and end the thread that has the store."""
        self._thread.close()

    @property
    def dropped(self) -> int:
        """Number of blocks that were neither written nor asked for."""
        return self._thread.dropped

    def restart(self) -> None:
        """Drop all questions, and forget the hash of the weights, so that it is taken anew."""
        self._asked.clear()
        self._weights.clear()

    def _content(self, group: str) -> int | None:
        """Return the hash of the weights that compute a group's rows; taken once in an epoch.

        None if it cannot be known.
        """
        epoch, drafter = self._ledger.epoch, self._drafters[group]
        known = self._weights.get(drafter)
        if known is None or known[0] != epoch:
            known = self._weights[drafter] = epoch, self._weights_now(drafter)
        return known[1]

    def remember(
        self, request: str, group: str, contents: Tensor, last: Tensor, expected: Tensor, first: int
    ) -> None:
        """Have the identities of full blocks written to the store, for other processes.

        Blocks without the request's own rows, by the weights of now, are left out. Nothing is
        written if the hash of the weights cannot be known.

        Args:
            request: the request whose rows they are.
            group: their group.
            contents: int64 ``[n, 2]`` on the host, checksums of the bytes of neighbouring blocks.
            last: int64 ``[n]`` on the host, the words of their last rows, as
                ``Ledger.identities`` returns them.
            expected: int64 ``[n]`` on the host, the words that these rows should have.
            first: the position of the first row of the first block.
        """
        weights = self._content(group)
        if weights is None:
            return
        epoch, size, who = self._ledger.epoch, self._sizes[group], self._written_by(request)
        blocks = [
            StoredBlock(content, signed(word + epoch), weights, first + number * size, who)
            for number, (content, word, own) in enumerate(
                zip(_raw(contents), last.tolist(), expected.tolist(), strict=True)
            )
            if word == own
        ]
        if blocks:
            self._thread.put(self._scopes[group], blocks)

    def ask(
        self, request: str, place: tuple[str, int], content: Tensor, first: int, rows: int, own: int
    ) -> bool:
        """Ask the store whose rows a connector has brought; ``look`` judges the answer later.

        Args:
            request: the request that they were brought for.
            place: the block, and before it the group.
            content: int64 ``[2]`` on the host, the checksum of the block's bytes.
            first: the position of the block's first row.
            rows: the rows that were brought.
            own: the word that the block's last row should have, as ``Ledger.expected`` returns it.

        Returns:
            False if nothing was asked, because nobody knows what the weights are.
        """
        group, block = place
        weights = self._content(group)
        if weights is None:
            return False
        question = self._thread.ask(self._scopes[group], _raw(content[None]))
        digest, step = signed(own + self._ledger.epoch), self._ledger.steps
        self._asked.append(
            _Asked(question, request, group, block, first, rows, digest, weights, step)
        )
        return True

    def drop(self, blocks: Collection[int]) -> None:
        """Drop the questions about blocks that could not be loaded."""
        self._asked = [each for each in self._asked if each.block not in blocks]

    def look(self) -> None:
        """Judge the blocks of which the store has answered; the others go on waiting.

        Rows that are another's become violations, and unknown ones count as unverified.
        """
        waiting = []
        for each in self._asked:
            if each.question.answer is None:
                waiting.append(each)
            else:
                lost = each.question.lost_prefixes
                self._judge(each, each.question.answer[0], lost=lost)
        self._asked = waiting

    def settle(self) -> None:
        """Wait up to a second for the store, and judge what it has answered; not for a step.

        No step runs meanwhile, and a server asks for counters again and again. So a store that
        fails or hangs is waited for once, and then no more until it has answered.
        """
        if self._asked:
            in_vain = self._hangs or self._thread.fails
            self._hangs = not self._thread.wait(0.0 if in_vain else _PATIENCE)
            self.look()

    def _judge(self, asked: _Asked, known: Sequence[StoredBlock], *, lost: bool) -> None:
        """Compare what the store knows of a block's bytes with the request that got the block.

        The request's own rows by the present weights are right. Unknown bytes, or those of several
        other prefixes, count as unverified. Else a violation of kind "imported" is added, which
        names the writer and the difference.

        Args:
            asked: the block.
            known: the store's entries for its bytes.
            lost: the store has forgotten prefixes with these bytes, so that there were several.
        """
        own = [each for each in known if each.digest == asked.digest]
        if any(each.weights == asked.weights for each in own):
            return
        several = lost or len({each.digest for each in known}) != 1
        if not own and (several or asked.group in self._context_free):
            # Unknown bytes; or rows of several prefixes, and so perhaps of this one, which is lost.
            self._ledger.believe(asked.rows)
            return
        other = (own or known)[0]
        self._ledger.findings.add(
            Violation(
                kind="imported",
                step=asked.step,
                request=asked.request,
                group=asked.group,
                layer=None,
                position=asked.first,
                block=asked.block,
                slot=asked.block * self._sizes[asked.group],
                found="foreign",
                expected=(),
                written_position=other.position,
                written_request=other.who,
                brought=True,
                differs=_difference(asked, other, same_tokens=bool(own)),
            )
        )


def read_key(url: str | None, path: str | None) -> Key | None:
    """Return the key of the processes that share a store; None without a store or a file.

    A file that has no valid key is said in the log as a warning, and None is returned: then nothing
    is shared.

    Args:
        url: of the store; the first process of a machine's own store writes the file.
        path: the file with the key.
    """
    try:
        if url is None or path is None:
            return None
        return key_from_file(path, may_write=store_url(url).path is not None)
    except ConfigError as error:
        effect = "rows that others bring count as unverified"
        log.warning("kvtxn.audit_store_failed", why=str(error), effect=effect)
        return None


def share(
    ledger: Ledger,
    url: str,
    layouts: Mapping[str, object],
    weights: Callable[[bool], int | None],
    place: str,
    *,
    names: bool,
) -> SharedIdentities:
    """Return the sharing of a ledger's blocks with other processes; a thread opens the store.

    Close it to end the thread.

    Args:
        ledger: the ledger, which has the key of these processes.
        url: of the store.
        layouts: by name of a group, what the bytes of a block depend on besides its rows, as JSON
            can hold it; blocks of other layouts are never compared.
        weights: as for ``SharedIdentities``.
        place: says which process this is, in a report of another one.
        names: the store may have the names of requests; else a keyed hash stands for each.
    """
    scopes = {
        name: hashlib.blake2b(json.dumps([_SCOPES, layout]).encode(), digest_size=16).digest()
        for name, layout in layouts.items()
    }
    key = ledger.books.key

    def written_by(request: str) -> str:
        name = request if names else f"#{key.salt(request) & _WORD:016x}"
        name = name[:_LONGEST].encode(errors="replace").decode()  # a client may have chosen it
        return f"{place}, request {name}"

    thread = StoreThread(store_url(url).open)
    return SharedIdentities(ledger, thread, scopes, weights, written_by)


def _difference(asked: _Asked, other: StoredBlock, *, same_tokens: bool) -> str:
    """Return the key of ``violation.DIFFERENCES`` for a block that another process has written.

    "weights" for the same tokens, else "position" if it lay elsewhere in its request, or "unknown".
    """
    if same_tokens:
        return "weights"
    return "unknown" if other.position == asked.first else "position"


def _raw(contents: Tensor) -> list[bytes]:
    """Return each row of int64 ``[n, 2]`` as 16 bytes."""
    return [bytes(row) for row in contents.contiguous().view(torch.uint8).tolist()]
