"""Requests that a cache holds at once: how they are counted, and the table."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from kvtxn.benchmarks.engines import capacity, child
from kvtxn.benchmarks.engines.load import Work
from kvtxn.benchmarks.engines.models import MODELS
from kvtxn.integrations.vllm_plugin.seam.measuring import Scheduled

pytest.importorskip("vllm")


class Holding:
    """An engine that runs two requests at once, and preempts one of them once."""

    def __init__(self) -> None:
        self.waiting: deque[str] = deque()
        self.running: list[str] = []
        self.preempted, self.steps, self.limits = 3, 0, []
        scheduler = SimpleNamespace(running=self.running)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self.llm_engine = self

    def get_metrics(self):
        value = self.preempted
        return [
            SimpleNamespace(name="vllm:num_preemptions", value=value),
            SimpleNamespace(name="x"),
        ]

    def add_request(self, name, prompt, params, arrival_time):
        self.limits.append((params.max_tokens, len(prompt["prompt_token_ids"])))
        self.waiting.append(name)

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)

    def step(self):
        self.steps += 1
        if self.steps == 2:
            self.waiting.appendleft(self.running.pop())
            self.preempted += 1
            return []
        if self.steps % 2:
            while self.waiting and len(self.running) < 2:
                self.running.append(self.waiting.popleft())
            return []
        ended = [SimpleNamespace(finished=True) for _ in self.running]
        self.running.clear()
        return ended


def test_requests_that_run_at_once_are_counted():
    """Those in one step, not those that wait; and preemptions since the requests came."""
    engine = Holding()
    found = child.hold(engine, Work(prompts=[[1, 2]] * 5, max_tokens=7))
    assert (found.most, found.preempted, found.finished) == (2, 1, 5)
    assert engine.limits == [(7, 2)] * 5


def test_more_requests_come_than_are_reported_to_fit():
    """Of the longest length, all different, so that the prefix cache holds none for another."""
    work = capacity.work_of(1024, 20.4)
    assert len(work.prompts) > 20.4
    assert {len(prompt) + work.max_tokens for prompt in work.prompts} == {1024 - 8}
    assert len({tuple(prompt[:16]) for prompt in work.prompts}) == len(work.prompts)


def test_a_model_with_fewer_layers_has_the_same_pages():
    """Of four layers, three have states; heads and sizes are the whole model's."""
    whole = MODELS["qwen3.5-9b"]
    part = capacity.model()
    assert (part.shape.layers, part.shape.states.layers) == (4, 3)
    assert part.shape.row_bytes == whole.shape.row_bytes
    assert part.shape.states.heads == whole.shape.states.heads


def test_the_most_without_preemption():
    """All that ran, if none was preempted; else as many as run so."""
    assert capacity.most_without_preemption(lambda _: 0, 9) == 9
    for right in (1, 2, 7, 8):
        found = capacity.most_without_preemption(lambda most, right=right: most > right, 9)
        assert found == right


@pytest.mark.parametrize(("cache", "atleast"), [("none", 3.2), ("align", 2.2)])
def test_vllms_scheduler_runs_as_many_as_vllm_reports(cache, atleast, tmp_path):
    """Stock and one state per request, by vLLM's own planning and scheduler; none is preempted."""
    layers = capacity.caches_of(capacity.model().shape)
    arguments = MODELS["tiny"].arguments(tmp_path, 1024) | capacity.common(cache, 1024)
    found = []
    for one_state in (False, True):
        caches = Scheduled(arguments, layers, 256 << 20, one_state=one_state)
        fits = int(caches.reported()) - 1  # some blocks stay between requests
        ran = caches.run(2 * fits, 800, 200, fits)
        assert (ran.most, ran.preempted, ran.finished) == (fits, 0, 2 * fits)
        found.append(caches.reported())
    assert found[1] / found[0] > atleast
