from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import store_fabricated as fabricated

from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import Incomplete
from ppd_bench.store import merge, run_folder
from ppd_bench.store.manifest import read_manifest
from ppd_bench.store.read import read_records
from ppd_bench.store.run_folder import RunFolder


def n_segments(folder: Path) -> int:
    return len(list((folder / "segments").glob("*.parquet")))


def test_a_finished_run_is_two_files_and_says_complete(tmp_path: Path) -> None:
    fabricated.finished_run(tmp_path)
    visible = sorted(name for name in os.listdir(tmp_path) if name != ".lock")
    assert visible == ["manifest.json", "records.parquet"]
    assert read_manifest(tmp_path).state == "complete"


def test_rows_come_in_the_given_point_order_then_in_their_own(tmp_path: Path) -> None:
    order = ["point0002", "point0000", "point0001"]
    with fabricated.open_run(tmp_path, order) as run:
        for point_id in sorted(order):
            run.append(point_id, fabricated.columns(point_id, 2))
        run.finalise()
    expected = [f"{point_id}-{row}" for point_id in order for row in (0, 1)]
    assert read_records(tmp_path)["request_id"].tolist() == expected


def test_the_bytes_do_not_tell_in_which_order_or_cuts_points_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "ROW_GROUP_ROWS", 40)
    order = fabricated.ids(30)
    contents = set()
    for seed in range(4):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        shuffled = rng.sample(order, len(order)) if seed else order[::-1]
        while shuffled:
            with fabricated.open_run(folder, order) as run:
                for point_id in [shuffled.pop() for _ in range(min(len(shuffled), rng.randint(1, 9)))]:
                    run.append(point_id, fabricated.columns(point_id, int(point_id[-4:]) % 8))
        with fabricated.open_run(folder, order) as run:
            run.finalise()
        contents.add((folder / "records.parquet").read_bytes())
    assert len(contents) == 1
    # 0+1+...+7 = 28 rows per 8 points, so 30 points hold 3 * 28 + (0+1+2+3+4+5) = 99 rows.
    metadata = pq.read_metadata(tmp_path / "0/records.parquet")
    sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    assert sum(sizes) == 99
    assert max(sizes) <= 40
    assert len(sizes) == 3


def test_a_point_without_turns_is_finished_after_reopening(tmp_path: Path) -> None:
    with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
        run.append("point0000", fabricated.columns("point0000", 0))
    with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
        assert run.finished == {"point0000"}
        run.append("point0001", fabricated.columns("point0001", 0))
        run.finalise()
    assert len(read_records(tmp_path)) == 0
    with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
        assert run.finished == {"point0000", "point0001"}


def test_a_run_without_points_can_be_finished(tmp_path: Path) -> None:
    fabricated.finished_run(tmp_path, 0)
    assert len(read_records(tmp_path)) == 0


def test_append_writes_when_two_seconds_have_passed_since_the_last_write(tmp_path: Path) -> None:
    now_s = [100.0]
    with fabricated.open_run(tmp_path, fabricated.ids(4), clock=lambda: now_s[0]) as run:
        counts = []
        for point_id, step_s in zip(fabricated.ids(4), (1.9, 0.1, 1.9, 0.2), strict=True):
            now_s[0] += step_s
            run.append(point_id, fabricated.columns(point_id))
            counts.append(n_segments(tmp_path))
    assert counts == [0, 1, 1, 2]


def test_append_writes_when_enough_rows_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "FLUSH_ROWS", 8)
    with fabricated.open_run(tmp_path, fabricated.ids(3)) as run:
        run.append("point0000", fabricated.columns("point0000", 7))
        assert n_segments(tmp_path) == 0
        run.append("point0001", fabricated.columns("point0001", 1))
        assert n_segments(tmp_path) == 1


