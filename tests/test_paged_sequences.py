"""``PagedSequences`` against a list of tokens, under random programs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtxn.integrations.transformers_cache.paged_sequences import PagedSequences
from kvtxn.integrations.transformers_cache.ring_storage import Shape

from kvtxn import CapacityError, IncompleteWindowError, LayerError, TxnConfig

WINDOWS = (4, None, 7)
HEADS, KEY_SIZE, VALUE_SIZE = 2, 3, 2


class Model:
    """Feeds a ``PagedSequences`` and keeps the truth: one number per token, sequence and layer."""

    def __init__(self, policy="deferred", batch=2, max_tokens=30, max_drafts=3, windows=WINDOWS):
        self.shape = Shape(windows, max_tokens, block_size=2, max_drafts=max_drafts)
        self.sequences = PagedSequences(self.shape, TxnConfig(policy=policy, backend="torch"))
        self.batch, self.next = batch, 1
        self.tokens: list[int] = []  # kept and pending
        self.pending = 0
        self.broken = False  # a forward is still under way: under "undo" its rows are in the cache
        self.replay: dict[tuple[int, int, int], int] = {}  # layer, sequence, slot: token

    def rows(self, tokens, layer, size):
        """Every element of a row says whose it is."""
        number = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
        row = number * 1000 + layer * 100 + torch.arange(self.batch).view(-1, 1, 1, 1) * 10
        return (row + torch.arange(HEADS).view(1, -1, 1, 1)).expand(-1, -1, -1, size).contiguous()

    def forward(self, count, fail_after=None):
        """One forward; every layer must see exactly its window. ``fail_after`` breaks it off."""
        fresh = list(range(self.next, self.next + count))
        self.next += count
        seen = [*self.tokens, *fresh]
        self.broken = False  # whatever comes of this one
        for layer, window in enumerate(self.shape.windows):
            if layer == fail_after:
                self.broken = True
                return
            parts = [self.rows(fresh, layer, size) for size in (KEY_SIZE, VALUE_SIZE)]
            got = self.sequences.take(layer, *parts)
            if layer == 0:  # it did not refuse: what was pending stays for good
                self._settle()
            visible = seen if window is None else seen[-(window - 1 + count) :]
            for part, size in zip(got, (KEY_SIZE, VALUE_SIZE), strict=True):
                assert torch.equal(part, self.rows(visible, layer, size))
        self.tokens, self.pending = seen, count
        if not self.sequences.recording:
            self._settle()

    def _settle(self, rejected=0):
        """The oracle's commit: what is kept goes to its slots, in order."""
        end = len(self.tokens)
        kept = range(end - self.pending, end - rejected)
        for layer in range(len(self.shape.windows)):
            run = self.sequences.region(layer).num_rows
            for position in kept:
                if position >= end - run:  # an older one never had a slot
                    self.replay[layer, position % run] = self.tokens[position]
        self.tokens = self.tokens[: end - rejected]
        self.pending = 0

    def crop(self, remove):
        """Take back pending tokens, and older ones if there are not enough."""
        self.broken = False
        self.sequences.crop(remove)
        pending = min(remove, self.pending)
        self._settle(pending)
        self.tokens = self.tokens[: len(self.tokens) - (remove - pending)]

    def check(self):
        """Length, and every byte of every cache."""
        assert self.sequences.seq_length == len(self.tokens)
        if self.sequences.manager is None:
            return
        for layer, ref in enumerate(self.sequences.manager.layers.values()):
            run = self.sequences.region(layer).num_rows
            for cache, size in ((ref.key_cache, KEY_SIZE), (ref.value_cache, VALUE_SIZE)):
                held = cache.view(self.batch, run, HEADS, size)
                for slot in range(run):
                    token = self.replay.get((layer, slot))
                    rows = held[:, slot].unsqueeze(2)
                    if token is None:
                        assert not rows.any()
                    else:
                        assert torch.equal(rows, self.rows([token], layer, size))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.integers(1, 12)),
        st.tuples(st.just("fail"), st.integers(1, 12), st.integers(1, 2)),
        st.tuples(st.just("crop"), st.integers(0, 5)),
        st.tuples(st.just("record"), st.booleans()),
        st.tuples(st.just("reset")),
        st.tuples(st.just("clone")),
    ),
    max_size=12,
)


