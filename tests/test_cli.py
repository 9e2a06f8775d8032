"""The command line: what it prints, how it refuses, and that it needs no engine."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtxn.benchmarks.host import idle_window

from kvtxn import __version__, cli, doctor, extras
from kvtxn.cli import main


@pytest.fixture(autouse=True)
def _restore_logging():
    logger = logging.getLogger("kvtxn")
    before = logger.level, logger.handlers[:], logger.propagate
    yield
    logger.level, logger.handlers, logger.propagate = before


def test_doctor_prints_versions_backends_and_the_choice(capsys):
    """For people."""
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"kvtxn {__version__}" in text
    said = " ".join(text.split())
    assert "backend torch on cpu: deferred, direct, undo; attention reads the window" in said
    assert "paged, recurrent, replayed, ring layers" in said
    assert "auto on cpu, in an engine of your own: backend torch, policy deferred" in said


def test_doctor_prints_json(capsys):
    """For programs."""
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["auto"]["cpu"]["policy"] == "deferred"
    assert {"name": "torch", "device": "cpu", "runs": True}.items() <= next(
        row for row in report["backends"] if row["name"] == "torch"
    ).items()


def test_doctor_says_why_a_backend_cannot_run():
    """Each that cannot has a reason, each that can has policies."""
    for row in doctor.examine()["backends"]:
        assert row["policies"] if row["runs"] else row["why_not"]


@dataclasses.dataclass
class Integration:
    """An entry point: a function of engine arguments, or the error of its import."""

    reports: Callable[[Any], dict[str, Any]] | Exception
    name: str = "engine"

    def load(self):
        if isinstance(self.reports, Exception):
            raise self.reports
        return self.reports


def test_a_broken_integration_does_not_hide_the_report(monkeypatch):
    """Its section says what is wrong, the rest stands."""
    broken = Integration(RuntimeError("no such engine"))
    monkeypatch.setattr(doctor, "entry_points", lambda group: [broken])
    report = doctor.examine()
    assert report["engine"] == {"unavailable": "RuntimeError: no such engine"}
    assert "engine    unavailable: RuntimeError: no such engine" in doctor.as_text(report)


def test_the_page_fits_a_terminal(monkeypatch, capsys):
    """Whatever an integration reports; its long table is printed only if it is asked for."""
    words, path = "one word and many others " * 20, "/a/path/without/a/single/blank" * 8
    report = {
        "version": words,
        "engine": {"model": path, "says": words},
        "matrix": [f"row {number}: {words}" for number in range(3)],
    }
    wordy = Integration(lambda engine_args: report)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [wordy])
    pages = {}
    for option in ([], ["--matrix"]):
        assert main(["doctor", *option]) == 0
        pages[len(option)] = capsys.readouterr().out
        assert max(map(len, pages[len(option)].splitlines())) == 100
    assert "matrix: 3 kinds of engines; `kvtxn doctor --matrix` prints them" in pages[0]
    assert "row 2" not in pages[0]
    assert all(f"matrix: row {number}: one word" in pages[1] for number in range(3))


def test_errors_fit_a_terminal(capsys):
    """They are sentences of any length."""
    assert main(["doctor", "--engine-args", json.dumps({f"word{n}": 0 for n in range(60)})]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 100


NOISY = """
import logging, os, sys
from types import SimpleNamespace
from kvtxn import cli, doctor

earlier = logging.StreamHandler(sys.stdout)
logging.getLogger("engine").addHandler(earlier)

def report(engine_args):
    logging.getLogger("engine").warning("logged")
    later = logging.StreamHandler(sys.stdout)
    logging.getLogger("another").addHandler(later)
    logging.getLogger("another").warning("logged late")
    print("printed")
    os.write(1, b"written\\n")
    return {"version": 1}

entry = SimpleNamespace(name="engine", load=lambda: report)
doctor.entry_points = lambda group: [entry]
print("before")
code = cli.main(["doctor", *sys.argv[1:]])
print("after")
raise SystemExit(code)
"""


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_the_page_stands_alone_on_stdout(option):
    """Whatever an engine prints or logs while it is asked goes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", NOISY, *option], capture_output=True, text=True, check=True
    )
    noise = ("logged", "logged late", "printed", "written")
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert not [each for each in noise if each in lines]
    assert sorted(noise) == sorted(done.stderr.splitlines())
    if option:
        assert json.loads("".join(lines[1:-1]))["engine"] == {"version": 1}
    else:
        assert lines[1].startswith("kvtxn ")


