"""The store of identities on a server, and the URLs of stores."""

from __future__ import annotations

import socket
import sys

import fakeredis
import pytest
from test_identity_store import LONG, SCOPE, block, contents

from kvtxn import ConfigError
from kvtxn.audit import redis_store
from kvtxn.audit.identity_store import StoreError
from kvtxn.audit.redis_store import KEPT, RedisStore
from kvtxn.audit.store_thread import StoreThread
from kvtxn.audit.store_url import store_url


@pytest.fixture
def server():
    return fakeredis.FakeServer()


def client(server):
    return fakeredis.FakeRedis(server=server)


def store(server, **changes):
    return RedisStore(client(server), "redis://a:1/0", **changes)


@pytest.fixture
def clock(monkeypatch):
    """The time by which a store knows which block was used last."""

    class Clock:
        now = 1000.0

        def time(self):
            self.now += 1.0
            return self.now

    monkeypatch.setattr(redis_store, "time", Clock())


def test_a_store_forgets_what_was_unused_for_longest(server, clock):
    writer, reader = store(server, most_blocks=100), store(server, most_blocks=100)
    writer.put(SCOPE, [block(0), block(1)])
    for begin in range(10, 1000, 10):
        writer.put(SCOPE, [block(1), *map(block, range(begin, begin + 10))])  # used again
        reader.get(SCOPE, contents(0, 1))
    assert sorted(reader.get(SCOPE, contents(*range(1000)))) == contents(0, 1, *range(902, 1000))
    assert client(server).zcard(redis_store._USED) == 100
    assert len(client(server).keys("*")) == 101


def test_a_store_with_less_room_than_it_had_shrinks(server, clock):
    store(server).put(SCOPE, map(block, range(100)))
    small = store(server, most_blocks=10)
    for number in range(100, 200):
        small.put(SCOPE, [block(number)])
    assert sorted(small.get(SCOPE, contents(*range(200)))) == contents(*range(190, 200))


def test_bytes_are_forgotten_with_all_that_they_were(server, clock):
    """Half of it would accuse who has the other half."""
    found = store(server, most_blocks=2)
    for digest in range(5):
        found.put(SCOPE, [block(1, digest=digest)])
    assert len(found.get(SCOPE, contents(1))[block(1).content]) == 5
    found.put(SCOPE, [block(2), block(3)])
    assert sorted(found.get(SCOPE, contents(1, 2, 3))) == contents(2, 3)


def test_what_nobody_uses_expires(server):
    found, direct = store(server), client(server)
    found.put(SCOPE, [block(1), block(2)])
    assert {direct.ttl(name) for name in direct.keys("*")} == {KEPT}
    for name in direct.keys("*"):
        direct.expire(name, 9)
    found.get(SCOPE, contents(1))
    assert sorted(direct.ttl(name) for name in direct.keys("*")) == [9, KEPT, KEPT]


def test_a_read_brings_nothing_back_that_is_being_forgotten(server, clock):
    """Between a reader's two trips another process forgets the block."""
    writer, reader = store(server), store(server)
    writer.put(SCOPE, [block(1)])
    pipeline = reader._client.pipeline

    def later(**given):
        reader._client.pipeline = lambda **again: (writer._forget(1), pipeline(**again))[1]
        return pipeline(**given)

    reader._client.pipeline = later
    assert reader.get(SCOPE, contents(1)) == {block(1).content: [block(1)]}
    assert client(server).keys("*") == []


@pytest.mark.parametrize(
    "written", [{b"a": b"b"}, {b"a" * 16: b"short"}, {b"a" * 16: b"\0" * 8 + b"\xff"}, "text"]
)
def test_what_another_program_has_written_is_an_error(server, written):
    name = redis_store._PREFIX + SCOPE + block(1).content
    direct = client(server)
    direct.set(name, written) if written == "text" else direct.hset(name, mapping=written)
    with pytest.raises(StoreError, match="redis://a:1/0 cannot be read"):
        store(server).get(SCOPE, contents(1))
    if written == "text":
        with pytest.raises(StoreError, match="redis://a:1/0 cannot be written"):
            store(server).put(SCOPE, [block(1)])


def test_a_server_that_is_away_and_comes_back(server, caplog):
    """It costs one line in the log, and what was to be written meanwhile."""
    thread = StoreThread(lambda: store(server), again=0.0)
    thread.put(SCOPE, [block(1)])
    assert thread.wait(LONG)
    server.connected = False
    for _ in range(3):
        thread.put(SCOPE, [block(2)])
        question = thread.ask(SCOPE, contents(1))
        assert thread.wait(LONG)
        assert question.answer == [()]
        assert thread.fails
    server.connected = True
    thread.put(SCOPE, [block(3)])
    question = thread.ask(SCOPE, contents(1, 2, 3))
    assert thread.wait(LONG)
    assert question.answer == [[block(1)], (), [block(3)]]
    assert thread.dropped == 6
    thread.close(LONG)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "kvtxn.audit_store_failed" in line
    assert "redis://a:1/0" in line


def test_a_server_that_does_not_answer_is_left_after_a_moment(monkeypatch):
    monkeypatch.setattr(redis_store, "_WAIT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://anna:secret@127.0.0.1:{silent.getsockname()[1]}/3"
        found = store_url(url).open()
        with pytest.raises(StoreError, match=r"127\.0\.0\.1:\d+/3 cannot be read") as error:
            found.get(SCOPE, contents(1))
        found.close()
    assert "secret" not in f"{error.value!s} {store_url(url)!r}"
    found = store_url(url).open()
    with pytest.raises(StoreError, match=r"cannot be written; got ConnectionError: .*refused"):
        found.put(SCOPE, [block(1)])


@pytest.mark.parametrize("given", [
    "sqlite:///", "/data/a.db", "mysql://x", "", None, 3, "redis://", "redis:///0",
    "redis://h/a", "redis://h:port/0", "redis://h:99999", "redis://h/0#a", "redis://h?db=3",
    "redis://h?ssl_certfile=a", "rediss://h?socket_timeout=9", "rediss://h?ssl_certfile",
])  # fmt: skip
def test_urls_that_name_no_store(given):
    with pytest.raises(ConfigError, match=r"sqlite:///PATH.* or redis://HOST:PORT/DATABASE"):
        store_url(given)


def test_urls():
    assert str(store_url("sqlite:////data/a%20b.db").path) == "/data/a b.db"
    assert str(store_url("sqlite:///a.db").path) == "a.db"
    for url, where in (
        ("redis://h", "redis://h:6379/0"),
        ("redis://:p%40w@h:1234/", "redis://h:1234/0"),
        ("rediss://anna:secret@h/7?ssl_certfile=/c&ssl_keyfile=/k", "rediss://h:6379/7"),
    ):
        found = store_url(url)
        assert (found.where, found.path) == (where, None)
        found.open().close()


def test_no_error_has_a_password():
    with pytest.raises(ConfigError) as error:
        store_url("redis://anna:secret@h/words")
    assert "secret" not in str(error.value)


def test_a_server_needs_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setattr("kvtxn.audit.store_url.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtxn\[redis\]'"):
        store_url("redis://h")
    assert store_url("sqlite:///a.db").path is not None
