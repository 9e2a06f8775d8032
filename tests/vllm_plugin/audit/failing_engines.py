"""Engines in which a forward fails and that go on: vLLM's prefix cache has its blocks already.

A request is aborted by the failure; another one with the same tokens hits the blocks, and is told
that nobody has computed their rows. A request that begins before them computes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from planting import Rig, around, texts

#: Rows of a block.
SIZE = 32


class FailedForward(RuntimeError):
    """A forward that a test lets fail."""


class _Failing:
    """Stands before the runner's model, whose forward fails before it begins or once it is done."""

    def __init__(self, model: Any, fail: Callable[[str], None], *, late: bool) -> None:
        self._model, self._fail, self._late = model, fail, late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._late:
            self._fail("model")
        output = self._model(*args, **kwargs)
        if self._late:
            self._fail("model")
        return output


@contextmanager
def _fails(rig: Rig, when: Callable[[Rig], bool], *, late: bool) -> Iterator[list[str]]:
    """Let one forward fail, before it has computed anything or after; yields how it ran."""
    ways: list[str] = []

    def fail(way: str) -> None:
        if not ways and when(rig):
            ways.append(way)
            raise FailedForward("a forward that a test lets fail")

    def graph(*args: Any, **kwargs: Any) -> None:
        fail("graph")

    with ExitStack() as stack:
        manager = getattr(rig.runner, "cudagraph_manager", None)
        if hasattr(manager, "run_fullgraph"):
            moment = {"after" if late else "before": graph}
            stack.enter_context(around(manager, "run_fullgraph", **moment))
        failing = _Failing(rig.runner.model, fail, late=late)
        stack.enter_context(mock.patch.object(rig.runner, "model", failing))
        yield ways


def _scheduled(rig: Rig) -> Any:
    """Return the one request that runs; None if others do."""
    running = rig.scheduler.running
    return running[0] if len(running) == 1 else None


def _run(rig: Rig, prompt: list[int], outputs: int) -> list[int] | None:
    """Run one request; None if a forward failed, and then the request is gone."""
    try:
        return rig.run([prompt], outputs)[0]
    except FailedForward:
        rig.engine.abort_request(list(rig.scheduler.requests), internal=True)
        while rig.engine.has_unfinished_requests():
            rig.engine.step()
        return None


def _reads(rig: Rig, prompt: list[int]) -> dict[str, Any]:
    """Run a request that begins like the one that failed; returns its hit and what is found."""
    known: list[tuple[str, int]] = []

    def after(output: Any, *args: Any) -> None:
        known.extend((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)

    with around(rig.scheduler, "schedule", after=after):
        rig.run([prompt], 4)
    ((name, hit),) = known
    return {"request": name, "hit": hit, "violations": rig.found()[:4]}


def _fills_a_block(rig: Rig) -> bool:
    """Tell whether the running request's last token is the last one of a block."""
    request = _scheduled(rig)
    return request is not None and bool(request.output_token_ids) and not request.num_tokens % SIZE


def _prompts(rig: Rig) -> bool:
    request = _scheduled(rig)
    return request is not None and not request.output_token_ids


def _never(rig: Rig) -> bool:
    return False


def live(llm: Any) -> dict[str, Any]:
    """Let forwards fail in each way, and report what the audit found of each.

    On a GPU stock's V1 runner with whole graphs gives a request one of several texts, by what ran
    before it, fail or not. So each way to fail is compared with the same requests in the same
    order where nothing fails, and where the same fails and nobody watches.

    Returns:
        By way: how the forward ran, the hit of the request that came next, what was found, and
        what was found of a request that computes all rows again. ``same`` tells whether its text
        is the one it has where nothing failed, or nobody watched; ``steady`` whether the former
        is the engine's first one.
    """
    rig = Rig(llm)
    prompt = texts(5, 1, 3 * SIZE)[0][: 3 * SIZE - 1]  # the first decode step fills a block
    rig.clear()
    text = rig.run([prompt], 60)[0]
    said = [*prompt, *text]

    def unwatched(when: Callable[[Rig], bool], late: bool, length: int) -> list[int]:
        rig.clear()
        rig.watch.begun = False
        with _fails(rig, when, late=late):
            _run(rig, prompt, 60)
        rig.run([said[:length]], 4)
        rig.engine.reset_prefix_cache()
        found = rig.run([prompt], 60)[0]
        rig.watch.begin()
        return found

    def after(when: Callable[[Rig], bool], late: bool, length: int) -> dict[str, Any]:
        rig.clear()
        with _fails(rig, when, late=late) as ways:
            whole = _run(rig, prompt, 60)
        found: dict[str, Any] = {"ways": ways, "failed": whole is None}
        found |= _reads(rig, said[:length])
        rig.clear()
        return found | {"text": rig.run([prompt], 60)[0], "again": rig.found()[:4]}

    report: dict[str, Any] = {}
    long = len(prompt) + 59  # so long that each full block of the request that failed is hit
    ways_to_fail = {
        "prompt": (_prompts, False, len(prompt)),
        "decode": (_fills_a_block, False, long),
        "late": (_fills_a_block, True, long),
    }
    for name, (when, late, length) in ways_to_fail.items():
        right = [after(_never, late, length)["text"]]
        if rig.runner.device.type == "cuda":
            right.append(unwatched(when, late, length))
        found = after(when, late, length)
        report[name] = found | {"same": found["text"] in right, "steady": right[0] == text}
    return report


def report(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Do the same as the work of an engine on a CPU."""
    return live(llm)
