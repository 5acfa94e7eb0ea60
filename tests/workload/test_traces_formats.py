"""What each format means: values that only its own reader can get right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from trace_files import (
    agentic_code,
    azure,
    bailian,
    burstgpt,
    delta,
    flat_sessions,
    lines,
    mooncake,
    openai_messages,
    replay_sessions,
    sharegpt,
)
from trace_files import mt_bench as mt_bench_file

from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceRow
from ppd_bench.workload.traces import open_trace


def rows_of(path: Path, **options: object) -> list[TraceRow]:
    return list(open_trace(path, **options).rows())  # type: ignore[arg-type]


def shared_blocks(a: TraceRow, b: TraceRow) -> int:
    """Length of the common run of blocks."""
    n = 0
    for x, y in zip(a.block_ids, b.block_ids, strict=False):
        if x != y:
            break
        n += 1
    return n


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(SpecError) as caught:
        rows_of(path, **options)
    return str(caught.value)


def test_mooncake_milliseconds_become_seconds_and_unsigned_ids_keep_their_bits(tmp_path: Path) -> None:
    trace = open_trace(mooncake(tmp_path).path)
    rows = list(trace.rows())
    assert [r.arrival_s for r in rows] == [0.0, 0.0, 3.0, 2.0]
    assert list(rows[2].block_ids) == [-1]
    assert [r.session_id for r in rows] == [None] * 4
    assert [r.row for r in rows] == [0, 1, 2, 3]
    assert any("earlier than the row before it" in note and note.endswith("mooncake.jsonl:4)") for note in trace.notes)


def test_mooncake_rows_with_sessions_are_full_prompts(tmp_path: Path) -> None:
    entries = [
        {"session_id": s, "timestamp": t, "input_length": 512, "output_length": 1, "hash_ids": [1]}
        for t, s in enumerate(["a", "b", "a"])
    ]
    rows = rows_of(lines(tmp_path / "t.jsonl", list(entries)))
    assert [(r.session_id, r.turn, r.prompt_tokens) for r in rows] == [("a", 1, 512), ("b", 1, 512), ("a", 2, 512)]


def test_bailian_chats_form_sessions_and_branches_begin_their_own(tmp_path: Path) -> None:
    trace = open_trace(bailian(tmp_path).path)
    rows = list(trace.rows())
    assert [(r.request_id, r.session_id, r.turn, r.parent_id) for r in rows] == [
        ("c10", "c10", 1, None),
        ("c11", "c10", 2, None),
        ("c12", "c12", 1, "c10"),
        ("c13", "c13", 1, None),
        ("c14", "c10", 3, None),
    ]
    assert [r.arrival_s for r in rows] == [0.0, 1.0, 1.0, 1.5, 2.0]
    assert any("names a parent that was not read before it" in note for note in trace.notes)


def test_delta_rows_become_full_prompts(tmp_path: Path) -> None:
    a1, b1, a2, a3 = rows_of(delta(tmp_path).path)
    assert [r.prompt_tokens for r in (a1, b1, a2, a3)] == [600, 600, 600 + 100 + 700, 600 + 100 + 700 + 9 + 50]
    assert [(r.arrival_s, r.delay_s) for r in (a1, b1, a2, a3)] == [(0.0, None), (0.5, None), (None, 1.5), (None, 0.0)]
    assert shared_blocks(a1, b1) == 1
    assert shared_blocks(a1, a2) == len(a1.block_ids) == 1
    assert shared_blocks(a2, a3) == len(a2.block_ids) == 2


def test_a_delta_session_with_a_second_timestamp_is_refused(tmp_path: Path) -> None:
    row = {"session_id": "a", "timestamp": 0, "input_length": 5, "output_length": 1}
    path = lines(tmp_path / "t.jsonl", [row, {**row, "session_id": "b", "delay": 3}, row])
    assert "t.jsonl:3" in refusal(path)
    assert "has a timestamp" in refusal(path)


def test_agents_are_sessions_that_a_request_of_their_parent_started(tmp_path: Path) -> None:
    rows = rows_of(agentic_code(tmp_path).path)
    assert [(r.request_id, r.session_id, r.turn, r.delay_s, r.parent_id) for r in rows] == [
        ("s1.t1", "s1", 1, None, None),
        ("s1/agent_001.t1", "s1/agent_001", 1, 1.0, "s1.t1"),
        ("s1.t2", "s1", 2, 1.0, None),
        ("s2.t1", "s2", 1, None, None),
    ]
    assert all(r.arrival_s is None for r in rows)
    assert shared_blocks(rows[0], rows[2]) == 2
    assert not set(rows[3].block_ids) & {i for r in rows[:3] for i in r.block_ids}, "local id 1 of two sessions"


def test_public_agent_sessions_have_the_requests_that_are_known(shared: Path) -> None:
    rows = rows_of(shared / "data/agentic_code")
    mains = [r for r in rows if "/" not in (r.session_id or "")]
    agents = [r for r in rows if "/" in (r.session_id or "")]
    assert (len(mains), len(agents)) == (913, 174)
    assert len({r.session_id for r in mains}) == 40
    assert len({r.session_id for r in agents}) == 15
    assert all(r.parent_id for r in agents if r.turn == 1)


def test_burstgpt_times_begin_at_the_first_request(tmp_path: Path) -> None:
    rows = rows_of(burstgpt(tmp_path).path)
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in rows] == [(0.0, 472, 18), (40.0, 1087, 230)]


def test_azure_dates_are_exact_to_100_ns(tmp_path: Path) -> None:
    rows = rows_of(azure(tmp_path).path)
    assert [r.arrival_s for r in rows] == [0.0, 0.0520001, 0.0520001]


def test_prompts_of_a_conversation_hold_earlier_answers_and_their_blocks(tmp_path: Path) -> None:
    rows = rows_of(sharegpt(tmp_path).path, block_tokens=4)
    first, second = [r for r in rows if r.session_id == "plain"]
    # Per message 5 tokens of framing, 3 that open the answer.
    assert second.prompt_tokens == first.prompt_tokens + first.output_tokens + 2 + (3 + 2 + 2) + 3
    assert shared_blocks(first, second) == len(first.block_ids) == first.prompt_tokens // 4
    assert [r.session_id for r in rows].count("plain#2") == 1


def test_consecutive_messages_and_tools_have_their_place(tmp_path: Path) -> None:
    trace = open_trace(sharegpt(tmp_path).path)
    by_session: dict[str | None, list[TraceRow]] = {}
    for row in trace.rows():
        by_session.setdefault(row.session_id, []).append(row)
    assert [(r.prompt_tokens, r.output_tokens) for r in by_session["doubled"]] == [(2 * 6 + 3, 2)]
    call, answer = by_session["tools"]
    assert answer.prompt_tokens > call.prompt_tokens + call.output_tokens
    assert any("several answers in a row" in note for note in trace.notes)


def test_parts_that_are_not_text_are_said_and_calls_of_tools_count(tmp_path: Path) -> None:
    trace = open_trace(openai_messages(tmp_path).path)
    seen = [r for r in trace.rows() if (r.session_id or "").startswith("s")][-2:]
    assert seen[0].output_tokens > 5
    assert any("part that is not text" in note for note in trace.notes)


def test_questions_without_answers_say_so(tmp_path: Path) -> None:
    trace = open_trace(mt_bench_file(tmp_path).path)
    rows = list(trace.rows())
    assert [(r.session_id, r.turn, r.output_tokens) for r in rows] == [("81", 1, 0), ("81", 2, 0), ("83", 1, 0)]
    assert rows[1].prompt_tokens > rows[0].prompt_tokens
    assert any("questions without answers" in note for note in trace.notes)


def test_recorded_pauses_come_before_their_turn(tmp_path: Path) -> None:
    assert [r.delay_s for r in rows_of(replay_sessions(tmp_path).path)] == [None, 2.5]


def test_flattened_sessions_are_put_in_order_of_time(tmp_path: Path) -> None:
    rows = rows_of(flat_sessions(tmp_path).path)
    assert [(r.session_id, r.turn, r.row, r.arrival_s) for r in rows] == [
        ("s", 1, 1, 0.0),
        ("t", 1, 4, 0.0),
        ("s", 2, 0, 3.0),
    ]
    assert shared_blocks(rows[0], rows[2]) >= len(rows[0].block_ids) - 1 > 0


def test_the_shared_conversations_have_544_turns_and_reuse_near_the_independent_figure(shared: Path) -> None:
    """81.7 % with another tool's tokenizer; the estimate must not be far off, and must be called one."""
    trace = open_trace(shared / "data/chat/sharegpt_conv_128.json")
    seen: set[int] = set()
    n_rows = n_prompt = n_hit = 0
    for row in trace.rows():
        known = [block_id in seen for block_id in row.block_ids]
        n_hit += 16 * (known.index(False) if False in known else len(known))
        seen.update(row.block_ids)
        n_prompt += row.prompt_tokens
        n_rows += 1
    assert n_rows == 544
    assert n_hit / n_prompt == pytest.approx(0.817, abs=0.02)
    assert trace.format.token_count == "estimated"
    assert any("estimated, not from a tokenizer" in note for note in trace.notes)