def test_sections_of_integrations_stand_in_order(monkeypatch):
    """That of their entry points, every time."""
    names = [f"engine{number}" for number in range(8)]
    found = [Integration(lambda engine_args: {"version": 1}, name) for name in names]
    monkeypatch.setattr(doctor, "entry_points", lambda group: found)
    lines = doctor.as_text(doctor.examine()).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("engine")] == names


def test_engine_arguments_that_cannot_be_judged(monkeypatch, capsys):
    """It is the arguments that are refused, not the engine that is missing; the exit code is 2."""

    def judge(engine_args):
        if engine_args is not None:
            raise TypeError("unexpected keyword argument 'nope'")
        return {"version": 1}

    monkeypatch.setattr(doctor, "entry_points", lambda group: [Integration(judge)])
    assert main(["doctor"]) == 0
    assert main(["doctor", "--engine-args", '{"model": "m", "nope": 1}']) == 2
    said = capsys.readouterr().out
    assert "engine    cannot judge these engine arguments: TypeError: unexpected keyword" in said


def test_an_engine_that_lacks_what_it_asks_for(monkeypatch, capsys):
    """The page names it, and the exit code is 1."""
    judge = Integration(lambda given: {} if given is None else {doctor.LACKS: ["policy undo"]})
    monkeypatch.setattr(doctor, "entry_points", lambda group: [judge])
    assert main(["doctor"]) == 0
    assert main(["doctor", "--engine-args", '{"model": "m"}']) == 1
    assert "engine    does not get: policy undo" in capsys.readouterr().out


@pytest.mark.parametrize(("installed", "code"), [(["vllm"], 0), ([], 2)])
def test_an_engine_that_is_not_installed_is_not_asked(monkeypatch, capsys, installed, code):
    """Another one has judged the arguments, unless none is there."""
    found = [Integration(lambda given: {"version": 1}, name) for name in ("sglang", "vllm")]
    monkeypatch.setattr(doctor, "entry_points", lambda group: found)
    why = "it is not installed"
    monkeypatch.setattr(doctor.extras, "missing", lambda name: None if name in installed else why)
    assert main(["doctor", "--engine-args", '{"model": "m"}']) == code
    assert f"sglang    unavailable: {why}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "host --layers 0",
        "host --requests 1 -1",
        "host --windows 0",
        "kernels --requests 0",
        "recurrent --dtypes float16",
    ],
)
def test_bench_refuses_what_cannot_be_measured(capsys, arguments):
    """In a sentence about the argument, before anything is measured."""
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments.split()])
    assert caught.value.code == 2
    assert f"argument {arguments.split()[1]}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("suite", ["kernels", "recurrent", "steps"])
def test_bench_without_a_gpu(capsys, suite):
    """A bench of GPUs says that it needs one, and starts nothing."""
    assert main(["bench", suite]) == 2
    assert "a CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "no such file"),
        ("/", "a folder"),
        ("{", "no JSON"),
        ("[1]", "object"),
        ("{}", "none"),
    ],
)
def test_bench_report_of_another_file(tmp_path, capsys, text, word):
    """A file that is no result of `kvtxn bench vllm` is named as what it is."""
    path = tmp_path / "x.json"
    if text == "/":
        path.mkdir()
    elif text is not None:
        path.write_text(text)
    assert main(["bench", "report", str(path)]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--prompt", " ", "nothing to continue"),
        ("--model", "/nowhere", "not a folder with a model's config.json"),
        ("--repetition-penalty", "-1", "not a number above 0"),
        ("--repetition-penalty", "nan", "not a number above 0"),
    ],
)
def test_the_demo_refuses_before_an_engine_starts(capsys, option, value, says):
    """As an error of use, not as a difference in tokens."""
    with pytest.raises(SystemExit) as caught:
        main(["demo", f"{option}={value}"])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("given", ["{}", "3", "[1]", '{"model": 3}', '{"dtype": "float32"}'])
