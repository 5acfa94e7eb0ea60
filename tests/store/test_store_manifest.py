from __future__ import annotations

import json
from pathlib import Path

import pytest
import store_fabricated as fabricated

from ppd_bench.core.errors import SchemaMismatch, StoreError
from ppd_bench.store.manifest import installed_versions, read_manifest, write_manifest


def test_a_manifest_reads_back_equal_and_has_sorted_keys(tmp_path: Path) -> None:
    manifest = fabricated.manifest(["b", "a"], spec={"z": (1, 2), "a": None})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    keys = list(json.loads((tmp_path / "manifest.json").read_text()))
    assert keys == sorted(keys)
    assert manifest.n_points == 2
    assert manifest.spec == {"z": [1, 2], "a": None}


def test_the_points_hash_depends_on_the_order() -> None:
    assert fabricated.manifest(["a", "b"]).points_hash != fabricated.manifest(["b", "a"]).points_hash


def test_installed_versions_name_what_can_change_a_number() -> None:
    assert set(installed_versions()) == {"ppd_bench", "python", "numpy", "pandas", "pyarrow", "scipy"}


def test_a_missing_folder_and_a_strange_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such run folder"):
        read_manifest(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"not a run folder \(manifest.json is missing\)"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: "", "it is not JSON"),
        (lambda text: text[: len(text) // 2], "it is not JSON"),
        (lambda text: "\xff" * 8, "it is not JSON"),
        (lambda text: "[]", "it has no schema_version"),
        (lambda text: text.replace('"seed"', '"sead"', 1), "missing or unknown keys: sead"),
        (lambda text: text.replace('"repeats": 1', '"repeats": 2'), "its spec does not fit its hash"),
        (lambda text: text.replace('"running"', '"ruining"'), "unknown state 'ruining'"),
        (lambda text: text.replace('"executor": "sim"', '"executor": "sum"'), "'sum' is not a valid Executor"),
    ],
)
def test_a_damaged_manifest_is_refused_with_advice(tmp_path: Path, damage: object, words: str) -> None:
    spec = {"grid": {"repeats": 1}}
    write_manifest(tmp_path, fabricated.manifest(["a"], spec=spec))
    file = tmp_path / "manifest.json"
    file.write_text(damage(file.read_text()), encoding="latin-1")  # type: ignore[operator]
    with pytest.raises(StoreError) as refusal:
        read_manifest(tmp_path)
    assert f"{file}: damaged ({words}" in str(refusal.value)
    assert f"delete the folder {tmp_path}" in str(refusal.value)


def test_a_manifest_of_another_schema_version_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, fabricated.manifest(["a"]))
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    with pytest.raises(SchemaMismatch, match="schema version 7"):
        read_manifest(tmp_path)
