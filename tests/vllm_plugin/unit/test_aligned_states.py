"""States that the prefix cache keeps at the ends of blocks, beside vLLM's own over whole lives.

vLLM's own code prepares each step and copies states and pasts after it; its kernels run through
Triton's interpreter. Blocks are so short that drafts cross their ends in most steps.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import held_rig as held
import interpreted
import pytest
import torch
from engine_jobs import missing
from kernels_here import ON_GPU, importing_kernels
from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA
from kvtxn.integrations.vllm_plugin.seam import aligned_states
from kvtxn.integrations.vllm_plugin.seam.state_commits import StateTables
from torch import Tensor

with importing_kernels():
    import kvtxn.backends.move_rows.stage_rows  # noqa: F401 - interpreted from here on
    from kvtxn.backends.state_tables import block_boundaries

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

TOKENS, COLUMNS = 7, 12
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2**-5}


class Engine:
    """The part of vLLM's V2 runner that moves states between blocks, of one side."""

    def __init__(self, side: held.Side, spec_blocks: int, tables: Tensor) -> None:
        from vllm.model_executor.layers.mamba import mamba_utils as copies
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

        own = interpreted.load("v1/worker/mamba_utils.py")
        past, state = side.layer.kv_cache
        spec = MambaSpec(
            shapes=(past.shape[1:], state.shape[1:]),
            dtypes=(past.dtype, state.dtype),
            block_size=TOKENS,
            mamba_cache_mode="align",
            num_speculative_blocks=spec_blocks,
        )
        self.spec, self.side, self.tables, self.own = spec, side, tables, own
        self.config = KVCacheConfig(held.BLOCKS, [], [KVCacheGroupSpec(["it"], spec)])
        functions = {spec.mamba_type: (copies.get_conv_copy_spec, copies.get_temporal_copy_spec)}
        self.functions = functions
        self.context = own.MambaSpecDecodeGPUContext.create(
            held.REQUESTS, self.config, functions, torch.device("cpu"), self.buffer
        )
        self.begin()
        self.column = torch.full((held.REQUESTS,), -1, dtype=torch.int32)
        self.source, self.offset = self.column.clone(), self.column.clone()
        self.accepted = torch.ones(held.REQUESTS, dtype=torch.int32)

    def buffer(self, *_: int, **__: object) -> object:
        """Make no buffer: V2 has its own."""

    def begin(self) -> None:
        """Begin in the middle of blocks."""
        tables, layers = [self.tables], {"it": self.side.layer}
        self.context._populate_metadata(self.config, layers, self.functions, tables, tables)

    def under(self, runner: Any) -> None:
        """Become part of a runner."""
        runner.block_tables = SimpleNamespace(input_block_tables=[self.tables])
        runner.model_state = SimpleNamespace(_mamba_ctx=self.context)

    def prepare(self, computed: Tensor, starts: Tensor, spec_blocks: int) -> None:
        """Move states to the blocks of the step's last rows, as vLLM does before a forward."""
        places = torch.arange(held.REQUESTS, dtype=torch.int32)
        self.own.preprocess_mamba_align_fused_kernel[(1,)](
            *(places, self.column, computed, starts, self.accepted, self.source, self.offset),
            held.REQUESTS,
            BLOCK_SIZE=8,
            MAMBA_BLOCK_SIZE=TOKENS,
        )
        given = self.column, self.source, self.offset, places
        self.context.run_fused_precopy(held.REQUESTS, *given)
        columns = self.column[:, None] + torch.arange(1 + spec_blocks)
        self.side.table = self.tables.gather(1, columns.long())

    def finish(self, sampled: Tensor, computed: Tensor) -> None:
        """Copy what is at the ends of blocks, as vLLM does after a step's tokens are known."""
        self.accepted.copy_(sampled.clamp(min=1))
        places = torch.arange(held.REQUESTS, dtype=torch.int32)
        self.context.run_fused_postprocess_align(
            held.REQUESTS, self.accepted, self.column, computed, places
        )

    def block(self, request: int, column: int) -> tuple[Tensor, Tensor]:
        """The past and the state in a request's block."""
        past, state = (cache[self.tables[request, column]] for cache in self.side.layer.kv_cache)
        return past, state

    def state(self, request: int) -> Tensor:
        """A request's present state: there is a column for each row where stock keeps them."""
        spread = self.side.table.shape[1] > 1
        column = int(self.column[request]) + (int(self.accepted[request]) - 1 if spread else 0)
        return self.block(request, column)[1]


