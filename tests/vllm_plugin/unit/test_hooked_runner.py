"""A runner that was hooked is as it was, whatever raises while its hooks are undone."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
from kvtxn.integrations.serving.parts import Part, Parts
from kvtxn.integrations.vllm_plugin.policy.settings import PluginSettings
from kvtxn.integrations.vllm_plugin.runners import hooked_runner

from kvtxn import TxnConfig


class Runner:
    """Stands for a model runner of vLLM's."""


class Adapter:
    """Stands before it."""


class Fails(Part):
    """Cannot abort the window that is open."""

    def released(self):
        raise MemoryError("planted")


def hooked(parts):
    """Hook a runner with two hooks around it; returns it, and what is undone by and by."""
    runner, undone = Runner(), []
    hooked_runner.hook_runner(runner, PluginSettings(TxnConfig()), 0, {}, Adapter)
    runner.kvtxn_parts = Parts(parts)
    runner.kvtxn_undo.callback(undone.append, "caches")
    runner.kvtxn_unhook.callback(undone.append, "runner")
    return runner, undone


@pytest.mark.parametrize("parts", [[], [Fails()]], ids=["orderly", "a part raises"])
def test_every_hook_is_undone(parts):
    """The hooks around the caches go first; an error of a part's is raised afterwards."""
    runner, undone = hooked(parts)
    assert isinstance(runner, Adapter)
    if parts:
        with pytest.raises(MemoryError):
            hooked_runner.unhook_runner(runner)
    else:
        hooked_runner.unhook_runner(runner)
    assert undone == ["caches", "runner"]
    assert type(runner) is Runner
    assert vars(runner) == {}


def test_an_error_of_one_runner_leaves_no_other_one_hooked():
    """Every runner of the process is unhooked, then the error is raised."""
    pairs = [hooked([Fails()]), hooked([])]
    with (
        mock.patch.object(hooked_runner, "_hooked", {runner for runner, _ in pairs}),
        pytest.raises(MemoryError),
    ):
        hooked_runner.unhook_runners()
    assert [undone for _, undone in pairs] == [["caches", "runner"]] * 2
    assert all(type(runner) is Runner for runner, _ in pairs)
    hooked_runner.unhook_runner(SimpleNamespace())  # was never hooked
