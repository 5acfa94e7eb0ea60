from __future__ import annotations

from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
import store_fabricated as fabricated
from test_store_damage import DAMAGES, damage

from ppd_bench.core.errors import Incomplete, SchemaMismatch, StoreError
from ppd_bench.store.frames import FrameMetadata, read_frame, write_frame
from ppd_bench.store.schema import SCHEMA_VERSION

UNITS = {"topology": "", "n_ok": "1", "ttft_mean_s": "s", "is_valid": "1", "ttft_p99_s": "s"}
FRAME = pd.DataFrame(
    {
        "topology": pd.Categorical(["4R", "1P_3D"]),
        "n_ok": [160, 0],
        "ttft_mean_s": [0.25, float("nan")],
        "is_valid": [True, False],
    }
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = fabricated.finished_run(tmp_path / "run") / "summaries.parquet"
    write_frame(path, FRAME, UNITS, "summaries", executor="sim")
    return path


def test_a_frame_reads_back_equal_with_kind_version_executor_and_units(file: Path) -> None:
    frame, metadata = read_frame(file, "summaries")
    pd.testing.assert_frame_equal(frame, FRAME)
    units = {name: UNITS[name] for name in FRAME.columns}
    assert metadata == FrameMetadata(kind="summaries", schema_version=SCHEMA_VERSION, executor="sim", units=units)
    assert pq.read_schema(file).field("ttft_mean_s").metadata[b"unit"] == b"s"


def test_a_missing_value_is_null_in_other_readers(file: Path) -> None:
    assert pl.read_parquet(file)["ttft_mean_s"].to_list() == [0.25, None]
    rows = duckdb.execute("select topology, ttft_mean_s from read_parquet(?)", [str(file)]).fetchall()
    assert rows == [("4R", 0.25), ("1P_3D", None)]


def test_equal_frames_give_equal_bytes(file: Path, tmp_path: Path) -> None:
    write_frame(tmp_path / "again.parquet", FRAME.copy(), UNITS, "summaries", executor="sim")
    assert (tmp_path / "again.parquet").read_bytes() == file.read_bytes()


def test_a_column_without_a_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="summaries: columns without a unit: is_valid, topology"):
        write_frame(tmp_path / "f", FRAME, {"n_ok": "1", "ttft_mean_s": "s"}, "summaries", executor="sim")


def test_another_kind_is_refused(file: Path) -> None:
    with pytest.raises(SchemaMismatch, match="holds 'summaries', but 'deltas' is needed"):
        read_frame(file, "deltas")


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "flipped in the footer"])
def test_a_damaged_frame_is_refused_with_the_way_to_rebuild_it(file: Path, kind: str) -> None:
    damage(file, kind)
    with pytest.raises(StoreError) as refusal:
        read_frame(file, "summaries")
    assert str(refusal.value).startswith(f"{file}: damaged or not Parquet (")
    assert "made anew from the records, and no point runs again" in str(refusal.value)


def test_what_is_missing_is_said(tmp_path: Path, file: Path) -> None:
    with pytest.raises(StoreError, match="no such run folder"):
        read_frame(tmp_path / "nothing/summaries.parquet", "summaries")
    with pytest.raises(StoreError, match="not a run folder"):
        read_frame(tmp_path / "summaries.parquet", "summaries")
    with pytest.raises(StoreError, match=r"deltas.parquet: missing; give the same"):
        read_frame(file.with_name("deltas.parquet"), "deltas")
    fabricated.write_points(tmp_path / "running", fabricated.ids(2), ["point0000"])
    with pytest.raises(Incomplete, match="not made yet, because the run is not finished"):
        read_frame(tmp_path / "running/summaries.parquet", "summaries")