class EngineV1(Engine):
    """The part of vLLM's V1 runner that does it, whose counts are on the host."""

    def buffer(self, size: int, dtype: torch.dtype) -> object:
        """Make a buffer as the runner does."""
        from vllm.v1.utils import CpuGpuBuffer

        return CpuGpuBuffer(size, dtype=dtype, device=torch.device("cpu"), pin_memory=False)

    def begin(self) -> None:
        """Begin in the middle of blocks; vLLM fills the context in the first step."""
        names = [str(number) for number in range(held.REQUESTS)]
        self.kept = torch.ones(held.REQUESTS, dtype=torch.int32)
        self.columns = dict.fromkeys(names, 0)
        table = SimpleNamespace(get_device_tensor=lambda count: self.tables[:count])
        counts = self.kept.numpy()
        self.batch = SimpleNamespace(
            req_ids=names, num_accepted_tokens_cpu=counts, block_table=[table]
        )
        none = SimpleNamespace(mamba_group_ids=[0], mamba_spec=self.spec, offset=0)
        self.buffers = SimpleNamespace(preprocess=none, postprocess_align=self.context)
        self.cache = self.config, {"it": self.side.layer}, self.functions

    def under(self, runner: Any) -> None:
        """Become part of a runner."""
        runner.input_batch, runner.kv_cache_config = self.batch, self.config
        runner._get_mamba_bufs = lambda: self.buffers
        runner._get_mamba_state_copy_funcs = lambda: self.functions

    def prepare(self, computed: Tensor, starts: Tensor, spec_blocks: int) -> None:
        """Move states to the blocks of the step's last rows, as vLLM does before a forward."""
        names, lengths = self.batch.req_ids, starts.diff().tolist()
        step = SimpleNamespace(
            finished_req_ids=(),
            preempted_req_ids=None,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
            num_scheduled_tokens=dict(zip(names, lengths, strict=True)),
            scheduled_spec_decode_tokens={
                name: [0] * (length - 1) for name, length in zip(names, lengths, strict=True)
            },
        )
        both = zip(names, computed.tolist(), strict=True)
        requests = {name: SimpleNamespace(num_computed_tokens=count) for name, count in both}
        config, layers, functions = self.cache
        self.own.preprocess_mamba(
            *(step, config, SimpleNamespace(enable_prefix_caching=True), self.columns),
            *(self.batch, requests, layers, functions, self.buffers.preprocess),
            align_ctx=self.context,
        )
        given = names, len(names), requests, self.columns
        self.own.stage_postprocess_inputs_to_gpu(self.context, step, *given)
        self.column = torch.tensor([self.columns[name] for name in names])
        self.accepted = self.kept.clone()
        columns = self.column[:, None] + torch.arange(1 + spec_blocks)
        self.side.table = self.tables.gather(1, columns)

    def finish(self, sampled: Tensor, _: Tensor) -> None:
        """Copy what is at the ends of blocks, as vLLM does after a step's tokens are known."""
        config, layers, functions = self.cache
        self.own.postprocess_mamba_align_gpu(
            bufs=self.buffers,
            num_reqs=held.REQUESTS,
            num_accepted_tokens_gpu=sampled.clamp(min=1),
            num_accepted_tokens_cpu_tensor=self.kept,
            input_batch=self.batch,
            kv_cache_config=config,
            forward_context=layers,
            mamba_state_copy_funcs=functions,
        )
        self.accepted = self.kept.clone()