def test_engine_arguments_without_a_model_are_refused(capsys, given):
    """In a sentence on stderr: vLLM would take a model of its own choice from the network."""
    assert main(["doctor", "--engine-args", given]) == 2
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert said.startswith("kvtxn doctor: --engine-args is not a JSON object with a model")
    assert printed.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--engine-args", "{" + "x" * 300],
        ["doctor", "--" + "long" * 60],
        ["bench", "host", "--layers", "many " * 40],
        ["a" * 300],
    ],
)
def test_errors_of_arguments_fit_a_terminal(capsys, words):
    """argparse's own, which are as wide as what they quote."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 100
    assert "error: " in "".join(lines)


@pytest.mark.parametrize("words", [[], ["doctor"], ["audit"], ["trace"], ["bench"], ["demo"]])
def test_help_says_what_exit_codes_mean(capsys, words):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("exit codes: 0 if all is well; 1 if the command found something wrong") == 1


def test_a_reader_that_leaves_early_gets_no_traceback():
    """``kvtxn doctor --json | head -1``."""
    code = (
        "from kvtxn import cli, doctor\n"
        "doctor.examine = lambda given: {'long': ['x' * 99] * 9999}\n"
        "raise SystemExit(cli.main(['doctor', '--json']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "{\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("text", ["x", "x" * 99_999], ids=["in the last flush", "before it"])
def test_a_full_disk_is_one_sentence(text):
    code = (
        "import sys; from kvtxn import cli, doctor\n"
        "doctor.examine = lambda given: {'long': sys.argv[1]}\n"
        "raise SystemExit(cli.main(['doctor', '--json']))"
    )
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code, text], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.stderr == "kvtxn: the output cannot be written: No space left on device\n"
    assert ended.returncode == 2


def test_arguments_that_are_no_json_are_shown_and_explained(capsys):
    """The message quotes the argument, and says what is wrong with it."""
    with pytest.raises(SystemExit):
        main(["doctor", "--engine-args", "{model: x}"])
    said = capsys.readouterr().err
    assert "expected JSON: " in said
    assert "model: x" not in said  # it may be a secret


def test_a_broken_command_does_not_hide_the_others(monkeypatch, capsys):
    """Somebody else's package may fail to import in its own way."""
    broken, real = Integration(SyntaxError("half a line"), "broken"), cli.entry_points
    monkeypatch.setattr(cli, "entry_points", lambda group: [broken, *real(group=group)])
    assert main(["doctor"]) == 0
    with pytest.raises(SystemExit):
        main(["broken"])
    assert "broken cannot be used: SyntaxError('half a line'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "lines",
    [
        'help = "counts blocks"\nNEEDS = ("nowhere",)\nimport nowhere\n',
        'help: str = "counts blocks"\nNEEDS: tuple[str, ...] = ("nowhere",)\nimport nowhere\n',
        'about = "blocks"\nhelp = f"counts {about}"\n',
    ],
)
def test_a_command_of_another_package_is_listed(lines, tmp_path, monkeypatch, capsys):
    """Its line is read off its source, or, if it is not written out there, off the module."""
    (tmp_path / "their_blocks.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    theirs, real = EntryPoint("blocks", "their_blocks", cli.GROUP), cli.entry_points
    monkeypatch.setattr(cli, "entry_points", lambda group: [theirs, *real(group=group)])
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "counts blocks" in said
    assert ("(needs nowhere)" in said) == ("NEEDS" in lines)


@pytest.mark.parametrize("option", ["--help", "--version"])
@pytest.mark.parametrize("front", [["-m", "kvtxn"], ["-c", "from kvtxn.cli import main; main()"]])
def test_help_and_version_import_next_to_nothing(front, option):
    """Neither torch nor a command: they come at once, whichever way they are asked for."""
    words = [sys.executable, "-X", "importtime", *front, option]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "kvtxn.cli" in imported
    assert not {"torch", "rich", "structlog", "kvtxn.doctor", "kvtxn.benchmarks.command"} & imported
    said = f"kvtxn {__version__}" if option == "--version" else "doctor      versions, devices"
    assert said in done.stdout


@pytest.mark.parametrize("command", ["audit", "bench", "demo", "doctor", "trace"])
def test_help_of_a_command_imports_no_torch(command):
    """Nor an engine: torch takes some seconds, and help needs none of it."""
    pytest.importorskip("rich")
    code = (
        "import sys; from kvtxn.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'numpy', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"usage: kvtxn {command} ")
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_is_a_command():
    """``python -m kvtxn`` is ``kvtxn``, exit code included."""
    words = [sys.executable, "-m", "kvtxn", "heal"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "kvtxn: error: argument COMMAND: invalid choice: 'heal'" in done.stderr


def test_help_says_what_each_command_needs(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for command in ("audit", "demo", "trace"):
        [line] = [line for line in lines if line.startswith(f"  {command} ")]
        assert line.endswith("(needs rich and vllm)")
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    said = capsys.readouterr().out
    assert "deferred and undo (needs numpy, tabulate and vllm)" in said


@pytest.fixture
def without(monkeypatch):
    """Hides these modules."""

    def hide(*names):
        for module in (cli, extras):
            real = module.find_spec
            monkeypatch.setattr(
                module, "find_spec", lambda name, real=real: None if name in names else real(name)
            )

    return hide


@pytest.mark.parametrize("command", ["audit", "demo", "trace"])
def test_a_command_says_all_that_is_missing_at_once(monkeypatch, capsys, without, command):
    """Also where it cannot even be imported."""

    def missing(entry):
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    without("rich", "vllm")
    monkeypatch.setattr("importlib.metadata.EntryPoint.load", missing)
    with pytest.raises(SystemExit):
        main([command])
    said = " ".join(capsys.readouterr().err.split())
    assert f"{command} cannot be used: needs rich and vllm, which are not installed: " in said
    assert said.endswith("pip install 'kvtxn[vllm]'")


def test_a_bench_says_all_that_is_missing_at_once(capsys, without):
    """Of several extras, if no single one has it all; its help needs none."""
    without("numpy", "tabulate", "vllm")
    assert main(["bench", "vllm"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "kvtxn bench: needs numpy, tabulate and vllm, which are not installed: "
        "pip install 'kvtxn[bench,vllm]'"
    )


def test_the_matrix_of_an_integration_that_is_missing(capsys, without):
    """One sentence beside the page, and the exit code for what could not be done."""
    without("vllm")
    assert main(["doctor"]) == 0
    capsys.readouterr()
    assert main(["doctor", "--matrix"]) == 2
    printed = capsys.readouterr()
    assert "backend   torch on cpu" in printed.out
    said = " ".join(printed.err.split())
    assert said.startswith("kvtxn doctor: there is no matrix to print; ")
    assert said.endswith("; vllm is not installed; pip install 'kvtxn[vllm]' brings it")


def test_bench_host_says_what_it_lacks_before_it_measures(monkeypatch, capsys):
    """And that the extra for benchmarks brings it, which others may bring as well."""
    monkeypatch.setattr(cli, "find_spec", lambda module: None)
    monkeypatch.setattr(idle_window, "measure", None)
    assert main(["bench", "host"]) == 2
    says = "kvtxn bench: needs tabulate, which is not installed: pip install 'kvtxn[bench]'\n"
    assert capsys.readouterr().err == says


@pytest.mark.parametrize(
    ("module", "prefer", "extra"),
    [
        ("numpy", "bench", "bench"),
        ("numpy", "vllm", "vllm"),
        ("numba", "bench", "numba"),
        ("numpy.linalg", "nobody", "numba"),
        ("cpuinfo", None, "bench"),
    ],
)
def test_the_extra_that_brings_a_module(module, prefer, extra):
    """Of several, the one with all that the command needs."""
    error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    found = extras.bringing(error, prefer)
    assert found is not None
    assert found.command == f"pip install 'kvtxn[{extra}]'"
    assert extras.bringing(ModuleNotFoundError("x", name="x"), prefer) is None


def test_bench_host_measures(capsys):
    """A tiny run: every policy, its parts, and the machine it ran on."""
    args = ["bench", "host", "--layers", "2", "--requests", "1", "--windows", "3", "--json"]
    assert main(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in result["rows"]] == ["deferred", "undo", "direct"]
    assert all(row["all"] > row["stage"] > 0 for row in result["rows"])
    assert result["machine"]["kvtxn"] == __version__
