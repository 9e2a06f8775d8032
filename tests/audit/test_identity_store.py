"""Stores of identities, the one in a file, and the thread that reads and writes it."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time

import fakeredis
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvtxn.audit import identity_store
from kvtxn.audit.identity_store import (
    SqliteStore,
    StoredBlock,
    StoreError,
)
from kvtxn.audit.redis_store import RedisStore
from kvtxn.audit.store_thread import StoreThread

SCOPE, OTHER = b"a" * 16, b"b" * 16


def block(number, digest=5, weights=6, who="engine 1: request a"):
    return StoredBlock(b"%016d" % number, digest, weights, 15, who)


def contents(*numbers):
    return [b"%016d" % number for number in numbers]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "identities.db"


@pytest.fixture(params=["SQLite", "Redis"])
def opened(request, path):
    """Open the same store once more, as another process does."""
    if request.param == "SQLite":
        return lambda **room: SqliteStore(path, **room)
    server = fakeredis.FakeServer()
    return lambda **room: RedisStore(fakeredis.FakeRedis(server=server), "redis://a:1/0", **room)


def test_a_second_process_knows_what_the_first_has_written(opened):
    first, second = opened(), opened()
    first.put(SCOPE, [block(1), block(2, digest=-(1 << 63)), block(2, weights=(1 << 63) - 1)])
    found = second.get(SCOPE, contents(1, 2, 3))
    assert found == {
        block(1).content: [block(1)],
        block(2).content: [block(2, digest=-(1 << 63)), block(2, weights=(1 << 63) - 1)],
    }
    assert second.get(OTHER, contents(1, 2, 3)) == {}
    first.put(SCOPE, [block(1, who="engine 2: request \u00e4")])  # the first who wrote it
    assert second.get(SCOPE, contents(1)) == {block(1).content: [block(1)]}
    first.close()
    second.close()


def test_many_at_once(opened):
    store = opened()
    store.put(SCOPE, (block(number) for number in range(1000)))
    assert len(store.get(SCOPE, contents(*range(500, 1500)))) == 500
    store.put(SCOPE, [])
    assert store.get(SCOPE, []) == {}


def test_what_is_used_is_not_forgotten(opened):
    """By readers and by writers; with it goes whatever else the same bytes were."""
    writer, reader = opened(most_blocks=100), opened(most_blocks=100)
    writer.put(SCOPE, [block(0), block(1), block(1, digest=6), block(2), block(2, digest=6)])
    for begin in range(10, 1000, 10):
        writer.put(SCOPE, [block(1), *map(block, range(begin, begin + 10))])
        assert len(reader.get(SCOPE, contents(0, 1))) == 2
    found = reader.get(SCOPE, contents(*range(1000)))
    assert set(contents(0, 1, *range(930, 1000))) <= {*found}
    assert len(found[block(1).content]) == 2
    assert block(2).content not in found
    assert len(found) <= 100


def test_a_store_says_that_it_has_forgotten_bytes_of_several_prefixes(opened):
    """Of one prefix, whatever its weights, there is no half."""
    store, other = opened(most_blocks=100), opened(most_blocks=100)
    for begin in range(0, 400, 10):
        store.put(SCOPE, [block(0, weights=begin), *map(block, range(begin, begin + 10))])
    assert other.get(SCOPE, contents(399))
    assert not other.lost_prefixes
    store.put(SCOPE, [block(399, digest=6)])
    for begin in range(400, 900, 10):
        assert not other.lost_prefixes or not other.get(SCOPE, contents(399))
        store.put(SCOPE, map(block, range(begin, begin + 10)))
        other.get(SCOPE, contents(begin))
    assert other.lost_prefixes
    assert other.get(SCOPE, contents(399)) == {}


def test_only_its_owner_reads_the_file(path):
    SqliteStore(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_bytes_are_forgotten_with_all_that_they_were(path):
    """Half of it would accuse who has the other half."""
    store = SqliteStore(path, most_blocks=40)
    for number in range(39):
        store.put(SCOPE, [block(number)])
    store.put(SCOPE, [block(0, digest=6)])
    store._file.execute(
        "UPDATE blocks SET number = 0 WHERE content = ? AND digest = 5", contents(0)
    )
    store.put(SCOPE, [block(40)])
    assert sorted(store.get(SCOPE, contents(*range(41)))) == contents(*range(1, 39), 40)


def test_a_file_that_another_process_has_filled_shrinks(path):
    SqliteStore(path).put(SCOPE, map(block, range(1000)))
    small = SqliteStore(path, most_blocks=640)
    small.put(SCOPE, [block(2000)])
    assert len(small.get(SCOPE, contents(*range(2001)))) == 640


def test_a_store_stays_as_small_as_the_guide_says(path):
    store = SqliteStore(path, most_blocks=4000)
    who = "engine 0123456789abcdef rank 0: request 0123456789abcdef"
    for begin in range(0, 20_000, 1000):
        many = [block(number, -(1 << 60), 1 << 60, who) for number in range(begin, begin + 1000)]
        store.put(SCOPE, many)
    store.close()
    assert path.stat().st_size < 4000 * 256


#: Of batches: which of two scopes a block is of, and its numbers of content, digest and weights.
BATCHES = st.lists(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 2), st.integers(0, 1)),
        max_size=8,
    ),
    max_size=5,
)


@settings(max_examples=20, deadline=None)
@given(BATCHES)
def test_against_a_dict(tmp_path_factory, batches):
    stores = (
        SqliteStore(tmp_path_factory.mktemp("store") / "identities.db"),
        RedisStore(fakeredis.FakeRedis(server=fakeredis.FakeServer()), "redis://a:1/0"),
    )
    model = {}
    for batch in batches:
        for scope in (SCOPE, OTHER):
            some = [block(*each[1:]) for each in batch if each[0] == (scope == SCOPE)]
            for store in stores:
                store.put(scope, some)
            for each in some:
                model.setdefault((scope, each.content), set()).add(each)
    for store in stores:
        for scope in (SCOPE, OTHER):
            found = store.get(scope, contents(*range(7)))
            assert {(scope, content): set(each) for content, each in found.items()} == {
                key: each for key, each in model.items() if key[0] == scope
            }
            assert all(len(set(each)) == len(each) for each in found.values())
        store.close()


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("table", ["orders (number)", "blocks (number, name)"])
def test_another_programs_file_stays_as_it_is(path, table, version):
    with sqlite3.connect(path) as file:
        file.execute(f"CREATE TABLE {table}")
        file.execute(f"INSERT INTO {table.partition(' ')[0]} (number) VALUES (1), (9000000)")
        file.execute(f"PRAGMA user_version={version}")
    file.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program's"):
        SqliteStore(path, most_blocks=1)
    assert path.read_bytes() == before


def test_a_store_whose_making_was_cut_short_is_made_whole(path):
    store = SqliteStore(path)
    store.put(SCOPE, [block(1)])
    store._file.execute("PRAGMA user_version=0")
    store.close()
    assert SqliteStore(path).get(SCOPE, contents(1)) == {block(1).content: [block(1)]}


def test_a_new_file_that_another_process_holds_is_waited_for(path):
    """SQLite itself waits for nobody while the journal is changed."""
    other = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ends = threading.Timer(0.3, lambda: other.execute("COMMIT"))
    ends.start()
    store = SqliteStore(path)
    ends.join()
    store.put(SCOPE, [block(1)])
    assert store.get(SCOPE, contents(1)) == {block(1).content: [block(1)]}
    other.close()


def test_a_file_that_another_process_keeps_is_an_error(path, monkeypatch):
    monkeypatch.setattr(identity_store, "_WAIT", 0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"cannot be opened; got .*locked"):
        SqliteStore(path)
    other.close()


def test_a_reader_that_stops_keeps_no_writer_waiting_and_its_log_goes(path, monkeypatch):
    """The log of all writes grows while one reads, and is emptied then."""
    monkeypatch.setattr(identity_store, "_MOST_LOG", 1 << 18)
    store, log = SqliteStore(path), path.with_name(f"{path.name}-wal")
    store.put(SCOPE, [block(0)])
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM blocks").fetchall()
    begin = time.monotonic()
    for number in range(1, 200):
        store.put(SCOPE, [block(number * 100 + one) for one in range(20)])
    assert log.stat().st_size > 1 << 20
    assert time.monotonic() - begin < LONG / 2
    reader.execute("COMMIT")
    for number in range(200, 250):
        store.put(SCOPE, [block(number * 100 + one) for one in range(20)])
    assert log.stat().st_size < 1 << 19
    reader.close()


KILLED = """
import sys
from kvtxn.audit.identity_store import SqliteStore, StoredBlock
store = SqliteStore(sys.argv[1])
store.put(b"a" * 16, [StoredBlock(b"%016d" % 1, 5, 6, 15, "engine 1: request a")])
store._file.execute("BEGIN IMMEDIATE")
store._file.execute("DELETE FROM blocks")
print("now", flush=True)
sys.stdin.read()
"""


def test_a_writer_that_is_killed_leaves_what_was_there(path):
    """In the middle of a transaction, with the lock in its hands."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout.readline() == "now\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    store = SqliteStore(path)
    store.put(SCOPE, [block(2)])
    assert store.get(SCOPE, contents(1, 2)) == {
        block(number).content: [block(number)] for number in (1, 2)
    }


