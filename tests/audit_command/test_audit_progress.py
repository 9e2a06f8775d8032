"""``kvtxn audit`` says how far it is, and what it found until it was interrupted."""

from __future__ import annotations

import asyncio
import io
import json
import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import attrs
import pytest
import recorded

pytest.importorskip("vllm")

from kvtxn.integrations.audit_command import command, engine
from kvtxn.integrations.audit_command.jobs import STOP
from kvtxn.integrations.audit_command.progress import Progress

from kvtxn.cli import main


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_line_in_a_log(terminal):
    """Also while the engine starts; on a terminal each line takes the last one's place."""
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    with Progress("kvtxn audit", 100, stream, every=0.01) as progress:
        _wait_for(lambda: "kvtxn audit: starting the engine, 0 s" in stream.getvalue())
        progress.show("chat", 37)
        _wait_for(lambda: "kvtxn audit: chat, 37 of 100 requests, " in stream.getvalue())
        progress.show("chat", 103)
        _wait_for(lambda: ", 103 of 103 requests" in stream.getvalue())
        progress.interrupt()
    said = stream.getvalue()
    assert "kvtxn audit: interrupted: asking the engine what it found so far" in said
    assert ("\r" in said, "\n" in said) == (terminal, not terminal)
    assert said.endswith("\r\x1b[K") == terminal


def _wait_for(said):
    end = time.monotonic() + 60
    while not said():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_progress_is_no_part_of_json(capsys, monkeypatch):
    result = recorded.found(steps=30)
    asked = threading.Event()
    monkeypatch.setattr(Progress, "__str__", lambda self: asked.set() or "how far it is")
    monkeypatch.setattr("kvtxn.integrations.audit_command.progress._LINES", 0.01)

    def play(job, progress):
        assert asked.wait(60)
        return result

    monkeypatch.setattr(command, "run_engine", play)
    assert main(["audit", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["interrupted"] is False
    assert "how far it is" in printed.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_workloads_and_a_second_one_everything(number):
    """The engine is told to stop, and its answer is waited for."""
    sent, said = [], []
    process = SimpleNamespace(send=sent.append)
    progress = SimpleNamespace(interrupt=lambda: said.append("interrupted"))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with engine._ending_early(process, progress):
        os.kill(os.getpid(), number)
        _wait_for(lambda: sent)
        assert (sent, said) == ([STOP], ["interrupted"])
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("stopped", [False, True])
def test_workloads_end_when_they_are_told_to(stopped):
    ours, theirs = multiprocessing.Pipe()
    ended = []

    async def work():
        try:
            await asyncio.sleep(30 if stopped else 0)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    if stopped:
        ours.send(STOP)
    assert asyncio.run(engine._until_stopped(work(), theirs)) is not stopped
    assert ended == [True]


def test_an_interrupted_audit_gives_a_verdict_so_far(capsys, monkeypatch):
    """Marked as such, and never healthy."""
    result = attrs.evolve(recorded.found(steps=30), interrupted=True)
    monkeypatch.setattr(command, "run_engine", lambda job, progress: result)
    assert main(["audit"]) == 2
    said = capsys.readouterr().out
    assert said.startswith("Interrupted, so far: Not all was judged: ")
    assert main(["audit", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["interrupted"], found["verdict"]) == (True, "not all judged")
