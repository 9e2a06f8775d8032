"""The list of releases, and moved hook points, over source files that stand for vLLM's."""

from __future__ import annotations

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from invented_releases import LISTS
from kvtxn.integrations.serving.source_files import Sources
from kvtxn.integrations.vllm_plugin.policy import doctor as report
from kvtxn.integrations.vllm_plugin.policy import release_records, supported
from kvtxn.integrations.vllm_plugin.policy.doctor import record_release
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.release_records import Release
from kvtxn.integrations.vllm_plugin.seam import engine_config as engine_config
from kvtxn.integrations.vllm_plugin.seam import workers
from kvtxn.integrations.vllm_plugin.seam.hook_points import HOOK_POINTS

from kvtxn import doctor

RUNNER = '''
"""A runner."""
from .base import Base as Parent, helper
from . import outer

class Runner(Parent):
    """It runs."""

    def step(self, rows, *, last=False):
        """Take a step."""
        return rows + 1  # and no more

class Output:
    names: list[str]
    rows: int = 0
'''
BASE = """
class Base:
    async def below(self, first, /, second, *rest, **others):
        return second

if True:
    def helper(value):
        return value
"""


def package(folder, **files):
    """A folder with source files of a package ``vllm``; returns its sources."""
    texts = {"__init__": "", "_version": "__version__ = version = '0.99.0+cpu'", "base": BASE,
             "outer": "from vllm.base import helper", "runner": RUNNER}  # fmt: skip
    (folder / "vllm").mkdir(parents=True, exist_ok=True)
    for name, text in (texts | files).items():
        (folder / "vllm" / f"{name}.py").write_text(text)
    return Sources(folder)


def test_a_function_is_its_body_and_no_overload(tmp_path):
    """What is said of its types alone has no source to compare."""
    text = "import typing\n\n{}def step(rows): return rows + 1\n"
    plain = package(tmp_path / "one", runner=text.format("")).find("vllm.runner.step")
    said = "@typing.overload\ndef step(rows: int) -> int: ...\n"
    assert package(tmp_path / "two", runner=text.format(said)).find("vllm.runner.step") == plain


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("vllm.runner.Runner.step", ("rows", "last")),
        ("vllm.runner.Runner.below", ("first", "second", "rest", "others")),
        ("vllm.runner.helper", ("value",)),
        ("vllm.outer.helper", ("value",)),
        ("vllm.runner.Output", ("names", "rows")),
        ("vllm.runner.Runner.nothing", None),
        ("vllm.runner.Nobody", None),
        ("vllm.nowhere.Runner", None),
        ("vllm.runner.Runner.step.deeper", None),
    ],
)
def test_definitions_are_found_through_imports_and_base_classes(tmp_path, name, takes):
    found = package(tmp_path).find(name)
    assert (None if found is None else found.takes) == takes


def test_the_version_is_read_without_its_suffix(tmp_path):
    assert package(tmp_path).version_of("vllm") == "0.99.0"
    assert package(tmp_path / "other", _version="").version_of("vllm") == ""


STEP = "vllm.runner.Runner.step"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("  # and no more", "  # or\n        # more", None),
        ("Take a step.", "Take any step.", None),
        ("(self, rows, *, last=False)", "(\n        self, rows, *, last = False\n    )", None),
        ("rows + 1", "rows + 2", "source changed: vllm.runner.Runner.step"),
        ("last=False", "last=True", "source changed: vllm.runner.Runner.step"),
        ("rows, *,", "rows, *, more,",
         "parameters changed: vllm.runner.Runner.step (+more)"),
        ("rows, *, last=False", "last, rows",
         "parameters changed: vllm.runner.Runner.step (in another order)"),
        ("def step", "def leap", "gone: vllm.runner.Runner.step"),
    ],
)  # fmt: skip
def test_a_moved_hook_is_told_from_one_that_looks_different(tmp_path, old, new, says):
    before = release_records.read_hooks(package(tmp_path / "a"), [STEP])
    assert old in RUNNER
    after = package(tmp_path / "b", runner=RUNNER.replace(old, new))
    found = release_records.moves(before, release_records.read_hooks(after, [STEP]), [STEP])
    assert [str(move) for move in found] == ([] if says is None else [says])


