"""Windows over a captured forward: bad arguments are refused, and nothing has happened then."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from small_caches import HEAD_SIZE, HEADS, changed_slots, copies, make_layers

from kvtxn import (
    AcceptanceError,
    ConfigError,
    LayerError,
    LayerRef,
    TransactionManager,
    TxnConfig,
    WindowState,
    WindowStateError,
)
from kvtxn.draft_tree import as_parents
from kvtxn.layout import RowLayout
from kvtxn.lifecycle import Lifecycle
from kvtxn.testing import registered
from kvtxn.window_transitions import Event

sys.path.insert(0, str(Path(__file__).parent / "testing"))
from mutants_captured import Prepared

CPU = torch.device("cpu")
MAX_ROWS = 8

build = partial(RowLayout.build, device=CPU)
full = partial(torch.full, dtype=torch.int64)


class Forward:
    """A forward over one group; with ``prepared`` its commits are prepared launches."""

    def __init__(self, *, prepared: bool = True, policy: str = "deferred", width: int = 20) -> None:
        self.layers = make_layers(2)
        with registered(Prepared) as name:
            config = TxnConfig(
                policy=policy, backend=name if prepared else "torch", max_rows=MAX_ROWS
            )
            self.manager = TransactionManager(self.layers, config)
        self.slots = full((1, width), -1)
        self.windows = self.manager.captured_windows(self.slots)

    def begin(self, *drafts: int):
        """A window of requests with one settled row each, whose slots are 0, 1, ..."""
        layout = build(drafts, (1,) * len(drafts))
        self.slots[0, : layout.num_rows] = torch.arange(layout.num_rows)
        return self.windows.begin(self.windows.plan(layout))

    def run(self, value: float) -> None:
        """Replay: marked rows wait, the others are written."""
        for row, place in enumerate(self.windows.position.tolist()):
            for ref in self.layers if row < self.slots.shape[1] else ():
                slot = int(self.slots[0, row])
                for part, cache in enumerate((ref.key_cache, ref.value_cache)):
                    if place >= 0 and self.windows.deferred:
                        self.windows.rows[ref.name][part][row] = value + row
                    elif slot >= 0:
                        cache.view(-1, HEADS, HEAD_SIZE)[slot] = value + row

    def shown(self) -> list[float]:
        """The numbers in the first slots of a cache; rows without one are noise."""
        numbers = self.layers[-1].value_cache.view(-1, HEADS * HEAD_SIZE)[:MAX_ROWS]
        return [float(row[0]) if (row == row[0]).all() else -1.0 for row in numbers]


@pytest.fixture(params=[True, False], ids=["prepared", "executor"])
def forward(request):
    """With prepared launches, and without."""
    return Forward(prepared=request.param)


# -- sampled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["sampled", "counts"])
def test_what_does_not_fit_is_refused_before_the_forward_too(form):
    """The window stays as it is, though a commit before a forward that saves would fall back."""
    forward = Forward(policy="undo")
    window = forward.begin(3)
    window._unsaved = True  # as where the forward is to save
    with pytest.raises(AcceptanceError):
        window.commit_sampled("nonsense") if form == "sampled" else window.commit("nonsense")
    assert window.state is WindowState.STAGED
    window.abort()


@pytest.mark.parametrize(
    "sampled",
    [
        torch.tensor([2]),
        torch.tensor([2.9, 1.0]),
        torch.tensor([[2], [2]]),
        torch.tensor([True, True]),
        torch.tensor([2, 2], dtype=torch.uint8),
        torch.tensor(2),
        torch.tensor([2, 2], device="meta"),
        torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2])]),
        torch.nested.nested_tensor([torch.tensor([1])], layout=torch.jagged),
        torch.tensor([1, 2]).to_sparse(),
        torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 1, 0, torch.qint32),
        [2, 1],
        2,
        None,
    ],
    ids=repr,
)
@pytest.mark.parametrize("policy", ["deferred", "undo"])
@pytest.mark.parametrize("prepared", [True, False])
def test_sampled_tokens_that_do_not_fit(prepared, policy, sampled):
    """Refused before anything happens; the same window then commits."""
    forward = Forward(prepared=prepared, policy=policy)
    window = forward.begin(3, 3)
    forward.run(10.0)
    state, before, counts = window.state, copies(forward.layers), forward.manager.snapshot()
    with pytest.raises(AcceptanceError, match=r"signed int \[2\] or longer on cpu") as caught:
        window.commit_sampled(sampled)
    assert caught.value.operation == "commit_sampled"
    assert (window.state, forward.manager.current) == (state, window)
    assert changed_slots(forward.layers, before) == [set()] * 4
    assert forward.manager.snapshot() == counts
    assert window.commit_sampled(torch.tensor([2, 4])) is WindowState.COMMITTED
    kept = [10.0, 11.0, 14.0, 15.0, 16.0, 17.0]
    assert [n for n in forward.shown() if n >= 0] == kept


def test_sampled_tokens_of_more_requests(forward):
    """An engine's whole buffer may be given; of each signed dtype."""
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        window = forward.begin(2)
        forward.run(10.0)
        assert window.commit_sampled(torch.tensor([3, 9, 9], dtype=dtype)) is WindowState.COMMITTED
        assert forward.shown()[:3] == [10.0, 11.0, 12.0]