class Rig(held.Rig):
    """Stock and one state per request, both with states at the ends of blocks."""

    engine = Engine

    def hold(self, layer: held.Layer) -> Any:
        requests, spread = held.REQUESTS, held.DRAFTS + 1
        tables = [1 + torch.arange(requests * n).view(requests, n).int()
                  for n in (COLUMNS + spread, COLUMNS)]  # fmt: skip
        pairs = zip(self.sides, (held.DRAFTS, 0), tables, strict=True)
        self.engines = [self.engine(side, blocks, table) for side, blocks, table in pairs]
        for request in range(requests):  # the same state and past before the first step
            for mine, theirs in zip(*(e.block(request, 0) for e in self.engines), strict=True):
                theirs.copy_(mine)
        for engine in self.engines:
            engine.column.zero_()
        states = super().hold(layer)
        config = self.runner.vllm_config.cache_config
        config.mamba_cache_mode = "align"
        self.engines[1].under(self.runner)
        [group] = self.runner.kv_cache_config.kv_cache_groups
        group.kv_cache_spec = self.engines[1].spec
        states = type(states)(self.runner, self.make, fast=self.fast)
        states.hook()
        self.undo = aligned_states.hook_copies(self.runner, ends=not states.writes_ends)
        self.computed = torch.tensor([1, 3, 4, 6], dtype=torch.int32)
        self.crossed = 0
        return states

    def step(self, lengths: list[int], sampled: list[int]) -> None:
        rows = torch.randn(sum(lengths), self.sides[0].layer.channels).to(self.dtype)
        more = torch.randn(sum(lengths), 2, held.HEADS).to(self.dtype)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        for engine in self.engines:
            engine.prepare(self.computed, starts, engine.side.table.shape[1] - 1)
        self.batch = SimpleNamespace(seq_lens=self.computed + starts.diff(), query_start_loc=starts)
        outputs = []
        for engine in self.engines:
            self.accepted = engine.accepted
            outputs.append(self.forward(engine.side, lengths, rows, more))
        stored = self.sides[0].layer.kv_cache[1].dtype
        near = NEAR[stored] if self.fast else 0
        self.same(*outputs, max(near, 2**-7) if self.fast else 0)
        counts = torch.tensor(sampled, dtype=torch.int32)
        self.commit(counts)
        before, self.computed = self.computed, self.computed + counts
        for engine in self.engines:
            engine.finish(counts, self.computed)
        for request in range(held.REQUESTS):
            self.same(*(engine.state(request) for engine in self.engines), near)
            self.same(*(e.block(request, int(e.column[request]))[0] for e in self.engines), 0)
            end = int(self.computed[request]) // TOKENS
            if end > int(before[request]) // TOKENS:
                self.crossed += 1
                pasts, states = zip(*(e.block(request, end - 1) for e in self.engines), strict=True)
                self.same(*states, near)
                self.same(*(past[: held.WIDTH - 1] for past in pasts), 0)

    def same(self, theirs: Tensor, ours: Tensor, near: float) -> None:
        assert (theirs - ours).abs().max() <= near * theirs.abs().max()


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "BLOCKS", 80)


