"""SGLang's requests as the ledger hears of them: which begin, and which gave back their rows."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Final

from ....audit.digest import EMBEDDED
from ...serving.step import NO_CHANGES, Arrival, Changes
from .protocols import Req
from .steps import ForwardStep


class Requests:
    """The requests that hold rows, and the requests that gave theirs back since the last step.

    A request is new when its first rows are computed, and again after a retraction. Its end is told
    with the next step, since the present one may run still: under overlap a finished request takes
    part in one more forward. That forward may even begin later, where SGLang takes in a result
    between planning the next step and running it.

    Args:
        most: requests that can hold rows at one time.
    """

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self._known: Final[OrderedDict[str, Req]] = OrderedDict()
        self._gone: list[str] = []
        self._had: Final[OrderedDict[str, int]] = OrderedDict()
        self._embedded: Final = count(1)

    def released(self, req: Req) -> None:
        """Note that a request gives back its rows: it is done, aborted, or retracted.

        A request that is not known is left alone. Of one that comes again its rows are remembered.
        """
        if self._known.pop(req.rid, None) is None:
            return
        self._gone.append(req.rid)
        if not req.finished():
            self._had[req.rid] = req.kv.kv_committed_len
            while len(self._had) > self._most:
                self._had.popitem(last=False)

    def forget(self) -> None:
        """Forget all requests, as the cache was flushed."""
        self._known.clear()
        self._gone.clear()
        self._had.clear()

    def changes(self, step: ForwardStep) -> Changes:
        """Return who came and went since the last step, before a step's forward.

        ``NO_CHANGES`` if nobody did. The end of a finished request that takes part in this step is
        told with a later one. Only a step with prompts can have arrivals.

        Args:
            step: the step.
        """
        gone, self._gone = self._gone, []
        if gone:
            runs = {req.rid for req in step.requests if req.finished()}
            self._gone = [name for name in gone if name in runs]
            gone = [name for name in gone if name not in runs]
        arrivals = [] if not step.extends else self._arrivals(step)
        if not (gone or arrivals):
            return NO_CHANGES
        return Changes(gone, arrivals, (), ())

    def _arrivals(self, step: ForwardStep) -> list[Arrival]:
        """Return the requests of a step with prompts that are new, and know them from now on.

        One whose end is not told yet is left out. Beyond the most requests, those that came first
        are known no longer.
        """
        before = step.batch.extend_prefix_lens_cpu
        found = []
        for number, req in enumerate(step.requests):
            if self._known.get(req.rid) is req or req.rid in self._gone:
                continue
            self._known[req.rid] = req
            found.append(
                Arrival(
                    name=req.rid,
                    tokens=plain([*req.origin_input_ids, *req.output_ids]),
                    extras=extras_of(req, self._embedded.__next__),
                    embedded={},
                    computed=int(before[number]) if before is not None else 0,
                    tables=(),
                    prompt=len(req.origin_input_ids),
                    had=self._had.pop(req.rid, None),
                )
            )
        while len(self._known) > self._most:  # each has a line of SGLang's table
            self._known.popitem(last=False)
        return found


def plain(tokens: list[int]) -> list[int]:
    """Return token ids as the ledger writes them: the same list, or one with the ids of images cut.

    For a position of an image SGLang has a hash of up to 63 bits. Of a row's id the ledger counts
    the bits of a token.

    Args:
        tokens: the ids.
    """
    try:
        array("I", tokens)  # quicker than to look at each
    except OverflowError:
        return [each & (EMBEDDED - 1) for each in tokens]
    return tokens


def extras_of(req: Req, number: Callable[[], int]) -> list[int]:
    """Return what a request's rows depend on beside its tokens; empty without anything.

    An adapter counts by the name that SGLang gave it when it was loaded, which no two loads share.
    A request with vectors in place of tokens gets a number of its own: it shares rows with no
    other.

    Args:
        req: the request.
        number: returns a number that it has not returned before.
    """
    extras = []
    if req.lora_id is not None:
        name = hashlib.blake2b(req.lora_id.encode(), digest_size=8).digest()
        extras.append(int.from_bytes(name, "little", signed=True))
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        extras.append(number())
    return extras