# -- plans and begin -------------------------------------------------------------------------------


def test_layouts_take_the_forms_that_windows_take():
    """Lists, and one number of settled rows for all requests."""
    assert build([3, 2], 1).settled == build((3, 2), (1, 1)).settled == (1, 1)


def test_draft_trees_are_refused(forward):
    """Only a window that holds its rows can move them; so are things that are no layouts."""
    tree = build((3,), (1,), parents=as_parents([-1, -1, 1]))
    for layout in (tree, None, [3], (3,)):
        with pytest.raises(ConfigError, match="without a draft tree, on cpu"):
            forward.windows.plan(layout)


def test_a_layout_in_place_of_a_plan(forward):
    """No window was begun, and the next one begins."""
    layout = build((3,), (1,))
    others = Forward().windows.plan(layout)
    for plan in (layout, None, others):
        with pytest.raises(ConfigError, match=r"expected what plan\(layout\) of the same object"):
            forward.windows.begin(plan)
        assert forward.manager.current is None
    forward.begin(3).abort()
    assert forward.manager.snapshot()["kvtxn_windows_total"] == 1


@pytest.mark.parametrize("width", [3, MAX_ROWS, 20])
@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
def test_warming_up_takes_any_layout(policy, width):
    """Without rows, or with more than there is room for: nothing is launched for these."""
    forward = Forward(policy=policy, width=width)
    before = copies(forward.layers)
    layouts = [build((), ()), build((0, 0), (0, 0)), build((2,), (1,)), build((7,), (1,))]
    forward.windows.warm_up([*layouts, build((MAX_ROWS,), (1,))])
    assert changed_slots(forward.layers, before) == [set()] * 4
    window = forward.begin(2)
    forward.run(10.0)
    assert window.commit_sampled(torch.tensor([3])) is WindowState.COMMITTED
    assert forward.shown()[:3] == [10.0, 11.0, 12.0]


# -- rows ------------------------------------------------------------------------------------------


def given_rows(layers, dtype=torch.float32):
    """A tensor for each plane."""
    make = partial(torch.zeros, MAX_ROWS, HEADS, HEAD_SIZE, dtype=dtype)
    return {ref.name: (make(), make()) for ref in layers}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint16])
