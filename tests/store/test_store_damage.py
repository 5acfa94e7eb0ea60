from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import store_fabricated as fabricated
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_bench.core.errors import StoreError
from ppd_bench.store.read import read_records
from ppd_bench.store.segments import verified

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "flipped in a page": lambda data: flipped(data, 40),
    "flipped in the footer": lambda data: flipped(data, len(data) - 200),
    "not Parquet": lambda data: b"hello" * 100,
}


def flipped(data: bytes, position: int, bit: int = 0) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def damage(file: Path, kind: str) -> None:
    file.write_bytes(DAMAGES[kind](file.read_bytes()))


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").glob("*.parquet"))


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_segment_is_set_aside_and_its_points_run_again(tmp_path: Path, kind: str) -> None:
    order = fabricated.ids(3)
    fabricated.write_points(tmp_path, order, order[:2])
    victim = segments(tmp_path)[0]
    damage(victim, kind)
    with fabricated.open_run(tmp_path, order) as run:
        assert run.finished == {"point0001"}
        assert run.notice.startswith(f"{victim}: damaged (its content does not fit its checksum)")
        assert run.notice.endswith(f"renamed to {victim.name}.damaged, and its points run again")
        for point_id in ("point0000", "point0002"):
            run.append(point_id, fabricated.columns(point_id))
        run.finalise()
    fabricated.finished_run(tmp_path / "whole")
    assert (tmp_path / "records.parquet").read_bytes() == (tmp_path / "whole/records.parquet").read_bytes()


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_records_are_refused_until_deleted(tmp_path: Path, kind: str) -> None:
    fabricated.finished_run(tmp_path)
    records = tmp_path / "records.parquet"
    damage(records, kind)
    for access in (lambda: read_records(tmp_path), lambda: fabricated.open_run(tmp_path, fabricated.ids(3))):
        with pytest.raises(StoreError) as refusal:
            access()
        assert str(refusal.value).startswith(f"{records}: damaged (its content does not fit its checksum)")
        assert "restore it from a copy, or delete it and give the same `ppd-bench sweep` command" in str(refusal.value)
    records.unlink()
    with fabricated.open_run(tmp_path, fabricated.ids(3)) as run:
        assert run.finished == frozenset()
        assert "points run again" not in run.notice


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    fabricated.write_points(folder, fabricated.ids(1), fabricated.ids(1))
    return segments(folder)[0]


@settings(deadline=None)
@given(share=st.floats(0, 1), bit=st.integers(0, 7))
def test_no_flipped_bit_anywhere_in_a_segment_goes_unseen(segment: Path, share: float, bit: int) -> None:
    content = segment.read_bytes()
    victim = segment.with_suffix(".flipped")
    digest = segment.stem.partition("-")[2]
    assert verified(segment, digest, "").points == (("point0000", 4),)
    victim.write_bytes(flipped(content, round(share * (len(content) - 1)), bit))
    with pytest.raises(StoreError, match="does not fit its checksum"):
        verified(victim, digest, "")


def test_reading_a_running_run_with_a_damaged_segment_names_it_and_changes_nothing(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(2), fabricated.ids(2))
    victim = segments(tmp_path)[1]
    damage(victim, "truncated")
    with pytest.raises(StoreError, match=r"damaged .* it sets this file aside and runs its points again"):
        read_records(tmp_path)
    assert victim.exists()


def test_a_segment_damaged_while_the_run_is_open_is_found_when_merging(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(2), fabricated.ids(2))
    with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
        damage(segments(tmp_path)[0], "flipped in a page")
        with pytest.raises(StoreError, match="damaged"):
            run.finalise()
    assert not (tmp_path / "records.parquet").exists()
