from __future__ import annotations

from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pytest
import store_fabricated as fabricated

from ppd_bench.core.errors import Incomplete, StoreError
from ppd_bench.core.record import RECORD_FIELDS
from ppd_bench.store.read import read_records

BYTES = [2**40, None, 2**40 + 2, None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fabricated.finished_run(tmp_path_factory.mktemp("store") / "qps=9")


def test_records_have_all_columns_with_labels_as_categories_and_nan_where_missing(run: Path) -> None:
    records = read_records(run)
    assert tuple(records.columns) == RECORD_FIELDS
    assert len(records) == 12
    assert records["route"].dtype == "category"
    assert records["route"].tolist() == ["pd", "local"] * 6
    assert records["prefill_worker"].isna().tolist() == [False, True] * 6
    assert records["transfer_bytes"].dtype == "float64"
    assert records["transfer_bytes"].fillna(-1).tolist() == [2**40, -1, 2**40 + 2, -1] * 3
    assert records["input_tokens"].dtype == "int64"
    assert records["turn"].dtype == "int32"
    # The folder is named qps=9: a hive-like name must not become a column.
    assert records["qps"].tolist() == [4.0] * 12


def test_types_do_not_depend_on_whether_a_value_is_missing(run: Path) -> None:
    some, none = read_records(run), read_records(run, point_ids=[])
    assert len(none) == 0
    labels = some.columns[some.dtypes == "category"]
    assert some.dtypes.drop(labels).equals(none.dtypes.drop(labels))
    assert (none.dtypes[labels] == "category").all()


def test_columns_and_points_can_be_chosen(run: Path) -> None:
    records = read_records(run, columns=["status", "request_id"], point_ids={"point0001"})
    assert list(records.columns) == ["status", "request_id"]
    assert records["request_id"].tolist() == [f"point0001-{row}" for row in range(4)]


def test_records_can_be_changed_in_place(run: Path) -> None:
    records = read_records(run)
    records.loc[0, "sent_s"] = 7.0
    assert records["sent_s"].iloc[0] == 7.0


def test_unknown_columns_are_named(run: Path) -> None:
    with pytest.raises(StoreError, match="records have no column ttft_s; they have point_id"):
        read_records(run, columns=["ttft_s"])


def test_pandas_reads_records_without_help(run: Path) -> None:
    frame = pd.read_parquet(run / "records.parquet", partitioning=None)
    assert frame["topology"].tolist() == ["1P_2D"] * 12
    assert frame["transfer_bytes"].isna().sum() == 6


def test_duckdb_reads_records_without_help(run: Path) -> None:
    query = "select point_id, route, transfer_bytes, itl_s from read_parquet(?, hive_partitioning = false) limit 4"
    rows = duckdb.execute(query, [str(run / "records.parquet")]).fetchall()
    assert rows == [("point0000", ("pd", "local")[row % 2], BYTES[row], None) for row in range(4)]


def test_polars_reads_records_without_help(run: Path) -> None:
    frame = pl.read_parquet(run / "records.parquet", hive_partitioning=False)
    assert frame["route"].cast(pl.String).to_list() == ["pd", "local"] * 6
    assert frame["transfer_bytes"].to_list() == BYTES * 3
    assert frame["itl_s"].null_count() == 12


def test_segments_read_like_records_when_all_points_are_there(tmp_path: Path, run: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(3), fabricated.ids(3))
    pd.testing.assert_frame_equal(read_records(tmp_path), read_records(run))


def test_an_unfinished_run_says_how_many_points_of_how_many(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(3), ["point0001"])
    with pytest.raises(Incomplete) as refusal:
        read_records(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path}: 1 of 3 points are finished; give the same `ppd-bench sweep`")
    assert len(read_records(tmp_path, allow_incomplete=True)) == 4
    assert len(read_records(tmp_path, point_ids=["point0001"])) == 4
    with pytest.raises(Incomplete, match=r"1 of the 2 points asked for are not there \(such as point0002\)"):
        read_records(tmp_path, point_ids=["point0001", "point0002"])


def test_a_missing_folder_and_a_strange_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such run folder"):
        read_records(tmp_path / "nothing")
    with pytest.raises(StoreError, match="not a run folder"):
        read_records(tmp_path)
