from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import store_fabricated as fabricated

from ppd_bench.core.errors import StoreError
from ppd_bench.store import atomic
from ppd_bench.store.read import read_records


def test_an_exception_in_the_body_leaves_the_old_file_and_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "file"
    atomic.write_bytes(file, b"old")

    def write_half() -> None:
        with atomic.replacing(file) as stream:
            stream.write(b"ne")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_digests_of_a_file_and_of_its_bytes_agree(tmp_path: Path) -> None:
    atomic.write_bytes(tmp_path / "file", b"abc")
    # The well-known SHA-256 of "abc".
    assert atomic.file_digest(tmp_path / "file") == atomic.bytes_digest(b"abc") == "ba7816bf8f01cfea"


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.json.123.tmp", "b.tmp", ".hidden"):
        (tmp_path / name).touch()
    atomic.remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "b.tmp"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full; free some space, then give the same command again"),
        (errno.EDQUOT, "your disk quota is used up; free some space"),
        (errno.EROFS, "the file system is read-only; check its permissions, or choose another folder"),
        (errno.EACCES, "permission denied; check its permissions"),
        (errno.EIO, "Input/output error; check the disk"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_os_error_becomes_a_sentence_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: str
) -> None:
    atomic.write_bytes(tmp_path / "file", b"old")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError) as refusal:
        atomic.write_bytes(tmp_path / "file", b"new")
    assert str(refusal.value).startswith(f"{tmp_path / 'file'}: cannot write: {words}")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("n_written", [0, 1])
def test_a_disk_that_fills_up_keeps_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_written: int
) -> None:
    order = fabricated.ids(2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill_the_disk() -> None:
        with fabricated.open_run(tmp_path, order) as run:
            for index, point_id in enumerate(order):
                run.append(point_id, fabricated.columns(point_id))
                if index >= n_written:
                    monkeypatch.setattr(os, "fsync", full)
                run.flush()

    with pytest.raises(StoreError, match="the disk is full"):
        fill_the_disk()
    monkeypatch.undo()
    with fabricated.open_run(tmp_path, order) as run:
        assert run.finished == set(order[:n_written])
        for point_id in order[n_written:]:
            run.append(point_id, fabricated.columns(point_id))
        run.finalise()
    assert len(read_records(tmp_path)) == 8


def test_a_full_disk_while_merging_keeps_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(2), fabricated.ids(2))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(StoreError, match=r"records.parquet: cannot write: the disk is full"):
            run.finalise()
        monkeypatch.undo()
        run.finalise()
    assert len(read_records(tmp_path)) == 8
