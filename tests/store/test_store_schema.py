from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from ppd_bench.core.errors import SchemaMismatch
from ppd_bench.core.record import RECORD_FIELDS
from ppd_bench.store.schema import (
    LABEL_COLUMNS,
    check_schema,
    points_of,
    record_schema,
    records_metadata,
)

FILE = Path("somewhere/records.parquet")


def with_metadata(schema: pa.Schema, **changes: str) -> pa.Schema:
    return schema.with_metadata({**records_metadata("sim", []), **changes})


def test_the_schema_has_the_record_fields_in_order_with_unit_and_meaning() -> None:
    schema = record_schema()
    assert tuple(schema.names) == RECORD_FIELDS
    assert schema.field("sent_s").metadata == {
        b"unit": b"s",
        b"meaning": b"instant the turn left the client, before any prefill",
    }
    assert all(field.metadata[b"meaning"] for field in schema)


@pytest.mark.parametrize(
    ("name", "kind", "nullable"),
    [
        ("point_id", pa.dictionary(pa.int32(), pa.string()), False),
        ("reason", pa.dictionary(pa.int32(), pa.string()), True),
        ("request_id", pa.string(), False),
        ("turn", pa.int32(), False),
        ("input_tokens", pa.int64(), False),
        ("transfer_bytes", pa.int64(), True),
        ("qps", pa.float64(), False),
        ("first_token_s", pa.float64(), True),
        ("itl_s", pa.list_(pa.field("element", pa.float32())), True),
    ],
)
def test_column_types_follow_from_hint_and_unit(name: str, kind: pa.DataType, nullable: bool) -> None:
    field = record_schema().field(name)
    assert field.type == kind
    assert field.nullable is nullable


def test_every_text_column_but_the_two_identifiers_is_a_label() -> None:
    texts = {f.name for f in record_schema() if pa.types.is_dictionary(f.type) or pa.types.is_string(f.type)}
    assert texts - LABEL_COLUMNS == {"request_id", "session_id"}
    assert texts >= LABEL_COLUMNS


def test_points_survive_the_metadata() -> None:
    schema = record_schema().with_metadata(records_metadata("sim", [("a", 3), ("b", 0)]))
    assert points_of(schema) == (("a", 3), ("b", 0))


def test_a_schema_of_ours_passes() -> None:
    check_schema(with_metadata(record_schema()), FILE)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (record_schema(), "not written by ppd-bench"),
        (with_metadata(record_schema(), kind="summaries"), "holds 'summaries', but 'records' is needed"),
        (with_metadata(record_schema(), schema_version="99"), "version 99, but this ppd-bench reads version"),
        (with_metadata(record_schema().remove(7)), "columns differ (session_id: string not null)"),
        (with_metadata(pa.schema(list(record_schema())[::-1])), "columns differ (order)"),
    ],
)  # fmt: skip
def test_a_foreign_schema_is_refused_with_the_file_and_the_reason(found: pa.Schema, words: str) -> None:
    with pytest.raises(SchemaMismatch) as refusal:
        check_schema(found, FILE)
    assert str(refusal.value).startswith(f"{FILE}: ")
    assert words in str(refusal.value)
