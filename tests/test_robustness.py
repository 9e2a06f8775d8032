"""Hostile callers and failing executors: nothing leaks, nothing lies, nothing gets stuck."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from interrupts import interrupted_at
from kvtxn.backends.torch_executor import TorchExecutor
from small_caches import changed_slots, copies, make_layers, noise, rows

from kvtxn import (
    AcceptanceError,
    LayerError,
    LayerRef,
    SampledIds,
    SlotMappingError,
    StagedTwiceError,
    TransactionManager,
    TxnConfig,
    WindowState,
    WindowStateError,
)
from kvtxn.acceptance import Acceptance
from kvtxn.lifecycle import Lifecycle
from kvtxn.staging import Stager
from kvtxn.testing import registered

SLOTS = [0, 1, 2]


@pytest.fixture
def manager_with(layers):
    """A manager whose executor has some methods replaced."""

    def build(policy="deferred", on_error="fallback", debug=False, refs=layers, **methods):
        with registered(type("Replaced", (TorchExecutor,), methods)) as name:
            config = TxnConfig(policy=policy, backend=name, on_error=on_error, debug=debug)
            return TransactionManager(refs, config)

    return build


def stage_all(window, layers):
    for ref in layers:
        window.stage(ref, *rows(window.num_rows))


def boom(*_, **__):
    raise RuntimeError("boom")


@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
def test_a_manager_made_in_inference_mode_works_outside(layers, policy):
    """Its counters and buffers outlive the mode they were made in, both ways."""
    with torch.inference_mode():
        manager = TransactionManager(layers, TxnConfig(policy=policy, staging="copy"))
        with manager.window(2, SLOTS) as w:
            stage_all(w, layers)
            w.commit(1)
    with manager.window(2, SLOTS) as w:
        stage_all(w, layers)
        w.commit(1)
    assert manager.snapshot()["kvtxn_windows_total_committed"] == 2


@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
def test_caches_made_in_inference_mode_are_written_outside(policy):
    """torch refuses such writes; the engine that made the caches need not make the steps."""
    with torch.inference_mode():
        made = make_layers()
    manager = TransactionManager(made, TxnConfig(policy=policy, on_error="raise"))
    with manager.window(2, SLOTS) as w:
        stage_all(w, made)
        w.commit(1)
    assert w.state is WindowState.COMMITTED
    assert all(ref.key_cache[0, 1].any() for ref in made)


@pytest.fixture
def elsewhere():
    """torch makes tensors on another device, unless told where."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
@pytest.mark.parametrize("given", [list, lambda slots: torch.tensor(slots, device="cpu")])
def test_the_default_device_does_not_matter(request, policy, given):
    """Host values stay on the host, where they are checked, and reach the caches' device."""
    made = make_layers()
    staged = {ref.name: rows(3) for ref in made}
    accepted = [given([0]), given([2])]
    request.getfixturevalue("elsewhere")
    manager = TransactionManager(made, TxnConfig(policy=policy))
    for counts, slots in zip(accepted, ([0, 1, 2], [3, 4, 5]), strict=True):
        with manager.window([2], given(slots)) as w:
            for ref in made:
                w.stage(ref, *staged[ref.name], slots=given(slots))
            with pytest.raises(AcceptanceError):
                w.commit([9])
            w.commit(counts)
    with pytest.raises(SlotMappingError, match="two rows"):
        manager.window(2, given([0, 0, 1]))
    assert all(torch.equal(ref.key_cache[0, 3], staged[ref.name][0][0]) for ref in made)
    assert manager.snapshot()["kvtxn_rows_committed_total"] == 2


def test_layers_and_trees_do_not_follow_the_default_device(elsewhere):
    """Scales, states of several dimensions, and paths are host values too."""
    host = torch.device("cpu")
    codes = torch.zeros(2, 4, 1, 2, dtype=torch.int8, device=host)
    LayerRef("a", codes, codes.clone(), k_scale=2.0, v_scale=0.5)
    state = torch.zeros(2, 6, 2, 3, 4, device=host)[:, ::2].transpose(1, 3)
    manager = TransactionManager([LayerRef.recurrent("s", state)], TxnConfig(policy="deferred"))
    with manager.window(2, [1], tree=[-1, -1]) as w:
        w.stage(manager.layers["s"], torch.ones(3, *state.shape[1:], device=host))
        w.commit([[1]])
    assert bool(state[1].all())


