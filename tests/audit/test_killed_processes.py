"""Processes that share a store of identities while one after the other is killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import time
import traceback

import pytest

from kvtxn.audit.identity_store import MOST_BLOCKS, SqliteStore, StoredBlock
from kvtxn.audit.store_thread import StoreThread

SCOPES = (b"a" * 16, b"b" * 16)
WRITERS, READERS = 3, 2
#: Seconds until a process that does nothing hangs; SQLite waits five for a lock.
LONG = 30.0
#: Seconds between what a process does, as between an engine's fast steps.
STEP = 0.002
#: Kills of a run.
ROUNDS = 25
#: Blocks of a batch, of one prefix and of two with the same bytes by turns.
MOST = 12

_fork = multiprocessing.get_context("fork")


def batch(writer, number):
    """A writer's batch: the scope and the blocks, which follow from the two numbers alone."""
    chance = random.Random(f"{writer}.{number}")
    blocks = []
    for one in range(1 + chance.randrange(MOST)):
        content = chance.randbytes(16)
        for digest in range(1 + one % 2):
            word = int.from_bytes(content[:7]) + digest
            blocks.append(StoredBlock(content, word, writer, one, f"process {writer}"))
    return SCOPES[number % 2], blocks


class Shared:
    """What the processes tell each other: plain numbers in memory, which no kill can lock."""

    def __init__(self):
        self.confirmed = _fork.RawArray("q", WRITERS)  # batches, by writer
        self.alive = _fork.RawArray("q", WRITERS + READERS)  # things done, by process
        self.failed = _fork.RawArray("c", 4000)
        self.ends = _fork.RawValue("b", 0)


def opened(path, room):
    return StoreThread(lambda: SqliteStore(path, room))


def write(path, room, shared, me):
    """Write batch after batch, and confirm each once it is written; go on where another ended."""
    thread, number = opened(path, room), shared.confirmed[me]
    while not shared.ends.value:
        thread.put(*batch(me, number))
        assert thread.wait(LONG), "a write hangs"
        assert thread.dropped == 0, "a write was dropped"
        number += 1
        shared.confirmed[me] = number
        shared.alive[me] += 1
        time.sleep(STEP)
    thread.close(LONG)


def read(path, room, shared, me):
    """Ask for batches that are confirmed, and for ones that are being written."""
    thread, chance = opened(path, room), random.Random(os.getpid())
    while not shared.ends.value:
        writer = chance.randrange(WRITERS)
        done = shared.confirmed[writer]
        number = chance.randrange(done + 2)
        scope, blocks = batch(writer, number)
        wanted = [*dict.fromkeys(each.content for each in blocks)]
        question = thread.ask(scope, wanted)
        assert thread.wait(LONG), "a question hangs"
        assert thread.dropped == 0, "a question was dropped"
        judge(blocks, wanted, question.answer, confirmed=number < done, forgets=room < MOST_BLOCKS)
        shared.alive[me] += 1
        time.sleep(STEP)
    thread.close(LONG)


def judge(blocks, wanted, answer, *, confirmed, forgets):
    """Compare an answer with a batch: each content with all that it was, or unknown."""
    for content, found in zip(wanted, answer, strict=True):
        right = {each for each in blocks if each.content == content}
        assert not found or set(found) == right, f"{found} is not {right}"
    known = sum(bool(found) for found in answer)
    if not forgets:
        assert known == len(wanted) or (known == 0 and not confirmed), "half a batch, or none"


def begin(work, *given):
    """Start a process; what ends it otherwise than a kill is said in ``failed``."""
    shared = given[2]

    def run():
        try:
            work(*given)
        except BaseException:
            shared.failed.value = traceback.format_exc().encode()[-3900:]
        os._exit(0)

    process = _fork.Process(target=run)
    process.start()
    return process


def check(shared):
    said = shared.failed.value.decode()
    assert not said, said


def all_go_on(shared, since):
    """Wait until each process has done something since then."""
    until = time.monotonic() + LONG
    while any(now <= then for now, then in zip(shared.alive, since, strict=True)):
        check(shared)
        assert time.monotonic() < until, "a process hangs"
        time.sleep(0.001)


@pytest.mark.parametrize("room", [MOST_BLOCKS, 300], ids=["keeps all", "forgets"])
def test_a_killed_process_harms_nobody(tmp_path, room):
    """The others go on; what was confirmed is there, whole, and for what it was."""
    path, shared, chance = tmp_path / "identities.db", Shared(), random.Random(7)
    works = [write] * WRITERS + [read] * READERS
    processes = [begin(work, path, room, shared, me) for me, work in enumerate(works)]
    try:
        all_go_on(shared, [0] * len(works))
        for _ in range(ROUNDS):
            time.sleep(chance.uniform(0.0, 0.04))
            me = chance.randrange(len(works))
            os.kill(processes[me].pid, signal.SIGKILL)
            processes[me].join()
            before = [*shared.alive]
            before[me] = -1
            all_go_on(shared, before)
            check(shared)
            processes[me] = begin(works[me], path, room, shared, me)
        all_go_on(shared, [*shared.alive])
    finally:
        shared.ends.value = 1
        for process in processes:
            process.join(LONG)
            process.kill()
    check(shared)
    confirmed(path, room, shared)


def confirmed(path, room, shared):
    """Look up all that was confirmed, in a file that is whole."""
    with sqlite3.connect(path) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    file.close()
    store = SqliteStore(path, room)
    every = [(who, at) for who in range(WRITERS) for at in range(shared.confirmed[who])]
    for writer, number in every:
        scope, blocks = batch(writer, number)
        wanted = [*dict.fromkeys(each.content for each in blocks)]
        found = store.get(scope, wanted)
        answer = [found.get(content, ()) for content in wanted]
        judge(blocks, wanted, answer, confirmed=True, forgets=room < MOST_BLOCKS)
    store.close()