@given(steps=STEPS, batch=st.integers(1, 2), policy=st.sampled_from(["deferred", "undo"]))
@settings(max_examples=150, deadline=None)
def test_random_programs(steps, batch, policy):
    """Every layer sees its window and every byte is the oracle's, whatever is refused."""
    model = Model(policy, batch)
    for step, *values in steps:
        room = model.sequences.capacity - len(model.tokens)
        if step == "forward" and values[0] <= room:
            model.forward(*values)
        elif step == "forward":
            with pytest.raises(CapacityError):
                model.forward(*values)
        elif step == "fail" and values[0] <= room:
            broken_first = model.sequences.manager is None
            model.forward(*values)
            if broken_first:
                with pytest.raises(IncompleteWindowError, match=r"reset\(\)"):
                    model.forward(1)
                model.sequences.reset()
        elif step == "crop":
            crop(model, values[0])
        elif step == "record":
            model.sequences.recording = values[0]
        elif step == "reset":
            model.sequences.reset()
            model.tokens, model.pending, model.broken = [], 0, False
        elif step == "clone" and not model.pending:
            model.sequences.abort()  # a broken forward counts as nothing
            model.broken = False
            model.sequences = model.sequences.clone()
        if policy == "deferred" or not (model.pending or model.broken):
            model.check()
    assert model.sequences.seq_length == len(model.tokens)


def crop(model, remove):
    """Up to ``max_drafts`` tokens can always be taken back; more only where the rows are there."""
    try:
        model.crop(min(remove, len(model.tokens)))
    except CapacityError:
        assert remove > model.shape.max_drafts or remove > model.pending


@given(
    window=st.integers(2, 9),
    drafts=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_max_drafts_can_always_be_taken_back(window, drafts, steps):
    """Verify steps of up to ``max_drafts`` candidates, after a prompt of any length."""
    model = Model(batch=1, max_tokens=60, max_drafts=drafts, windows=(window, None))
    model.sequences.recording = True
    model.forward(17)
    model.crop(min(drafts, steps[0][1]))
    for count, rejected in steps:
        model.forward(min(count, drafts + 1))
        model.crop(min(rejected, drafts, min(count, drafts + 1) - 1))
        model.check()
    assert model.sequences.seq_length == len(model.tokens)


def test_a_crop_too_deep_says_so_and_loses_nothing():
    """A sliding window would reach rows that later ones replaced."""
    model = Model()
    model.forward(20)
    with pytest.raises(CapacityError, match=r"window of 4 tokens.*max_drafts"):
        model.sequences.crop(10)
    model.check()
    model.crop(3)
    model.forward(2)


def test_batch_cannot_change():
    """The memory is for the first forward's batch."""
    model = Model(batch=2)
    model.forward(2)
    model.batch = 1
    with pytest.raises(LayerError, match="another batch size"):
        model.forward(1)


def test_a_misshapen_layer_drops_the_forward():
    """The error is the library's; the next forward goes on as if nothing had been."""
    model = Model()
    model.forward(5)
    for layer, count in ((0, 1), (1, 2)):
        key, value = torch.zeros(2, HEADS, count, KEY_SIZE), torch.zeros(2, HEADS, count, 2)
        if layer == 0:
            model.sequences.take(layer, key, value)
    with pytest.raises(LayerError, match="wrong shape"):
        model.sequences.take(layer, key, value)
    model.forward(2)
    model.check()


@pytest.mark.parametrize("policy", ["direct", "undo"])
def test_rows_written_through_count_as_written(policy, monkeypatch):
    """As "direct" does, and a window that fell back to it: a crop knows which rows are gone."""
    model = Model(policy, windows=(4,), max_drafts=1)
    model.sequences.recording = True
    model.forward(4)
    model.crop(0)
    if policy == "undo":
        monkeypatch.setattr(model.sequences.manager.executor, "stage", failing)
    model.forward(4)
    with pytest.raises(CapacityError, match="overwritten"):
        model.sequences.crop(4)
    model.crop(1)
    model.forward(1)
    assert model.sequences.manager.snapshot()["kvtxn_fallbacks_total"] == 2 * (policy == "undo")


def failing(*_):
    """An executor's own failure."""
    raise RuntimeError("broken")
