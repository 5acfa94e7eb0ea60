from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import store_fabricated as fabricated

from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import StoreError
from ppd_bench.store.frames import write_frame
from ppd_bench.store.manifest import read_manifest
from ppd_bench.store.read import read_records
from ppd_bench.store.resume import changed_keys

REPEATED = {"grid": {"qps": [4], "repeats": 2}, "seed": 0}


def refusal(folder: Path, order: list[str], **changes: Any) -> str:
    with pytest.raises(StoreError) as caught:
        fabricated.open_run(folder, order, **changes)
    return str(caught.value)


def test_the_same_spec_keeps_finished_points_without_a_word(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(3), ["point0001"])
    with fabricated.open_run(tmp_path, fabricated.ids(3)) as run:
        assert run.finished == {"point0001"}
        assert run.notice == ""


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_larger_spec_keeps_finished_points_and_says_so(tmp_path: Path, is_complete: bool) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(2), fabricated.ids(2))
    if is_complete:
        with fabricated.open_run(tmp_path, fabricated.ids(2)) as run:
            run.finalise()
    order = ["point0003", *fabricated.ids(3)]
    with fabricated.open_run(tmp_path, order, spec=REPEATED) as run:
        assert run.finished == set(fabricated.ids(2))
        assert "the spec changed (grid.repeats: 1 -> 2); all 2 finished points" in run.notice
        assert "4 points now (2 before)" in run.notice
        assert read_manifest(tmp_path).state == "running"
        for point_id in ("point0002", "point0003"):
            run.append(point_id, fabricated.columns(point_id))
        run.finalise()
    with fabricated.open_run(tmp_path / "whole", order, spec=REPEATED) as run:
        for point_id in order:
            run.append(point_id, fabricated.columns(point_id))
        run.finalise()
    assert (tmp_path / "records.parquet").read_bytes() == (tmp_path / "whole/records.parquet").read_bytes()
    assert read_manifest(tmp_path) == read_manifest(tmp_path / "whole")


def test_adding_points_to_a_finished_run_removes_stale_summaries(tmp_path: Path) -> None:
    fabricated.finished_run(tmp_path, 2)
    write_frame(tmp_path / "summaries.parquet", pd.DataFrame({"n": [2]}), {"n": "1"}, "summaries", executor="sim")
    with fabricated.open_run(tmp_path, fabricated.ids(2)):
        assert (tmp_path / "summaries.parquet").exists()
    with fabricated.open_run(tmp_path, fabricated.ids(3), spec=REPEATED):
        assert not (tmp_path / "summaries.parquet").exists()


def test_the_same_points_in_another_order_are_merged_anew(tmp_path: Path) -> None:
    fabricated.finished_run(tmp_path, 2)
    with fabricated.open_run(tmp_path, fabricated.ids(2)[::-1]) as run:
        run.finalise()
    assert read_records(tmp_path, columns=["point_id"])["point_id"].tolist() == ["point0001"] * 4 + ["point0000"] * 4


def test_a_spec_without_a_finished_point_is_refused_and_names_the_changed_keys(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(2), ["point0001"])
    message = refusal(tmp_path, ["point0000", "point0007"], spec={"grid": {"qps": [8]}, "seed": 0, "new": "a"})
    assert message.startswith(f"{tmp_path}: changed spec under the same name: 1 of the 1 finished points are not in")
    assert 'Changed: grid.qps: [4] -> [8]; grid.repeats: 1 -> (absent); new: (absent) -> "a".' in message
    assert "Use another --out or --name, or delete the folder" in message


def test_points_that_changed_with_the_program_are_refused_by_version(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(1), fabricated.ids(1))
    message = refusal(tmp_path, ["point0007"], versions={"ppd_bench": "0.2.0", "numpy": "2.0"})
    assert 'nothing in the spec, but versions (ppd_bench: "0.1.0" -> "0.2.0")' in message


def test_dropping_points_that_never_ran_is_allowed(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(3), ["point0001"])
    with fabricated.open_run(tmp_path, ["point0001"], spec={"grid": {"qps": [2]}}) as run:
        run.finalise()
    assert len(read_records(tmp_path)) == 4


def test_another_executor_is_refused(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(1), [])
    message = refusal(tmp_path, fabricated.ids(1), executor=Executor.LIVE)
    assert "holds a simulated run (executor sim), but this one would be measured (executor live)" in message
    assert "--name" in message


def test_a_folder_that_holds_something_else_is_never_adopted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    message = refusal(tmp_path, fabricated.ids(1))
    assert "not a run folder (manifest.json is missing) and not empty (it holds thesis.tex)" in message
    assert not (tmp_path / "manifest.json").exists()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'}: cannot create the folder" in refusal(tmp_path / "file", fabricated.ids(1))


def test_a_refused_folder_is_not_left_locked(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(1), [])
    refusal(tmp_path, fabricated.ids(1), executor=Executor.LIVE)
    with fabricated.open_run(tmp_path, fabricated.ids(1)) as run:
        assert run.finished == frozenset()


def test_a_resume_in_another_environment_is_noticed_and_kept_in_the_manifest(tmp_path: Path) -> None:
    fabricated.write_points(tmp_path, fabricated.ids(2), ["point0000"])
    newer = {"ppd_bench": "0.1.0", "numpy": "2.1"}
    for _ in range(2):
        with fabricated.open_run(tmp_path, fabricated.ids(2), versions=newer, created="later") as run:
            assert 'another environment (versions.numpy: "2.0" -> "2.1")' in run.notice
    manifest = read_manifest(tmp_path)
    assert manifest.versions["numpy"] == "2.0"
    assert manifest.created == "2026-01-02T03:04:05Z"
    assert manifest.resumed == [{"created": "later", "versions": newer, "machine": {"cpus": 2}}]


def test_changed_keys_are_leaves_with_old_and_new_value_and_long_values_are_cut() -> None:
    old = {"a": {"b": 1, "c": {}}, "same": [1]}
    new = {"a": {"b": 1.5, "c": {}, "d": None}, "same": [1], "long": "x" * 200}
    cut = f'"{"x" * 96}...'
    assert changed_keys(old, new) == ["a.b: 1 -> 1.5", "a.d: (absent) -> null", f"long: (absent) -> {cut}"]
    assert changed_keys({"a": "x" * 200}, {"a": "x" * 201}) == [f"a: {cut} -> {cut}"]
