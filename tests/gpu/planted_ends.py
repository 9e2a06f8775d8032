"""Prompts over several blocks of states, whose ends the prefix cache keeps; and faults there."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from kvtxn.integrations.vllm_plugin.seam import aligned_states
from planting import Rig, texts
from scenarios import Engine, text


def ends(engine: Engine) -> Any:
    """Requests that end behind a block's end, and others that begin there."""
    bases = [text(800 + index, 560 + 150 * index) for index in range(4)]
    first = engine.run(bases, 40)
    again = engine.run([base + text(820 + i, 30) for i, base in enumerate(bases)], 40)
    said = [base + answer for base, answer in zip(bases, first, strict=True)]
    grown = engine.run([each + text(840 + i, 9) for i, each in enumerate(said)], 40)
    other = engine.run([[base[0] ^ 1, *base[1:]] for base in bases], 20)
    if not engine.cached:
        raise ValueError("no request began with a state of another one")
    return first + again + grown + other


def work(rig: Rig) -> list[list[int]]:
    """The same, where faults are planted."""
    bases = [each[: 560 + 150 * number] for number, each in enumerate(texts(3, 4, 1100))]
    found = rig.run(bases, 20)
    found += rig.run([base + new for base, new in zip(bases, texts(4, 4, 30), strict=True)], 20)
    return found + rig.run([[base[0] ^ 1, *base[1:]] for base in bases], 10)


class _Moves:
    """The copies that vLLM is about to make before a step: columns by request of the batch."""

    def __init__(self, rig: Rig, given: dict[str, Any]) -> None:
        runner, mapping = rig.runner, given["idx_mapping"]
        count = given["num_reqs"]
        self.lines = range(count) if mapping is None else mapping[:count].tolist()
        if mapping is None:
            self.names = runner.input_batch.req_ids[:count]
            self.first = [runner.requests[name].num_computed_tokens for name in self.names]
        else:
            states = runner.req_states
            self.names = [states.index_to_req_id[line] for line in self.lines]
            self.first = [int(states.num_computed_tokens.gpu[line]) for line in self.lines]
        self.source = [int(given["src_col_gpu"][line]) for line in self.lines]
        self.target = [int(given["state_idx_gpu"][line]) for line in self.lines]

    def of(self) -> list[int]:
        """Return the numbers of the requests whose states are copied."""
        pairs = enumerate(zip(self.source, self.target, strict=True))
        return [index for index, (one, other) in pairs if one >= 0 and one != other]


def _copies(rig: Rig, change: Any, after: Any = None) -> Any:
    """Change the arguments of copies before steps; ``change`` gets them by name."""
    context = aligned_states.context_of(rig.runner)
    real, names = context.run_fused_precopy, aligned_states.METHODS["run_fused_precopy"]

    def call(*args: Any, **named: Any) -> None:
        given = {**dict(zip(names, args, strict=False)), **named}
        if rig.struck is None:
            given |= change(_Moves(rig, given), given) or {}
        real(**given)
        if after is not None:
            after()

    return mock.patch.object(context, "run_fused_precopy", call)


def wrong_column_carried(rig: Rig) -> Any:
    """A state is copied from the column behind the one that the step continues."""

    def change(moves: _Moves, given: dict[str, Any]) -> dict[str, Any] | None:
        for index in moves.of()[:1]:
            bias = given["token_bias_gpu"].clone()
            bias[moves.lines[index]] += 1
            rig.strike(moves.names[index], moves.first[index] - 1, None)
            return {"token_bias_gpu": bias}
        return None

    return _copies(rig, change)


def state_of_another_hit(rig: Rig) -> Any:
    """A request that begins behind a common text gets the state of another one's."""
    undo: list[tuple[torch.Tensor, torch.Tensor]] = []
    known: set[str] = set()

    def change(moves: _Moves, given: dict[str, Any]) -> None:
        new = [index for index in moves.of() if moves.names[index] not in known]
        known.update(moves.names)
        hits = [index for index in new if moves.first[index]]
        if len(hits) < 2:
            return
        one, other = hits[:2]
        tables = aligned_states.tables_of_requests(rig.runner, [*rig.watch.states])
        for table in tables:
            cell = table[moves.lines[one], moves.source[one]]
            undo.append((cell, cell.clone()))
            cell.copy_(table[moves.lines[other], moves.source[other]])
        rig.strike(moves.names[one], moves.first[one] - 1, None)

    def after() -> None:
        while undo:
            cell, before = undo.pop()
            cell.copy_(before)

    return _copies(rig, change, after)


FAULTS = (wrong_column_carried, state_of_another_hit)
