"""Watches the states of recurrent layers inside vLLM's workers, beside the rows of attention.

It knows nothing of kvtxn. It sees the inputs of each layer, vLLM's drafts and sampled ids, and
keeps a plain float64 recurrence of each request over exactly the tokens that were kept, and, by
vLLM's own operator one token after another, the very bits of its states. After each step the cache
has to hold them, and nothing else may have changed: neither a block of somebody else's nor a row of
a rejected draft.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from cache_oracle import drafted, words
from state_twins import Family
from torch import Tensor

#: The largest difference between a state and its float64 twin, by the twin's largest number: vLLM's
#: operators round in bfloat16 on the way. A state with one row more or less also shows in the past
#: of the convolution, which is compared to the byte.
CLOSE = 0.02


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of the memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def same_view(tensor: Tensor, storage: Tensor) -> Tensor:
    """The place of ``tensor`` in a copy of its memory."""
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage.untyped_storage(), *place)


def places(layer: Any, slots: Tensor) -> Tensor:
    """The place in the layer's memory of each number in these slots: ``[slots, 2, heads, size]``.

    As vLLM's x86 kernels pack a block of keys and values, ``[heads, size, 2 * head_size]``: keys
    first. With AMX, keys lie in tiles of 16 rows and values in tiles of 16 numbers, in pairs.
    """
    _, heads, size, both = layer.kv_cache.shape
    width, row = both // 2, (slots % size)[:, None, None]
    number, head = torch.arange(width), torch.arange(heads)[:, None]
    if layer.isa == "amx":
        key = row // 16 * 16 * width + number // 2 * 32 + row % 16 * 2 + number % 2
        value = number // 16 * 16 * size + row // 2 * 32 + number % 16 * 2 + row % 2
    else:
        assert layer.isa in ("vec", "vec16"), "another packing"
        key, value = number * size + row, row * width + number
    of_block, of_head = layer.kv_cache.stride()[:2]
    first = layer.kv_cache.storage_offset() + (slots // size)[:, None, None] * of_block
    return torch.stack([first + head * of_head + part for part in (key, size * width + value)], 1)


def words_of(layer: Any, copies: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """The words of the memory that holds a layer's rows, and those of its copy."""
    memory, dtype = storage_bytes(layer.kv_cache), words(layer.kv_cache).dtype
    return memory.view(dtype), copies[memory.data_ptr()].view(dtype)


