"""Our own forms, for any rows at all: what is written is what is read, in JSON lines and in Parquet, in one row group or many."""

from __future__ import annotations

import io
from array import array
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces import open_trace, writer
from ppd_bench.workload.traces.own import PARQUET_SCHEMA, format_of, header
from ppd_bench.workload.traces.writer import OwnForm, write_rows

FORM = TraceFormat(
    name="mooncake",
    time_unit="ms",
    block_tokens=512,
    tail="ceil",
    id_scope="global",
    row_means="full_prompt",
    loop="timestamps",
    token_count="recorded",
)
FORMS: tuple[OwnForm, ...] = ("jsonl", "parquet")
SECONDS = st.none() | st.floats(0, 1e12)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ROWS = st.builds(
    TraceRow,
    row=st.integers(0, 2**62),
    request_id=NAMES,
    session_id=st.none() | NAMES,
    turn=st.none() | st.integers(1, 2**31 - 1),
    arrival_s=SECONDS,
    delay_s=SECONDS,
    prompt_tokens=st.integers(1, 2**62),
    output_tokens=st.integers(0, 2**62),
    block_ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda ids: array("q", ids)),
    parent_id=st.none() | NAMES,
)


def write(path: Path, form: OwnForm, rows: list[TraceRow], notes: list[str]) -> int:
    with open(path, "wb") as file:
        return write_rows(file, form, FORM, iter(rows), notes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROWS, min_size=1, max_size=12), notes=st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_any_row_comes_back_as_it_was(rows: list[TraceRow], notes: list[str], tmp_path: Path) -> None:
    for form in FORMS:
        path = tmp_path / f"t.{form}"
        assert write(path, form, rows, notes) == len(rows)
        trace = open_trace(path)
        assert list(trace.rows()) == rows
        assert (trace.format, trace.standing_notes) == (FORM, tuple(notes))


@pytest.mark.parametrize("form", FORMS)
def test_pieces_of_any_size_make_one_trace(form: OwnForm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [TraceRow(i, f"r{i}", None, None, float(i), None, 5, 1, array("q", range(i % 4))) for i in range(50)]
    for group_rows, group_ids, n_bytes in product((1, 7, 100), (2, 100), (1, 10_000)):
        monkeypatch.setattr(writer, "GROUP_ROWS", group_rows)
        monkeypatch.setattr(writer, "GROUP_IDS", group_ids)
        monkeypatch.setattr(writer, "JSONL_BYTES", n_bytes)
        path = tmp_path / f"t.{form}"
        assert write(path, form, rows, []) == 50
        assert list(open_trace(path).rows()) == rows


def test_every_format_has_a_header_that_reads_back() -> None:
    declared, notes = format_of(header(FORM, ["a note"]), "file")
    assert (declared, notes) == (FORM, ("a note",))


def test_the_columns_of_parquet_are_the_fields_of_a_row_with_units() -> None:
    assert set(PARQUET_SCHEMA.names) == set(TraceRow._fields)
    for field in PARQUET_SCHEMA:
        unit = {"s": "s", "tokens": "tokens"}.get(field.name.rsplit("_", 1)[-1])
        assert unit is None or field.metadata[b"unit"].decode() == unit


def test_a_flipped_byte_of_parquet_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write(
        path,
        "parquet",
        [TraceRow(i, f"r{i}", "s", i + 1, None, None, 5, 1, array("q", range(200))) for i in range(300)],
        [],
    )
    data = bytearray(path.read_bytes())
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(PARQUET_SCHEMA.names.index("block_ids"))
    data[column.data_page_offset + 60] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(SpecError, match="damaged"):
        list(open_trace(path).rows())
