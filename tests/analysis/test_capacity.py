"""Loads judged against objectives: what failures do to quantiles, and what is pooled."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ppd_bench.analysis.capacity import Limits, conversation_s, judge_loads

ASKED = Limits(quantile=0.95, ttft_s=0.2, success_ratio=0.5)
LOST = {"status": "timeout", "first_token_s": math.nan, "last_token_s": math.nan, "generated_tokens": 0}


def test_a_failed_turn_is_infinitely_late_and_too_few_successes_miss_by_themselves(
    make_point, make_row, make_frame
) -> None:
    point = make_point()
    records = make_frame(*(make_row(point, f"s{i}", **(LOST if i < 10 else {})) for i in range(100)))
    late = judge_loads(records, [point], ASKED).iloc[0]
    assert math.isinf(late["ttft_s"])
    assert (bool(late["met"]), late["broken"]) == (False, "TTFT")
    lower = dataclasses.replace(ASKED, quantile=0.8)
    assert judge_loads(records, [point], lower).iloc[0]["met"]
    few = judge_loads(records, [point], dataclasses.replace(lower, success_ratio=0.95)).iloc[0]
    assert (bool(few["met"]), few["broken"]) == (False, "success")


def test_repeats_are_pooled_and_counted_one_by_one(make_point, make_row, make_frame) -> None:
    points = [make_point(repeat=i) for i in range(2)]
    rows = [make_row(points[0], f"s{i}", ttft=0.1) for i in range(90)]
    rows += [make_row(points[1], f"t{i}", ttft=0.9) for i in range(10)]
    found = judge_loads(make_frame(*rows), points, dataclasses.replace(ASKED, quantile=0.8)).iloc[0]
    assert (found["n_repeats"], found["n_turns"], found["n_repeats_met"], bool(found["met"])) == (2, 100, 1, True)
    assert found["ttft_s"] == pytest.approx(0.1)


def test_a_conversation_lasts_from_its_first_instant_to_its_last_end(make_point, make_row, make_frame) -> None:
    point, other = make_point(), make_point(qps=1.0)
    rows = [make_row(point, f"s{i}", at=float(i), end_s=i + 1.0) for i in range(3)]
    rows += [make_row(point, f"s{i}", 2, at=i + 3.0, end_s=i + 5.0) for i in range(3)]
    rows += [make_row(other, "s0", end_s=100.0)]
    assert conversation_s(make_frame(*rows), [point]) == 5.0
    assert math.isnan(conversation_s(make_frame(), [point]))


def test_a_load_without_turns_meets_nothing(make_point, make_frame) -> None:
    found = judge_loads(make_frame(), [make_point()], ASKED).iloc[0]
    assert (bool(found["met"]), found["broken"]) == (False, "success")