def test_a_failing_count_ends_the_window(manager_with, monkeypatch):
    """Whatever fails, the manager is free again and the label claims nothing."""
    manager = manager_with(commit=boom)
    w = manager.window(2, SLOTS)
    stage_all(w, manager.layers.values())
    monkeypatch.setattr("kvtxn.executor.Txn.count", boom)
    with pytest.raises(RuntimeError, match="boom"):
        w.commit(1)
    assert w.state is WindowState.FAILED
    assert manager.current is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_lens": torch.tensor([-5])},
        {"seq_lens": torch.tensor([2])},
        {"seq_lens": torch.tensor([99])},
        {"seq_lens": torch.tensor([3.0])},
        {"seq_lens": [3]},
        {"block_table": [[0]]},
        {"block_table": torch.tensor([[0.0]])},
        {"block_table": None},
        {"block_table": torch.tensor([[99]]), "seq_lens": torch.tensor([4])},
        {"block_table": torch.tensor([[-1]]), "seq_lens": torch.tensor([4])},
        {"query": np.zeros((3, 2, 8))},
        {"query": torch.zeros(3, 2, 8, dtype=torch.int64)},
        {"scale": "x"},
        {"soft_cap": 0.0},
        {"sliding_window": 0},
        {"sliding_window": 1.5},
        {"ref": "layer.0"},
    ],
    ids=str,
)
def test_a_mistake_in_attend_is_no_executor_failure(layers, wrong):
    """It is refused, and no rejected row is written because of it."""
    manager, before = TransactionManager(layers, TxnConfig(policy="deferred")), copies(layers)
    call = {
        "ref": layers[0],
        "query": noise(3, 2, 8),
        "block_table": torch.tensor([[0]]),
        "seq_lens": torch.tensor([3]),
        **wrong,
    }
    with manager.window(2, SLOTS) as w:
        stage_all(w, layers)
        with pytest.raises(LayerError):
            w.attend(**call)
        w.commit(0)
    assert w.state is WindowState.COMMITTED
    assert changed_slots(layers, before) == [{0}] * 6
    assert manager.snapshot()["kvtxn_fallbacks_total"] == 0


def test_a_refused_stage_leaves_the_window_as_it_was(layers):
    """Neither rows nor slots of a refused call are remembered."""
    manager = TransactionManager(layers, TxnConfig(policy="deferred"))
    key, value = rows(2)
    with manager.window(1) as w:
        with pytest.raises(LayerError, match="wrong shape"):
            w.stage(layers[0], key, value, [0, 1, 2, 3])
        with pytest.raises(LayerError, match="wrong shape"):
            w.stage(layers[0], key, value[:1], [0, 1])
        key.add_(1)
        w.stage(layers[0], key, value, [0, 1])
        stage_all(w, layers[1:])
        w.commit(1)
    assert torch.equal(layers[0].key_cache[0, :2], key)


def test_a_pickled_layer_is_still_one_memory(layers):
    """Its planes are views of its caches, as before."""
    copy = pickle.loads(pickle.dumps(layers[0]))
    manager = TransactionManager([copy], TxnConfig(policy="deferred"))
    key, value = rows(1)
    with manager.window(0, [5]) as w:
        w.stage(copy, key, value)
        w.commit(0)
    assert torch.equal(copy.key_cache.flatten(0, 1)[5], key[0])


def test_numpy_is_welcome(layers):
    """Engines hold counts and slots as arrays."""
    manager, before = TransactionManager(layers, TxnConfig(policy="deferred")), copies(layers)
    with manager.window(np.array([1, 1]), np.array([0, 1, 4, 5]), settled=np.int64(1)) as w:
        stage_all(w, layers)
        w.commit(np.array([1, 0]))
    assert changed_slots(layers, before) == [{0, 1, 4}] * 6


