"""The encoder outputs that a step of vLLM's makes, forgets and uses.

vLLM keeps the outputs of an encoder by the names of the items, also when no request has them any
more. A request that comes later with the same item takes the output from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...serving.step import EncodedPart, EncoderStep
from .engine_protocols import Feature, SchedulerOutput
from .runner_protocols import Runner

#: A modality whose items are vectors already: no encoder computes them.
_VECTORS: Final = "prompt_embeds"


class EncoderSteps:
    """The images and audio of a runner's requests, by which its steps are read."""

    def __init__(self) -> None:
        self._items: Final[dict[str, Sequence[Feature]]] = {}

    def read(self, told: SchedulerOutput) -> EncoderStep | None:
        """Read a step; None as long as no request has an item. Call this for each step."""
        for name in told.finished_req_ids:
            self._items.pop(name, None)
        for new in told.scheduled_new_reqs:
            if new.mm_features:
                self._items[new.req_id] = new.mm_features
        if not (self._items or told.free_encoder_mm_hashes):
            return None
        encoded = [
            self._items[name][number].identifier
            for name, numbers in told.scheduled_encoder_inputs.items()
            for number in numbers
            if name in self._items
        ]
        return EncoderStep(
            encoded, told.free_encoder_mm_hashes, lambda: list(_parts(self._items, told))
        )


def _parts(items: dict[str, Sequence[Feature]], told: SchedulerOutput) -> Iterator[EncodedPart]:
    """Yield which rows of a step are computed of which item."""
    cached = told.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in told.scheduled_new_reqs}
    computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for name, begin in computed.items():
        end = begin + told.num_scheduled_tokens.get(name, 0)
        for item in items.get(name, ()):
            place = item.mm_position
            first, last = max(place.offset, begin), min(place.offset + place.length, end)
            if first < last and item.modality != _VECTORS:
                yield EncodedPart(name, item.identifier, first - begin, last - begin)


def encoder_step(runner: Runner, told: SchedulerOutput) -> EncoderStep | None:
    """Read what the encoder of a runner's model does in a step; None without any item.

    Rows of an encoder-decoder model stand for no positions of the encoder's input.
    """
    if runner.model_config.is_encoder_decoder:
        return None
    known: EncoderSteps = vars(runner).setdefault("kvtxn_encoder_steps", EncoderSteps())
    return known.read(told)
