"""TransactionManager: what it is built from, what it chooses, and who is active."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import logging
import pickle
import weakref

import pytest
import torch
from small_caches import make_layers, noise, rows

from kvtxn import (
    BackendUnavailableError,
    ConfigError,
    LayerError,
    LayerRef,
    TransactionManager,
    TxnConfig,
    WindowState,
    WindowStateError,
    kv_window,
)
from kvtxn.errors import ManagerCopyError
from kvtxn.executor import Capabilities
from kvtxn.layout import RowLayout
from kvtxn.manager import choose_policy


def test_auto_defers_where_attention_reads_the_window(layers):
    """And says why."""
    manager = TransactionManager(layers)
    assert manager.policy == "deferred"
    assert "attention can read" in manager.policy_reason
    assert manager.executor.name == "torch"
    # vLLM's plug-in logs its own reason beside this one, whoever chose the policy.
    named = TransactionManager(make_layers(), TxnConfig(policy="deferred"))
    assert named.policy_reason == "TxnConfig names it"


@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
def test_caches_go_with_their_last_reference(policy):
    """At once: gigabytes cannot wait for the garbage collector."""
    layers = make_layers()
    manager = TransactionManager(layers, TxnConfig(policy=policy))
    with manager.window(2, [0, 1, 2]) as window:
        for ref in layers:
            window.stage(ref, *rows(3))
        window.commit(1)
    memory = weakref.ref(layers[0].key_cache)
    gc.disable()
    try:
        del layers, ref, window, manager
        assert memory() is None
    finally:
        gc.enable()


def test_kv_window_takes_what_window_takes(layers):
    """The same names, order and defaults; and all of them arrive."""
    method = inspect.signature(TransactionManager.window).parameters
    function = inspect.signature(kv_window).parameters
    assert list(function.values()) == list(method.values())[1:]
    manager = TransactionManager(layers, TxnConfig(policy="undo"))
    with manager.activate(), kv_window(1, [0, 1], written_by="caller") as window:
        assert window.state is WindowState.STAGED
        window.abort()


def test_auto_does_not_defer_latents(layers):
    """``attend`` does not take them: a forward could not see its own drafts."""
    latent = LayerRef.latent("latent", torch.zeros(4, 4, 8))
    for refs in ([latent], [latent, *layers]):
        manager = TransactionManager(refs)
        assert manager.policy == "undo"
        assert "latent rows" in manager.policy_reason
    assert TransactionManager([latent], TxnConfig(policy="deferred")).policy == "deferred"


@pytest.mark.parametrize(
    ("capabilities", "kinds", "policy"),
    [
        (Capabilities(attention=True), {"paged"}, "deferred"),
        (Capabilities(), {"paged"}, "undo"),
        (Capabilities(attention=True, policies=frozenset({"undo"})), {"paged"}, "undo"),
        (Capabilities(policies=frozenset({"direct"})), {"paged"}, "direct"),
        (Capabilities(), {"ring"}, "undo"),
        (Capabilities(), {"recurrent"}, "deferred"),
        (Capabilities(attention=True), {"recurrent", "paged"}, "deferred"),
    ],
)
def test_auto_policy_follows_capabilities(capabilities, kinds, policy):
    """deferred, else undo, else direct; never undo for states."""
    assert choose_policy("auto", capabilities, kinds)[0] == policy


def test_a_named_policy_never_falls_back():
    """Only "auto" chooses."""
    with pytest.raises(BackendUnavailableError, match="undo"):
        choose_policy("undo", Capabilities(policies=frozenset({"direct"})))


def test_layers_must_fit_together():
    """Equal names, shared caches, mixed block sizes, no layers: each is refused."""
    one = make_layers(1)[0]
    key, value = noise(3, 8, 2, 8), noise(3, 8, 2, 8)
    for layers, message in [
        ([], "no layers"),
        ([one, one], "named 'layer.0'"),
        (["layer.0"], "LayerRef objects"),
        ([one, LayerRef("b", one.key_cache, one.value_cache)], "share one cache"),
        ([one, LayerRef("b", one.key_cache[1:], noise(5, 4, 2, 8))], "overlap"),
        ([one, LayerRef("b", key, value)], "block sizes differ"),
    ]:
        with pytest.raises(LayerError, match=message):
            TransactionManager(layers)
    TransactionManager([one, LayerRef("b", key, value, group="other")])


def test_the_caller_cannot_write_deferred_rows(layers):
    """Foreign writes and deferral contradict each other."""
    manager = TransactionManager(layers, TxnConfig(policy="deferred"))
    with pytest.raises(ConfigError, match="written_by"):
        manager.window(1, torch.tensor([0, 1]), written_by="caller")


def test_kv_window_uses_the_active_manager(layers):
    """The innermost activation counts, and it ends with its block."""
    outer, inner = TransactionManager(layers), TransactionManager(make_layers(1))
    with outer.activate():
        with inner.activate() as active:
            assert active is inner
            with kv_window(1, torch.tensor([0, 1])) as w:
                assert inner.current is w
                w.abort()
        with kv_window(1, torch.tensor([0, 1])) as w:
            assert outer.current is w
            w.abort()
    with pytest.raises(WindowStateError, match=r"manager\.activate"):
        kv_window(1, torch.tensor([0, 1]))


def test_activation_is_per_context(layers):
    """Concurrent tasks do not see each other's manager."""

    async def task(manager, started, done):
        with manager.activate():
            started.set()
            await done.wait()
            with kv_window(0, torch.tensor([0])) as w:
                found = manager.current is w
                w.abort()
            return found

    async def both():
        one, two = TransactionManager(layers), TransactionManager(make_layers(1))
        events = [asyncio.Event() for _ in range(3)]
        tasks = [
            asyncio.create_task(task(one, events[0], events[2])),
            asyncio.create_task(task(two, events[1], events[2])),
        ]
        await events[0].wait()
        await events[1].wait()
        events[2].set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(both()) == [True, True]


