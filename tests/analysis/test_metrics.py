import math

import numpy as np
import pandas as pd
import pytest

from ppd_bench.analysis.metrics import (
    delta_tpot,
    delta_ttft,
    floats,
    meets,
    prefix_hit_tokens,
    prompt_tokens,
    score,
    with_latencies,
)
from ppd_bench.core.slo import SLO


def test_latencies_follow_the_glossary(make_point, make_row, make_frame):
    # Scheduled 1.0, sent 1.5, first token 2.0, last token 4.0, five tokens: four gaps of 0.5 s.
    row = make_row(make_point(), scheduled_s=1.0, sent_s=1.5, first_token_s=2.0, last_token_s=4.0, generated_tokens=5)
    out = with_latencies(make_frame(row)).iloc[0]
    assert (out["ttft_s"], out["tpot_s"], out["e2e_s"], out["send_lag_s"]) == (0.5, 0.5, 2.5, 0.5)


def test_tpot_is_null_below_two_tokens_and_defined_at_two(make_point, make_row, make_frame):
    p = make_point()
    rows = [make_row(p, f"s{n}", generated_tokens=n, first_token_s=1.0, last_token_s=1.25) for n in (0, 1, 2)]
    tpot = with_latencies(make_frame(*rows))["tpot_s"]
    assert tpot.isna().tolist() == [True, True, False]
    assert tpot.iloc[2] == 0.25


def test_a_turn_that_was_never_sent_has_no_latency(make_point, make_row, make_frame):
    nothing = dict.fromkeys(("scheduled_s", "sent_s", "first_token_s", "last_token_s"))
    out = with_latencies(make_frame(make_row(make_point(), status="unsent", generated_tokens=0, **nothing)))
    assert out[["ttft_s", "tpot_s", "e2e_s", "send_lag_s"]].isna().all(axis=None)


@pytest.mark.parametrize("dtype", ["Float64", "float64", "object", "float64[pyarrow]"])
def test_a_column_of_any_nullable_type_reads_as_float_with_nan(dtype):
    frame = pd.DataFrame({"a": pd.Series([1.5, None], dtype=dtype)})
    np.testing.assert_array_equal(floats(frame, "a"), [1.5, math.nan])


def test_goodput_needs_every_stated_bound_and_judges_a_null_tpot_on_the_others(make_point, make_row, make_frame):
    p = make_point()
    frame = with_latencies(
        make_frame(
            make_row(p, "good", ttft=0.1, tpot=0.01),
            make_row(p, "late", ttft=0.3, tpot=0.01),
            make_row(p, "slow", ttft=0.1, tpot=0.03),
            make_row(p, "one_token", ttft=0.1, n=1),
            make_row(p, "one_token_late", ttft=0.3, n=1),
            make_row(p, "failed", ttft=0.1, tpot=0.01, status="timeout"),
        )
    )
    assert meets(frame, SLO(ttft_s=0.2, tpot_s=0.02)).tolist() == [True, False, False, True, False, False]
    assert meets(frame, SLO()).tolist() == [True] * 5 + [False]
    # E2E: 0.1 + 10 * 0.01 = 0.2 s and 0.1 + 10 * 0.03 = 0.4 s.
    assert meets(frame, SLO(e2e_s=0.25)).tolist() == [True, False, False, True, False, False]


def test_a_prefix_hit_is_counted_where_the_prompt_was_prefilled(make_point, make_row, make_frame):
    p = make_point()
    frame = make_frame(
        make_row(p, "through_p", turn=2, prefill_cached_tokens=100, cached_tokens=200, transferred_tokens=50),
        make_row(p, "local", turn=2, cached_tokens=200),
        make_row(p, "unknown", turn=2),
    )
    np.testing.assert_array_equal(prefix_hit_tokens(frame), [100, 200, math.nan])
    # Turn 1 was 128 -> 128, turn 2 brings 16 new tokens.
    assert prompt_tokens(frame).tolist() == [272, 272, 272]


def test_deltas_and_score_follow_the_glossary():
    # TTFT 200 ms at x=0, 50 ms at x=1: local saves 75 %. TPOT 10 ms at x=0, 12 ms at x=1: local costs 20 %.
    assert delta_ttft(0.200, 0.050) == pytest.approx(0.75)
    assert delta_tpot(0.010, 0.012) == pytest.approx(0.20)
    assert score(0.75, 0.20, 1.0, 3.0) == pytest.approx(0.15)
    assert score(0.75, 0.20, 1.0, 4.0) == pytest.approx(-0.05)


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0])
@pytest.mark.parametrize("delta", [delta_ttft, delta_tpot])
def test_a_missing_or_zero_mean_has_no_delta(delta, bad):
    assert math.isnan(delta(bad, 0.1))
    assert math.isnan(delta(0.1, bad))
