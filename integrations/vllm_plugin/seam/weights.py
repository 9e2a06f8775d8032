"""vLLM's weights: the calls that change them, and the parameters that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from .hooks import follow, follow_end

if TYPE_CHECKING:
    from .engine_protocols import WorkerWrapper
    from .runner_protocols import Runner

#: The names of the weights that change apart, for ``kvtxn.audit``.
TARGET: Final = "target"
DRAFTER: Final = "drafter"

#: Methods of a worker that change the target's weights; not every release has all of them.
_CHANGES: Final = ("reload_weights", "reset_weights")
#: Methods that change the weights whose update has begun.
_UPDATES: Final = ("update_weights", "finish_weight_update")
#: Methods that begin an update, and whose weights it is of.
_BEGIN: Final = {"start_weight_update": TARGET, "start_draft_weight_update": DRAFTER}
#: From this level on sleep loses the weights.
_LOSES_WEIGHTS: Final = 2


def follow_updates(wrapper: WorkerWrapper, changed: Callable[[str], None]) -> Callable[[], None]:
    """Call a function whenever a worker has changed weights, or has lost them in its sleep.

    It is called if the update fails, too: some of the weights may have changed by then. Methods
    that this release's worker lacks are left out.

    Args:
        wrapper: the worker's wrapper.
        changed: gets ``TARGET`` or ``DRAFTER``; after a sleep that lost the weights it is called
            for both, when they are back.

    Returns:
        A function that undoes it.
    """
    worker, undo = wrapper.worker, ExitStack()
    updated, slept = TARGET, 0

    def change(*args: Any, **kwargs: Any) -> None:
        changed(TARGET)

    def update(*args: Any, **kwargs: Any) -> None:
        changed(updated)

    def begin(_: object, weights: str) -> None:  # where it refuses, the update under way goes on
        nonlocal updated
        updated = weights

    def sleep(level: int = 1, *args: Any, **kwargs: Any) -> None:
        nonlocal slept
        slept = level

    def wake_up(tags: Sequence[str] | None = None, *args: Any, **kwargs: Any) -> None:
        nonlocal slept
        if slept >= _LOSES_WEIGHTS and (tags is None or "weights" in tags):
            slept = 0
            changed(TARGET)
            changed(DRAFTER)

    ends = {**dict.fromkeys(_CHANGES, change), **dict.fromkeys(_UPDATES, update)}
    for name, then in {**ends, "sleep": sleep, "wake_up": wake_up}.items():
        if hasattr(worker, name):
            undo.callback(follow_end(worker, name, then))
    for name, weights in _BEGIN.items():
        if hasattr(worker, name):
            undo.callback(follow(worker, name, partial(begin, weights=weights)))
    return undo.close


def follow_loads(runner: Runner, changed: Callable[[str], None]) -> Callable[[], None]:
    """Call a function whenever the ``load_weights`` of a runner's model or drafter has run.

    Training frameworks call it on the model itself, once for each parameter or for many.

    Args:
        runner: with a loaded model.
        changed: gets ``TARGET`` or ``DRAFTER``; is called even if the load raised.

    Returns:
        A function that undoes it.
    """
    undo = ExitStack()

    def loaded(name: str, /, *args: object, **kwargs: object) -> None:
        changed(name)

    for weights, model in _models(runner).items():
        if hasattr(model, "load_weights"):
            undo.callback(follow_end(model, "load_weights", partial(loaded, weights)))
    return undo.close


def parameters(runner: Runner) -> Mapping[str, Callable[[], Iterable[Tensor]]]:
    """Return functions that list the parameters of the target and, if there is one, the drafter.

    What a drafter has from its target counts as the target's. The mapping is empty where the engine
    moves experts between ranks by itself: their bytes change, and no weights.
    """
    if getattr(runner.vllm_config.parallel_config, "enable_eplb", False):
        return {}
    models = _models(runner)
    target = models[TARGET]

    def own() -> list[Tensor]:
        shared = {id(each) for each in target.parameters()}
        return [each for each in models[DRAFTER].parameters() if id(each) not in shared]

    found: dict[str, Callable[[], Iterable[Tensor]]] = {TARGET: target.parameters}
    return found if DRAFTER not in models else {**found, DRAFTER: own}


def rotary_positions(runner: Runner, *, drafter: bool = True) -> list[Tensor]:
    """Return two rows of each table of rotary positions that a runner's models have, in bfloat16.

    They are rounded, since vLLM changes a table's dtype when it is used first. A table that models
    share counts once.

    Args:
        runner: with a loaded model.
        drafter: the drafter's tables, too.
    """
    tables = {
        each.data_ptr(): each
        for weights, model in _models(runner).items()
        if drafter or weights == TARGET
        for name, each in model.named_buffers()
        if name.endswith("cos_sin_cache") and each.ndim == 2 and len(each)
    }
    return [each[[len(each) // 2, -1]].bfloat16() for each in tables.values()]


def _models(runner: Runner) -> dict[str, nn.Module]:
    """Return a runner's models by the name of their weights; a drafter only if it is a module."""
    found: dict[str, nn.Module] = {TARGET: runner.get_model()}
    for name in ("drafter", "speculator"):  # of the V1 and the V2 runner
        model = getattr(getattr(runner, name, None), "model", None)
        model = getattr(model, "unwrap", lambda model=model: model)()  # out of its graphs
        if isinstance(model, nn.Module):
            found[DRAFTER] = model
    return found