def test_events_are_logged_under_one_name(layers, caplog):
    """Nothing above debug in the hot path; the life of a window at debug."""
    with caplog.at_level(logging.DEBUG, logger="kvtxn"):
        manager = TransactionManager(layers)
        with manager.window(1, torch.tensor([0, 1])) as w:
            for ref in layers:
                w.stage(ref, *rows(2))
            w.commit([0])
    events = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert events[0][0] == "INFO"
    assert "manager.ready" in events[0][1]
    assert "policy='deferred'" in events[0][1]
    assert [level for level, _ in events[1:]] == ["DEBUG", "DEBUG"]
    assert "window.begin" in events[1][1]
    assert "accepted=[0] never_written=1" in events[2][1]


class FullDisk(logging.Handler):
    """Fails for the first window that begins."""

    failed = False

    def emit(self, record):
        if "window.begin" in record.getMessage() and not self.failed:
            self.failed = True
            raise OSError("the disk is full")


@pytest.mark.parametrize("captured", [False, True], ids=["window", "captured"])
def test_a_window_that_nobody_got_does_not_stay_open(layers, captured):
    """The log fails once it has begun: nobody could end it, and the next one begins."""
    manager = TransactionManager(layers)
    windows = manager.captured_windows(torch.tensor([[0, 1]])) if captured else None

    def begin():
        if windows is None:
            return manager.window(1, torch.tensor([0, 1]))
        return windows.begin(windows.plan(RowLayout.build((1,), (1,), manager.device)))

    logger, handler = logging.getLogger("kvtxn"), FullDisk()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with pytest.raises(OSError, match="the disk is full"):
            begin()
        assert manager.current is None
        window = begin()
        assert window.number == 0
        window.abort()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_repr(layers):
    """For the debugger's sake."""
    text = repr(TransactionManager(layers))
    assert text == "<TransactionManager 3 layers on cpu, policy deferred, backend torch>"


