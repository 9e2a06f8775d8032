"""A fork of one process: pytest runs tests that know nothing of kvtxn, with ``--kvtxn-audit``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from forked_commands import Child

#: The tests; the fault is planted by reaching into the engine, as no test of a user's would.
TESTS = """
import pytest
from engine_options import options
from model_files import write
from planted_rows import lost_write
from planting import Rig, texts


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    from vllm import LLM

    arguments = options(write("llama", tmp_path_factory.mktemp("model")), {})
    del arguments["additional_config"]
    return LLM(**arguments)


def test_that_is_well(llm):
    assert Rig(llm).watch is not None
    Rig(llm).run(texts(0, 2, 40), 8)


def test_with_a_lost_write(llm, seed=1):
    rig = Rig(llm)
    rig.clear()
    with lost_write(rig):
        rig.run(texts(seed, 2, 40), 8)
    assert rig.struck is not None


def test_with_a_lost_write_that_fails_anyway(llm):
    test_with_a_lost_write(llm, seed=4)
    raise RuntimeError("a failure of its own")


def test_that_is_well_again(llm):
    rig = Rig(llm)
    rig.clear()
    rig.run(texts(2, 2, 40), 8)


def test_whose_engine_is_in_another_process(tmp_path, monkeypatch):
    from vllm import LLM, SamplingParams, TokensPrompt

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    given = {"kvtxn": {"audit": "bytes", "audit_every": 4}}
    llm = LLM(**options(write("llama", tmp_path), given["kvtxn"]))
    prompts = [TokensPrompt(prompt_token_ids=text) for text in texts(3, 2, 40)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
"""


def run(folder: Path) -> dict[str, Any]:
    """Run the tests; returns what pytest prints and its exit code."""
    (folder / "test_engines.py").write_text(TESTS)
    os.environ["COLUMNS"] = "200"
    words = ["-q", "-rA", "--color=no", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    words += [str(folder / "test_engines.py"), "--kvtxn-audit"]
    with (folder / "out").open("w") as out:
        code = Child(lambda: pytest.main(words), out, out).wait()
    return {"rc": code, "out": (folder / "out").read_text()}
