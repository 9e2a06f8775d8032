"""Reads the recurrent states on the device around every step of a GPU's V1 runner."""

from __future__ import annotations

from typing import Any

import attrs
import numpy
import state_watch
import torch
from moved_prompts import with_moved_prompts


@attrs.frozen(eq=False)
class Batch:
    """The requests of a step, as ``state_watch`` reads them of V2's input batch."""

    num_reqs: int
    req_ids: list[str]
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    is_prefilling_np: Any
    num_draft_tokens_per_req: Any

    @classmethod
    def of(cls, runner: Any, metadata: Any, lengths: Any) -> Batch:
        """Read a V1 runner that has prepared a step, without drafts where that has none."""
        batch, count = runner.input_batch, len(lengths)
        drafts = numpy.array([0] * count if metadata is None else metadata.num_draft_tokens)
        prompts = batch.num_computed_tokens_cpu[:count] < batch.num_prompt_tokens[:count]
        # A preempted request computes its answer like a prompt.
        prompts |= lengths - drafts > 1
        return cls(
            count,
            list(batch.req_ids),
            runner.seq_lens[:count].clone(),
            runner.query_start_loc.gpu[: count + 1].clone(),
            prompts,
            drafts,
        )


class Watch(state_watch.Watch):
    """The worker extension of engines with the V1 runner."""

    def watch(self) -> None:
        """Digest states from now on; the same drafts are accepted, whatever the batch's order."""
        from vllm.v1.sample import rejection_sampler
        from vllm.v1.worker import gpu_model_runner

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.know(runner)
        rejection_sampler.generate_uniform_probs = self.lots
        gpu_model_runner.update_ngram_gpu_tensors_incremental = with_moved_prompts(
            gpu_model_runner.update_ngram_gpu_tensors_incremental, runner.requests
        )
        prepare, build = runner._prepare_inputs, runner._build_attention_metadata
        forward, sample = runner._model_forward, runner._sample
        update = runner._update_states_after_model_execute

        def prepared(scheduler_output: Any, lengths: Any) -> Any:
            result = prepare(scheduler_output, lengths)
            self.batch = Batch.of(runner, result[1], lengths)
            return result

        def built(*args: Any, **kwargs: Any) -> Any:
            """States have moved to the blocks of this forward by now."""
            result = build(*args, **kwargs)
            if kwargs.get("num_scheduled_tokens") is not None:  # else vLLM warms up, or captures
                self.before = self.states_now()
                self.blocks = self.blocks_now()
            return result

        def forwarded(*args: Any, **kwargs: Any) -> Any:
            from vllm.forward_context import get_forward_context

            self.counts["graphs"] += get_forward_context().cudagraph_runtime_mode.name == "FULL"
            return forward(*args, **kwargs)

        def sampled(logits: Any, metadata: Any) -> Any:
            self.look("forward")
            self.step = runner.kvtxn_states._step if self.replayed else None
            return sample(logits, metadata)

        def updated(ids: torch.Tensor, scheduler_output: Any) -> None:
            update(ids, scheduler_output)
            self.look("commit")
            kept = (ids != -1).sum(1, dtype=torch.int32)
            if self.step is not None:
                self.recur(self.step, kept)
            self.note_v1(kept)

        runner._prepare_inputs, runner._build_attention_metadata = prepared, built
        runner._model_forward, runner._sample = forwarded, sampled
        runner._update_states_after_model_execute = updated

    def lots(self, num_tokens: int, num_draft_tokens: list[int], *_: Any) -> torch.Tensor:
        """Draw the lots of a step by request and position, where vLLM draws them by place."""
        names = [int(self.name_of(request)) for request in self.batch.req_ids]
        both = zip(names, self.computed().tolist(), num_draft_tokens, strict=True)
        drawn = [numpy.random.default_rng([name, at]).random(count) for name, at, count in both]
        assert num_tokens == sum(num_draft_tokens)
        return torch.from_numpy(numpy.concatenate(drawn)).to(self.batch.seq_lens.device)

    def note_v1(self, kept: torch.Tensor) -> None:
        """Digest the state of each request of the batch."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        torch.cuda.synchronize()  # vLLM copies the counts to the host
        count = self.batch.num_reqs
        accepted = runner.input_batch.num_accepted_tokens_cpu_tensor[:count].to(kept.device)
        drafts = torch.from_numpy(self.batch.num_draft_tokens_per_req).to(kept.device)
        after = self.batch.seq_lens - drafts + kept - 1
        self.note_states(kept, after.tolist(), accepted.long() - 1)

    def tables(self, layer: Any) -> torch.Tensor:
        """The blocks of the batch's requests in a layer's group."""
        return self.all_tables()[int(layer.group.partition(".")[2])]

    def all_tables(self) -> list[torch.Tensor]:
        """The blocks of the batch's requests, of every group."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        tables, groups = runner.input_batch.block_table, runner.kv_cache_config.kv_cache_groups
        count = self.batch.num_reqs
        return [tables[n].get_device_tensor(count).long() for n in range(len(groups))]
