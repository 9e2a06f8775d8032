"""Bytes of prompts' blocks as an engine computed them, to hold what connectors bring against.

The ledger has no part in it: blocks are compared once the step that read them is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import attrs
import identity_faults
import torch
from torch import Tensor

if TYPE_CHECKING:  # which the rules' own tests do not need
    from planting import Rig


@attrs.define
class Came:
    """Blocks that came and whose bytes are known.

    Attributes:
        blocks: their number.
        misplaced: blocks that came with other bytes than were computed for their tokens.
    """

    blocks: int = 0
    misplaced: int = 0


class Computed:
    """The blocks of prompts, as they were computed first.

    Args:
        rig: the engine.
        rows: rows of each prompt that are looked at, whole blocks.
        path: where an earlier engine has saved its blocks; None if there is no such engine.
    """

    def __init__(self, rig: Rig, rows: int, path: Path | None = None) -> None:
        self._rig: Final = rig
        self._rows: Final = rows
        self._bytes: dict[tuple[int, ...], Tensor] = {} if path is None else torch.load(path)

    def save(self, path: Path) -> None:
        """Keep the blocks for a later engine."""
        torch.save(self._bytes, path)

    @contextmanager
    def watching(self) -> Iterator[Came]:
        """Note the bytes of blocks that a step computes; compare those of blocks that come."""
        came, waiting = Came(), dict[str, int]()
        transfers, engine = self._rig.watch.transfers, self._rig.engine
        real_change, real_step = transfers.change, engine.step

        def change(arrivals: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            waiting.update({each.name: each.computed for each in arrivals})
            real_change(arrivals, *args, **kwargs)

        def step() -> Any:
            outputs, requests = real_step(), self._rig.scheduler.requests
            for name in [*waiting]:
                request = requests.get(name)
                if request is None:
                    del waiting[name]
                elif request.num_computed_tokens >= self._rows:
                    self._note(name, request.prompt_token_ids, waiting.pop(name), came)
            return outputs

        with (
            mock.patch.object(transfers, "change", change),
            mock.patch.object(engine, "step", step),
        ):
            yield came

    def _note(self, name: str, prompt: Sequence[int], computed: int, came: Came) -> None:
        """Compare what a request came with; keep the blocks of one that came with nothing."""
        key = tuple(prompt[: self._rows])
        table = self._rig.manager.get_block_ids(name)[0]
        now = content(identity_faults.caches(self._rig), table[: self._rows // 32])
        if not computed:
            self._bytes.setdefault(key, now)
        elif (before := self._bytes.get(key)) is not None:
            blocks = computed // 32
            came.blocks += blocks
            came.misplaced += int((now != before)[:blocks].any(1).sum())


def content(layers: Sequence[Tensor], blocks: Sequence[int]) -> Tensor:
    """Return the bytes of blocks in all layers, uint8 ``[blocks, bytes]`` on the host."""
    found = [layer[list(blocks)].flatten(1).contiguous().view(torch.uint8) for layer in layers]
    return torch.cat(found, 1).cpu()