def test_a_gzipped_file_and_a_folder_read_as_the_files_do(tmp_path: Path) -> None:
    made = mooncake(tmp_path).path
    rows = rows_of(made)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(made.read_bytes()))
    assert rows_of(folder) == rows
    (folder / "b.jsonl").write_bytes(made.read_bytes())
    both = rows_of(folder)
    assert len(both) == 2 * len(rows)
    assert len({r.request_id for r in both}) == len(both)


def test_one_object_over_several_lines_is_one_session(tmp_path: Path) -> None:
    entry = json.loads(agentic_code(tmp_path).path.read_text().splitlines()[0])
    path = tmp_path / "pretty.json"
    path.write_text(json.dumps(entry, indent=2))
    assert [r.request_id for r in rows_of(path)] == ["s1.t1", "s1/agent_001.t1", "s1.t2"]


def test_a_line_of_megabytes_is_a_row(tmp_path: Path) -> None:
    long = "word " * 400_000
    entry = {"id": "big", "conversations": [{"from": "human", "value": long}, {"from": "gpt", "value": "ok"}]}
    rows = rows_of(lines(tmp_path / "t.jsonl", [entry]))
    assert rows[0].prompt_tokens > 400_000
    assert len(rows[0].block_ids) == rows[0].prompt_tokens // 16