def test_a_full_disk(path):
    store = SqliteStore(path)
    store.put(SCOPE, [block(0)])
    store._file.execute("PRAGMA max_page_count=8")
    with pytest.raises(StoreError, match="full"):
        store.put(SCOPE, [block(number) for number in range(5000)])
    assert store.get(SCOPE, contents(*range(50))) == {block(0).content: [block(0)]}


@pytest.mark.parametrize("damage", ["text", "version", "folder"])
def test_a_file_that_is_no_store(path, damage):
    if damage == "text":
        path.write_bytes(b"nothing that SQLite knows " * 500)
    elif damage == "folder":
        path.mkdir()
    else:
        SqliteStore(path).close()
        file = sqlite3.connect(path)
        file.execute("PRAGMA user_version=7")
        file.close()
    with pytest.raises(StoreError, match=str(path)):
        SqliteStore(path)


def test_a_file_that_is_damaged_later(path):
    store = SqliteStore(path)
    store.put(SCOPE, [block(number) for number in range(2000)])
    store.close()
    raw = bytearray(path.read_bytes())
    raw[4096:-4096] = os.urandom(len(raw) - 8192)
    path.write_bytes(raw)
    with pytest.raises(StoreError):
        SqliteStore(path).get(SCOPE, contents(*range(2000)))


