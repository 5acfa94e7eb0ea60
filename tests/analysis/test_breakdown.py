"""Stages of TTFT add up, whatever the route and whatever an executor does not know; engines' loads are shares."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.analysis.breakdown import STAGES, longest_short_wait, role_loads, stage_figures, stages, start_waits_s

INSTANTS = ("prefill_start_s", "prefill_done_s", "transfer_start_s", "transfer_done_s", "decode_start_s")


def turn(name: str = "a", **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "request_id": name, "route": "replica", "status": "ok", "scheduled_s": 0.0, "sent_s": 0.0, "first_token_s": 1.0,
        "last_token_s": 2.0, "end_s": 2.0, "generated_tokens": 2, "decode_worker": "R0", "context_tokens": 0,
        "input_tokens": 10, **dict.fromkeys(INSTANTS),
    }  # fmt: skip
    return {**base, **fields}


def split(*turns: dict[str, Any]) -> list[dict[str, float]]:
    return [{str(k): float(v) for k, v in row.items()} for row in stages(pd.DataFrame(list(turns))).to_dict("records")]


def test_a_turn_through_p_has_every_stage() -> None:
    (found,) = split(
        turn(route="pd", sent_s=1.0, prefill_start_s=1.5, prefill_done_s=2.5, transfer_start_s=4.5, transfer_done_s=4.75,
             decode_start_s=4.8, first_token_s=5.0)
    )  # fmt: skip
    assert found == {
        "queue_s": 0.5, "prefill_s": 1.0, "decode_wait_s": 2.0, "transfer_s": 0.25, "first_step_s": 0.25, "unsplit_s": 0.0
    }  # fmt: skip


def test_a_replica_queues_and_prefills() -> None:
    (found,) = split(turn(sent_s=1.0, decode_start_s=1.25, first_token_s=3.0))
    assert (found["queue_s"], found["prefill_s"]) == (0.25, 1.75)
    assert sum(found.values()) == 2.0


def test_what_an_executor_does_not_know_stays_together() -> None:
    (unknown,) = split(turn(first_token_s=3.0))
    assert unknown["unsplit_s"] == 3.0
    (half,) = split(turn(route="pd", prefill_start_s=0.5, prefill_done_s=1.0, first_token_s=3.0))
    assert (half["queue_s"], half["prefill_s"], half["unsplit_s"]) == (0.5, 0.5, 2.0)


def test_a_turn_without_a_first_token_has_no_stages() -> None:
    (found,) = split(turn(first_token_s=None, status="timeout"))
    assert all(math.isnan(value) for value in found.values())


@given(
    st.lists(st.floats(0.0, 10.0), min_size=7, max_size=7),
    st.sampled_from(["pd", "pd_readback", "local", "replica"]),
    st.sets(st.sampled_from(INSTANTS)),
)
def test_stages_add_up_to_ttft(gaps: list[float], route: str, missing: set[str]) -> None:
    at, instants = 0.0, []
    for gap in gaps:
        at += gap
        instants.append(at)
    names = ("sent_s", *INSTANTS, "first_token_s")
    fields = {name: None if name in missing else instant for name, instant in zip(names, instants, strict=True)}
    (found,) = split(turn(route=route, **fields))
    assert sum(found.values()) == pytest.approx(instants[-1] - instants[0], abs=1e-9)
    assert min(found.values()) >= 0.0
    assert tuple(found) == STAGES


def test_shares_are_of_all_ok_turns_together() -> None:
    frame = pd.DataFrame([
        turn("a", decode_start_s=0.5, first_token_s=1.0),
        turn("b", decode_start_s=1.0, first_token_s=3.0),
        turn("c", decode_start_s=5.0, first_token_s=9.0, status="timeout"),
    ])  # fmt: skip
    queue, prefill = stage_figures(frame)
    assert (queue.stage, queue.p50_s, queue.ttft_share_ratio) == ("queue", 0.75, 1.5 / 4.0)
    assert prefill.ttft_share_ratio == 2.5 / 4.0
    assert stage_figures(frame.iloc[2:]) == []


def test_the_longest_wait_of_a_short_prompt_names_the_long_one_that_was_there() -> None:
    through = {
        "route": "pd",
        "decode_worker": "D1",
        "prefill_start_s": 0.0,
        "transfer_done_s": 9.0,
        "first_token_s": 9.5,
    }
    frame = pd.DataFrame([
        turn("long", **through, input_tokens=64_000, prefill_done_s=0.5, transfer_start_s=0.5, end_s=8.0),
        turn("short", **through, input_tokens=49, sent_s=0.5, prefill_done_s=1.0, transfer_start_s=8.5, end_s=10.0),
        turn("other", **{**through, "decode_worker": "D0"}, input_tokens=90_000, prefill_done_s=0.1, transfer_start_s=0.2,
             end_s=9.9),
        turn("later", **through, input_tokens=80_000, sent_s=8.6, prefill_done_s=8.7, transfer_start_s=8.8, end_s=9.0),
        turn("unsent", sent_s=None, first_token_s=None, status="unsent", decode_worker=None, route=None),
    ])  # fmt: skip
    wait = longest_short_wait(frame, 100)
    assert wait is not None
    assert (wait.request_id, wait.worker, wait.wait_s, wait.behind_tokens) == ("short", "D1", 7.5, 64_000)
    assert longest_short_wait(frame, 10) is None


def test_a_wait_whose_end_is_not_known_is_no_wait_of_zero() -> None:
    frame = pd.DataFrame([turn("replica"), turn("through", route="pd", prefill_done_s=0.5, decode_start_s=0.7)])
    assert longest_short_wait(frame, 100) is None
    told = longest_short_wait(pd.DataFrame([turn("at once", decode_start_s=0.0)]), 100)
    assert told is not None
    assert (told.wait_s, told.behind_tokens) == (0.0, 10)


def test_engines_that_do_not_tell_how_long_their_steps_took_are_not_called_idle() -> None:
    gauges = pd.DataFrame(
        {"worker_id": ["R0"] * 2, "time_s": [1.0, 2.0], "kv_cache_usage_ratio": [0.1, 0.3], "busy_s": math.nan}
    )
    everyone, _ = role_loads(gauges, {"R0": "R"})
    assert math.isnan(everyone.busy_ratio)
    assert everyone.kv_mean_ratio == pytest.approx(0.2)


def test_start_waits_are_of_sent_turns() -> None:
    frame = pd.DataFrame([turn(scheduled_s=1.0, sent_s=4.0), turn(scheduled_s=None, sent_s=None)])
    assert start_waits_s(frame).tolist() == [3.0]


def test_loads_are_by_role_and_of_all() -> None:
    gauges = pd.DataFrame({
        "worker_id": ["P0", "D0", "P0", "D0"], "time_s": [1.0, 1.0, 2.0, 2.0], "kv_cache_usage_ratio": [0.0, 0.96, 0.5, 0.2],
        "busy_s": [0.5, 0.2, 1.0, 0.4],
    })  # fmt: skip
    everyone, p, d = role_loads(gauges, {"P0": "P", "D0": "D"})
    assert (everyone.role, everyone.n_engines, everyone.busy_ratio) == ("all", 2, 0.35)
    assert (p.busy_ratio, p.kv_full_ratio) == (0.5, 0.0)
    assert (d.busy_ratio, d.kv_mean_ratio, d.kv_max_ratio, d.kv_full_ratio) == (0.2, pytest.approx(0.58), 0.96, 0.5)
