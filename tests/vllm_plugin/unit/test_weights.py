"""Which calls of vLLM's count as a change of weights, and which parameters are sampled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.vllm_plugin import audit_report, new_weights
from kvtxn.integrations.vllm_plugin.seam import weights
from torch import nn

from kvtxn import ConfigError


class Worker:
    """A worker with all calls that change weights."""

    def reload_weights(self, path=None):
        return path

    def update_weights(self, info):
        if info == "broken":
            raise RuntimeError("half of them")

    def start_weight_update(self):
        """A target's."""

    def start_draft_weight_update(self):
        if hasattr(self, "refuses"):
            raise RuntimeError("an update is active")

    def finish_weight_update(self):
        """All of them are there."""

    def sleep(self, level=1):
        """Take the memory away."""

    def wake_up(self, tags=None):
        """Bring it back."""


@pytest.fixture
def worker():
    worker = Worker()
    worker.heard = []
    undo = weights.follow_updates(SimpleNamespace(worker=worker), worker.heard.append)
    yield worker
    undo()
    assert list(vars(worker)) == ["heard"]


def test_each_update_is_heard_after_it_even_if_it_fails(worker):
    assert worker.reload_weights(path="x") == "x"
    worker.start_weight_update()
    worker.update_weights("part")
    with pytest.raises(RuntimeError, match="half"):
        worker.update_weights("broken")
    worker.finish_weight_update()
    assert worker.heard == ["target"] * 4


def test_a_drafter_s_update_is_the_drafter_s(worker):
    worker.start_draft_weight_update()
    worker.update_weights("part")
    worker.finish_weight_update()
    worker.start_weight_update()
    worker.finish_weight_update()
    assert worker.heard == ["drafter", "drafter", "target"]


def test_a_drafter_s_update_that_is_over_or_refused(worker):
    """Reloads are the target's whatever was updated before; a second update is refused."""
    worker.start_draft_weight_update()
    worker.finish_weight_update()
    worker.reload_weights()
    worker.start_weight_update()
    worker.refuses = True
    with pytest.raises(RuntimeError, match="active"):
        worker.start_draft_weight_update()
    del worker.refuses
    worker.finish_weight_update()
    assert worker.heard == ["drafter", "target", "target"]


@pytest.mark.parametrize(
    ("level", "tags", "heard"),
    [
        (1, None, []),
        (2, None, ["target", "drafter"]),
        (2, ["weights"], ["target", "drafter"]),
        (2, ["kv_cache"], []),
    ],
)
def test_sleep_of_level_two_loses_the_weights(worker, level, tags, heard):
    worker.sleep(level)
    worker.wake_up(tags)
    worker.wake_up(tags)
    assert worker.heard == heard


def test_a_worker_of_a_release_without_some_of_them():
    worker = SimpleNamespace(reload_weights=lambda: "done")
    heard = []
    weights.follow_updates(SimpleNamespace(worker=worker), heard.append)
    assert worker.reload_weights() == "done"
    assert heard == ["target"]


class Model(nn.Module):
    """A model with weights that can be loaded."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.own = embedding, nn.Parameter(torch.ones(3))

    def load_weights(self, pairs):
        return {name for name, _ in pairs}


def runner(eplb=False, **more):
    model = Model(nn.Embedding(4, 2))
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=eplb))
    return SimpleNamespace(get_model=lambda: model, vllm_config=config, **more)


@pytest.mark.parametrize("kind", ["drafter", "speculator"])
def test_loads_into_either_model_are_heard(kind):
    engine = runner()
    drafter = Model(engine.get_model().embedding)
    setattr(engine, kind, SimpleNamespace(model=drafter))
    heard = []
    undo = weights.follow_loads(engine, heard.append)
    assert engine.get_model().load_weights([("a", 1)]) == {"a"}
    drafter.load_weights(pairs=[])
    assert heard == ["target", "drafter"]
    undo()
    drafter.load_weights([])
    assert len(heard) == 2
    found = {name: [*each()] for name, each in weights.parameters(engine).items()}
    assert found["target"] == [*engine.get_model().parameters()]
    assert len(found["drafter"]) == 1  # the embedding is the target's
    assert found["drafter"][0] is drafter.own


def test_an_engine_that_moves_experts_by_itself_is_not_sampled():
    assert weights.parameters(runner(eplb=True)) == {}
    assert [*weights.parameters(runner())] == ["target"]


def test_the_public_calls_reach_every_worker():
    called = []
    client = SimpleNamespace(collective_rpc=lambda method: called.append(method) or [[]])
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))
    new_weights(llm)
    new_weights(llm, "drafter")
    assert audit_report(llm, ages=True) == [[]]
    assert called == ["kvtxn_new_weights", "kvtxn_new_draft_weights", "kvtxn_audit_ages"]
    with pytest.raises(ConfigError, match="unknown"):
        new_weights(llm, "adapter")
    with pytest.raises(ConfigError, match="no engine"):
        new_weights(object())


def test_rotary_positions_tell_each_parameter_of_rope_apart():
    """In whatever dtype vLLM has the table by now; its first column is the same for each base."""

    class Rotary(nn.Module):
        def __init__(self, base, scale=1.0, dtype=torch.float32):
            super().__init__()
            angles = torch.arange(128)[:, None] / scale * base ** (-torch.arange(8) / 8)
            table = torch.cat([angles.cos(), angles.sin()], 1).to(dtype)
            self.register_buffer("cos_sin_cache", table, persistent=False)

    def positions(*of):
        model = nn.ModuleList([Rotary(*each) for each in of])
        found = weights.rotary_positions(SimpleNamespace(get_model=lambda: model))
        return [each.tolist() for each in found]

    assert positions((1e4,)) == positions((1e4, 1.0, torch.bfloat16))
    assert len({str(positions(each)) for each in ((1e4,), (1e6,), (1e4, 2.0))}) == 3
    assert len(positions((1e4,), (1e6,))) == 2
    assert positions() == []
