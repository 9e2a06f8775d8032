"""Faults in what is dead, in what lasts, and in kernels, which only bytes show on a GPU.

Dead are rows of rejected drafts and states that no step continues; ``"poison"`` fills them with
NaN. The V2 runner prepares its attention in one place, so kernels are misled there. Where NaN comes
out of a forward, its logits become zeros once the audit has looked: vLLM's V2 sampler would take a
token beyond the vocabulary, and the GPU would stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from planting import Rig, around

from kvtxn.audit.byte_books import Watched
from kvtxn.row_io import read


def _both(*contexts: Any) -> ExitStack:
    """Enter several contexts as one."""
    stack = ExitStack()
    for each in contexts:
        stack.enter_context(each)
    return stack


def _left(request: Any) -> int:
    """Return how many tokens a request may still say."""
    return int(request.max_tokens - request.num_output_tokens)


def _calm(rig: Rig) -> Any:
    """Let no logits of the V2 runner be NaN when they are sampled.

    Its sampler would draw a token that does not exist. The audit looks at the outputs before them.
    The V1 runner has the logits alone: there the audit looks at these, and argmax is a token.
    """
    if hasattr(rig.runner, "_sample"):
        return nullcontext()

    def after(logits: Any, *args: Any) -> Any:
        return None if logits is None else logits.nan_to_num(0.0)

    return around(rig.runner.model, "compute_logits", after=after)


@contextmanager
def _dead_rows(rig: Rig) -> Iterator[dict[str, int]]:
    """Let requests go on without drafts where two or more of the step before were rejected.

    Yields the position of the first rejected row that such a step leaves, by request.
    """
    dead: dict[str, int] = {}

    def before(scheduler_output: Any, output: Any) -> None:
        dead.clear()
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for name, index in output.req_id_to_index.items():
            kept = len(output.sampled_token_ids[index]) - 1
            if len(drafts.get(name, ())) >= kept + 2 and name in rig.scheduler.requests:
                dead[name] = rig.scheduler.requests[name].num_tokens + kept + 1

    def schedule(*args: Any) -> None:
        running = {request.request_id: request for request in rig.scheduler.running}
        for name in [*dead]:
            request = running.get(name)
            if rig.struck is not None or request is None or _left(request) <= 8:
                del dead[name]
        for request in running.values() if dead else ():
            request.spec_token_ids = []  # of all: latent attention reads rows of drafts otherwise

    with (
        around(rig.scheduler, "update_from_output", before),
        around(rig.scheduler, "schedule", schedule),
    ):
        yield dead


@contextmanager
def dead_row_read(rig: Rig) -> Iterator[None]:
    """A kernel reads one row too many, that of a rejected draft."""
    longer: list[tuple[Any, int]] = []
    with _dead_rows(rig) as dead:

        def before(batch: Any, *args: Any, **kwargs: Any) -> None:
            longer.clear()
            for index, name in enumerate(batch.req_ids):
                if rig.struck is None and name in dead and batch.num_scheduled_tokens[index] == 1:
                    batch.seq_lens[index] += 1
                    longer.append((batch, index))
                    rig.strike(name, dead[name] - 1, rig.slot(name, dead[name]))

        def restore(*args: Any, **kwargs: Any) -> None:
            for batch, index in longer:
                batch.seq_lens[index] -= 1
            longer.clear()

        with (
            _calm(rig),
            around(rig.runner.model_state, "prepare_attn", before),
            around(rig.runner, "sample", restore),
        ):
            yield


@contextmanager
def dead_row_written(rig: Rig) -> Iterator[None]:
    """Somebody writes into the row of a rejected draft; it is nobody's, and nobody reads it."""
    with _dead_rows(rig) as dead:

        def schedule(*args: Any) -> None:
            for name, position in dead.items():
                if rig.struck is None:
                    slot = rig.slot(name, position)
                    for layer in _layers(rig):
                        for _, plane in layer.planes if not layer.ref.states else ():
                            plane.cells[plane.index(_at(plane, slot))] = 0
                    rig.strike(name, position, slot)

        with around(rig.scheduler, "schedule", after=lambda result, *_: schedule()):
            yield


def _layers(rig: Rig) -> list[Watched]:
    return [layer for layers in rig.watch.scrub.books.layers.values() for layer in layers]


def _at(plane: Any, slot: int) -> torch.Tensor:
    return torch.tensor([slot], device=plane.cells.device)


def later(rig: Rig, change: Callable[[Any], None]) -> Any:
    """Call a function with a request that has rows to spare, once, between two steps."""

    def schedule(*args: Any) -> None:
        for request in rig.scheduler.running:
            if rig.struck is None and request.num_computed_tokens > 64 and _left(request) > 8:
                torch.cuda.synchronize()
                with torch.inference_mode():
                    change(request)
                torch.cuda.synchronize()

    return around(rig.scheduler, "schedule", schedule)


def not_a_number(rig: Rig) -> Any:
    """A row that is read becomes NaN; no checksum is compared until it comes out."""

    def change(request: Any) -> None:
        slot = rig.slot(request.request_id, 37)
        layer = [layer for layer in _layers(rig) if not layer.ref.states][-1]
        for _, plane in layer.planes:
            plane.cells[plane.index(_at(plane, slot))] = -1  # all bits: a NaN in each format
        rig.watch.scrub.books.seals.zero_()
        rig.strike(request.request_id, None, None)  # type: ignore[arg-type]

    return _both(_calm(rig), later(rig, change))


def flipped_state(rig: Rig) -> Any:
    """One bit of the state of a request flips, in the last recurrent layer."""

    def change(request: Any) -> None:
        layer = [layer for layer in _layers(rig) if layer.ref.states][-1]
        blocks = rig.manager.get_block_ids(request.request_id)[int(layer.ref.group[6:])]
        plane = layer.planes[-1][1]
        for block in blocks:  # whichever the next step continues
            row = read(plane, _at(plane, block)).clone()
            row.view(-1)[3] ^= 1
            plane.cells[plane.index(_at(plane, block))] = row
        rig.strike(request.request_id, request.num_computed_tokens - 1, None)

    return later(rig, change)


def dead_state_read(rig: Rig) -> Any:
    """The kernels continue another column than the one they are told, the state of which is dead.

    The ledger was told the right one: only the NaN that comes out shows it.
    """

    def after(found: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        every = {id(each): each for each in found.values()}.values()
        told = [each for each in every if getattr(each, "num_accepted_tokens", None) is not None]
        for each in told[:1]:
            mask = getattr(each, "spec_sequence_masks", None)
            number = len(batch.req_ids)
            names = list(batch.req_ids)
            if mask is not None:
                flags = mask[:number].tolist()
                names = [name for name, flag in zip(names, flags, strict=True) if flag]
            kept = each.num_accepted_tokens[: len(names)].tolist()
            for index, count in enumerate(kept):
                if rig.struck is None and count >= 2:
                    for one in told:
                        one.num_accepted_tokens[index] -= 1
                    rig.strike(names[index], None, None)  # type: ignore[arg-type]

    return _both(_calm(rig), around(rig.runner.model_state, "prepare_attn", after=after))


FAULTS = (dead_row_read, not_a_number, flipped_state, dead_state_read)
#: Nobody reads what these change.
HARMLESS = (dead_row_written,)