def _set(cache: torch.Tensor) -> None:
    cache.set_(cache.clone())


def _data(cache: torch.Tensor) -> None:
    cache.data = cache.clone()


def _storage(cache: torch.Tensor) -> None:
    before, storage = cache.data_ptr(), cache.untyped_storage()
    storage.resize_(64 * storage.nbytes())
    assert cache.data_ptr() != before


@pytest.mark.parametrize("move", [_set, _data, _storage])
@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
def test_a_cache_that_moved_is_noticed(policy, move):
    """Before anything is written: the rows would go where nobody reads them."""
    scales = torch.ones(2, 8, 4, 2)
    layers = [
        LayerRef("rows", *torch.zeros(2, 8, 4, 2, 8).unbind()),
        LayerRef("codes", *torch.zeros(2, 8, 4, 2, 8, dtype=torch.int8).unbind(),
                 k_scale=scales[0].clone(), v_scale=scales[1].clone()),
        LayerRef.latent("latent", torch.zeros(8, 4, 8)),
    ]  # fmt: skip
    states = [] if policy != "deferred" else [
        LayerRef.recurrent("state", torch.zeros(8, 3), torch.zeros(8, 5), group="state")
    ]  # fmt: skip
    tensors = [tensor for ref in (*layers, *states) for tensor, _ in ref.memory]
    assert len(tensors) == 7 + 2 * len(states)
    for number in range(len(tensors)):
        copies = [pickle.loads(pickle.dumps(ref)) for ref in (*layers, *states)]
        manager = TransactionManager(copies, TxnConfig(policy=policy))
        cache = [tensor for ref in copies for tensor, _ in ref.memory][number]
        move(cache)
        with pytest.raises(LayerError, match=r"window: .* moved since .*new TransactionManager"):
            manager.window(1, {"default": [4, 5], "state": [1]})
        assert manager.current is None
        with pytest.raises(LayerError, match=r"TransactionManager: .* moved since"):
            TransactionManager(copies, TxnConfig(policy=policy))


@pytest.mark.parametrize("larger", [False, True])
def test_a_cache_that_was_resized_is_noticed(layers, larger):
    """At the same address: its slots are others."""
    manager = TransactionManager(layers)
    cache = layers[1].value_cache
    if larger:
        cache.data = cache.expand(2, *cache.shape)[0].as_strided(
            (7, *cache.shape[1:]), (0, 1, 1, 1)
        )
    else:
        cache.resize_(2, *cache.shape[1:])
    with pytest.raises(
        LayerError, match=r"window: .*'layer.1' was resized.*new TransactionManager"
    ):
        manager.window(1, [0, 1])
    assert manager.current is None


def test_captured_windows_notice_a_cache_that_moved(layers):
    manager = TransactionManager(layers, TxnConfig(policy="undo"))
    _set(layers[0].key_cache)
    with pytest.raises(LayerError, match=r"captured_windows: .* moved since"):
        manager.captured_windows(torch.full((len(manager.groups), 8), -1))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_is_not_copied(layers, way):
    """Two managers over the same caches would not know of each other's windows."""
    manager = TransactionManager(layers)
    for holder in (manager, {"model": [manager]}) if way is not copy.copy else (manager,):
        with pytest.raises(TypeError, match=r"neither copied nor pickled.*new LayerRef objects"):
            way(holder)
    with manager.window(1, [0, 1]) as window:
        window.abort()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_window_is_not_copied(layers, way):
    """Its rows would be committed twice."""
    slots = torch.full((1, 8), -1)
    manager = TransactionManager(layers)
    captured = manager.captured_windows(slots)
    plan = captured.plan(RowLayout.build((1,), (1,), slots.device))
    for begin in (lambda: manager.window(1, [0, 1]), lambda: captured.begin(plan)):
        window = begin()
        with pytest.raises(ManagerCopyError, match="a window can be neither copied nor pickled"):
            way(window)
        window.abort()