def test_a_hook_that_the_checked_release_lacks_did_not_move():
    assert release_records.moves({}, {}, [STEP]) == []


def test_the_list_survives_being_written(tmp_path):
    release_records.save(reversed(release_records.load()), tmp_path / "list.json")
    assert (tmp_path / "list.json").read_bytes() == release_records.FILE.read_bytes()


def test_the_nearest_release_is_a_checked_one():
    listed = [Release("0.9.0", ("cpu",), {}), Release("0.10.0", ("cpu", "gpu"), {}),
              Release("0.12.0", (), {})]  # fmt: skip
    assert release_records.nearest("0.13.0", "cpu", listed).version == "0.10.0"
    assert release_records.nearest("0.9.5", "cpu", listed).version == "0.9.0"
    assert release_records.nearest("0.9.5", "gpu", listed).version == "0.10.0"
    assert release_records.checked_for("gpu", listed) == ("0.10.0",)


def test_versions_before_a_release_come_before_it():
    ordered = ["0.9.1", "0.32.0+cpu", "0.33.0.dev12", "0.33.0", "0.33.1rc1", "0.33.1", "0.34.0a2"]
    numbers = [release_records.number(version) for version in ordered]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(ordered)
    assert release_records.number("0.33.0rc1") < release_records.number("0.33.0+cu129")
    assert release_records.number("0.33.0.post1") == release_records.number("0.33.0")
    assert release_records.number("0.31.9") < (0, 32) < release_records.number("0.32.0")


def test_what_was_checked_of_the_listed_releases():
    """At least these; what is special on a device was checked where the device was."""
    assert {"0.28.0", "0.29.0"} <= set(supported.AUDIT_RELEASES)
    assert not set(supported.AUDIT_RELEASES) & {*supported.RELEASES, *supported.GPU_RELEASES}
    assert {"0.31.0", "0.32.0"} <= set(supported.RELEASES)
    assert {"0.32.0", "0.33.0"} <= set(supported.GPU_RELEASES)
    assert set(LISTS) == set(release_records.CHECKS)
    listed = {check: set(getattr(supported, name)) for check, name in LISTS.items()}
    assert listed["states"] <= listed["cpu"]
    special = {"gpus", "gpu-stages", "gpu-backends", "gpu-states"}
    assert set().union(*(listed[check] for check in special)) <= listed["gpu"]
    assert set(supported.LEFT_OUT) <= listed["gpu"]
    for each in release_records.load():
        assert set(each.checked) == {check for check in listed if each.version in listed[check]}


def test_the_plainest_engine_has_a_release_with_which_most_was_checked():
    """One that was adopted in part is not the default, however new it is."""
    counts = {
        each.version: len(each.checked) for each in release_records.load() if not each.left_out
    }
    assert counts[supported.MOST_CHECKED] == max(counts.values())
    assert EngineFacts().version == supported.MOST_CHECKED


def test_what_moved_from_0_32_to_0_33():
    """Recorded from the source of both, so it can be said on any machine."""
    known = {release.version: release.hooks for release in release_records.load()}
    names = [name for place in HOOK_POINTS.values() for name in place]
    said = [str(move) for move in release_records.moves(known["0.32.0"], known["0.33.0"], names)]
    runner = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    assert f"parameters changed: {runner}.postprocess_sampled (+draft_tokens)" in said
    assert f"source changed: {runner}.prepare_attn" in said
    latent = "vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl.do_kv_cache_update"
    assert f"parameters changed: {latent} (+skip_scale)" in said
    assert not any(line.startswith("gone") for line in said)


@pytest.fixture
def unlisted(tmp_path, monkeypatch):
    """An installed release that nobody knows, of which most hook points are gone."""
    package(tmp_path)
    monkeypatch.setattr(workers, "version", lambda: "0.99.0")
    monkeypatch.setattr(workers, "source_folder", lambda: tmp_path)
    facts = EngineFacts(version="0.99.0")
    monkeypatch.setattr(engine_config, "plain_facts", lambda: facts)