def test_rows_of_another_dtype(dtype):
    """Their bits would be read as numbers of the cache's dtype; bits may be given as integers."""
    cache = partial(torch.zeros, 4, 16, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    layers = [LayerRef("one", cache(), cache())]
    manager = TransactionManager(layers, TxnConfig(policy="deferred", max_rows=MAX_ROWS))
    slots = full((1, MAX_ROWS), -1)
    with pytest.raises(LayerError, match=r"expected one tensor per plane: torch.bfloat16 \[8, "):
        manager.captured_windows(slots, given_rows(layers, dtype))
    for known in (torch.bfloat16, torch.int16):
        manager.captured_windows(slots, given_rows(layers, known))


def test_a_refused_tensor_is_named_by_its_shape(forward):
    """Not by its content."""
    one = torch.zeros(MAX_ROWS, HEADS, HEAD_SIZE)
    with pytest.raises(LayerError, match=r"got torch.float32 \[8, \d, \d+\] on cpu"):
        forward.manager.captured_windows(forward.slots, dict.fromkeys(forward.manager.layers, one))
    sparse = {ref.name: (one.to_sparse(), one) for ref in forward.layers}
    with pytest.raises(LayerError, match="do not fit the layer"):
        forward.manager.captured_windows(forward.slots, sparse)


def test_rows_that_share_memory(forward):
    """Expanded ones, one tensor for two planes or layers, and tensors that overlap."""
    a, b = (ref.name for ref in forward.layers)
    one, two = given_rows(forward.layers)[a]
    expanded = torch.zeros(1, HEADS, HEAD_SIZE).expand(MAX_ROWS, HEADS, HEAD_SIZE)
    long = torch.zeros(MAX_ROWS + 1, HEADS, HEAD_SIZE)
    fused = torch.zeros(MAX_ROWS, HEADS, 2 * HEAD_SIZE)
    sound = given_rows(forward.layers)
    for wrong, where in (
        ({a: (expanded, two)}, a),
        ({a: (one, one)}, f"{a} and {a}"),
        ({b: (one, sound[a][1])}, f"{a} and {b}|{b} and {a}"),
        ({b: (long[:-1], long[1:])}, f"{b} and {b}"),
    ):
        with pytest.raises(LayerError, match=f"rows given for layer ({where}) share memory"):
            forward.manager.captured_windows(forward.slots, sound | wrong)
    halves = {b: (fused[..., :HEAD_SIZE], fused[..., HEAD_SIZE:])}  # as of a fused projection
    forward.manager.captured_windows(forward.slots, sound | halves)


def test_windows_over_two_forwards(forward):
    """Each commits by its own slots and rows, whichever was made last."""
    slots = full((1, 20), -1)
    other = forward.manager.captured_windows(slots, given_rows(forward.layers))
    plan = other.plan(build((1,), (0,)))
    for number in range(3):
        slots[0, 0], before = 20, copies(forward.layers)
        window = other.begin(plan)
        for part in (part for parts in other.rows.values() for part in parts):
            part[0] = 70.0 + number
        window.commit_sampled(torch.tensor([2]))
        assert changed_slots(forward.layers, before) == [{20}] * 4
        assert (
            float(forward.layers[0].key_cache.view(-1, HEADS, HEAD_SIZE)[20, 0, 0]) == 70 + number
        )
        window = forward.begin(2)
        forward.run(10.0 + number)
        window.commit([number])
        assert int(slots[0, 0]) == 20
    assert forward.shown()[:3] == [12.0, 13.0, 14.0]


@pytest.mark.parametrize("prepared", [True, False])
def test_windows_beside_each_other(prepared):
    """Each set of windows takes turns among its own, and commits over its own slots."""
    forward = Forward(prepared=prepared, policy="undo")
    before = copies(forward.layers)
    slots = torch.arange(8, 24).view(1, -1)
    others = forward.manager.captured_windows(slots, beside=True)
    first = forward.begin(2)
    second = others.begin(others.plan(build((2,), (1,))))
    with pytest.raises(WindowStateError, match="one window at a time"):
        others.begin(others.plan(build((1,), (1,))))
    for slot in (0, 1, 2, 8, 9, 10):
        for ref in forward.layers:
            for cache in (ref.key_cache, ref.value_cache):
                cache.view(-1, HEADS, HEAD_SIZE)[slot] = 70 + slot
    second.commit_sampled(torch.tensor([2]))
    assert (first.state, second.state) == (WindowState.STAGED, WindowState.COMMITTED)
    assert forward.manager.current is first
    assert changed_slots(forward.layers, before) == [{0, 1, 2, 8, 9}] * 4
    first.commit_sampled(torch.tensor([1]))
    assert changed_slots(forward.layers, before) == [{0, 8, 9}] * 4
    assert forward.manager.current is None
    assert forward.manager.snapshot()["kvtxn_rows_rejected_total"] == 3


# -- marks -----------------------------------------------------------------------------------------


def test_graphs_that_share_their_marks(forward):
    """The marks are those of the step that is under way, whichever graph ran before."""
    position, first = forward.windows.position, forward.windows
    rows = given_rows(forward.layers)
    second = forward.manager.captured_windows(forward.slots, rows, position)
    for windows, drafts, value in ((first, (2, 2), 1.0), (second, (3,), 2.0), (first, (2, 2), 3.0)):
        forward.windows, before = windows, copies(forward.layers)
        window = forward.begin(*drafts)
        forward.run(value)
        window.commit_sampled(torch.ones(len(drafts), dtype=torch.int32))
    assert changed_slots(forward.layers, before) == [{0, 3}] * 4
    assert [forward.shown()[slot] for slot in (0, 3)] == [3.0, 6.0]


def test_marks_are_not_taken_from_an_open_window(forward):
    """They would all become -1 under it."""
    position = forward.windows.position
    with forward.begin(2) as window:
        marked = position.clone()
        with pytest.raises(WindowStateError, match="is still OPEN"):
            forward.manager.captured_windows(forward.slots, position=position)
        assert torch.equal(position, marked)
        window.abort()


def test_marks_beside_the_slots(forward):
    """A line of the slots holds no marks."""
    with pytest.raises(LayerError, match="beside the slots"):
        forward.manager.captured_windows(forward.slots, position=forward.slots[0])
    assert not (forward.slots + 1).any()


# -- the end of a step -----------------------------------------------------------------------------


def test_falling_back_after_a_replay(forward):
    """No layer was noted, so a graph was replayed: its drafts are written, and none is lost."""
    window = forward.begin(3)
    forward.run(10.0)
    window.fall_back("attend", RuntimeError("after the replay"))
    assert window.state is WindowState.DIRECT
    assert window.commit_sampled(torch.tensor([4])) is WindowState.FELL_BACK
    assert forward.shown()[:4] == [10.0, 11.0, 12.0, 13.0]
    counts = forward.manager.snapshot()
    assert counts["kvtxn_rows_committed_total"] == 3
    assert counts["kvtxn_stage_operations_total"] == 4 * 2


def test_falling_back_before_the_first_layer(forward):
    """A caller that runs the forward itself says so: rows that it wrote stay as they are."""
    window = forward.begin(3)
    before = copies(forward.layers)
    window.fall_back("attend", RuntimeError("in the first layer"), replayed=False)
    assert changed_slots(forward.layers, before) == [set()] * 4
    forward.windows.mark(None)
    forward.run(10.0)
    assert window.commit_sampled(torch.tensor([4])) is WindowState.FELL_BACK
    assert forward.shown()[:4] == [10.0, 11.0, 12.0, 13.0]


def test_hooks_that_come_and_go_within_a_step(forward):
    """The commit calls those that are registered when it comes."""
    told = []
    window = forward.begin(2)
    hook = forward.manager.on_commit(lambda ended: told.append(ended.number))
    window.commit_sampled(torch.tensor([1]))
    window = forward.begin(2)
    hook.remove()
    window.commit_sampled(torch.tensor([1]))
    assert told == [0]


def test_a_refused_commit_counts_nothing(forward):
    """The window is OPEN as before, and layers can be noted."""
    window = forward.begin(3)
    forward.run(10.0)
    with pytest.raises(AcceptanceError):
        window.commit([9])
    assert window.state is WindowState.OPEN
    assert forward.manager.snapshot()["kvtxn_stage_operations_total"] == 0
    for ref in forward.layers:
        window.note_staged(ref)
    window.commit([3])
    assert forward.manager.snapshot()["kvtxn_stage_operations_total"] == 4 * 2
    assert forward.shown()[:4] == [10.0, 11.0, 12.0, 13.0]


def test_a_refused_note_leaves_no_trace(forward):
    """The graph was replayed, and its rows are committed; the layer was another manager's."""
    window = forward.begin(3)
    forward.run(10.0)
    for ref in (make_layers(1)[0], None):
        with pytest.raises(LayerError):
            window.note_staged(ref)
    assert window.missing == ("layer.0", "layer.1")
    assert window.commit_sampled(torch.tensor([4])) is WindowState.COMMITTED
    assert forward.shown()[:4] == [10.0, 11.0, 12.0, 13.0]


def test_looking_at_a_window_that_is_over_counts_nothing(forward):
    """Whichever way it was committed."""
    window = forward.begin(3)
    forward.run(10.0)
    for ref in forward.layers:
        window.note_staged(ref)
    window.commit_sampled(torch.tensor([1]))
    counts = forward.manager.snapshot()
    assert window.fallback_reason is None
    assert window.state is WindowState.COMMITTED
    assert forward.manager.snapshot() == counts


def test_a_captured_commit_is_replayed_at_its_own_address_alone():
    """Contiguous int32 counts there; the same bytes in other steps or dtypes are read anew."""
    forward, replayed = Forward(), []
    sampled = torch.full((2,), 3, dtype=torch.int32)
    window = forward.begin(3)
    plan = window.plan

    def replay() -> None:
        replayed.append(sampled.tolist())
        plan.launches.commit(sampled)

    plan.launches.replays = {sampled.data_ptr(): replay}
    kinds = [sampled, sampled[::2], sampled.view(torch.int16)[:1], sampled.clone(), sampled[:1]]
    for given, times in zip(kinds, (1, 2, 2, 2, 3), strict=True):
        forward.run(10.0)
        assert window.commit_sampled(given) is WindowState.COMMITTED
        assert len(replayed) == times
        window = forward.windows.begin(plan)
    with pytest.raises(AcceptanceError):
        window.commit_sampled(torch.sparse_coo_tensor([[0]], [3], (2,), dtype=torch.int32))
    window.abort()
    assert replayed == [[3, 3]] * 3


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_after_the_launch_claims_nothing(monkeypatch, fails):
    """The drafts are in the caches, or are being written: no later abort may deny it."""
    forward = Forward()
    forward.manager.on_commit(print)
    window = forward.begin(3)
    forward.run(10.0)

    def launch(_) -> None:
        if fails:
            raise RuntimeError("no launch")

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(window.plan.launches, "commit", launch)
    monkeypatch.setattr(Lifecycle, "follow", interrupted)
    monkeypatch.setattr(Lifecycle, "go", after_staging(Lifecycle.go, interrupted))
    with pytest.raises(KeyboardInterrupt):
        window.commit_sampled(torch.tensor([3, 3], dtype=torch.int32))
    assert window.state is WindowState.FAILED
    assert forward.manager.current is None


def after_staging(go, interrupted):
    """Let ``go`` be interrupted at a commit's event."""
    return lambda life, event: interrupted() if event is Event.COMMIT else go(life, event)


def test_the_log_is_asked_anew_once_its_level_changed(caplog):
    """A level counts from the next window on."""
    forward = Forward()
    for level, quiet in (("INFO", True), ("DEBUG", False), ("INFO", True)):
        with caplog.at_level(level, logger="kvtxn"):
            for _ in range(2):
                window = forward.begin(3)
                assert window._shared.quiet == quiet
                window.abort()
