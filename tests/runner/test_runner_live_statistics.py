"""What is told of a live point's turns while they end."""

from __future__ import annotations

import pytest

from ppd_bench.core.enums import Status
from ppd_bench.loadgen.rows import TurnEnd
from ppd_bench.runner.listeners import RECENT_S, TurnWatch


def turn(
    end_s: float, *, ttft_s: float = 0.2, tpot_s: float = 0.01, tokens: int = 11, status: Status = Status.OK
) -> TurnEnd:
    last_s = end_s
    first_s = last_s - tpot_s * (tokens - 1)
    return TurnEnd(
        request_id=f"t{end_s}",
        status=status,
        sent_s=first_s - ttft_s,
        first_token_s=first_s,
        last_token_s=last_s,
        end_s=end_s,
        generated_tokens=tokens,
    )


def test_medians_are_over_the_ok_turns_of_the_last_seconds() -> None:
    watch = TurnWatch(10)
    watch.ended(turn(1.0, ttft_s=9.0))
    for ttft_s in (0.1, 0.3, 0.5):
        watch.ended(turn(6.0 + ttft_s, ttft_s=ttft_s))
    watch.ended(turn(6.9, ttft_s=7.0, status=Status.TIMEOUT))
    told = watch.statistics(1.0 + RECENT_S + 1.0)
    assert (told.n_turns, told.n_ended, told.n_failed) == (10, 5, 1)
    assert told.ttft_median_s == pytest.approx(0.3)
    assert told.tpot_median_s == pytest.approx(0.01)
    later = watch.statistics(100.0)
    assert (later.n_ended, later.ttft_median_s, later.tpot_median_s) == (5, None, None)


def test_turns_of_one_token_have_no_tpot() -> None:
    watch = TurnWatch(1)
    watch.ended(turn(1.0, tokens=1))
    told = watch.statistics(1.5)
    assert told.ttft_median_s == pytest.approx(0.2)
    assert told.tpot_median_s is None


def test_before_any_turn_nothing_is_known() -> None:
    told = TurnWatch(4).statistics(1.0)
    assert (told.n_ended, told.n_failed, told.ttft_median_s, told.tpot_median_s) == (0, 0, None, None)
