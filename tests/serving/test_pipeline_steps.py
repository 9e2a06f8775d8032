"""Windows of a pipeline stage before the last one, without vLLM."""

from __future__ import annotations

import random
from collections import Counter, deque

import attrs
import numpy
import pytest
import torch
from failing_stage import STAGES, InjectedFault, failing_stage
from kernels_here import importing_kernels
from step_rig import BLOCK, DEVICE, HEADS, MAX_ROWS, SIZE, Rig, anywhere, refs_over  # noqa: F401

from kvtxn import ConfigError, TransactionManager, TxnConfig

with importing_kernels():
    from kvtxn.integrations.serving.pipeline_steps import PipelineSteps


NUM_BLOCKS, PER_REQUEST, MOST, DRAFTS, PROMPT = 24, 5, 6, 3, 5


@attrs.define(eq=False)
class Request:
    """A request of the rig.

    Attributes:
        index: its index in the runner.
        blocks: its blocks.
        tokens: the tokens whose rows are right, rejected drafts left out.
        heard: as many rows the scheduler knows of; anybody may read them.
        ready: the first step in which it may run again.
    """

    index: int
    blocks: list[int]
    tokens: list[int] = attrs.field(factory=list)
    heard: int = 0
    ready: int = 0

    def slot(self, place: int) -> int:
        """The slot of a place."""
        return self.blocks[place // BLOCK] * BLOCK + place % BLOCK


@attrs.define(eq=False)
class Entry:
    """A step's batch, and what the last stage will say of it.

    Attributes:
        batch: the requests' indices in the runner.
        generations: of these indices, when the step ran.
        requests: of the batch.
        sampled: tokens sampled for each.
        rejected: for each, the slots of rejected drafts with the bytes before the step.
    """

    batch: numpy.ndarray
    generations: numpy.ndarray
    requests: list[Request]
    sampled: list[int]
    rejected: list[dict[int, torch.Tensor]]


class Stage:
    """An early pipeline stage: a scheduler, its queue of acceptance, and caches, driven at random.

    Requests come, verify drafts, end, are preempted, and hand their blocks on, as often as possible
    to a request that begins in the same step. The stage hears what was accepted as many steps
    later as there are stages, as in vLLM's V2 runner (``PPHandler``): an entry per step; of
    requests whose index was freed meanwhile nothing, and nothing at all where none is left. The
    scheduler may hear it earlier, and publish blocks.

    Every row has bytes that say for which token it stands, so ``check`` judges rows without a look
    at the steps.

    Args:
        depth: number of stages.
        seed: of everything that is drawn.
        config: fields of ``TxnConfig``.

    Attributes:
        cached: rows that requests left in the prefix cache, the token of each by slot.
        seen: what happened, counted.
    """

    def __init__(self, depth: int, seed: int = 0, **config) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        shape = (NUM_BLOCKS, BLOCK, HEADS, 2 * SIZE)
        self.caches = [torch.randn(shape, device=DEVICE).transpose(1, 2) for _ in range(2)]
        given = {"backend": "triton", "policy": "undo", "max_rows": MAX_ROWS} | config
        self.manager = TransactionManager(refs_over(self.caches), TxnConfig(**given))
        self.slots = torch.full((1, 64), -1, dtype=torch.int64, device=DEVICE)
        self.steps = PipelineSteps(self.manager, self.slots, 1 + DRAFTS, depth)
        self.depth, self.number, self.named = depth, 0, 0
        self.queue: deque[Entry | None] = deque([None] * depth)
        self.generations = numpy.zeros(MOST, dtype=numpy.int32)
        self.running: list[Request] = []
        self.free, self.indices = list(range(NUM_BLOCKS)), list(range(MOST))
        self.cached: dict[int, int] = {}
        self.seen: Counter[str] = Counter()

    # -- rows ------------------------------------------------------------------------

    def row(self, token: int) -> torch.Tensor:
        """The bytes of a token's row, ``[layers, HEADS, 2 * SIZE]``."""
        own = torch.Generator().manual_seed(token)
        return torch.randn(2, HEADS, 2 * SIZE, generator=own).to(DEVICE)

    def read(self, slot: int) -> torch.Tensor:
        """The bytes in a slot, ``[layers, HEADS, 2 * SIZE]``."""
        return torch.stack([cache[slot // BLOCK, :, slot % BLOCK] for cache in self.caches])

    def write(self, slot: int, row: torch.Tensor) -> None:
        """Write a row, as the forward does."""
        for cache, part in zip(self.caches, row, strict=True):
            cache[slot // BLOCK, :, slot % BLOCK] = part

    def check(self) -> None:
        """Every row that somebody may read is that of its token."""
        rows = dict(self.cached)
        for request in self.running:
            rows |= {request.slot(i): request.tokens[i] for i in range(request.heard)}
        for slot, token in rows.items():
            assert torch.equal(self.read(slot), self.row(token)), (self.number, slot)

    # -- the scheduler ------------------------------------------------------------------

    def begin(self) -> None:
        """Let a request begin, in the blocks that were freed last."""
        if not self.indices or len(self.free) < PER_REQUEST:
            return
        blocks = [self.free.pop() for _ in range(PER_REQUEST)]
        for slot in [block * BLOCK + i for block in blocks for i in range(BLOCK)]:
            self.seen["handed on"] += self.cached.pop(slot, None) is not None
        self.running.append(Request(self.indices.pop(), blocks))

    def leave(self, request: Request) -> None:
        """Free a request; its whole blocks of rows that were heard of stay in the prefix cache."""
        self.running.remove(request)
        self.generations[request.index] += 1
        self.indices.append(request.index)
        for place in range(request.heard // BLOCK * BLOCK):
            self.cached[request.slot(place)] = request.tokens[place]
        self.free += request.blocks

    def hear(self, entry: Entry | None) -> None:
        """The scheduler gets a step's tokens."""
        for request in () if entry is None else entry.requests:
            if request in self.running:
                request.heard = len(request.tokens)

    # -- a step ------------------------------------------------------------------------

    def step(self, leaving: float = 0.15, early: float = 0.5) -> None:
        """One step.

        Args:
            leaving: the share of requests that are freed.
            early: the share of steps of whose tokens the scheduler hears before the stage does.
        """
        self.number += 1
        for entry in self.queue:
            if self.random.random() < early:
                self.hear(entry)
        leavers = [each for each in self.running if self.random.random() < leaving]
        self.update()
        for request in leavers:
            self.leave(request)
        while self.random.random() < 0.6:
            self.begin()
        self.check()
        self.forward()
        self.check()

    def update(self) -> None:
        """Take the queue's next entry, which is what the runner does first."""
        entry, before = self.queue.popleft(), [cache.clone() for cache in self.caches]
        self.queue.append(None)
        self.hear(entry)
        batch, freed = None, None
        if entry is not None:
            batch, freed = entry.batch, self.generations[entry.batch] != entry.generations
        self.steps.advance(batch, freed)
        if entry is not None:
            self.seen["all gone"] += bool(freed.all())
            self.seen["some gone"] += bool(freed.any() and not freed.all())
            if not freed.all():
                self.steps.commit(torch.tensor(entry.sampled, dtype=torch.int32, device=DEVICE))
        self.steps.settle()
        self.judge(entry, freed, before)

    def judge(self, entry: Entry | None, freed, before: list[torch.Tensor]) -> None:
        """A commit puts back rejected rows of requests that are still there, and nothing else."""
        now = [cache.clone() for cache in self.caches]
        for cache, old in zip(self.caches, before, strict=True):
            cache.copy_(old)
        for gone, rows in () if entry is None else zip(freed, entry.rejected, strict=True):
            for slot, row in () if gone else rows.items():
                self.write(slot, row)
                self.seen["put back"] += 1
        for cache, found in zip(self.caches, now, strict=True):
            assert torch.equal(cache, found), self.number

    def forward(self) -> None:
        """Run every request that may run; those with drafts lead."""
        batch = []
        for request in self.running:
            left = len(request.blocks) * BLOCK - len(request.tokens)
            if request.ready > self.number or left < 1 + DRAFTS:
                continue
            if len(request.tokens) < PROMPT:
                batch.append((request, 0, min(3, PROMPT - len(request.tokens))))
            else:
                drafts = self.random.randint(0, DRAFTS)
                batch.append((request, drafts, 1 + drafts))
        batch.sort(key=lambda each: each[1] == 0)
        if not batch:
            return
        places = [(request, len(request.tokens)) for request, _, _ in batch]
        slots = [
            request.slot(start + i)
            for (request, start), (_, _, length) in zip(places, batch, strict=True)
            for i in range(length)
        ]
        self.slots.fill_(-1)
        self.slots[0, : len(slots)] = torch.tensor(slots)
        indices = numpy.array([request.index for request, _, _ in batch])
        drafts = numpy.array([drafts for _, drafts, _ in batch], dtype=numpy.int32)
        lengths = numpy.array([length for _, _, length in batch], dtype=numpy.int32)
        prompts = numpy.array([len(request.tokens) < PROMPT for request, _, _ in batch])
        self.steps.begin(drafts if drafts.any() else None, lengths, prompts, indices)
        watched = self.steps.lanes[self.steps._turn].window is not None
        self.seen["windows"] += watched
        entry = Entry(indices, self.generations[indices], [], [], [])
        for request, count, length in batch:
            self.compute(entry, request, count, length, watched)
        if any(request.ready > self.number for request, _, _ in batch):
            self.queue[-1] = entry

    def compute(
        self, entry: Entry, request: Request, drafts: int, length: int, watched: bool
    ) -> None:
        """Write a request's rows, and draw how many drafts are accepted."""
        start = len(request.tokens)
        tokens = list(range(self.named, self.named + length))
        self.named += length
        old = {request.slot(start + i): self.read(request.slot(start + i)) for i in range(length)}
        for (slot, _), token in zip(old.items(), tokens, strict=True):
            self.write(slot, self.row(token))
        accepted = self.random.randint(0, drafts)
        kept = length - drafts + accepted
        request.tokens += tokens[:kept]
        request.heard = max(request.heard, start + length - drafts)
        if len(request.tokens) >= PROMPT:  # else the next chunk of a prompt follows at once
            request.ready = self.number + self.depth
        entry.requests.append(request)
        entry.sampled.append(1 + accepted)
        late = list(old.items())[kept:] if watched else []
        entry.rejected.append(dict(late))
        self.seen["rejected"] += len(late)

    def count(self, name: str) -> float:
        """A counter."""
        return self.manager.snapshot().get(f"kvtxn_{name}", 0)


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_requests_that_come_and_go(depth, backend):
    """Accepted rows last and are never missed, rejected ones are put back, nobody else's change."""
    stage = Stage(depth, seed=depth, backend=backend)
    for _ in range(60):
        stage.step()
    assert min(stage.seen[each] for each in ("handed on", "some gone", "all gone")) > 0, stage.seen
    assert 0 < stage.seen["put back"] < stage.seen["rejected"]
    assert stage.count("windows_total_committed") > 10
    assert stage.count("fallbacks_total") == 0


class Two:
    """Two stages, and two requests in one batch: three drafts each, then nothing for a step."""

    def __init__(self, policy="undo", **config) -> None:
        self.rig = Rig(policy, **config)
        self.steps = PipelineSteps(self.rig.manager, self.rig.slots, 4, 2)
        self.before = self.copies()
        self.batch = numpy.array([4, 7])

    def copies(self):
        return [cache.clone() for cache in self.rig.caches]

    def run(self, batch=None, first=0) -> None:
        """A step without acceptance to hear of; request r has the block ``first`` + r."""
        self.steps.advance(None, None)
        self.steps.settle()
        self.forward(self.batch if batch is None else batch, first)

    def forward(self, batch, first=0) -> None:
        rows = [(first + r) * 4 + i for r in range(len(batch)) for i in range(4)]
        self.rig.slots.fill_(-1)
        self.rig.slots[0, : len(rows)] = torch.tensor(rows)
        counts = numpy.full(len(batch), 3)
        self.steps.begin(counts, counts + 1, counts < 0, batch)
        self.written = self.rig.forward()

    def idle(self) -> None:
        """A step without requests."""
        self.steps.advance(None, None)
        self.steps.settle()
        self.rig.slots.fill_(-1)

    def hear(self, sampled, freed=(False, False), batch=None) -> None:
        """A step begins, and the acceptance of the step before the last one comes."""
        self.steps.advance(self.batch if batch is None else batch, numpy.array(freed))
        if sampled is not None:
            self.steps.commit(torch.tensor(sampled, dtype=torch.int32, device=DEVICE))
        self.steps.settle()

    def count(self, name: str) -> float:
        return self.rig.count(name)


def test_rows_of_a_freed_request_stay_and_count_nowhere():
    """The other request's rejected rows are put back meanwhile."""
    two = Two()
    two.run()
    whole = two.copies()
    two.idle()
    two.hear([1, 2], freed=(True, False))
    for cache, written, before in zip(two.rig.caches, whole, two.before, strict=True):
        assert torch.equal(cache[0], written[0])  # [block, heads, row, 2 * size]
        assert torch.equal(cache[1, :, :2], written[1, :, :2])
        assert torch.equal(cache[1, :, 2:], before[1, :, 2:])
    counts = [two.count(f"rows_{name}_total") for name in ("staged", "committed", "rejected")]
    assert counts == [3, 1, 2]


@pytest.mark.parametrize(
    "way", ["all freed", "never sent", "another batch", "the runner is unhooked"]
)
def test_where_no_acceptance_comes_the_rows_stay(way):
    """As stock leaves them; and the next steps have windows."""
    two = Two()
    two.run()
    whole = two.copies()
    two.idle()
    if way == "all freed":
        two.hear(None, freed=(True, True))
    elif way == "never sent":
        two.idle()
    elif way == "another batch":
        two.hear([1, 1], batch=numpy.array([4, 7]))
    else:
        two.steps.abandon()
    assert all(map(torch.equal, two.rig.caches, whole))
    assert two.count("windows_total_aborted") == 1
    two.run()
    two.idle()
    two.hear([4, 4])
    assert two.count("windows_total_committed") == 1


def test_windows_are_committed_in_the_order_of_their_steps():
    """Two are open at one time, each over slots of its own though the runner has one buffer."""
    two = Two()
    first, second = numpy.array([1, 2]), numpy.array([3, 5])
    two.run(first)
    two.run(second, first=2)
    assert [lane.window is not None for lane in two.steps.lanes] == [True, True]
    two.hear([1, 4], batch=first)
    two.forward(first)
    assert two.count("rows_rejected_total") == 3
    two.hear([2, 2], batch=second)
    assert two.count("rows_rejected_total") == 3 + 4
    for cache, before in zip(two.rig.caches, two.before, strict=True):
        assert torch.equal(cache[2:4, :, 2:], before[2:4, :, 2:])
        assert not torch.equal(cache[0, :, 1:], before[0, :, 1:])  # of the third step, not told yet


@pytest.mark.parametrize("stage", STAGES["undo"])
def test_a_stage_of_a_step_that_fails(stage):
    """No row of a request is lost, the fault is counted once, and the lane rests for a while."""
    engine = Stage(2, seed=1)
    for _ in range(4):
        engine.step(leaving=0)
    engine.judge = lambda *args: None  # the rejected rows of that step may stay
    with failing_stage(engine.steps.lanes[0], stage, 0) as calls:
        for _ in range(6):
            engine.step(leaving=0)
    assert calls[0] >= 1
    for _ in range(30):
        engine.step()
    assert engine.count("fallbacks_total") == 1
    assert engine.count("bypassed_windows_total_resting") > 0
    assert engine.count("windows_total_committed") > 5


def test_slots_that_cannot_be_copied(monkeypatch):
    """The step has no window, and the caches are as stock leaves them."""
    two = Two()

    def broken(*args):
        raise InjectedFault("copy")

    monkeypatch.setattr(two.steps, "_copy", broken)
    two.run()
    whole = two.copies()
    two.idle()
    two.hear([1, 1])
    assert all(map(torch.equal, two.rig.caches, whole))
    assert (two.count("fallbacks_total"), two.count("windows_total")) == (1, 0)


def test_errors_are_raised_where_they_are_asked_for():
    """Rejected rows are restored first, of freed requests none."""
    two = Two(on_error="raise")
    with failing_stage(two.steps.lanes[1], "commit", 0):
        two.run()
        whole = two.copies()
        two.idle()
        with pytest.raises(InjectedFault):
            two.hear([1, 2], freed=(True, False))
    for cache, written, before in zip(two.rig.caches, whole, two.before, strict=True):
        assert torch.equal(cache[0], written[0])
        assert torch.equal(cache[1, :, 1:], before[1, :, 1:])


def test_steps_without_drafts_and_batches_that_get_no_window():
    """The reason is counted once per step, and nothing waits for an acceptance."""
    two = Two()
    lengths = numpy.array([1, 1])
    two.steps.advance(None, None)
    two.steps.begin(None, lengths, lengths < 0, two.batch)
    two.idle()
    two.steps.advance(None, None)
    two.steps.begin(numpy.array([0, 2]), numpy.array([1, 3]), lengths < 0, two.batch)
    two.idle()
    two.hear([1, 1])
    two.forward(numpy.arange(5))
    assert two.count("bypassed_windows_total_order") == 1
    assert two.count("bypassed_windows_total_max_rows") == 1
    assert two.count("windows_total") == 0


def test_drafts_do_not_wait_here():
    with pytest.raises(ConfigError, match="drafts cannot wait on a pipeline stage"):
        Two("deferred")


@pytest.mark.parametrize("policy", ["undo", "direct"])
def test_warming_up_leaves_no_trace(policy):
    two = Two(policy)
    counts = two.rig.manager.snapshot()
    two.steps.warm_up()
    assert all(map(torch.equal, two.rig.caches, two.before))
    assert two.rig.manager.snapshot() == counts
    assert two.steps.nbytes >= 2 * sum(lane.windows.slots.nbytes for lane in two.steps.lanes)