@pytest.mark.parametrize(
    "slots", [[0.0, 1.7], [True, False], ["a", "b"], [[0], [1]], [2**70, 1], {0, 1}, object(),
     torch.tensor([0, 1]).to_sparse(), torch.nested.nested_tensor([torch.zeros(2)])]
)  # fmt: skip
def test_slots_are_never_guessed(layers, slots):
    """Floats are not cut off, and nothing leaks an error of torch's."""
    manager = TransactionManager(layers)
    with pytest.raises(SlotMappingError):
        manager.window(1, slots)
    with manager.window([1]) as window:
        with pytest.raises(SlotMappingError):
            window.stage(layers[0], *rows(2), slots)
        window.abort()


def test_a_mapping_changed_in_place_is_another_mapping(layers):
    """The same tensor with other numbers is refused."""
    slots = torch.tensor([0, 1])
    with TransactionManager(layers).window(1, slots) as w:
        slots += 4
        with pytest.raises(SlotMappingError, match="second, different"):
            w.stage(layers[0], *rows(2), slots)
        w.abort()


@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
def test_the_note_of_a_failure_says_what_became_of_the_caches(manager_with, layers, policy):
    """Under direct nothing was restored, and nothing says so."""
    manager, before = manager_with(policy, on_error="raise", commit=boom), copies(layers)
    window = manager.window(2, SLOTS)
    stage_all(window, layers)
    with pytest.raises(RuntimeError, match="boom") as caught:
        window.commit(1)
    restored = changed_slots(layers, before) == [{0}] * 6
    assert restored is (policy != "direct")
    note = "the caches were restored" if restored else "rows already written stay"
    assert caught.value.__notes__ == [f"kvtxn: commit failed; {note}"]


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_debug_finds_and_repairs_a_wrong_commit(manager_with, policy):
    """An executor that lies is caught, and the reference finishes its work."""

    def sloppy(self, txn, accepted):
        TorchExecutor.commit(self, txn, torch.full_like(accepted, 2))

    manager = manager_with(policy, debug=True, commit=sloppy)
    layers = list(manager.layers.values())
    before = copies(layers)
    with manager.window(2, SLOTS) as w:
        stage_all(w, layers)
        w.commit(1)
    assert w.state is WindowState.FELL_BACK
    assert changed_slots(layers, before) == [{0, 1}] * 6
    assert manager.snapshot()["kvtxn_rows_committed_total"] == 1


def test_an_interrupt_while_restoring_still_restores(manager_with):
    """The bytes are back, the manager is free, the interrupt surfaces."""

    def interrupted(*_):
        raise KeyboardInterrupt

    manager = manager_with("undo", restore=interrupted)
    layers = list(manager.layers.values())
    before = copies(layers)
    w = manager.window(2, SLOTS)
    stage_all(w, layers)
    with pytest.raises(KeyboardInterrupt):
        w.abort()
    assert w.state is WindowState.ABORTED
    assert changed_slots(layers, before) == [{0}] * 6
    assert manager.current is None


def ring_layers(count=2):
    made = torch.randn(count, 2, 2, 4, 2, 8)
    return [LayerRef.ring(f"ring.{i}", *pair, window=4) for i, pair in enumerate(made)]


@pytest.mark.parametrize("make", [make_layers, ring_layers])
def test_rows_for_which_there_is_no_buffer_are_written_directly(manager_with, monkeypatch, make):
    """No memory for a buffer of ``max_rows`` is no reason to lose an accepted row."""
    refs = make()
    manager = manager_with(refs=refs)
    before = copies(refs)
    monkeypatch.setattr(Stager, "_keep", boom)
    staged = {ref.name: rows(3) for ref in refs}
    with manager.window(2, SLOTS) as w:
        for ref in refs:
            given = [part.clone() for part in staged[ref.name]]
            w.stage(ref, *given)
            given[0].zero_()  # the caller's buffer is free again, as with copies
        w.commit(1)
    assert (w.state, w.fallback_reason) == (WindowState.FELL_BACK, "stage")
    for ref in refs:
        key, value = staged[ref.name]
        for cache, part in ((ref.key_cache, key), (ref.value_cache, value)):
            assert torch.equal(cache[0, :2], part[:2].to(cache.dtype))
    if make is ring_layers:  # the rejected row would have evicted a live one
        assert changed_slots(refs, before) == [{0, 1}] * 4


