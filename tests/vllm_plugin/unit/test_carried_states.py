"""The audit follows states that vLLM's prefix cache keeps at the ends of blocks, over whole lives.

vLLM's own code decides what is copied and copies it; its kernels run through Triton's interpreter.
What stands for a state is the sum of the tokens that it has taken in, so that each copy is seen.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import attrs
import held_rig as held
import pytest
import torch
from engine_jobs import missing
from kernels_here import importing_kernels
from test_aligned_states import COLUMNS, TOKENS, Engine, EngineV1
from torch import Tensor

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.seam import aligned_states, audited_states

from kvtxn.integrations.serving.step import Rows

from kvtxn.audit import Ledger, StateGroup, Step

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

GROUP = "group.0"
WIDE = held.DRAFTS + 1
#: The block of nobody's, those of the requests, and one of a request that begins with a state.
BLOCKS = 2 + held.REQUESTS * (COLUMNS + WIDE)
OWN = BLOCKS - 1


@attrs.define(eq=False)
class Side:
    """A layer's caches, and the step's table, for the engines of ``test_aligned_states``."""

    layer: Any
    table: Tensor


class Life:
    """Requests whose states vLLM moves, and a ledger that is told.

    Args:
        engine: vLLM's V2 or V1 runner, as far as it moves states.
    """

    compares = True
    #: State blocks of a request beside the first, one for each draft.
    more = held.DRAFTS

    def __init__(self, engine: type[Engine]) -> None:
        count = held.REQUESTS
        past = torch.zeros(BLOCKS, 3 + held.DRAFTS, 2)
        self.state = torch.zeros(BLOCKS, 2, dtype=torch.float64)
        tables = 1 + torch.arange(BLOCKS - 2).view(count, -1).int()
        side = Side(SimpleNamespace(kv_cache=[past, self.state]), tables[:, :WIDE])
        self.engine = engine(side, self.more, tables)
        self.tables = tables
        self.ledger = Ledger([StateGroup(GROUP, BLOCKS)], max_requests=count, max_length=200)
        self.runner = SimpleNamespace(
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="align")),
            cache_config=SimpleNamespace(mamba_cache_mode="align"),
            compilation_config=SimpleNamespace(static_forward_context={"it": side.layer}),
            max_num_reqs=count,
        )
        self.engine.under(self.runner)
        if engine is Engine:
            self.runner.block_tables = SimpleNamespace(
                block_tables=[SimpleNamespace(gpu=tables)], input_block_tables=[tables]
            )
        self.told: list[Any] = []
        self.undo = self.hook()
        self.texts = [[100 * request + 1] for request in range(count)]
        self.computed = torch.zeros(count, dtype=torch.int32)
        for request, text in enumerate(self.texts):
            self.ledger.admit(str(request), text)
        self.draw = random.Random(5)

    def hook(self) -> Any:
        return aligned_states.tell_copies(self.runner, [GROUP], self.carry)

    def carry(self, copies: Any) -> None:
        (pair,) = copies.values()
        self.told.append([each.tolist() for each in pair])
        self.ledger.carry(copies)

    def step(self, drafts: list[int], kept: list[int]) -> None:
        """Every request has its last token, and drafts of which so many are kept."""
        lengths = [1 + number for number in drafts]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        self.engine.prepare(self.computed, starts, self.more)
        table, accepted = self.engine.side.table.long(), self.engine.accepted
        tokens, slots, sources, told = [], [], [], []
        for request, length in enumerate(lengths):
            text, first = self.texts[request], int(self.computed[request])
            new = [text[-1], *(self.draw.randrange(1, 90) for _ in range(length - 1))]
            source = int(table[request, int(accepted[request]) - 1 if self.more else 0])
            if first and self.compares:  # the bytes: the state is what vLLM says that it is
                assert self.state[source, 0] == sum(text[:first]), (request, first)
            for row in range(length):
                block = int(table[request, row]) if self.more else -1
                if self.more:
                    self.state[block] = sum(text[:first]) + sum(new[: row + 1])
                slots.append(block)
            tokens += new
            sources.append(source if first else -1)
            told.append(int(accepted[request]) - 1)
        number = torch.tensor(told)
        step = Step(
            lines=torch.tensor([self.ledger.line(str(r)) for r in range(len(lengths))]),
            starts=starts,
            first=self.computed.long(),
            tokens=torch.tensor(tokens),
            drafts=torch.tensor(drafts),
            slots={GROUP: torch.tensor(slots)},
            sources={GROUP: torch.tensor(sources)},
            told=torch.where(number > 0, number, -1),
        )
        self.ledger.write(step)
        self.ledger.check(step)
        counts = torch.tensor([1 + number for number in kept])
        ids = torch.full((len(lengths), WIDE), -1)
        for request, number in enumerate(kept):
            begin = int(starts[request]) + 1
            text = [*tokens[begin : begin + number], self.draw.randrange(1, 90)]
            self.texts[request] += text
            ids[request, : len(text)] = torch.tensor(text)
        self.ledger.resolve(counts, ids, besides=1)
        self.commit(step, counts)
        self.computed = self.computed + counts.int()
        self.engine.finish(counts.int(), self.computed)

    def commit(self, step: Step, counts: Tensor) -> None:
        """Nothing waits for the counts where each draft has a state."""

    def live(self, steps: int) -> None:
        for _ in range(steps):
            drafts = [self.draw.choice([0, held.DRAFTS, held.DRAFTS]) for _ in self.texts]
            self.step(drafts, [self.draw.randint(0, number) for number in drafts])

    def found(self) -> list[tuple[str, str, int, str]]:
        return [(v.kind, v.request, v.position, v.found) for v in self.ledger.violations()]


class HeldLife(Life):
    """Windows hold one state per request, and commits write it, and those at ends of blocks."""

    more = 0

    def hook(self) -> Any:
        self.runner.kv_cache_config, self.runner.max_num_tokens = self.engine.config, 64
        self.reader = audited_states.DeviceStateReader(self.runner, [GROUP], torch.device("cpu"))
        copies = aligned_states.hook_copies(self.runner, ends=True)
        told = aligned_states.tell_copies(self.runner, [GROUP], self.carry, held=True)
        return lambda: (told(), copies())

    def commit(self, step: Step, counts: Tensor) -> None:
        """Write states as commits do; vLLM copies one that is at an end with its last kept row."""
        table = self.engine.side.table.long()
        metadata = SimpleNamespace(
            spec_sequence_masks=torch.ones(len(counts), dtype=torch.bool),
            spec_state_indices_tensor=table[:, :1].expand(-1, WIDE),
            num_accepted_tokens=self.engine.accepted,
            non_spec_state_indices_tensor=None,
        )
        starts, names = step.starts, [*map(str, range(len(counts)))]
        places = torch.cat([
            torch.arange(int(first), int(first) + int(rows))
            for first, rows in zip(step.first, starts.diff(), strict=True)
        ])  # fmt: skip
        rows = Rows(names, starts, None, None, None, {}, {}, places)
        found = self.reader.read({"it": metadata}, rows, int(starts[-1]))
        assert found.sources[GROUP].tolist() == step.sources[GROUP].tolist()
        assert found.slots[GROUP][: int(starts[-1])].tolist() == step.slots[GROUP].tolist()
        self.ledger.leave(step.lines, found.leaves)
        self.ledger.leave(step.lines, found.ends, found.end_at)
        for request, (first, kept) in enumerate(zip(step.first, counts, strict=True)):
            text, after = self.texts[request], int(first + kept)
            self.state[int(table[request, 0])] = sum(text[:after])
            end, block = int(found.end_at[request]), int(found.ends[GROUP][request])
            if block > 0 and end < after:
                self.state[block] = sum(text[:end])


LIVES = [(Life, Engine), (Life, EngineV1), (HeldLife, Engine), (HeldLife, EngineV1)]


@pytest.fixture(params=LIVES, ids=["v2", "v1", "held v2", "held v1"])
def life(request, monkeypatch):
    kind, engine = request.param
    monkeypatch.setattr(audited_states, "holds_states", lambda runner: kind is HeldLife)
    made = kind(engine)
    made.engine.column.fill_(-1)
    if engine is EngineV1:
        made.engine.columns.clear()
    return made


def ends(life, request):
    """Yield the tokens up to each end of a request's blocks that its steps have left behind."""
    yield from range(TOKENS, int(life.computed[request]) - WIDE + 1, TOKENS)


