"""Windows in code that ``torch.compile`` compiles: what is staged lives until commit."""

from __future__ import annotations

import shutil

import pytest
import torch
from small_caches import HEAD_SIZE, HEADS, make_layers

from kvtxn import (
    CapturedRows,
    TransactionManager,
    TxnConfig,
    UnresolvedWindowError,
    WindowState,
    kv_window,
)
from kvtxn.layout import RowLayout

SLOTS = [4, 5, 6, 7]


@pytest.fixture(autouse=True)
def _no_memory():
    """Each test compiles anew."""
    torch._dynamo.reset()


def stage_all(window, layers, hidden):
    """Every layer's rows are short-lived results of the one before; the sum of what it sees."""
    seen = hidden.new_zeros(())
    for ref in layers:
        window.stage(ref, hidden * 2, hidden * 3)
        block = torch.tensor([[1]])
        seen = seen + window.attend(ref, hidden, block, torch.tensor([4])).sum()
        hidden = (hidden + 1).sin()
    return seen


def step(manager, layers, hidden):
    """A whole step: begin, a forward, commit."""
    with manager.window(3, SLOTS) as window:
        seen = stage_all(window, layers, hidden)
        window.commit(2)
    return seen, window


@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
@pytest.mark.parametrize("compiled", ["forward", "step"])
def test_a_compiled_caller_leaves_the_same_bytes(policy, compiled):
    """The compiler may see the forward alone, or everything around it, too."""
    layers, plain = make_layers(), make_layers()
    for ours, theirs in zip(layers, plain, strict=True):
        ours.key_cache.copy_(theirs.key_cache)
        ours.value_cache.copy_(theirs.value_cache)
    hidden = torch.randn(4, HEADS, HEAD_SIZE)
    want, _ = step(TransactionManager(plain, TxnConfig(policy=policy)), plain, hidden)
    manager = TransactionManager(layers, TxnConfig(policy=policy))
    if compiled == "step":
        seen, window = torch.compile(step, backend="aot_eager")(manager, layers, hidden)
    else:
        with manager.window(3, SLOTS) as window:
            seen = torch.compile(stage_all, backend="aot_eager")(window, layers, hidden)
            window.commit(2)
    assert window.state is WindowState.COMMITTED
    torch.testing.assert_close(seen, want)
    for ours, theirs in zip(layers, plain, strict=True):
        assert torch.equal(ours.key_cache, theirs.key_cache)
        assert torch.equal(ours.value_cache, theirs.value_cache)


def test_a_mistake_is_the_same_error():
    """The active manager, an abort, and a window that nobody resolves."""
    layers = make_layers()
    manager = TransactionManager(layers, TxnConfig(policy="deferred"))

    def abort(hidden):
        with manager.activate(), kv_window(3, SLOTS) as window:
            stage_all(window, layers, hidden)
            window.abort()
        return hidden + 1

    def forget(hidden):
        with manager.window(3, SLOTS):
            return hidden + 1

    hidden = torch.randn(4, HEADS, HEAD_SIZE)
    torch.compile(abort, backend="eager")(hidden)
    with pytest.raises(UnresolvedWindowError):
        torch.compile(forget, backend="eager")(hidden)
    assert manager.current is None
    assert manager.snapshot()["kvtxn_windows_total_aborted"] == 2


def test_captured_rows():
    """Held as the graph's outputs, so that they live."""
    layers = make_layers()
    manager = TransactionManager(layers, TxnConfig(policy="deferred", max_rows=4))
    held = CapturedRows(check=False)
    slots = torch.tensor([SLOTS])

    def forward(hidden):
        for ref in layers:
            held.stage(ref, hidden * 2, hidden * 3)
            hidden = hidden + 1
        return hidden

    hidden = torch.randn(4, HEADS, HEAD_SIZE)
    torch.compile(forward, backend="aot_eager")(hidden)
    windows = manager.captured_windows(slots, held.rows)
    layout = RowLayout.build((4,), (0,), torch.device("cpu"))
    windows.begin(windows.plan(layout)).commit([3])
    assert torch.equal(layers[0].key_cache[1, :3], hidden[:3] * 2)


STAGING: list = []  # what the operator below stages into


@torch.library.custom_op("kvtxn_tests::stage", mutates_args=())
def stage_in_a_graph(key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    """A cache update as engines hide it from the compiler: a dependency is all that comes out."""
    window, layers = STAGING[-1]
    window.stage(layers[layer], key, value)
    return key.new_zeros(())


@stage_in_a_graph.register_fake
def _(key, value, layer):
    return key.new_zeros(())


def forward_in_a_graph(hidden, weight, count):
    done = hidden.new_zeros(())
    for layer in range(count):
        key, value = hidden @ weight, (hidden + 1) @ weight
        done = done + stage_in_a_graph(key, value, layer)
        hidden = (key + value).sin()
    return hidden + done


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_an_operator_within_a_graph():
    """The compiler reuses the memory of rows that it sees no use of: held, they would be lost."""
    layers = make_layers(6)
    manager = TransactionManager(layers, TxnConfig(policy="deferred"))
    hidden, weight = torch.randn(4, HEADS, HEAD_SIZE), torch.randn(HEAD_SIZE, HEAD_SIZE) / 3
    compiled = torch.compile(forward_in_a_graph, fullgraph=True)
    for forward in (compiled, forward_in_a_graph, compiled):
        with manager.window([4], SLOTS, 0) as window:
            STAGING.append((window, layers))
            forward(hidden, weight, len(layers))
            window.commit([4])
        rows = hidden
        for ref in layers:
            key, value = rows @ weight, (rows + 1) @ weight
            torch.testing.assert_close(ref.key_cache[1], key, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ref.value_cache[1], value, atol=1e-4, rtol=1e-4)
            ref.key_cache.zero_()
            rows = (key + value).sin()