def test_rows_for_which_there_is_no_buffer_can_end_the_window(manager_with, monkeypatch):
    manager = manager_with(on_error="raise")
    layers = list(manager.layers.values())
    before = copies(layers)
    monkeypatch.setattr(Stager, "_keep", boom)
    with pytest.raises(RuntimeError, match="boom"), manager.window(2, SLOTS) as w:
        stage_all(w, layers)
    assert w.state is WindowState.ABORTED
    assert all(slots <= {0} for slots in changed_slots(layers, before))


@pytest.mark.parametrize("policy", ["deferred", "undo"])
@pytest.mark.parametrize("on_error", ["fallback", "raise"])
def test_ids_that_cannot_be_counted(manager_with, monkeypatch, policy, on_error):
    """The counting is a part of the commit: accepted rows are written, or all are taken back."""
    manager = manager_with(policy, on_error)
    layers = list(manager.layers.values())
    before = copies(layers)
    monkeypatch.setattr(Acceptance, "counted", boom)
    w = manager.window(2, SLOTS)
    stage_all(w, layers)
    ids = SampledIds(torch.tensor([[5, 6, -1]]))
    if on_error == "raise":
        with pytest.raises(RuntimeError, match="boom"):
            w.commit(ids)
    else:
        w.commit(ids)
    falls_back = on_error == "fallback"
    assert w.state is (WindowState.FELL_BACK if falls_back else WindowState.ABORTED)
    assert changed_slots(layers, before) == [{0, 1} if falls_back else {0}] * 6


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_interrupt_while_saving_leaves_the_group_without_slots(manager_with, end):
    """A caller that catches it and goes on gets its rejected drafts taken back all the same."""
    interrupts = [KeyboardInterrupt]

    def save(self, txn, group):
        if interrupts:
            raise interrupts.pop()
        return TorchExecutor.save(self, txn, group)

    manager = manager_with("undo", save=save)
    layers = list(manager.layers.values())
    before = copies(layers)
    w = manager.window(2)
    with pytest.raises(KeyboardInterrupt):
        w.stage(layers[0], *rows(3), SLOTS)
    assert w.state is WindowState.OPEN
    with pytest.raises(SlotMappingError, match="has no slot mapping"):
        w.stage(layers[0], *rows(3))
    for ref in layers:
        w.stage(ref, *rows(3), SLOTS)
    w.commit(0) if end == "commit" else w.abort()
    assert w.state is (WindowState.COMMITTED if end == "commit" else WindowState.ABORTED)
    assert changed_slots(layers, before) == [{0}] * 6


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_an_interrupt_after_the_commits_work_claims_nothing(layers, monkeypatch, policy):
    """No label says yet that the rows are committed, and none may say that they are not."""
    manager = TransactionManager(layers, TxnConfig(policy=policy))
    with pytest.raises(KeyboardInterrupt), manager.window(2, SLOTS) as w:  # noqa: PT012
        stage_all(w, layers)
        monkeypatch.setattr(Lifecycle, "follow", interrupt)
        w.commit(2)
    assert w.state is WindowState.FAILED
    assert manager.current is None


def test_an_interrupt_after_a_fallbacks_work_claims_nothing(manager_with, monkeypatch):
    """Drafts were written through already."""
    manager = manager_with(stage=boom)
    layers = list(manager.layers.values())
    with pytest.raises(KeyboardInterrupt), manager.window(2, SLOTS) as w:  # noqa: PT012
        monkeypatch.setattr(Lifecycle, "follow", interrupt)
        stage_all(w, layers)
    assert w.state is WindowState.FAILED
    assert manager.current is None


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_interrupt_at_the_end_leaves_nothing_stuck(layers, monkeypatch, end):
    """The label has moved: the next window begins, and is not checked for this one's tensors."""
    manager = TransactionManager(layers, TxnConfig(policy="deferred"))
    w = manager.window(2, SLOTS)
    staged = rows(3)
    for ref in layers:
        w.stage(ref, *staged)
    with monkeypatch.context() as patch:
        patch.setattr(manager.context.stager, "reset", interrupt)
        with pytest.raises(KeyboardInterrupt):
            w.commit(2) if end == "commit" else w.abort()
    assert w.state is (WindowState.COMMITTED if end == "commit" else WindowState.ABORTED)
    assert manager.current is None
    staged[0].zero_()
    with manager.window(2, SLOTS) as after:
        stage_all(after, layers)
        after.commit(1)
    assert after.state is WindowState.COMMITTED


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_interrupt_at_any_line_of_an_end_leaves_the_manager_usable(end):
    """Also where the window lets go of what it held while hooks are called."""
    for number in range(1, 200):
        layers = make_layers(1)
        manager = TransactionManager(layers, TxnConfig(policy="deferred"))
        w = manager.window(2, SLOTS)
        stage_all(w, layers)
        ending = partial(w.commit, 2) if end == "commit" else w.abort
        if not interrupted_at(number, ending, "line", "kvtxn.lifecycle"):
            break
        if manager.current is not None:
            manager.current.abort()
        assert w.state.is_final
        manager.window(2, SLOTS).abort()
    assert number > 10