# -- the thread ------------------------------------------------------------------------------

LONG = 60.0  # seconds, of which a healthy run takes none


@pytest.fixture
def thread(path):
    made = StoreThread(lambda: SqliteStore(path))
    yield made
    made.close(LONG)


def test_questions_are_answered_later(thread):
    thread.put(SCOPE, [block(1)])
    question = thread.ask(SCOPE, contents(1, 2))
    assert thread.wait(LONG)
    assert question.answer == [[block(1)], ()]
    assert thread.dropped == 0


def test_what_waits_is_written_at_the_end(path):
    thread = StoreThread(lambda: SqliteStore(path))
    for number in range(300):
        thread.put(SCOPE, [block(number)])
    thread.close(LONG)
    assert len(SqliteStore(path).get(SCOPE, contents(*range(300)))) == 300
    question = thread.ask(SCOPE, contents(1))
    assert question.answer == [()]


class Stuck:
    """A store that answers nobody until it may."""

    def __init__(self):
        self.begun, self.may = threading.Event(), threading.Event()

    def put(self, scope, blocks):
        self.begun.set()
        self.may.wait(LONG)

    def get(self, scope, contents):
        return {}

    def close(self):
        pass


def test_a_store_that_does_not_answer_keeps_nobody_waiting():
    store = Stuck()
    thread = StoreThread(lambda: store, waiting=10)
    thread.put(SCOPE, [block(1)])
    store.begun.wait(LONG)
    thread.put(SCOPE, [block(number) for number in range(9)])
    thread.put(SCOPE, [block(20), block(21)])  # the queue is full
    question = thread.ask(SCOPE, contents(1))
    assert question.answer == [()]
    assert thread.dropped == 3
    assert not thread.wait(0.0)
    store.may.set()
    thread.close(LONG)


def test_a_store_that_cannot_be_reached_is_one_line_in_the_log(tmp_path, caplog):
    thread = StoreThread(lambda: SqliteStore(tmp_path / "no folder" / "a.db"), again=0.0)
    for _ in range(3):
        thread.put(SCOPE, [block(1)])
        question = thread.ask(SCOPE, contents(1))
        assert thread.wait(LONG)
        assert question.answer == [()]
    thread.close(LONG)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "kvtxn.audit_store_failed" in line
    assert thread.dropped == 6


def test_a_store_that_comes_back_is_used_again(tmp_path):
    folder = tmp_path / "later"
    thread = StoreThread(lambda: SqliteStore(folder / "a.db"), again=0.0)
    thread.put(SCOPE, [block(1)])
    assert thread.wait(LONG)
    folder.mkdir()
    thread.put(SCOPE, [block(2)])
    question = thread.ask(SCOPE, contents(1, 2))
    assert thread.wait(LONG)
    assert question.answer == [(), [block(2)]]
    thread.close(LONG)


def test_a_store_that_failed_is_left_alone_for_a_while(tmp_path):
    calls = []

    def fail():
        calls.append(1)
        raise RuntimeError("no store")

    thread = StoreThread(fail, again=LONG * 60)
    for _ in range(3):
        thread.put(SCOPE, [block(1)])
    assert thread.wait(LONG)
    assert len(calls) == 1
    thread.close(LONG)
