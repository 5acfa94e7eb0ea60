"""Clients give up after timeout_s: what is recorded, and what is freed. Steps of 1/4 s, no overheads."""

from __future__ import annotations

from typing import Any

import pytest
from sim_points import cluster_of, constant_cost, make_point, rows_of, session, use_cost, workload

from ppd_bench.core.point import SimSettings
from ppd_bench.sim.recording import to_columns

BARE = SimSettings(step_overhead_s=0.0, sequence_overhead_s=0.0, visit_overhead_s=0.0, router_overhead_s=0.0)


@pytest.fixture(autouse=True)
def _quarter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cost(monkeypatch, constant_cost(0.25))


def _rows(topology: str, sessions: list[Any], timeout_s: float, **engine: Any) -> list[dict[str, Any]]:
    """Rows of a run that leaves no block in use."""
    settings = {"kv_link_latency_s": 0.0, "kv_link_bytes_per_s": 160 * 131072.0, "max_num_batched_tokens": 64, **engine}
    point = make_point(topology, workload((1, 1)), timeout_s=timeout_s, sim=BARE, **settings)
    cluster = cluster_of(point, sessions)
    for worker in cluster.workers:
        assert worker.pool.used == 0
        worker.pool.check()
    return rows_of(to_columns(point, cluster, keep_gaps=True))


def _stages(row: dict[str, Any]) -> list[float | None]:
    names = ("prefill_start_s", "prefill_done_s", "transfer_start_s", "decode_start_s", "first_token_s", "last_token_s")
    return [row[name] for name in names]


def test_a_turn_whose_last_token_comes_exactly_at_the_limit_is_ok() -> None:
    """8 tokens in 8 steps are 2 s."""
    (row,) = _rows("1R", [session("a", 1.0, (16, 8))], timeout_s=2.0)
    assert (row["status"], row["last_token_s"], row["generated_tokens"], row["message"]) == ("ok", 3.0, 8, None)


def test_a_turn_whose_last_token_would_come_just_after_the_limit_fails_without_it() -> None:
    (row,) = _rows("1R", [session("a", 1.0, (16, 8))], timeout_s=2.0 - 2**-20)
    assert (row["status"], row["last_token_s"], row["generated_tokens"]) == ("timeout", 2.75, 7)
    assert row["end_s"] == 3.0 - 2**-20
    assert row["itl_s"] == [0.25] * 6
    assert "2 s" in row["message"]


@pytest.mark.parametrize(
    ("timeout_s", "stages", "n_tokens"),
    [
        (0.5, [0.0, None, None, None, None, None], 0),  # while P computes
        (1.5, [0.0, 0.75, 0.75, 0.75, None, None], 0),  # while D's step waits for the transfer
        (1.875, [0.0, 0.75, 0.75, 0.75, None, None], 0),  # within D's first step
        (2.6, [0.0, 0.75, 0.75, 0.75, 2.0, 2.5], 3),  # while D decodes
        (3.75, [0.0, 0.75, 0.75, 0.75, 2.0, 3.75], 8),  # not at all
    ],
)
def test_a_pushed_turn_is_aborted_in_every_phase(timeout_s: float, stages: list[Any], n_tokens: int) -> None:
    """160 tokens: three chunks of 64 on P until 0.75 s; transfer until 1.75; first token 2.0, the eighth 3.75."""
    (row,) = _rows("1P_1D", [session("a", 0.0, (160, 8))], timeout_s)
    assert _stages(row) == stages
    assert row["generated_tokens"] == n_tokens
    assert row["status"] == ("ok" if n_tokens == 8 else "timeout")
    assert row["end_s"] == timeout_s


@pytest.mark.parametrize(
    ("timeout_s", "stages", "n_tokens"),
    [
        (0.5, [0.0, None, None, None, None, None], 0),
        (1.5, [0.0, 0.75, 0.75, None, None, None], 0),  # while the blocks are pulled: D has not begun
        (2.6, [0.0, 0.75, 0.75, 1.75, 2.0, 2.5], 3),
        (3.75, [0.0, 0.75, 0.75, 1.75, 2.0, 3.75], 8),
    ],
)
def test_a_pulled_turn_is_aborted_in_every_phase(timeout_s: float, stages: list[Any], n_tokens: int) -> None:
    (row,) = _rows("1P_1D", [session("a", 0.0, (160, 8))], timeout_s, handoff="pull_async")
    assert _stages(row) == stages
    assert row["generated_tokens"] == n_tokens


def test_a_turn_that_never_leaves_the_queue_has_no_stages() -> None:
    sessions = [session("a", 0.0, (16, 12)), session("b", 0.125, (16, 2))]
    _, second = _rows("1R", sessions, timeout_s=2.5, max_num_seqs=1)
    assert (second["status"], second["cached_tokens"], _stages(second)) == ("timeout", None, [None] * 6)
    assert (second["sent_s"], second["end_s"], second["route"]) == (0.125, 2.625, "replica")


def test_a_turn_that_waited_can_still_end_at_its_limit() -> None:
    """a takes 9 steps until 2.25 s, b two more until 2.75 s, which is 2.5 s after it was sent."""
    rows = _rows("1R", [session("a", 0.0, (16, 9)), session("b", 0.25, (16, 2))], timeout_s=2.5, max_num_seqs=1)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert rows[1]["end_s"] == 2.75


def test_turns_after_a_failed_one_are_unsent_and_have_no_schedule() -> None:
    rows = _rows("1R", [session("a", 0.0, (16, 2), (16, 20), (16, 2), (16, 2))], timeout_s=2.0)
    assert [row["status"] for row in rows] == ["ok", "timeout", "unsent", "unsent"]
    for row in rows[2:]:
        null = [name for name, value in row.items() if value is None]
        assert {"scheduled_s", "sent_s", "end_s", "route", "reason", "first_token_s", "cached_tokens"} <= set(null)
        assert (row["generated_tokens"], row["itl_count"], row["n_preemptions"]) == (0, 0, 0)
        assert row["message"] == "an earlier turn of the conversation failed"


def test_a_turn_waits_its_think_time_after_the_last_token() -> None:
    rows = _rows("1R", [session("a", 1.0, (16, 2), (16, 2), think_time_s=3.0)], timeout_s=2.0)
    assert [row["scheduled_s"] for row in rows] == [1.0, 4.5]


def test_an_abort_makes_room_for_the_next_turn_after_the_step_that_runs() -> None:
    """a gives up at 2.1 s, within the step that ends at 2.25; b begins then."""
    rows = _rows("1R", [session("a", 0.0, (16, 30)), session("b", 1.0, (16, 2))], timeout_s=2.1, max_num_seqs=1)
    assert (rows[0]["status"], rows[1]["status"]) == ("timeout", "ok")
    assert rows[1]["decode_start_s"] == 2.25