def test_staging_twice_is_one_error_whenever_it_happens():
    """While layers are missing and after the last one."""
    layers = make_layers(2)
    with TransactionManager(layers).window(1, [0, 1]) as w:
        w.stage(layers[0], *rows(2))
        with pytest.raises(StagedTwiceError, match="in this window already"):
            w.stage(layers[0], *rows(2))
        w.stage(layers[1], *rows(2))
        with pytest.raises(StagedTwiceError):
            w.stage(layers[1], *rows(2))
        w.abort()


def test_when_a_caller_cannot_give_up(layers):
    """Before there is anything to write, or twice; the window is as it was."""
    manager = TransactionManager(layers)
    with manager.window(2) as w:
        with pytest.raises(WindowStateError, match="no slots yet, in state OPEN"):
            w.fall_back("runner", RuntimeError())
        w.stage(layers[0], *rows(3), SLOTS)
        w.fall_back("runner", RuntimeError())
        with pytest.raises(WindowStateError, match=r"state DIRECT.*commit or abort this one"):
            w.fall_back("runner", RuntimeError())
        with pytest.raises(StagedTwiceError, match="in this window the caller writes the rows"):
            w.stage(layers[1], *rows(3))
        w.commit(1)
    assert w.state is WindowState.FELL_BACK


def test_a_finished_window_cannot_be_entered(layers):
    """Single-use; and the error has the facts as attributes."""
    w = TransactionManager(layers).window(1, [0, 1])
    w.abort()
    with pytest.raises(WindowStateError) as caught, w:
        pass
    assert (caught.value.state, caught.value.got) == ("ABORTED", "ABORTED")
    assert "OPEN" in caught.value.expected


def test_lengths_are_checked_before_slots_come(layers):
    """A length that can never fit is refused at once."""
    manager = TransactionManager(layers)
    for draft_len, settled in ((-1, 1), (1.0, 1), (None, 1), (1, -1)):
        with pytest.raises(SlotMappingError):
            manager.window(draft_len, settled=settled)
    assert manager.current is None


def test_neutral_scales_and_names_are_fine():
    """Engines pass a scale of one and the dtype's name for plain caches."""
    key, value = noise(2, 4, 2, 8), noise(2, 4, 2, 8)
    ref = LayerRef("a", key, value, k_scale=1.0, v_scale=torch.ones(1), kv_dtype="float32")
    assert not ref.planes[0].format.quantised
    with pytest.raises(LayerError, match="does not fit"):
        LayerRef("a", key, value, kv_dtype="bfloat16")


def test_stored_codes_may_come_as_bytes():
    """A uint8 cache takes uint8 rows as they are."""
    cache = torch.zeros(2, 4, 2, 8, dtype=torch.uint8)
    ref = LayerRef("a", cache, cache.clone(), kv_dtype="fp8", k_scale=2.0)
    codes = torch.randint(0, 127, (1, 2, 8), dtype=torch.uint8)
    with TransactionManager([ref], TxnConfig(policy="deferred")).window(0, [3]) as w:
        w.stage(ref, codes, codes)
        w.commit(0)
    assert torch.equal(cache[0, 3], codes[0])


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), True])
def test_scales_that_mean_nothing_are_refused(scale):
    """Division by them would."""
    cache = torch.zeros(2, 4, 2, 8, dtype=torch.int8)
    with pytest.raises(LayerError, match="scale"):
        LayerRef("a", cache, cache.clone(), k_scale=scale)
