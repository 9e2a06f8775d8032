"""Adapters and vectors count by their content in the identity of rows."""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.vllm_plugin.seam import audited_requests, hooks, lora_adapters
from kvtxn.integrations.vllm_plugin.seam.media_contents import Media
from transfer_rig import (
    TOKENS,
    Loaded,
    rig,
    state_of,
)

__all__ = ["rig"]


class Weights:
    """An adapter that is loaded."""


@pytest.fixture
def loaded(rig):
    """By number, the adapters that a worker has; the audit hears of each that is loaded."""
    manager = rig.runner.lora_manager = Loaded()
    real = manager._load_adapter = lambda lora_request: Weights()
    undo = audited_requests.follow_adapters(rig.runner)
    yield manager.adapters
    undo()
    assert manager._load_adapter is real


def named(name, number, path, **more):
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **more)


@pytest.fixture
def load(rig, loaded):
    """Load an adapter, for a step or because the user says so."""

    def load(*named_so):
        lora = named(*named_so)
        loaded[lora.lora_int_id] = rig.runner.lora_manager._load_adapter(lora)

    return load


@pytest.fixture
def extras(rig, loaded, load):
    """Return what tells a request's rows from others', once vLLM has loaded its adapter."""

    def told(name, number, path, **more):
        state = state_of([7, 8], TOKENS[:10], lora_request=named(name, number, path, **more))
        found = audited_requests.arrival_of(rig.runner, state, "c", TOKENS[:10], 0, [[7, 8]]).extras
        if number not in loaded or more:
            load(name, number, path)
        return found

    return told


def test_an_adapter_that_cannot_be_read_is_known_by_its_name_and_path(extras):
    """As in vLLM's prefix cache: one that is loaded again has another number and the same rows."""
    assert extras("poet", 1, "/poet") == extras("poet", 2, "/poet")
    others = [extras(*at) for at in (("poet", 3, "/x"), ("x", 4, "/poet"), ("poe", 5, "t/poet"))]
    assert extras("poet", 1, "/poet") not in others
    assert len({tuple(each) for each in others}) == 3


def test_a_salt_is_no_adapter_of_that_name(rig, extras):
    """vllm-project/vllm#44701: a client chooses its salt, and older releases mixed the two up."""
    state = state_of([7, 8], TOKENS[:10], cache_salt="poet")
    salted = audited_requests.arrival_of(rig.runner, state, "c", TOKENS[:10], 0, [[7, 8]]).extras
    assert salted == []  # its rows are those of the model alone
    assert extras("poet", 1, "/poet") != salted


@pytest.fixture
def folder(tmp_path):
    """An adapter's."""
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"old weights")
    return tmp_path


def test_an_adapter_is_known_by_its_weights(extras, folder):
    """One that was loaded again from other files has other rows; vLLM's prefix cache mixes both."""
    weights = folder / "adapter_model.safetensors"
    old = extras("poet", 1, folder)
    weights.write_bytes(b"new weights")
    assert extras("poet", 1, folder) == old  # what was loaded stays loaded
    new = extras("poet", 2, folder)
    assert new != old
    assert extras("poet", 1, folder, load_inplace=True) == extras("poet", 1, folder) == new
    weights.write_bytes(b"old weights")
    assert extras("poet", 3, folder) == old


def test_an_adapter_is_what_was_loaded_and_not_what_lies_there_by_now(extras, load, folder):
    """A trainer may write the next weights before a request for the last ones has come."""
    weights = folder / "adapter_model.safetensors"
    load("poet", 1, folder)
    weights.write_bytes(b"new weights")
    old = extras("poet", 1, folder)
    new = extras("poet", 2, folder)
    assert new != old
    load("poet", 1, folder)  # in place, without a request
    assert extras("poet", 1, folder) == new
    weights.write_bytes(b"old weights")
    load("poet", 1, folder)
    assert extras("poet", 1, folder) == old


def test_an_adapter_that_is_replaced_after_its_first_step_is_another(extras, load, folder):
    """What the first request's step had loaded is gone, whoever asks next."""
    old = extras("poet", 1, folder)
    load("poet", 1, folder)  # in that step
    (folder / "adapter_model.safetensors").write_bytes(b"new weights")
    load("poet", 1, folder)
    assert extras("poet", 1, folder) != old


def test_an_adapter_that_was_loaded_before_the_audit_is_what_lies_there(extras, loaded, folder):
    loaded[1] = Weights()
    found = extras("poet", 1, folder)
    (folder / "adapter_model.safetensors").write_bytes(b"new weights")
    assert extras("poet", 1, folder) == found != extras("poet", 2, folder)


def test_a_number_is_what_was_loaded_under_it_whatever_the_request_says(extras, load, folder):
    """vLLM asks for an adapter by its number alone."""
    load("poet", 1, folder)
    assert extras("writer", 1, "/elsewhere") == extras("poet", 1, folder)
    assert extras("writer", 2, "/elsewhere") != extras("poet", 1, folder)


