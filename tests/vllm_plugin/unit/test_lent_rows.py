"""Slots of drafts that are lent to vLLM's attention on a CPU, for a call; no engine."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from interrupts import interrupted_at
from kvtxn.integrations.serving import eager_steps
from kvtxn.integrations.serving.eager_steps import EagerSteps
from kvtxn.integrations.vllm_plugin.cpu import attention
from kvtxn.integrations.vllm_plugin.seam.layers import TargetLayer

from kvtxn import LayerError, LayerRef, TransactionManager, TxnConfig
from kvtxn.window_transitions import WindowState


class Attention:
    """Stands for vLLM's attention: writes rows, and says what the cache holds while it attends."""

    def __init__(self) -> None:
        self.seen = None

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        for part, rows in zip(kv_cache, (key, value), strict=True):
            part.view(-1, 1, 2)[slot_mapping] = rows

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=None, output_block_scale=None):  # fmt: skip
        if self.seen == "fail":
            raise RuntimeError("a test made this fail")
        self.seen = kv_cache.clone()
        return output


class Lending:
    """One hooked attention, in a step with a row of a prompt and two drafts."""

    SLOTS = torch.tensor([2, 5, 6])

    def __init__(self, **settings) -> None:
        self.cache = torch.randn(2, 4, 4, 1, 2)
        self.before = self.cache.clone()
        ref = LayerRef("attn", *self.cache, group="rows")
        self.manager = TransactionManager(
            [ref], TxnConfig(policy="deferred", max_rows=4, **settings)
        )
        self.steps = EagerSteps(self.manager, 50)
        self.impl = Attention()
        shape = {"row_shape": (1, 2), "dtype": torch.float32}
        self.layers = [TargetLayer("attn", "rows", None, self.impl, self.cache[0], **shape)]
        attention.hook_attention(self.steps, self.layers)
        self.begin()
        self.rows = torch.randn(2, 3, 1, 2)

    def begin(self):
        """Begin a step, as vLLM's runner does once an earlier one is over or given up."""
        self.steps.abandon()
        self.steps.plan(lambda: ([2], [3]))
        self.steps.begin(lambda: {"rows": self.SLOTS})

    def attend(self, rows=None):
        """Write and attend, as vLLM does for each layer."""
        key, value = self.rows if rows is None else rows
        self.impl.do_kv_cache_update(None, key, value, self.cache, self.SLOTS)
        return self.impl.forward(None, None, key, value, self.cache, None, "attended")

    def expected(self, rows):
        """The caches with these rows written."""
        cache = self.before.clone()
        for part, written in zip(cache, self.rows, strict=True):
            part.view(-1, 1, 2)[self.SLOTS[rows]] = written[rows]
        return cache


def test_drafts_lie_in_their_slots_for_one_call():
    """The attention sees all rows; afterwards the drafts are gone, and the commit brings one."""
    lending = Lending()
    assert lending.attend() == "attended"
    assert torch.equal(lending.impl.seen, lending.expected([0, 1, 2]))
    assert torch.equal(lending.cache, lending.expected([0]))
    lending.steps.commit(lambda: torch.tensor([[7, 7, -1]]))
    assert torch.equal(lending.cache, lending.expected([0, 1]))


def test_drafts_leave_their_slots_even_if_the_attention_fails():
    lending = Lending()
    lending.impl.seen = "fail"
    with pytest.raises(RuntimeError, match="a test made this fail"):
        lending.attend()
    assert torch.equal(lending.cache, lending.expected([0]))


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_failure_while_lending_leaves_the_rows_written(what):
    """The step falls back: rows stay where vLLM has written them, as without kvtxn."""
    lending = Lending()
    with mock.patch.object(eager_steps, what, side_effect=RuntimeError("a test made this fail")):
        lending.attend()
    assert torch.equal(lending.impl.seen, lending.expected([0, 1, 2]))
    assert torch.equal(lending.cache, lending.expected([0, 1, 2]))
    window = lending.steps.window
    assert window is not None
    assert window.state is WindowState.DIRECT
    lending.steps.commit(lambda: torch.tensor([[7, 7, -1]]))
    reason = {"read": "stage", "write": "attend"}[what]
    assert lending.manager.snapshot()[f"kvtxn_fallbacks_total_{reason}"] == 1


@pytest.mark.parametrize("where", ["lend", "stage"])
def test_a_failure_that_is_raised_leaves_no_draft(where):
    """Whether slots are lent already or not."""
    lending = Lending(on_error="raise")
    stager = lending.manager.context.stager
    owner, name = {"lend": (eager_steps, "read"), "stage": (stager, "take_if_unchanged")}[where]
    with (
        mock.patch.object(owner, name, side_effect=RuntimeError("a test made this fail")),
        pytest.raises(RuntimeError, match="a test made this fail"),
    ):
        lending.attend()
    lending.steps.abandon()
    written = {"lend": [], "stage": [0]}[where]
    assert torch.equal(lending.cache, lending.expected(written))


@pytest.mark.parametrize("on_error", ["fallback", "raise"])
@pytest.mark.parametrize("attended", [True, False])
def test_a_layer_that_writes_twice(on_error, attended):
    """Whether it has attended or not: the cache has the last rows as in stock, or no draft."""
    lending = Lending(on_error=on_error)
    first, lending.rows = lending.rows, torch.randn(2, 3, 1, 2)
    if attended:
        lending.attend(first)
    else:
        lending.impl.do_kv_cache_update(None, *first, lending.cache, lending.SLOTS)
    if on_error == "raise":
        with pytest.raises(LayerError, match="writes twice"):
            lending.attend()
        lending.steps.abandon()
        lending.rows = first
        assert torch.equal(lending.cache, lending.expected([0]))
        return
    lending.attend()
    assert torch.equal(lending.impl.seen, lending.expected([0, 1, 2]))
    lending.steps.commit(lambda: torch.tensor([[7, 7, -1]]))
    assert torch.equal(lending.cache, lending.expected([0, 1, 2]))
    assert lending.manager.snapshot()["kvtxn_fallbacks_total_stage"] == 1


def test_an_interrupt_at_any_line_leaves_no_draft():
    """What vLLM's writer has written of settled rows stays."""
    for number in range(1, 2000):
        lending = Lending()
        ended = not interrupted_at(number, lending.attend, "line")
        lending.steps.abandon()
        settled = [lending.expected([]), lending.expected([0])]
        assert any(torch.equal(lending.cache, each) for each in settled), number
        if ended:
            break
    assert 50 < number < 1999


def test_after_an_interrupt_at_any_line_the_next_step_has_a_window():
    """Whether it came as a step ended, or as the next one began."""
    for number in range(1, 2000):
        lending = Lending()
        ended = not interrupted_at(number, lending.begin, "line")
        lending.begin()
        assert lending.steps.window is not None, number
        if ended:
            break
    assert 50 < number < 1999


def test_without_a_window_vllm_writes_and_attends():
    lending = Lending()
    lending.steps.abandon()
    lending.attend()
    assert torch.equal(lending.cache, lending.expected([0, 1, 2]))


def test_the_attention_is_vllms_own_again():
    lending = Lending()
    attention.unhook_attention(lending.layers)
    assert type(lending.impl) is Attention
    assert set(vars(lending.impl)) == {"seen"}
    attention.unhook_attention(lending.layers)
