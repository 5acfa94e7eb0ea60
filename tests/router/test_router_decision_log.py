"""The decision log on disk, and the report that reads it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from ppd_bench.core.errors import StoreError
from ppd_bench.router.decision_log import DecisionLog, LogSettings
from ppd_bench.runner.router_log import read_router_log, report_json, report_lines


def opened(folder: Path, **more: Any) -> DecisionLog:
    log = DecisionLog(LogSettings(folder=folder, **more), {"topology": "1P_1D"})
    log.open()
    return log


def entries(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def turn(number: int, **more: Any) -> dict[str, Any]:
    """A row of a turn of 100 ms: 1 ms to decide, 20 to D, 30 to the first byte."""
    at_s = float(number)
    row = {
        "request_id": f"r{number}", "session_id": "s", "turn": 2, "status": "ok", "route": "local", "reason": "always-local",
        "time_unix_s": at_s, "t_recv_s": at_s, "t_decided_s": at_s + 0.001, "t_d_sent_s": at_s + 0.021,
        "t_first_byte_s": at_s + 0.051, "t_done_s": at_s + 0.1, "sent_s": at_s, "first_token_s": at_s + 0.051,
        "last_token_s": at_s + 0.091, "generated_tokens": 5, "identity": "header", "x": 1, "scheduled_s": at_s,
    }  # fmt: skip
    return {**row, **more}


def test_every_row_is_on_disk_when_the_log_is_closed(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for number in range(1000):
        log.add(lambda number=number: {"n": number, "nothing": None})  # type: ignore[misc]
    log.close()
    assert entries(tmp_path) == [
        {"kind": "router-log", "schema": 1, "topology": "1P_1D"},
        *({"n": i} for i in range(1000)),
    ]
    assert (log.n_written, log.n_dropped, log.n_waiting) == (1000, 0, 0)


def test_rows_are_made_by_the_logs_own_thread(tmp_path: Path) -> None:
    log = opened(tmp_path)
    makers: list[str] = []
    log.add(lambda: makers.append(threading.current_thread().name) or {})  # type: ignore[func-returns-value]
    log.close()
    assert makers == ["decision-log"]


def test_files_are_rotated_by_size_and_the_oldest_go(tmp_path: Path) -> None:
    log = opened(tmp_path, max_bytes=100, max_files=3)
    for number in range(30):
        log.add(lambda number=number: {"n": number, "filler": "x" * 100})  # type: ignore[misc]
    log.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"decisions-{number:06d}.jsonl" for number in (28, 29, 30)]
    assert [entry["n"] for entry in entries(tmp_path) if "n" in entry] == [27, 28, 29]
    assert all(json.loads(path.read_text().splitlines()[0])["kind"] == "router-log" for path in tmp_path.iterdir())


def test_a_restart_begins_a_file_of_its_own(tmp_path: Path) -> None:
    for number in range(3):
        log = opened(tmp_path)
        log.add(lambda number=number: {"n": number})  # type: ignore[misc]
        log.close()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"decisions-{i:06d}.jsonl" for i in (1, 2, 3)]


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="give another --log"):
        opened(tmp_path / "file" / "log")


def test_one_row_that_cannot_be_made_ends_nothing_and_is_told(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.add(lambda: {"bad": object()})
    log.add(lambda: {"n": 1})
    log.close()
    assert entries(tmp_path)[1:] == [{"n": 1}]
    assert log.n_dropped == 1
    assert "could not be made" in str(log.problem)


def test_a_stalled_disk_drops_rows_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppd_bench.router.decision_log.MAX_WAITING", 5)
    log = DecisionLog(LogSettings(folder=tmp_path), {})
    for number in range(9):
        log.add(lambda number=number: {"n": number})  # type: ignore[misc]
    assert (log.n_waiting, log.n_dropped) == (5, 4)


# -- the report --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log = opened(tmp_path)
    table = {"table_hash": "ab", "rule": "equation1", "reason": "table ab large/tiny/8 measured equation1"}
    rows = [
        {"kind": "table", "hash": "ab", "evidence": "measured", "w_ttft": "1", "w_tpot": "3"},
        *(turn(i, **table, cell="large/tiny/8", evidence="measured") for i in range(6)),
        *(
            turn(i, **table, cell="huge/tiny/8", evidence="insufficient", route="pd", x=0, off_grid=True)
            for i in range(6, 8)
        ),
        turn(8, status="aborted", failure="client_gone", t_first_byte_s=None, first_token_s=None, last_token_s=None),
        turn(9, status="error", failure="timeout", counters=["prefill_retry", "decode_retry"], turn=1, x=None),
    ]
    for row in rows:
        log.add(lambda row=row: row)  # type: ignore[misc]
    log.close()
    return tmp_path


def test_the_report_says_which_cells_live_traffic_visits_and_on_what_they_rest(folder: Path) -> None:
    found = read_router_log(folder)
    assert (found.n_turns, found.n_damaged, found.n_table_decisions, found.span_s) == (10, 0, 8, 9.0)
    assert [(c.cell, c.n, c.evidence, c.n_off_grid, c.x_ratio) for c in found.cells] == [
        ("large/tiny/8", 6, "measured", 0, 1.0),
        ("huge/tiny/8", 2, "insufficient", 2, 0.0),
    ]
    assert found.cells[0].share_ratio == 0.75
    assert found.cells[0].mean_ttft_s == pytest.approx(0.051)
    assert found.cells[0].mean_tpot_s == pytest.approx(0.010)
    assert (found.insufficient_ratio, found.off_grid_ratio) == (0.25, 0.25)


def test_the_report_breaks_turns_down_into_stages_that_add_up(folder: Path) -> None:
    found = read_router_log(folder)
    assert [(stage.stage, stage.n) for stage in found.stages] == [
        ("decide", 10), ("to_decode", 10), ("first_byte", 9), ("stream", 10),
    ]  # fmt: skip
    assert sum(stage.share_ratio for stage in found.stages) == pytest.approx(1.0)
    assert sum(stage.n * stage.mean_s for stage in found.stages) == pytest.approx(10 * 0.1)


def test_the_report_counts_failures_and_fallbacks(folder: Path) -> None:
    found = read_router_log(folder)
    assert found.failures == {"client_gone": 1, "timeout": 1}
    assert found.counters == {"prefill_retry": 1, "decode_retry": 1}
    assert found.by_status == {"ok": 8, "aborted": 1, "error": 1}
    text = "\n".join(report_lines(found))
    assert "large/tiny/8" in text
    assert "table ab: measured" in text
    assert "25.0% in insufficient cells" in text
    assert json.loads(report_json(found))["n_turns"] == 10


def test_a_line_that_a_crash_cut_short_is_left_out_and_counted(folder: Path) -> None:
    path = next(folder.iterdir())
    path.write_bytes(path.read_bytes()[:-20])
    found = read_router_log(folder)
    assert (found.n_turns, found.n_damaged) == (9, 1)


@pytest.mark.parametrize(
    "line", [b"[1, 2]", b'"words"', b"7", b"{}", b'{"t_recv_s": "soon", "t_done_s": 1.0, "time_unix_s": 2.0}']
)
def test_a_line_that_is_no_turn_is_left_out_and_counted(folder: Path, line: bytes) -> None:
    path = next(folder.iterdir())
    path.write_bytes(path.read_bytes() + line + b"\n")
    found = read_router_log(folder)
    assert (found.n_turns, found.n_damaged) == (10, 1)
    assert "1 line that could not be read left out" in report_lines(found)


def test_no_log_and_another_version_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no decision log"):
        read_router_log(tmp_path)
    (tmp_path / "decisions-000001.jsonl").write_text('{"kind":"router-log","schema":9}\n')
    with pytest.raises(StoreError, match="schema"):
        read_router_log(tmp_path)


def test_a_log_without_turns_is_reported_as_such(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert "0 turns" in report_lines(read_router_log(tmp_path))[0]
