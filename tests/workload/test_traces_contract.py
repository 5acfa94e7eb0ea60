"""What holds for every reader: rows are accounted for, turns count up, time goes on, ids follow the tail rule and are chained."""

from __future__ import annotations

from pathlib import Path

import pytest
from trace_files import MAKERS, Made

from ppd_bench.core.trace import TraceRow
from ppd_bench.workload.traces import READERS, Trace, open_trace
from ppd_bench.workload.traces.anonymise import anonymous_rows
from ppd_bench.workload.traces.values import n_blocks
from ppd_bench.workload.traces.writer import write_rows

OWN = ("ppd_jsonl", "ppd_parquet")
SHARED_DATA = (
    "mooncake/conversation_trace.jsonl",
    "mooncake/synthetic_trace.jsonl",
    "agentic_code",
    "azure/AzureLLMInferenceTrace_code.csv",
    "azure/AzureLLMInferenceTrace_conv.csv",
    "chat/sharegpt_conv_128.json",
    "chat/dialogstudio_ShareGPT_original_example.json",
    "chat/fastchat_dummy_conversation.json",
    "chat/mt_bench_question.jsonl",
    "agent_sessions/kernel_sessions.replay.jsonl",
    "agent_sessions/miniswe",
)


def written(trace: Trace, path: Path) -> Path:
    with open(path, "wb") as file:
        write_rows(
            file, "parquet" if path.suffix == ".parquet" else "jsonl", trace.format, trace.rows(), trace.standing_notes
        )
    return path


@pytest.fixture(params=[*MAKERS, *OWN])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A small file of every format; of our own forms, one written from another."""
    if request.param not in OWN:
        return MAKERS[request.param](tmp_path)
    trace = open_trace(MAKERS["agentic_code"](tmp_path).path)
    suffix = ".parquet" if request.param == "ppd_parquet" else ".jsonl"
    return Made(written(trace, tmp_path / f"own{suffix}"), trace.counts.n_kept, {})


def check_contract(trace: Trace) -> list[TraceRow]:
    assert (trace.counts.n_read, trace.notes) == (0, list(trace.standing_notes)), "nothing is counted before a pass"
    rows = list(trace.rows())
    counts, notes = trace.counts, trace.notes
    assert counts.n_kept == len(rows) > 0
    assert counts.n_read == counts.n_kept + counts.n_dropped
    assert len({row.row for row in rows}) == len({row.request_id for row in rows}) == len(rows)
    assert list(trace.rows()) == rows
    assert trace.counts == counts
    assert trace.notes == notes
    for row in rows:
        assert row.prompt_tokens > 0
        assert row.output_tokens >= 0
        assert row.arrival_s is None or row.arrival_s >= 0
        assert row.delay_s is None or row.delay_s >= 0
        assert (row.session_id is None) == (row.turn is None)
    check_sessions(rows)
    check_blocks(trace, rows)
    return rows


def check_sessions(rows: list[TraceRow]) -> None:
    """Turns are 1, 2, 3 ... and none arrives before the one before it; a parent is a request of another session, read before."""
    turns: dict[str, int] = {}
    latest: dict[str, float] = {}
    session_of: dict[str, str | None] = {}
    for row in rows:
        if row.session_id is not None:
            assert row.turn == turns.get(row.session_id, 0) + 1, row
            turns[row.session_id] = row.turn
            if row.arrival_s is not None:
                assert row.arrival_s >= latest.get(row.session_id, 0.0), row
                latest[row.session_id] = row.arrival_s
        if row.parent_id is not None:
            assert row.turn == 1
            assert session_of[row.parent_id] != row.session_id
        session_of[row.request_id] = row.session_id


def check_blocks(trace: Trace, rows: list[TraceRow]) -> None:
    """As many ids as the tail rule says, 64 bits each, and an id stands for its whole prefix."""
    before: dict[int, int | None] = {}
    for row in rows:
        if trace.format.block_tokens is None:
            assert not len(row.block_ids)
            continue
        assert len(row.block_ids) == n_blocks(row.prompt_tokens, trace.format.block_tokens, trace.format.tail or ""), (
            row
        )
        previous = None
        for block_id in row.block_ids:
            assert -(2**63) <= block_id < 2**63
            assert before.setdefault(block_id, previous) == previous, row
            previous = block_id


def test_every_reader_has_a_file_here() -> None:
    assert {name.split()[0] for name in MAKERS} | set(OWN) == set(READERS)
    assert all(name == reader.name for name, reader in READERS.items())


def test_every_reader_keeps_the_contract(made: Made) -> None:
    check_contract(open_trace(made.path))


def test_every_row_is_kept_or_dropped_by_name(made: Made) -> None:
    trace = open_trace(made.path)
    for _ in trace.rows():
        pass
    assert trace.counts.dropped == made.dropped
    assert trace.counts.n_kept == made.n_kept
    for reason, n in made.dropped.items():
        assert any(note.startswith(f"{n:,} x dropped: {reason} (first at {made.path}") for note in trace.notes), reason


def test_the_format_of_a_file_is_detected(made: Made) -> None:
    name = open_trace(made.path).format.name
    assert open_trace(made.path, format=None if made.path.stem == "own" else name).format.name == name


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_our_own_forms_lose_nothing(made: Made, suffix: str, tmp_path: Path) -> None:
    trace = open_trace(made.path)
    again = open_trace(written(trace, tmp_path / f"again{suffix}"))
    assert list(again.rows()) == list(trace.rows())
    assert again.format == trace.format
    assert again.standing_notes == trace.standing_notes


def test_salted_ids_keep_lengths_times_sessions_and_sharing(made: Made) -> None:
    rows = list(open_trace(made.path).rows())
    hidden = list(anonymous_rows(rows, b"0123456789abcdef"))
    assert [(r.row, r.turn, *r[4:8], len(r.block_ids)) for r in hidden] == [
        (r.row, r.turn, *r[4:8], len(r.block_ids)) for r in rows
    ]
    for of in (lambda r: r.session_id, lambda r: r.request_id, lambda r: r.parent_id):
        pairs = {(of(a), of(b)) for a, b in zip(rows, hidden, strict=True)}
        assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)
        assert all((a is None) == (b is None) and (a is None or a != b) for a, b in pairs)
    ids = {(a, b) for r, h in zip(rows, hidden, strict=True) for a, b in zip(r.block_ids, h.block_ids, strict=True)}
    assert len({a for a, _ in ids}) == len({b for _, b in ids}) == len(ids)
    assert all(a != b for a, b in ids)


@pytest.mark.parametrize("name", SHARED_DATA)
def test_public_data_keeps_the_contract_and_loses_no_row(name: str, shared: Path) -> None:
    trace = open_trace(shared / "data" / name)
    check_contract(trace)
    assert trace.counts.dropped == {}