def test_an_adapter_of_one_content_is_one_wherever_it_lies(extras, folder, tmp_path_factory):
    """Such as on another machine, whose rows a connector brings."""
    other = tmp_path_factory.mktemp("other") / "adapter"
    shutil.copytree(folder, other)
    assert extras("poet", 1, folder) == extras("writer", 2, other)


@pytest.mark.parametrize("again", ["by the request", "before it"])
def test_an_adapter_that_was_pushed_out_is_read_again(extras, loaded, load, folder, again):
    old = extras("poet", 1, folder)
    assert extras("poet", 1, folder) == old
    (folder / "adapter_model.safetensors").write_bytes(b"new weights")
    del loaded[1]
    if again == "before it":
        load("poet", 1, folder)
    new = extras("poet", 1, folder)
    assert new != old
    (folder / "adapter_model.safetensors").write_bytes(b"newer")
    assert extras("poet", 1, folder) == extras("poet", 1, folder) == new


def test_requests_of_one_step_read_an_adapter_once(rig, loaded, load, folder, monkeypatch):
    """vLLM loads it after all of them have come."""
    read, content = [], lora_adapters._content
    monkeypatch.setattr(
        lora_adapters, "_content", lambda path: (read.append(path), content(path))[1]
    )

    def come():
        adapters = hooks.kept_on(rig.runner, "kvtxn_adapters", lora_adapters.Adapters)
        return adapters.identity(named("poet", 1, folder), rig.runner)

    old = come()
    assert come() == old
    load("poet", 1, folder)
    assert come() == old
    assert read == [str(folder)]
    del loaded[1]
    come()
    assert len(read) == 2  # a later step: it was pushed out
    (folder / "adapter_model.safetensors").write_bytes(b"much newer weights")
    assert come() != old
    load("poet", 1, folder)
    assert len(read) == 3


def test_files_that_stay_are_read_once(extras, loaded, folder, monkeypatch):
    """However often their adapter is pushed out, and under whichever number it comes."""
    read, content = [], lora_adapters._content
    monkeypatch.setattr(
        lora_adapters, "_content", lambda path: (read.append(path), content(path))[1]
    )
    now = time.time_ns() + 10**10  # the files were written some seconds ago
    monkeypatch.setattr(lora_adapters, "time", SimpleNamespace(time_ns=lambda: now))
    old = extras("poet", 1, folder)
    del loaded[1]
    assert extras("poet", 1, folder) == extras("poet", 2, folder) == old
    assert len(read) == 1
    weights = folder / "adapter_model.safetensors"
    fact = weights.stat()
    weights.write_bytes(b"new weights")
    os.utime(weights, ns=(fact.st_atime_ns, fact.st_mtime_ns))  # as a copy that keeps times does
    del loaded[1]
    assert extras("poet", 1, folder) != old
    assert len(read) == 2


def test_a_vector_costs_its_hash_and_nothing_else():
    vectors = torch.arange(6000.0).view(2000, 3)
    vectors[3] += 1
    vectors = torch.cat([vectors.bfloat16()] * 2, 1)[:, :3]
    feature = SimpleNamespace(
        mm_position=SimpleNamespace(offset=2000, length=50_000, is_embed=None),
        identifier="a picture",
    )
    is_token = [False, True] + [False] * 1998
    given = {"prompt_embeds": vectors, "prompt_is_token_ids": is_token}
    calls, found = [], {}
    sys.setprofile(lambda frame, event, arg: calls.append(event) if "call" in event else None)
    try:
        found = audited_requests._embedded(SimpleNamespace(mm_features=[feature], **given), Media())
    finally:
        sys.setprofile(None)
    assert len(calls) < 5 * len(vectors)
    assert [*found] == [0, *range(2, 52_000)]
    raw = vectors[2].contiguous().view(torch.uint8).numpy().tobytes()
    assert found[2] == lora_adapters.hash_of(raw) != found[3]
    assert found[2000] == found[51_999] == lora_adapters.hash_of(b"a picture")
    given["prompt_embeds"] = vectors[:0]
    assert audited_requests._embedded(SimpleNamespace(mm_features=None, **given), Media()) == {}


@pytest.mark.parametrize(
    ("name", "content", "same"),
    [
        ("README.md", "is not loaded", True),
        ("optimizer.pt", "is not loaded", True),
        ("adapter_model.bin", "there are safetensors", True),
        ("adapter_config.json", '{"lora_alpha": 16, "r": 8, "lora_dropout": 0.1}', True),
        ("adapter_config.json", '{"lora_alpha": 32, "r": 8}', False),
    ],
)
def test_files_that_vllm_does_not_load_change_nothing(extras, folder, name, content, same):
    old = extras("poet", 1, folder)
    (folder / name).write_text(content)
    assert (extras("poet", 2, folder) == old) is same