def hit(life, request, tokens, end):
    """A request with these tokens begins with the state at an end; returns what is found."""
    before = len(life.found())
    block = int(life.tables[request, end // TOKENS - 1])
    life.ledger.release("0")
    life.ledger.admit("0", tokens[: end + 1])
    life.ledger.carry({GROUP: (torch.tensor([block]), torch.tensor([OWN]))})
    life.ledger.write(one_more(life.ledger, end, tokens))
    return life.found()[before:]


def test_states_at_the_ends_are_right_for_whoever_begins_with_the_same_tokens(life):
    """Drafts cross ends of blocks, stop at them, and fall short of them; all reads are right."""
    life.live(16)
    assert life.found() == []
    assert int(life.computed.min()) > 2 * TOKENS
    assert sum(max(source) > 0 for source, _ in life.told) > 8
    read = 0
    for request in range(1, held.REQUESTS):
        text = life.texts[request]
        for end in ends(life, request):
            block = int(life.tables[request, end // TOKENS - 1])
            assert life.state[block, 0] == sum(text[:end])
            assert hit(life, request, text, end) == []
            assert hit(life, request, [7, *text[1:]], end) == [("state", "0", end - 1, "foreign")]
            read += 1
    assert read > 6
    life.undo()
    assert "run_fused_precopy" not in vars(life.engine.context)


def tampered(life, monkeypatch, name, change):
    """Let vLLM's runner give other arguments to a copy; ``change`` gets them by name."""
    context = life.engine.context
    real, names = getattr(context, name), aligned_states.METHODS[name]

    def call(*args, **named):
        given = {**dict(zip(names, args, strict=False)), **named}
        return real(**{**given, **change(given)})

    monkeypatch.setattr(context, name, call, raising=False)


def test_a_state_of_a_wrong_column_that_is_copied_is_found(life, monkeypatch):
    """That before the last accepted draft's, or of an older block: the next step continues it."""
    struck: list[str] = []

    def change(given):
        source, target = given["src_col_gpu"], given["state_idx_gpu"]
        bias, older = given["token_bias_gpu"].clone(), source.clone()
        for request in range(held.REQUESTS):
            moves = int(source[request]) >= 0 and int(source[request]) != int(target[request])
            if not struck and moves and life.more and int(bias[request]) > 0:
                bias[request] -= 1
                struck.append(str(request))
            if not struck and moves and not life.more and int(source[request]) > 0:
                older[request] -= 1
                struck.append(str(request))
        return {"token_bias_gpu": bias, "src_col_gpu": older}

    tampered(life, monkeypatch, "run_fused_precopy", change)
    life.compares = False
    life.live(16)
    (kind, request, _, found), *_ = life.found()
    assert (kind, [request], found) == ("state", struck, "foreign")


def test_a_wrong_block_that_is_copied_to_an_end_is_found_by_whoever_reads_it(life, monkeypatch):
    if not life.more:
        pytest.skip("commits leave these states, and nobody tells what vLLM copies besides")
    name = "run_fused_postprocess" + ("" if isinstance(life.engine, EngineV1) else "_align")
    column = [each for each in aligned_states.METHODS[name] if "state_idx" in each]

    def change(given):
        return {each: (given[each] - 1).clamp(min=0) for each in column}

    life.live(6)
    before = life.computed.clone()
    tampered(life, monkeypatch, name, change)
    life.compares = False
    life.live(8)
    wrong = {request: [] for request in range(1, held.REQUESTS)}
    for request, ends_found in wrong.items():
        for end in ends(life, request):
            block = int(life.tables[request, end // TOKENS - 1])
            right = life.state[block, 0] == sum(life.texts[request][:end])
            found = hit(life, request, life.texts[request], end)
            assert bool(found) != right
            if found:
                assert found == [("state", "0", end - 1, "foreign")]
                assert end > int(before[request]) - TOKENS
                ends_found.append(end)
    assert any(wrong.values())


def one_more(ledger: Ledger, first: int, tokens: list[int]) -> Step:
    """A step of one row that continues a state."""
    return Step(
        lines=torch.tensor([ledger.line("0")]),
        starts=torch.tensor([0, 1]),
        first=torch.tensor([first]),
        tokens=torch.tensor([tokens[first]]),
        slots={GROUP: torch.tensor([OWN])},
        sources={GROUP: torch.tensor([OWN])},
    )


def test_copies_that_the_host_decides(monkeypatch):
    """In the V1 runner without drafts: vLLM's own code, its scalar path, with its own columns."""
    copied: list[list[int]] = []
    runner = SimpleNamespace(mamba_state_idx={"a": 0, "b": 1, "c": 1, "left": 3})
    sizes = {"a": 20, "b": 12, "c": 7, "new": 14, "fresh": 0}
    lengths = {"a": 3, "b": 2, "c": 1, "new": 7, "fresh": 7}
    runner.requests = {
        name: SimpleNamespace(num_computed_tokens=count, block_ids=[[10 * n + c for c in range(5)]])
        for n, (name, count) in enumerate(sizes.items(), 1)
    }
    runner.input_batch = SimpleNamespace(
        req_ids=[*sizes], num_accepted_tokens_cpu=torch.ones(5, dtype=torch.int32).numpy()
    )
    output = SimpleNamespace(
        finished_req_ids={"left"},
        preempted_req_ids=None,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"c"}),
        num_scheduled_tokens=lengths,
    )
    from vllm.v1.worker import mamba_utils as own

    def meta(buffers, config, functions, groups, source, target, bias, state, context):
        copied.append([state.block_ids[0][source], state.block_ids[0][target], bias])

    monkeypatch.setattr(own, "collect_mamba_copy_meta", meta)
    copies = aligned_states.HostCopies(runner, {GROUP: TOKENS})
    copies.begin(output)
    spec = SimpleNamespace(num_speculative_blocks=0, block_size=TOKENS)
    buffers = SimpleNamespace(mamba_group_ids=[0], mamba_spec=spec, offset=0)
    own.preprocess_mamba(
        output, None, SimpleNamespace(enable_prefix_caching=True), runner.mamba_state_idx,
        runner.input_batch, runner.requests, {}, None, buffers,
    )  # fmt: skip
    found = copies.take()
    assert [[*pair, 0] for pair in zip(*found[GROUP], strict=True)] == copied
    assert len(copied) == 3