def test_leaving_the_folder_writes_what_is_buffered_even_after_an_interrupt(tmp_path: Path) -> None:
    def interrupted() -> None:
        with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
            run.append("point0001", fabricated.columns("point0001"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
        assert run.finished == {"point0001"}


def test_token_gaps_are_kept_when_given_and_cost_nothing_when_not(tmp_path: Path) -> None:
    columns = {**fabricated.columns("point0000", 2), "itl_s": [[0.25, 0.5], None]}
    with fabricated.open_run(tmp_path / "kept", fabricated.ids(1)) as run:
        run.append("point0000", columns)
        run.finalise()
    gaps = read_records(tmp_path / "kept")["itl_s"]
    assert gaps[0].tolist() == [0.25, 0.5]
    assert gaps[1] is None
    with fabricated.open_run(tmp_path / "none", fabricated.ids(1)) as run:
        run.append("point0000", fabricated.columns("point0000", 10_000))
        run.finalise()
    group = pq.read_metadata(tmp_path / "none/records.parquet").row_group(0)
    (gaps_column,) = [group.column(i) for i in range(group.num_columns) if "itl_s." in group.column(i).path_in_schema]
    assert gaps_column.total_compressed_size < 100


def test_nan_is_stored_as_missing(tmp_path: Path) -> None:
    with fabricated.open_run(tmp_path, fabricated.ids(1)) as run:
        run.append("point0000", {**fabricated.columns("point0000", 2), "first_token_s": [float("nan"), 1.5]})
        run.finalise()
    assert pq.read_table(tmp_path / "records.parquet")["first_token_s"].to_pylist() == [None, 1.5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"turn": None}, "missing or unknown columns: turn"),
        ({"ttft_s": [1.0, 1.0]}, "missing or unknown columns: ttft_s"),
        ({"turn": [1]}, "columns differ in length"),
        ({"point_id": ["point0000", "point0001"]}, "names another point or executor"),
        ({"executor": ["sim", "live"]}, "names another point or executor"),
        ({"turn": [1, None]}, "column turn has 1 nulls"),
        ({"turn": [1, "two"]}, "column turn"),
        ({"turn": [1, 2**40]}, "column turn"),
    ],
)
def test_columns_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    columns = {**fabricated.columns("point0000", 2), **changes}
    columns = {name: values for name, values in columns.items() if values is not None}

    def write() -> None:
        with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
            run.append("point0000", columns)

    with pytest.raises(ValueError, match=words):
        write()


def test_a_point_is_appended_once_and_must_belong_to_the_run(tmp_path: Path) -> None:
    with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
        run.append("point0000", fabricated.columns("point0000"))
        with pytest.raises(ValueError, match="appended before"):
            run.append("point0000", fabricated.columns("point0000"))
        with pytest.raises(ValueError, match="not one of this run's points"):
            run.append("point9999", fabricated.columns("point9999"))


def test_a_manifest_for_other_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="points_order"):
        RunFolder.open(tmp_path, manifest=fabricated.manifest(["a"]), points_order=["b"])
    with pytest.raises(ValueError, match="points_order"):
        RunFolder.open(tmp_path, manifest=fabricated.manifest(["a", "a"]), points_order=["a", "a"])


def test_finalising_with_missing_points_says_how_many(tmp_path: Path) -> None:
    with fabricated.open_run(tmp_path, fabricated.ids(3)) as run:
        run.append("point0000", fabricated.columns("point0000"))
        with pytest.raises(Incomplete, match="2 of 3 points have not run"):
            run.finalise()


def test_finalising_or_opening_a_finished_run_again_changes_no_byte(tmp_path: Path) -> None:
    fabricated.finished_run(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("records.parquet", "manifest.json")}
    with fabricated.open_run(tmp_path, fabricated.ids(3), created="later") as run:
        assert run.finished == set(fabricated.ids(3))
        assert run.notice == ""
        run.finalise()
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_a_live_run_says_so_in_manifest_and_parquet(tmp_path: Path) -> None:
    with fabricated.open_run(tmp_path, fabricated.ids(1), executor=Executor.LIVE) as run:
        run.append("point0000", fabricated.columns("point0000", executor="live"))
        run.finalise()
    assert read_manifest(tmp_path).executor is Executor.LIVE
    assert pq.read_schema(tmp_path / "records.parquet").metadata[b"executor"] == b"live"