def test_the_doctor_says_what_moved(unlisted, monkeypatch, capsys):
    entry = SimpleNamespace(name="vllm", load=lambda: report.report)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [entry])
    assert doctor.run(SimpleNamespace(url=None, engine_args=None, json=False, matrix=False)) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    flat = " ".join(printed.split())
    assert f"{supported.RELEASES[-1]}, the nearest release that was checked: " in flat
    assert "vllm moved: gone: vllm.v1.worker.worker_base.WorkerWrapperBase.init_device" in flat
    doctor.run(SimpleNamespace(url=None, engine_args=None, json=True, matrix=False))
    found = json.loads(capsys.readouterr().out)["vllm"]
    assert len(found["moved"]) > 40
    assert all(line.startswith("gone: vllm.") for line in found["moved"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "vLLM 0.99.0 was not checked, and lacks vllm.v1.worker"),
        ({"connectors": ("ExampleConnector",)}, "cannot take steps beside a KV connector"),
        (
            {"device": "cuda", "runner": "v2", "pipeline_parallel": 2},
            "cannot take steps over pipeline stages",
        ),
    ],
)
def test_the_doctor_promises_no_self_test_that_cannot_be(unlisted, monkeypatch, changes, says):
    """Each policy is off where the engine will run stock, and the line says why."""
    facts = EngineFacts(version="0.99.0", unchecked=True, **changes)
    monkeypatch.setattr(engine_config, "plain_facts", lambda: facts)
    found = report.report(None)
    for line in (*found["policies"], *found.get("policies on earlier stages", ())):
        assert " -> off (" in line
        assert says in line


def test_the_doctor_says_that_the_self_test_will_decide(unlisted, monkeypatch):
    """Every hook point is there still."""
    monkeypatch.setattr(report, "hook_gone", lambda facts: None)
    facts = EngineFacts(version="0.99.0", unchecked=True)
    monkeypatch.setattr(engine_config, "plain_facts", lambda: facts)
    for line in report.report(None)["policies"]:
        assert line.endswith("; if the engine passes the self-test at its start, else off)")
    monkeypatch.setattr(engine_config, "plain_facts", EngineFacts)
    assert "self-test" not in str(report.report(None)["policies"])


def test_the_doctor_compares_no_checked_release(unlisted, monkeypatch):
    monkeypatch.setattr(engine_config, "plain_facts", EngineFacts)
    assert not {"moved", "compared with"} & set(report.report(None))


def test_a_release_that_was_not_checked_has_its_gone_points_named(unlisted):
    found = report.compare("0.99.0", "cuda")
    assert found.gone == "vllm.v1.worker.worker_base.WorkerWrapperBase.init_device"
    assert found.version == supported.GPU_RELEASES[-1]


# -- the program ----------------------------------------------------------------------


@pytest.fixture
def listed(tmp_path):
    file = tmp_path / "list.json"
    file.write_bytes(release_records.FILE.read_bytes())
    return file


def test_a_wheel_is_recorded_without_being_checked(tmp_path, listed, capsys):
    package(tmp_path, runner="")
    assert record_release.main(["--source", str(tmp_path), "--list", str(listed)]) == 0
    new = release_records.load(listed)[-1]
    assert (new.version, new.checked, new.hooks) == ("0.99.0", (), {})
    assert release_records.load(listed)[:-1] == release_records.load()
    said = capsys.readouterr().out
    assert "vLLM 0.99.0: 0 of " in said
    assert "gone: vllm.v1.engine.llm_engine.LLMEngine.__init__" in said


CASE = '<testcase name="a"/>'
SKIPPED = '<testcase name="b"><skipped message="no engine"/></testcase>'


@pytest.mark.parametrize(
    ("code", "cases", "says"),
    [
        (0, CASE, None),
        (1, CASE, "the core of the grid failed with exit code 1"),
        (0, CASE + SKIPPED, "1 of 2 tests of the core of the grid were skipped"),
        (0, "", "0 of 0 tests of the core of the grid were skipped"),
        (KeyboardInterrupt(), CASE, "the core of the grid was interrupted"),
    ],
    ids=["passes", "fails", "skips", "finds-nothing", "interrupted"],
)
def test_a_release_is_listed_if_every_test_of_the_grid_passes(
    unlisted, listed, monkeypatch, capsys, code, cases, says
):
    """A machine that cannot run the tests skips them, and has shown nothing."""
    ran = []

    def run(command, check):
        *rest, report = command
        ran.append((tuple(rest), release_records.load(listed)[-1].checked))
        if isinstance(code, BaseException):
            raise code
        Path(report.partition("=")[2]).write_text(
            f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
        )
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt) if isinstance(code, BaseException) else nullcontext():
        assert bool(record_release.main(["--checked", "cpu", "--list", str(listed)])) == bool(says)
    assert ran == [(record_release.CORE, ("cpu",))]  # the grid finds the release in the list
    assert (release_records.load(listed)[-1].version == "0.99.0") == (says is None)
    if says is not None:
        assert f"{says}: list.json is as before" in capsys.readouterr().out
        assert listed.read_bytes() == release_records.FILE.read_bytes()


