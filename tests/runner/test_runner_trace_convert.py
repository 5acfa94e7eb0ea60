"""``trace convert`` and ``trace anonymise``: nothing lost, nothing told, nothing half written."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.runner.trace_convert import anonymise_trace, convert_trace
from ppd_bench.runner.trace_describe import describe_trace
from ppd_bench.workload.traces import Trace, open_trace

SALT = b"sixteen bytes or more"


@pytest.fixture
def chat(tmp_path: Path) -> Trace:
    turns = [("human", "Where is the secret garden of my grandmother?"), ("gpt", "Behind the house in Kyoto. " * 9)] * 3
    entry = {"id": "grandmother-7", "conversations": [{"from": r, "value": v} for r, v in turns]}
    path = tmp_path / "private.json"
    path.write_text(json.dumps([entry, {**entry, "id": "other"}]))
    return open_trace(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "name", ["mooncake/synthetic_trace.jsonl", "agentic_code", "azure/AzureLLMInferenceTrace_code.csv"]
)
def test_public_traces_survive_the_way_there_and_back(name: str, suffix: str, shared: Path, tmp_path: Path) -> None:
    trace = open_trace(shared / "data" / name)
    converted = convert_trace(trace, tmp_path / f"out{suffix}")
    again = open_trace(converted.path)
    assert converted.n_rows == trace.counts.n_kept
    assert list(again.rows()) == list(trace.rows())
    assert again.format == trace.format


def test_converted_text_gives_the_same_description(chat: Trace, tmp_path: Path) -> None:
    converted = convert_trace(chat, tmp_path / "new/folder/out.parquet")
    assert describe_trace(open_trace(converted.path)).stats == describe_trace(chat).stats
    assert any("estimated" in note for note in open_trace(converted.path).notes)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_anonymous_trace_tells_neither_text_nor_names_nor_salt(suffix: str, chat: Trace, tmp_path: Path) -> None:
    out = anonymise_trace(chat, tmp_path / f"out{suffix}", SALT).path
    told = (
        out.read_bytes() if suffix == ".jsonl" else repr((pq.read_table(out).to_pylist(), pq.read_schema(out))).encode()
    )
    for secret in (
        b"grandmother",
        b"garden",
        b"Kyoto",
        b"private",
        SALT,
        *(str(i).encode() for i in next(chat.rows()).block_ids),
    ):
        assert secret not in told
    again = describe_trace(open_trace(out)).stats
    assert again == describe_trace(chat).stats


def test_one_salt_gives_one_result_and_another_salt_another(chat: Trace, tmp_path: Path) -> None:
    first, same, other = (
        anonymise_trace(chat, tmp_path / f"{i}.jsonl", salt).path.read_bytes()
        for i, salt in enumerate((SALT, SALT, SALT * 2))
    )
    assert first == same
    assert first != other


def test_a_weak_salt_and_an_unknown_ending_are_refused_and_leave_nothing(chat: Trace, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="16 to 64 bytes, not 5"):
        anonymise_trace(chat, tmp_path / "a.jsonl", b"short")
    with pytest.raises(SpecError, match=r"allowed: \.jsonl, \.parquet"):
        convert_trace(chat, tmp_path / "a.csv")
    assert [p.name for p in tmp_path.iterdir()] == ["private.json"]


def test_a_source_that_breaks_off_leaves_what_was_there(tmp_path: Path) -> None:
    path, out = tmp_path / "torn.json", tmp_path / "out.parquet"
    chat = '{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}'
    path.write_text(f"[{chat}, {chat}, {{")
    out.write_bytes(b"as before")
    with pytest.raises(SpecError, match="entry 3"):
        convert_trace(open_trace(path), out)
    assert out.read_bytes() == b"as before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.parquet", "torn.json"]
