"""What a sweep shows while it runs: lines, a bar, events for machines, and the question about orphans."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ppd_bench.cli.event_log import EventLog
from ppd_bench.cli.orphans import orphan_question
from ppd_bench.cli.progress import SweepProgress
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.engine.orphans import Orphan, RegisteredEngine
from ppd_bench.engine.proc_fs import ProcessGroup
from ppd_bench.runner.listeners import DetailedListener, Listeners, TurnStatistics
from ppd_bench.runner.sweep import Outcome, Prepared, SweepRequest, prepare


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    overrides = {
        "topologies": ["4R", "1P_3D", "1P_3pD", "2P_2D"],
        "workloads": ["small_tiny"],
        "qps": [2],
        "executor": "sim",
    }
    return prepare(SweepRequest(overrides=overrides))


@pytest.fixture
def points(prepared: Prepared) -> tuple[Point, ...]:
    return prepared.points


def statistics(**changes: Any) -> TurnStatistics:
    content = {
        "time_s": 3.0,
        "n_turns": 40,
        "n_ended": 12,
        "n_failed": 0,
        "ttft_median_s": 0.0853,
        "tpot_median_s": 0.012,
    }
    return TurnStatistics(**{**content, **changes})


def screen(*, terminal: bool) -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, force_terminal=terminal, width=200, highlight=False), shown


def test_without_a_terminal_a_line_comes_now_and_then_and_says_what_matters(points: tuple[Point, ...]) -> None:
    console, shown = screen(terminal=False)
    clock = Clock()
    with SweepProgress(console, clock) as progress:
        progress.started(4, 1)
        progress.kept(1000, 990)
        progress.point_started(points[1], 40)
        clock.now_s += 5.0
        progress.turns(statistics())
        assert shown.getvalue() == "1 of 4 points were there already and are kept\n"
        clock.now_s += 25.0
        progress.turns(statistics(n_failed=2))
        progress.point_done(points[1], 40, 38)
        clock.now_s += 30.0
        progress.point_started(points[2], 40)
    lines = shown.getvalue().splitlines()
    assert lines[1] == (
        "1 of 4 points; 1,000 turns, 10 failed; now 1P_3D small_tiny QPS 2: 12 of 40 turns, 2 failed, TTFT 85.3 ms, TPOT 12 ms"
    )
    # One point of this start took 60 s up to now, two are left.
    assert lines[2] == "2 of 4 points; 1,040 turns, 12 failed; about 2.0 min left; now 1P_3pD small_tiny QPS 2"
    assert len(lines) == 3


def test_on_a_terminal_a_bar_shows_the_same_and_texts_stand_above_it(points: tuple[Point, ...]) -> None:
    console, shown = screen(terminal=True)
    with SweepProgress(console) as progress:
        progress.started(2, 0)
        progress.point_started(points[0], 40)
        progress.turns(statistics())
        until_s = time.monotonic() + 10.0
        while "now 4R" not in shown.getvalue() and time.monotonic() < until_s:
            time.sleep(0.05)  # the bar draws itself ten times a second
        progress.stage("D0 died; starting again")
        progress.point_done(points[0], 40, 40)
    text = shown.getvalue()
    assert "now 4R small_tiny QPS 2: 12 of 40 turns, TTFT 85.3 ms, TPOT 12 ms" in text
    assert "D0 died; starting again" in text
    assert "1/2" in text
    assert "40 turns, 0 failed" in text


def test_a_point_without_ended_turns_shows_no_latency(points: tuple[Point, ...]) -> None:
    console, shown = screen(terminal=False)
    clock = Clock()
    with SweepProgress(console, clock) as progress:
        progress.started(1, 0)
        progress.point_started(points[0], 40)
        clock.now_s += 11.0
        progress.turns(statistics(n_ended=0, ttft_median_s=None, tpot_median_s=None))
    assert shown.getvalue() == "0 of 1 points; now 4R small_tiny QPS 2: 0 of 40 turns\n"


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_json_lines_with_the_verdict_of_every_point(prepared: Prepared, tmp_path: Path) -> None:
    path, clock = tmp_path / "events.jsonl", Clock()
    point = prepared.points[1]
    with EventLog(str(path), prepared, clock) as log:
        log.started(4, 0)
        log.point_started(point, 40)
        clock.now_s += 1.5
        log.turns(statistics())
        log.point_judged(point, ["D0: engine died during the point"])
        log.point_done(point, 40, 30)
        log.point_judged(point, [])
        log.point_done(point, 40, 38)
        log.stage("Merging records")
        log.finished(Outcome(folder=tmp_path, artefacts=(tmp_path / "a",), notice="", warnings=("few turns",)))
    told = events_of(path)
    assert [line["event"] for line in told] == [
        "started", "point_started", "turns", "point_done", "point_done", "stage", "warning", "finished",
    ]  # fmt: skip
    assert (told[0]["evidence"], told[0]["n_points"]) == ("simulated", 4)
    assert told[1]["point"]["configuration"] == "1P_3D"
    assert (told[2]["time_s"], told[2]["point_time_s"], told[2]["ttft_median_s"]) == (1.5, 3.0, 0.0853)
    broken, sound = told[3], told[4]
    assert (broken["valid"], broken["problems"]) == (False, ["D0: engine died during the point"])
    assert (broken["success_ratio"], broken["failed"]) == (0.75, True)
    assert (sound["valid"], sound["problems"], sound["failed"]) == (True, [], False)
    assert {line["point_id"] for line in told[1:5] if "point_id" in line} == {point.point_id}


def test_a_log_goes_on_where_it_is_and_says_when_the_sweep_was_stopped(prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(str(path), prepared) as log:
        log.stage("one")
    with pytest.raises(KeyboardInterrupt), EventLog(str(path), prepared):
        raise KeyboardInterrupt
    assert [(line["event"], line.get("error")) for line in events_of(path)] == [
        ("stage", None), ("stopped", "KeyboardInterrupt"),
    ]  # fmt: skip
    with pytest.raises(SpecError, match="--log-json"):
        EventLog(str(tmp_path), prepared)


def test_the_log_can_be_standard_output(prepared: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog("-", prepared) as log:
        log.kept(3, 2)
    line = json.loads(capsys.readouterr().out)
    assert (line["event"], line["n_turns"], line["n_ok"]) == ("kept", 3, 2)


def test_several_listeners_hear_what_each_of_them_wants(points: tuple[Point, ...]) -> None:
    console, shown = screen(terminal=False)
    heard: list[str] = []
    plain = SimpleNamespace(
        started=lambda n, m: heard.append("started"),
        point_done=lambda point, n, m: heard.append("point_done"),
        stage=lambda text: heard.append(text),
    )
    both = Listeners(SweepProgress(console), plain)
    assert isinstance(both, DetailedListener)
    assert not isinstance(plain, DetailedListener)
    both.started(1, 0)
    both.kept(0, 0)
    both.point_started(points[0], 4)
    both.turns(statistics())
    both.point_judged(points[0], ())
    both.point_done(points[0], 4, 4)
    both.stage("done")
    assert heard == ["started", "point_done", "done"]
    assert shown.getvalue() == "done\n"


def orphans() -> list[Orphan]:
    engine = RegisteredEngine(worker_id="D0", port=8100, log="D0.log", group=ProcessGroup(group_id=1, known=()))
    return [Orphan(owner_pid=77, engine=engine)]


@pytest.mark.parametrize("clean", [True, False])
def test_without_a_terminal_orphans_are_told_of_and_ended_only_when_asked_for(clean: bool) -> None:
    console, shown = screen(terminal=False)
    assert orphan_question(console, clean=clean)(orphans()) is clean
    assert "D0 on port 8100 was left behind by a ppd-bench that was killed (process 77)" in shown.getvalue()
    assert ("--clean" in shown.getvalue()) is not clean


@pytest.mark.parametrize(("answer", "ended"), [("y\n", True), ("n\n", False), ("\n", True)])
def test_at_a_terminal_the_user_is_asked(answer: str, ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    console, _ = screen(terminal=True)
    typed = io.StringIO(answer)
    typed.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", typed)
    assert orphan_question(console, clean=False)(orphans()) is ended
