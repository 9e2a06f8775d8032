"""The pool of engines, with stand-ins for vLLM: one engine's failure is nobody else's."""

from __future__ import annotations

import mmap
import os
import queue
import subprocess
import sys
import threading
import time

import pytest
from engine_pool import LINES, WIDTH, EngineFailed, EnginePool, Turns, forget_segments


def behave(job, folder):
    """An engine that does what it is told."""
    print(f"starting {job}", flush=True)
    if job == "dies":
        os._exit(9)
    if job == "raises":
        sys.stderr.write(
            "(Worker pid=7) ERROR 01-02 03:04:05 [worker.py:6] ValueError: no weight\n"
        )
        sys.stderr.write("line of a traceback\n" * 100)
        raise RuntimeError("the engine failed to start\n" + "and here is why\n" * 100)
    if job == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child").write_text(str(child.pid))
        time.sleep(600)
    return {"done": job, "where": os.getcwd() == str(folder), "told": os.environ["TOLD"]}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A batch of which one engine dies, and one cannot start."""
    folder = tmp_path_factory.mktemp("engines")
    jobs = {name: name for name in ("first", "dies", "raises", "last")}
    work = {"work": "test_engine_pool:behave", "method": "spawn"}
    pool = EnginePool(
        jobs=jobs, folder=folder, count=2, seconds=600, environment={"TOLD": "yes"}, **work
    )
    yield pool
    pool.stop()


@pytest.mark.parametrize("name", ["first", "last"])
def test_the_others_report(pool, name):
    """Engines before and after one that fails."""
    assert pool.report(name) == {"done": name, "where": True, "told": "yes"}
    assert pool.finished(name)
    assert pool.log(name) == f"starting {name}\n"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dies", ["engine dies: its process ended with exit code 9", "starting dies"]),
        (
            "raises",
            [
                "engine raises: RuntimeError: the engine failed to start",
                "and here is why",
                "and here is why",
                "ValueError: no weight",
            ],
        ),
    ],
)
def test_one_that_fails_says_its_own_last_error(pool, name, says):
    """In a few lines, of its own log."""
    with pytest.raises(EngineFailed) as caught:
        pool.report(name)
    lines = str(caught.value).splitlines()
    assert lines == says
    assert len(lines) <= LINES
    assert all(len(line) <= WIDTH for line in lines)
    assert not pool.finished(name)


def test_all_come_to_an_end(pool):
    """Each one once, whatever became of it."""
    assert sorted(pool.as_they_end()) == ["dies", "first", "last", "raises"]


def test_one_that_hangs_is_ended_and_the_next_one_starts(tmp_path):
    """However far it came: a busy machine may not even have started its interpreter."""
    jobs = {"one": "hangs", "two": "hangs"}
    pool = EnginePool(
        "test_engine_pool:behave", jobs, tmp_path, count=1, seconds=0.5, method="spawn"
    )
    for name in jobs:
        with pytest.raises(EngineFailed, match=rf"^engine {name}: no report within 0\.5 s"):
            pool.report(name)
        assert not pool.finished(name)
    pool.stop()


def _lives(process):
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_gives_way_to_tests_that_compute():
    """A turn is left free until somebody waits; with one at a time there is none to leave."""
    for count, most in ((1, 1), (2, 1), (4, 3)):
        turns, began = Turns(count), queue.Queue()
        ends = threading.Event()

        def engine(turns=turns, began=began, ends=ends):
            with turns.turn():
                began.put(None)
                ends.wait(60)

        threads = [threading.Thread(target=engine) for _ in range(count + 1)]
        for thread in threads:
            thread.start()
        for _ in range(most):
            began.get(timeout=60)
        with pytest.raises(queue.Empty):
            began.get(timeout=0.2)
        with turns.waiting():
            for _ in range(count - most):
                began.get(timeout=60)
            with pytest.raises(queue.Empty):
                began.get(timeout=0.2)
        ends.set()
        for thread in threads:
            thread.join()
        assert began.get_nowait() is None  # the last one, once others had ended
        assert began.empty()


def test_a_pool_that_is_stopped_leaves_nothing(tmp_path):
    """Engines that run are ended with all that they started, those that wait never start."""
    jobs = {"one": "hangs", "two": "hangs"}
    pool = EnginePool(
        "test_engine_pool:behave", jobs, tmp_path, count=1, seconds=600, method="spawn"
    )
    until = time.monotonic() + 120
    while not ((path := tmp_path / "one" / "child").exists() and path.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    child = int(path.read_text())
    assert _lives(child)
    pool.stop()
    while _lives(child):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not (tmp_path / "two").exists()
    assert not pool.finished("one")


def test_shared_memory_that_nobody_has_mapped_goes(tmp_path):
    """What a killed rank left; what a rank has mapped, or may be about to map, stays."""
    paths = {name: tmp_path / f"{name}-tp:0-[0-1]-cpushm_0" for name in ("30001", "30002", "30003")}
    for path in paths.values():
        path.write_bytes(bytes(mmap.PAGESIZE))
    for name in ("30001", "30002"):
        os.utime(paths[name], (0, 0))
    other = tmp_path / "psm_0"
    other.touch()
    with paths["30002"].open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
        forget_segments(tmp_path)
    assert set(tmp_path.iterdir()) == {paths["30002"], paths["30003"], other}