class StateOracle:
    """Methods for ``collective_rpc``; ``self`` is vLLM's worker."""

    def states_install(self, weights: dict[str, list[list[float]]]) -> None:
        """Watch every step from now on.

        Args:
            weights: the convolution's weight of each layer, ``[channels, width]``.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        found = runner.compilation_config.static_forward_context
        groups = {
            name: number
            for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        self.gated = {n: (found[n], groups[n]) for n in groups if hasattr(found[n], "num_spec")}
        self.attending = {n: found[n] for n in groups if n not in self.gated}
        assert self.gated
        self.families = {}
        for name, (layer, _) in self.gated.items():
            weight = torch.tensor(weights[name], dtype=torch.bfloat16) if name in weights else None
            self.families[name] = Family(layer, weight)
        self.twins: dict[str, dict[str, Any]] = {}
        self.bits: dict[str, dict[str, Any]] = {}
        self.seen = Counter[str]()
        self.inputs: dict[str, Tensor] = {}
        for name, family in self.families.items():
            family.listen(partial(self.inputs.__setitem__, name))
        self._watch(runner)

    def _watch(self, runner: Any) -> None:
        forward, sample = runner._model_forward, runner._sample
        step: list[dict[str, Any]] = []

        def forwarded(*args: Any, **kwargs: Any) -> Any:
            from vllm.forward_context import get_forward_context

            context = get_forward_context()
            step.clear()
            if not isinstance(context.slot_mapping, dict):
                return forward(*args, **kwargs)
            slots = {name: context.slot_mapping[name].clone() for name in self.attending}
            before = {}
            for cache in self._caches():
                before.setdefault(cache.untyped_storage().data_ptr(), storage_bytes(cache).clone())
            step.append({"slots": slots, "before": before} | self._plan(runner))
            result = forward(*args, **kwargs)
            self._after_forward(step[0])
            return result

        def sampled(logits: Any, metadata: Any) -> Any:
            output = sample(logits, metadata)
            if step:
                ids = output.sampled_token_ids
                drafts = step[0]["drafts"]
                counts = ((ids != -1).sum(1) - 1).clamp(min=0).tolist()
                pairs = zip(counts, drafts, strict=True)
                self._judge(step[0], [min(count, most) for count, most in pairs])
                step.clear()
            return output

        runner._model_forward, runner._sample = forwarded, sampled

    def _caches(self) -> list[Tensor]:
        caches = [layer.kv_cache for layer in self.attending.values()]
        return caches + [state for layer, _ in self.gated.values() for state in layer.kv_cache]

    def _plan(self, runner: Any) -> dict[str, Any]:
        """The rows of each request, and the block of its state in each layer."""
        batch = runner.input_batch
        count = batch.num_reqs
        ends = runner.query_start_loc.np[1 : count + 1].tolist()
        asked = self.step_drafts(runner)
        names = list(batch.req_ids)
        return {
            "names": names,
            "ends": ends,
            "starts": [0, *ends[:-1]],
            "fresh": (batch.num_computed_tokens_cpu[:count] == 0).tolist(),
            "prompt": (batch.num_computed_tokens_cpu < batch.num_prompt_tokens)[:count].tolist(),
            "drafts": [len(asked.get(name, ())) for name in names],
            "blocks": {
                name: batch.block_table[group].get_cpu_tensor()[:count, 0].tolist()
                for name, (_, group) in self.gated.items()
            },
        }

    def step_drafts(self, runner: Any) -> dict[str, Any]:
        """The drafts of this step by request, as the scheduler asked for them."""
        return self.scheduled.scheduled_spec_decode_tokens

    def states_listen(self) -> None:
        """Keep what the scheduler asks for."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        prepare = runner._prepare_inputs

        def prepared(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            self.scheduled = scheduler_output
            return prepare(scheduler_output, num_scheduled_tokens)

        runner._prepare_inputs = prepared

    def _after_forward(self, step: dict[str, Any]) -> None:
        """Take in the rows that are no drafts; the states have to be there, and no draft yet."""
        for name, (layer, _) in self.gated.items():
            rows = self.families[name].rows(self.inputs[name])
            for number, request in enumerate(step["names"]):
                twins = self.twins.setdefault(name, {})
                if step["fresh"][number] or request not in twins:
                    assert step["fresh"][number], request
                    twins[request] = self.families[name].twin()
                    self.bits.setdefault(name, {})[request] = self.families[name].bits()
                start, end = step["starts"][number], step["ends"][number] - step["drafts"][number]
                for row in range(start, end):
                    twins[request].take_in(*(part[row] for part in rows))
                bits = self.bits[name][request]
                if step["prompt"][number] or end - start > 1:
                    bits.copy(layer, step["blocks"][name][number])
                else:
                    bits.take_in(*(part[start] for part in rows))
        self.seen["early"] += self._wrong_states(step)
        rows = drafted(step["drafts"], step["ends"])
        self.seen["early_rows"] += self._changed_rows(step, rows)

    def _judge(self, step: dict[str, Any], accepted: list[int]) -> None:
        """Take the accepted drafts in, and compare everything."""
        ends, drafts = step["ends"], step["drafts"]
        for name, family in self.families.items():
            rows = family.rows(self.inputs[name])
            for number, request in enumerate(step["names"]):
                first = ends[number] - drafts[number]
                for row in range(first, first + accepted[number]):
                    self.twins[name][request].take_in(*(part[row] for part in rows))
                    self.bits[name][request].take_in(*(part[row] for part in rows))
        seen = self.seen
        seen["steps"] += 1
        seen["windows"] += any(drafts)
        seen["ragged"] += len(set(drafts)) > 1
        seen["draftless"] += any(drafts) and any(
            end - start == 1 for start, end in zip(step["starts"], ends, strict=True)
        )
        seen["mixed"] += any(drafts) and any(
            end - start > drafted + 1
            for start, end, drafted in zip(step["starts"], ends, drafts, strict=True)
        )
        seen["kept"] += sum(accepted)
        seen["rejected"] += sum(drafts) - sum(accepted)
        seen["states"] += len(self.gated) * len(drafts)
        seen["wrong"] += self._wrong_states(step)
        rejected = [
            row
            for end, most, count in zip(ends, drafts, accepted, strict=True)
            for row in range(end - most + count, end)
        ]
        seen["strays"] += self._strays(step, rejected)
        for each in (*self.twins.values(), *self.bits.values()):
            for request in set(each) - set(self._alive()):
                del each[request]

    def _alive(self) -> list[str]:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        return list(runner.requests)

    def _wrong_states(self, step: dict[str, Any]) -> int:
        """Count states that are not their twin's."""
        wrong = 0
        for name, (layer, _) in self.gated.items():
            past, *states = layer.kv_cache
            for request, block in zip(step["names"], step["blocks"][name], strict=True):
                twin = self.twins[name][request]
                same = torch.equal(words(past[block][: len(twin.past)]), words(twin.past))
                differs = torch.zeros(1)
                for state in states:
                    largest = twin.state.abs().max()
                    differs = (state[block].double() - twin.state).abs().max() / largest
                self.worst = max(getattr(self, "worst", 0.0), float(differs) if same else 0.0)
                wrong += not same or bool(differs > CLOSE)
                self.seen["other_bits"] += self.bits[name][request].differ(layer, block)
        return wrong

    def _changed_rows(self, step: dict[str, Any], rows: list[int]) -> int:
        """Count the rows of attention layers that differ from before the forward."""
        changed = 0
        for name, layer in self.attending.items():
            where = places(layer, step["slots"][name][rows])
            now, then = words_of(layer, step["before"])
            changed += int((now[where] != then[where]).flatten(1).any(1).sum())
        return changed

    def _strays(self, step: dict[str, Any], rejected: list[int]) -> int:
        """Count the memory that changed anywhere but where this step may write."""
        expected = {pointer: copy.clone() for pointer, copy in step["before"].items()}
        kept = [row for row in range(step["ends"][-1]) if row not in set(rejected)]
        for name, layer in self.attending.items():
            where = places(layer, step["slots"][name][kept])
            now, wanted = words_of(layer, expected)
            wanted[where] = now[where]
        for name, (layer, _) in self.gated.items():
            for state in layer.kv_cache:
                wanted = same_view(state, expected[state.untyped_storage().data_ptr()])
                blocks = step["blocks"][name]
                wanted[blocks] = state[blocks]
        memory = {each.untyped_storage().data_ptr(): storage_bytes(each) for each in self._caches()}
        return sum(not torch.equal(memory[pointer], expected[pointer]) for pointer in memory)

    def states_take(self) -> dict[str, float]:
        """The counts since the last call, and the largest difference of a state from its twin."""
        taken = {**self.seen, "worst": getattr(self, "worst", 0.0)}
        self.seen.clear()
        self.worst = 0.0
        return taken
