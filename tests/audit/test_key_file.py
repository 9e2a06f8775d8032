"""A key that several processes share by a file."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtxn import ConfigError
from kvtxn.audit.key_file import key_from_file


def test_the_first_writes_it_and_all_have_it(tmp_path):
    path = tmp_path / "key"
    with ThreadPoolExecutor(8) as pool:
        keys = [*pool.map(key_from_file, [path] * 32)]
    assert set(keys) == {key_from_file(str(path))}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [*tmp_path.iterdir()] == [path]
    assert key_from_file(tmp_path / "another") != keys[0]


def test_a_key_of_several_machines_is_not_written(tmp_path):
    """Each machine would write another one."""
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="has no key"):
        key_from_file(path, may_write=False)
    assert not path.exists()
    assert key_from_file(path) == key_from_file(path, may_write=False)


@pytest.mark.parametrize("content", [
    b"", b"not json", b"[1, 2]", b'{"kvtxn audit key": ["1", "2", "3"]}',
    b'{"kvtxn audit key": [1, 2, 3, 4]}', b'{"kvtxn audit key": ["x", "2", "3", "4"]}', b"\xff\xfe",
    b'{"kvtxn audit key": ["1", "2", "3", "1ffffffffffffffff"]}', b"null",
    b"[" * 4000,
])  # fmt: skip
def test_a_file_without_a_key_stays_as_it_is(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="has no key"):
        key_from_file(path)
    assert path.read_bytes() == content


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="in a folder that exists"):
        key_from_file(tmp_path / "no folder" / "key")


def test_a_path_that_no_file_can_have(tmp_path):
    with pytest.raises(ConfigError, match="has no key"):
        key_from_file(tmp_path / "a\0b")