def test_a_release_keeps_what_was_checked_before(tmp_path, listed):
    package(tmp_path, _version="version = '0.32.0'")
    assert record_release.main(["--source", str(tmp_path), "--list", str(listed)]) == 0
    new = next(each for each in release_records.load(listed) if each.version == "0.32.0")
    [old] = [each for each in release_records.load() if each.version == "0.32.0"]
    assert new == attrs.evolve(old, hooks=new.hooks)
    assert new.hooks != old.hooks


def test_a_method_that_did_not_run_is_listed_with_its_reason(tmp_path, unlisted, listed, capsys):
    """It stays there when hook points are recorded again, until the GPU is checked again."""
    at = ["--list", str(listed)]
    assert record_release.main(["--checked", "gpu", "--without", "mtp=it died", *at]) == 0
    assert "checked: gpu; without mtp: it died" in capsys.readouterr().out
    for arguments, left in (
        (["--source", str(tmp_path)], {"mtp": "it died"}),
        (["--checked", "gpus"], {"mtp": "it died"}),
        (["--checked", "gpu"], {}),
    ):
        assert record_release.main([*arguments, *at]) == 0
        assert release_records.load(listed)[-1].left_out == left
    assert release_records.load(listed)[:-1] == release_records.load()


def test_a_backend_that_was_not_measured_is_listed_apart_from_methods(unlisted, listed):
    """Each check has its own: one that is made again forgets what it left out before."""
    at, left = ["--list", str(listed)], {"mtp": "it died", "FLASHMLA": "no time"}
    both = ["--checked", "gpu", "gpu-backends", "--without", *(f"{n}={w}" for n, w in left.items())]
    for arguments, kept in (
        (both, left),
        (["--checked", "gpu"], {"FLASHMLA": "no time"}),
        (both, left),
        (["--checked", "gpu-backends"], {"mtp": "it died"}),
    ):
        assert record_release.main([*arguments, *at]) == 0
        assert release_records.load(listed)[-1].left_out == kept


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--without", "mtp=it died"], "goes with --checked gpu"),
        (["--checked", "gpu", "--without", "FLASHMLA=no"], "goes with --checked gpu-backends"),
        (["--checked", "gpu", "--without", "mtp"], "expected NAME=WHY"),
        (["--checked", "gpu", "--without", "meduza=no"], "did you mean medusa?"),
        (
            ["--checked", "gpu", "gpu-backends", "--without", "FLASH_ATN_MLA=no"],
            "did you mean FLASH_ATTN_MLA?",
        ),
        (["--checked", "states", "gpu"], "--checked states goes with --checked cpu"),
        (["--checked", "gpu-states"], "--checked gpu-states goes with --checked gpu"),
    ],
)
def test_a_method_is_left_out_of_a_check_with_a_reason(
    unlisted, listed, tmp_path, capsys, arguments, says
):
    for path, text in (
        ("config/speculative.py", 'Methods = Literal["medusa", "mtp"]'),
        ("v1/attention/backends/registry.py", "class Names:\n    FLASH_ATTN_MLA = (0)"),
    ):
        file = tmp_path / "vllm" / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
    with pytest.raises(SystemExit):
        record_release.main([*arguments, "--list", str(listed)])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--checked", "cpu"], "nothing can be listed as checked"), ([], "says its version")],
)
def test_what_cannot_be_recorded_is_refused(tmp_path, listed, capsys, arguments, says):
    package(tmp_path, _version="")
    with pytest.raises(SystemExit):
        record_release.main(["--source", str(tmp_path), "--list", str(listed), *arguments])
    assert says in capsys.readouterr().err
