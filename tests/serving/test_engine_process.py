"""Sentences of an engine's process that fails, and lines of its log."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from kvtxn.integrations.serving.engine_process import EngineError, EngineProcess, ending_with

#: As vLLM's processes log it: a worker fails, then whoever waits for it.
LOG = """\
Triton is installed, but does not work. ErrorBars are off
(Worker pid=7) ERROR 11-23 15:28:04 [v1/executor.py:1063] WorkerProc hit an exception.
(Worker pid=7) ERROR 11-23 15:28:04 [v1/executor.py:1063] Traceback (most recent call last):
(Worker pid=7) ERROR 11-23 15:28:04 [v1/executor.py:1063]     raise ValueError("not this line")
(Worker pid=7) ERROR 11-23 15:28:04 [v1/executor.py:1063] {cause}
(EngineCore pid=6) ERROR 11-23 15:28:05 [v1/core.py:12] RuntimeError: a worker died
Traceback (most recent call last):
"""
CHILD = """\
import sys
from multiprocessing.connection import Connection
print({log!r} + "\\n" * {blank}, flush=True)
Connection(int(sys.argv[-1])).send((True, {failed!r}))
"""
REST = "--log-level debug shows the rest"


def failing(log, failed, blank=0, **named):
    """The error of a process that prints a log and says that it failed."""
    code = CHILD.format(log=log, failed=failed, blank=blank)
    process = EngineProcess(["-c", code], name="e", operation="audit", **named)
    with ending_with([process]), pytest.raises(EngineError) as raised:
        process.answer("while it ran")
    return raised.value


@pytest.mark.parametrize(
    "cause",
    ["AttributeError: 'Runner' object has no attribute 'drafter'", "torch.OutOfMemoryError: a: b",
     "AssertionError"],
)  # fmt: skip
def test_the_error_of_the_engine_s_own_process_is_named(cause):
    """It lies far above the last lines."""
    told = failing(LOG.format(cause=cause), "RuntimeError: See root cause above.", 60, rest=REST)
    assert str(told) == (
        "audit: the engine 'e' failed while it ran: RuntimeError: See root cause above.; "
        f"its log first says: {cause}; {REST}"
    )


def test_without_such_a_line_the_last_lines_are_quoted():
    """Also where the engine has said it itself, and where no way to the rest is known."""
    log = LOG.format(cause="ValueError: no")
    assert failing("killed", "EOFError: gone", rest=REST).hint.startswith("its log says last:\nkil")
    assert failing(log, "ValueError: no", rest=REST).hint.startswith("its log says last:\nTriton")
    assert failing(log, "RuntimeError: above").hint.startswith("its log says last:\nTriton")


def test_a_log_that_was_shown_is_not_quoted():
    assert failing("killed", "EOFError: gone", quiet=False, rest=REST).hint == "its log is above"


HOLDER = """\
from types import SimpleNamespace
from kvtxn.integrations.serving.engine_process import ending_with
engine = SimpleNamespace(stop=lambda patience: print("stopped", patience, flush=True))
with ending_with([engine]):
    print("holds", flush=True)
    import time; time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_that_ends_the_command_stops_its_engines(number):
    """A terminal that is closed sends SIGHUP."""
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "holds\n"
        it.send_signal(number)
        assert it.stdout.read() == "stopped 0.0\n"
    assert it.returncode == 128 + number