#: Each kind and each form under both runners, which decide the same copies for all of them.
@pytest.mark.parametrize(
    ("kind", "stored", "form", "engine"),
    [
        (GATED_DELTA, torch.float32, "graphs", Engine),
        (GATED_DELTA, torch.bfloat16, "exact", Engine),
        (GATED_DELTA, torch.float32, "fast", Engine),
        (MAMBA2, torch.float32, "fast", Engine),
        (OLMO_DELTA, torch.float32, "graphs", Engine),
        (OLMO_DELTA, torch.bfloat16, "exact", Engine),
        (MAMBA2, torch.float32, "exact", Engine),
        (GATED_DELTA, torch.float32, "graphs", EngineV1),
        (OLMO_DELTA, torch.bfloat16, "exact", EngineV1),
        (MAMBA2, torch.float32, "fast", EngineV1),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else str(each),
)
def test_blocks_keep_the_states_at_their_ends(kind, stored, form, engine, monkeypatch):
    """As stock does: where drafts cross an end, stop at it, begin at it, and fall short of it."""
    monkeypatch.setattr(Rig, "fast", form == "fast")
    monkeypatch.setattr(Rig, "engine", engine)
    rig = Rig(kind, stored, monkeypatch, held.Captures() if form == "graphs" else None)
    if rig.states.graphs is not None:
        rig.states.graphs.capture()
    draw = random.Random(3)
    rows = held.DRAFTS + 1
    for _ in range(4):
        lengths = [draw.choice([1, rows, rows, rows]) for _ in range(held.REQUESTS)]
        rig.step(lengths, [draw.randint(1, length) for length in lengths])
    for _ in range(2):  # all stop at an end, short of the last row or with it
        left = [-int(n) % TOKENS or TOKENS for n in rig.computed]
        rig.step([rows] * held.REQUESTS, [min(each, rows) for each in left])
    rig.step([rows] * held.REQUESTS, [2] * held.REQUESTS)
    assert rig.crossed >= 8
    assert not rig.repeated
    rig.undo()
    assert type(rig.engines[1].context) is type(rig.engines[0].context)


def test_vllms_copies_are_those_that_are_hooked():
    """Else the runner stays out; and what its class has is what kvtxn takes apart."""
    assert aligned_states.copies_differ() is None
    from vllm.v1.worker import mamba_utils as own

    class Other(own.MambaSpecDecodeGPUContext):
        def run_fused_precopy(self, num_reqs: int) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "MambaSpecDecodeGPUContext", Other)
        assert "state_base_addrs is not there" in str(aligned_states.copies_differ())
        Other.__annotations__ = own.MambaSpecDecodeGPUContext.__mro__[1].__annotations__
        assert "run_fused_precopy takes ('num_reqs',)" in str(aligned_states.copies_differ())


@pytest.mark.parametrize("placed", [False, True])
def test_the_kernel_names_the_same_snapshots(placed, monkeypatch):
    """Two groups, requests beyond one program's, places in another order."""
    count, device = 70, "cuda" if ON_GPU else "cpu"
    torch.manual_seed(1)
    tables = tuple(torch.randint(0, 99, (90, 9), dtype=torch.int32, device=device) for _ in "ab")
    made = block_boundaries.BlockTables.build(tables, TOKENS)
    rows = torch.randint(1, 5, (90,), device=device)
    before = torch.randint(0, 8 * TOKENS - 5, (90,), device=device)
    starts = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int()
    places = torch.randperm(90, device=device)[:count] if placed else None
    at = slice(count) if places is None else places
    column = ((before + rows - 1) // TOKENS)[at]
    line = torch.stack([t[at].gather(1, column[:, None])[:, 0] for t in tables])
    wide = torch.zeros(2, 80, 3, dtype=torch.int32, device=device)
    wide[:, :count, -1] = line
    sources = wide[:, :count, -1]
    found = []
    for kernel in (True, False):
        boundary = torch.zeros(80, dtype=torch.int32, device=device)
        snapshots = torch.zeros(2, 80, dtype=torch.int32, device=device)
        given = (before + rows).int(), starts, places, sources
        to = boundary[:count], snapshots[:, :count]
        with monkeypatch.context() as patch:
            if not ON_GPU:
                patch.setattr(torch.Tensor, "is_cuda", kernel, raising=False)
            block_boundaries.name_snapshots(made, *given, *to)
        found.append((boundary, snapshots))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    for number, place in enumerate(torch.arange(90, device=device)[at].tolist()):
        end = (int(before[place]) // TOKENS + 1) * TOKENS
        assert int(found[0][0][number]) == end - int(before[place])
        for group, table in enumerate(tables):
            block = int(table[place, end // TOKENS - 1])
            wanted = 0 if block == int(sources[group, number]) else block
            assert int(found[0][1][group, number]) == wanted


def test_tables_without_ends_name_none():
    """Nothing is spent on states where the prefix cache keeps none."""
    tables = StateTables.build(1, 2, 3, torch.device("cpu"))
    assert tables.boundary is None
    assert tables.snapshots is None
