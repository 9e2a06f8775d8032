"""A stand-in for vLLM's V2 runner and its scheduler, on a CPU: vLLM's own messages, torch's tables.

It keeps what the audit reads where the V2 runner keeps it. Which drafts are accepted is drawn by
lot; a rejected draft's row stays in its slot until the next step writes over it.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy
import torch
from kernels_here import importing_kernels
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

with importing_kernels():
    from kvtxn.integrations.vllm_plugin import runner_parts
    from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts

from kvtxn.integrations.vllm_plugin.policy.settings import settings

SIZE = 4
BLOCKS = 120
LENGTH = 96
DRAFTS = 3
REQUESTS = 4


def cache_config(window=None):
    """One group of full attention, and one of sliding windows if a window is given."""
    heads = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**heads))]
    if window is not None:
        spec = SlidingWindowSpec(**heads, sliding_window=window)
        groups.append(KVCacheGroupSpec(["sliding"], spec))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


class Own:
    """Stands for vLLM's runner. Methods have vLLM's names and parameters."""

    def __init__(self):
        self.max_num_reqs, self.max_model_len = REQUESTS, LENGTH
        self.speculative_config = SimpleNamespace(num_speculative_tokens=DRAFTS)
        self.cache_config = SimpleNamespace(enable_prefix_caching=True, kv_cache_memory_bytes=None)
        self.model_config = SimpleNamespace(is_encoder_decoder=False, runner_type="generate")
        self.model_state = SimpleNamespace(num_new_sampled_tokens_per_step=1)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace())
        self.model = torch.nn.Module()  # without parameters
        self.adaptive_verification = None
        self.is_last_pp_rank = True
        self.device = torch.device("cpu")
        self.input_buffers = SimpleNamespace(
            input_ids=torch.full((128,), -7, dtype=torch.int32),
            positions=torch.zeros(128, dtype=torch.int64),
            query_start_loc=torch.zeros(REQUESTS + 1, dtype=torch.int32),
        )
        self.output = self.forward = None

    def get_model(self):
        return self.model

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        return self.forward()

    def initialize_kv_cache(
        self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None
    ):
        self.kv_cache_config = kv_cache_config
        number = len(kv_cache_config.kv_cache_groups)
        self.tables = [
            torch.zeros(REQUESTS, LENGTH // SIZE + 2, dtype=torch.int32) for _ in range(number)
        ]
        slots = torch.zeros(number, 128, dtype=torch.int64)
        self.block_tables = SimpleNamespace(slot_mappings=slots, input_block_tables=self.tables)

    def update_requests(self, scheduler_output):
        self.told = scheduler_output

    def prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, num_active_loras):
        return "inputs"

    def prepare_attn(self, input_batch):
        return tuple(self.tables), self.block_tables.slot_mappings

    def sample(self, hidden_states, input_batch, grammar_output):
        return "sampled"

    def postprocess_sampled(
        self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=None
    ):
        self.sampled = num_sampled

    def sample_tokens(self, grammar_output):
        self.block_tables.slot_mappings.fill_(1)  # as V2's drafters do
        return self.output


class Request:
    """A request as the scheduler knows it."""

    def __init__(self, name, prompt, computed, tables):
        self.name, self.tokens, self.prompt = name, list(prompt), len(prompt)
        self.computed, self.tables, self.is_new, self.grown = computed, tables, True, None


class Rig:
    """A scheduler of a few requests, and a hooked runner.

    Args:
        asked: the user's settings.
        window: see ``cache_config``.
    """

    def __init__(self, window=None, seed=0, **asked):
        self.chance = random.Random(seed)
        self.runner = Own()
        wanted = settings({"kvtxn": {"audit": "ledger", **asked}}, 1, "cuda")
        facts = EngineFacts(device="cuda", runner="v2")
        runner_parts.attach(self.runner, wanted, 0, facts, windows=False)
        self.config = cache_config(window)
        self.free = list(range(1, BLOCKS))
        self.running: list[Request] = []
        self.gone, self.preempted = set(), set()
        self.tamper = None
        self.wrong_count = 0

    @property
    def watch(self):
        return self.runner.kvtxn_audit

    @property
    def ledger(self):
        """The runner's only part."""
        [ledger] = self.runner.kvtxn_parts._parts
        return ledger

    def start(self):
        self.runner.initialize_kv_cache(self.config)
        self.watch.begin()

    def blocks(self, count):
        return [self.free.pop(0) for _ in range(count)]

    def add(self, name, prompt, hit=None):
        """Add a request; ``hit`` is another one, whose full blocks it may begin with."""
        same = 0
        if hit is not None:
            limit = min(len(prompt) - 1, hit.computed)
            while same < limit and prompt[same] == hit.tokens[same]:
                same += 1
        full = same // SIZE
        need = -(-(len(prompt) + DRAFTS + 1) // SIZE) + 1
        tables = [
            (hit.tables[group][:full] if hit else []) + self.blocks(need - full)
            for group in range(len(self.config.kv_cache_groups))
        ]
        request = Request(name, prompt, full * SIZE, tables)
        self.running.append(request)
        return request

    def end(self, request, *, preempt=False):
        """End a request; its blocks are not handed out again here unless they are given back."""
        self.running.remove(request)
        (self.preempted if preempt else self.gone).add(request.name)

    def resume(self, request):
        """Begin a preempted request again, in new blocks."""
        again = self.add(request.name, request.tokens)
        again.prompt = len(request.tokens)
        return again

    def step(self, chunk=LENGTH):
        """Schedule and run one step; ``chunk`` rows of a prompt at most."""
        batch = self._batch(chunk)
        self.gone, self.preempted = set(), set()
        if self.tamper is not None:
            self.tamper(self, batch)
        prepared = self.runner.prepare_attn(batch)
        assert len(prepared) == 2
        ids, sampled = self._sample(batch)
        self.runner.postprocess_sampled(batch.idx_mapping, ids, sampled, None)
        return self.runner.sample_tokens(None)

    def _batch(self, chunk):
        runner, rows, starts, drafts, lengths = self.runner, [], [0], [], []
        for request in self.running:
            left = len(request.tokens) - request.computed
            number = min(left, chunk)
            count = self.chance.randrange(DRAFTS + 1) if number == left else 0
            request.fed = request.tokens[request.computed :][:number]
            request.drafts = [self.chance.randrange(1, 50) for _ in range(count)]
            rows += request.fed + request.drafts
            starts.append(len(rows))
            drafts.append(count)
            lengths.append(number + count)
            self._grow(request, request.computed + number + count)
        self._tell(dict(zip([r.name for r in self.running], lengths, strict=True)))
        runner.input_buffers.input_ids[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
        runner.input_buffers.query_start_loc[: len(starts)] = torch.tensor(starts)
        runner.input_buffers.query_start_loc[len(starts) :] = len(rows)
        first = [request.computed for request in self.running]
        for group, slots in enumerate(runner.block_tables.slot_mappings):
            slots.fill_(-1)
            for index, request in enumerate(self.running):
                table = request.tables[group]
                runner.tables[group][index, : len(table)] = torch.tensor(table, dtype=torch.int32)
                position = torch.arange(first[index], first[index] + lengths[index])
                runner.input_buffers.positions[starts[index] : starts[index + 1]] = position
                place = torch.tensor(table)[position // SIZE] * SIZE + position % SIZE
                slots[starts[index] : starts[index + 1]] = place
        return SimpleNamespace(
            req_ids=[request.name for request in self.running],
            num_reqs=len(self.running),
            idx_mapping=torch.arange(len(self.running)),
            num_scheduled_tokens=numpy.array(lengths, dtype=numpy.int32),
            num_draft_tokens=sum(drafts),
            num_draft_tokens_per_req=numpy.array(drafts, dtype=numpy.int32),
            query_start_loc=runner.input_buffers.query_start_loc[: len(starts)],
            is_prefilling_np=numpy.array([r.computed < r.prompt for r in self.running]),
            num_computed_prefill_tokens_np=numpy.array(
                [min(r.computed, r.prompt) for r in self.running], dtype=numpy.int32
            ),
            prefill_len_np=numpy.array([r.prompt for r in self.running], dtype=numpy.int32),
            has_prefill=any(r.computed < r.prompt for r in self.running),
        )

    def _grow(self, request, length):
        need = -(-length // SIZE) - len(request.tables[0])
        request.grown = None
        if need > 0:
            request.grown = tuple(self.blocks(need) for _ in request.tables)
            for table, new in zip(request.tables, request.grown, strict=True):
                table += new

    def _tell(self, scheduled):
        output = SchedulerOutput.make_empty()
        cached = CachedRequestData.make_empty()
        new = []
        for request in self.running:
            if request.is_new:
                request.is_new = False
                new.append(
                    NewRequestData(
                        req_id=request.name,
                        prompt_token_ids=request.tokens[: request.prompt],
                        mm_features=[],
                        sampling_params=None,
                        pooling_params=None,
                        block_ids=tuple(list(table) for table in request.tables),
                        num_computed_tokens=request.computed,
                        lora_request=None,
                        prefill_token_ids=list(request.tokens),
                    )
                )
            else:
                cached.req_ids.append(request.name)
                cached.num_computed_tokens.append(request.computed)
                cached.new_block_ids.append(request.grown)
        output.scheduled_new_reqs, output.scheduled_cached_reqs = new, cached
        output.finished_req_ids, output.preempted_req_ids = self.gone, self.preempted
        output.num_scheduled_tokens = scheduled
        self.runner.update_requests(output)

    def _sample(self, batch):
        ids = torch.full((len(self.running), DRAFTS + 1), 49, dtype=torch.int64)
        counts = torch.zeros(len(self.running), dtype=torch.int32)
        for index, request in enumerate(self.running):
            request.computed += len(request.fed)
            if request.computed < len(request.tokens):
                continue
            kept = self.chance.randrange(len(request.drafts) + 1)
            token = self.chance.randrange(1, 50)
            if kept < len(request.drafts) and token == request.drafts[kept]:
                token += 50
            drawn = [*request.drafts[:kept], token]
            ids[index, : len(drawn)] = torch.tensor(drawn)
            counts[index] = len(drawn) + self.wrong_count
            request.tokens += drawn
            request.computed += kept
        return ids, counts
