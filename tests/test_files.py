"""Files are whole or not there, their user's alone, and say what they are."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from devstream import _files
from devstream.exceptions import CacheWarning, FileFormatError

KIND, SCHEMA = "devstream.test", 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.json"


def test_what_was_written_is_read_again(path: Path) -> None:
    _files.write_json(path, {"rate": 1.5, "names": ["a"]}, kind=KIND, schema=SCHEMA)
    document = _files.read_json(path, kind=KIND, schema=SCHEMA)
    assert document == {"kind": KIND, "schema": SCHEMA, "rate": 1.5, "names": ["a"]}
    assert _files.read_cache(path, kind=KIND, schema=SCHEMA) == document


def test_only_the_user_can_read_it(path: Path) -> None:
    _files.write_json(path, {}, kind=KIND, schema=SCHEMA)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


BAD: dict[str, bytes] = {
    "half-written": b'{"kind": "devstream.test", "schema": 3, "ra',
    "empty": b"",
    "no text": b"\xff\xfe\x00\x80",
    "no object": b"[1, 2]",
    "of another kind": b'{"kind": "devstream.other", "schema": 3}',
    "of another schema": b'{"kind": "devstream.test", "schema": 4}',
    "somebody else's": b'{"version": 1}',
    "too deep": b"[" * 200_000,
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_an_error_for_who_named_it(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"file\.json can't be used"):
        _files.read_json(path, kind=KIND, schema=SCHEMA)


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_bad_cache_is_one_warning_and_counts_as_absent(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.warns(CacheWarning, match=r"file\.json") as caught:
        assert _files.read_cache(path, kind=KIND, schema=SCHEMA) is None
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_missing_file_is_an_error_for_who_named_it_and_none_for_a_cache(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _files.read_json(path, kind=KIND, schema=SCHEMA)
    assert _files.read_cache(path, kind=KIND, schema=SCHEMA) is None


def test_a_cache_that_cannot_be_read_is_one_warning(path: Path) -> None:
    path.mkdir()  # also root can't read a folder as a file
    with pytest.warns(CacheWarning, match="directory"):
        assert _files.read_cache(path, kind=KIND, schema=SCHEMA) is None


def test_a_cache_without_permission_is_one_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("{}")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.warns(CacheWarning, match="Permission denied"):
        assert _files.read_cache(path, kind=KIND, schema=SCHEMA) is None


def test_a_cache_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    with pytest.warns(CacheWarning, match="can't be written"):
        _files.write_cache(tmp_path / "file" / "cache.json", {}, kind=KIND, schema=SCHEMA)


def test_the_cache_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "cache.json"
    _files.write_cache(path, {"a": 1}, kind=KIND, schema=SCHEMA)
    assert json.loads(path.read_text())["a"] == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError], ids=["Ctrl-C", "a full disk"])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    _files.write_json(path, {"old": True}, kind=KIND, schema=SCHEMA)

    def stop(handle: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(error):
        _files.write_json(path, {"old": False}, kind=KIND, schema=SCHEMA)
    assert json.loads(path.read_text())["old"] is True
    assert os.listdir(path.parent) == ["file.json"]


@pytest.mark.parametrize(("value", "error"), [(float("nan"), ValueError), (object(), TypeError)])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(
    path: Path, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        _files.write_json(path, {"value": value}, kind=KIND, schema=SCHEMA)
    assert not path.exists()


def test_the_cache_folder_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _files.cache_dir() == tmp_path / "devstream"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert _files.cache_dir() == tmp_path / ".cache" / "devstream"
