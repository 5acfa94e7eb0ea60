"""Slowdowns on hand-made records."""

from __future__ import annotations

import pandas as pd
import pytest

from ppd_bench.analysis.interference import carrying_steps, slowdown


def records(gaps: list[float], *, n_streams: int = 3, sent_s: float = 1.0, status: str = "ok") -> pd.DataFrame:
    streams = [
        {"session_id": f"decode-{i}", "turn": 1, "sent_s": 0.0, "first_token_s": 0.0, "itl_s": gaps, "status": "ok"}
        for i in range(n_streams)
    ]
    prefills = [
        {"session_id": "prefill-0", "turn": 1, "sent_s": 0.0, "first_token_s": 0.01, "itl_s": [], "status": "ok"},
        {
            "session_id": "prefill-0",
            "turn": 2,
            "sent_s": sent_s,
            "first_token_s": sent_s + 0.4,
            "itl_s": [],
            "status": status,
        },
    ]
    return pd.DataFrame([*streams, *prefills])


def test_a_prefill_that_two_steps_carry_slows_those_two() -> None:
    gaps = [0.1] * 11 + [0.3, 0.2] + [0.1] * 8  # sent at 1.0: between the tenth gap and the eleventh
    found = slowdown(records(gaps, sent_s=1.05), n_carrying=2, window_tokens=4)
    assert found is not None
    assert found.baseline_tpot_s == pytest.approx(0.1)
    assert found.carrying_slowdown_ratio == pytest.approx(1.5)
    assert found.step_slowdown_ratio == pytest.approx(2.0)
    assert found.window_slowdown_ratio == pytest.approx(0.75)
    assert found.excess_s == pytest.approx(0.3)
    assert found.prefill_s == pytest.approx(0.4)
    assert (found.n_streams, found.n_carrying_steps) == (3, 2)


def test_an_undisturbed_stream_has_no_slowdown() -> None:
    found = slowdown(records([0.1] * 30), n_carrying=3, window_tokens=5)
    assert found is not None
    for value in (
        found.carrying_slowdown_ratio,
        found.step_slowdown_ratio,
        found.window_slowdown_ratio,
        found.excess_s,
    ):
        assert value == pytest.approx(0, abs=1e-9)


def test_the_excess_does_not_depend_on_the_window() -> None:
    gaps = [0.1] * 11 + [0.5] + [0.1] * 20
    narrow, wide = (slowdown(records(gaps), n_carrying=1, window_tokens=n) for n in (4, 8))
    assert narrow is not None
    assert wide is not None
    assert narrow.excess_s == pytest.approx(wide.excess_s)
    assert narrow.window_slowdown_ratio == pytest.approx(2 * wide.window_slowdown_ratio)


@pytest.mark.parametrize(
    "unusable",
    [
        records([0.1] * 12),
        records([0.1] * 30, sent_s=0.2),
        records([0.1] * 30, status="timeout"),
        records([0.1] * 30, n_streams=0),
    ],
    ids=["ends too early", "begins too late", "a turn failed", "no stream"],
)
def test_what_cannot_be_told_is_null(unusable: pd.DataFrame) -> None:
    assert slowdown(unusable, n_carrying=1, window_tokens=5) is None


@pytest.mark.parametrize(
    ("n_decode", "tokens", "budget", "steps"), [(200, 1024, 512, 4), (1, 1024, 8192, 1), (10, 0, 512, 1), (9, 2, 10, 2)]
)
def test_decodes_take_their_share_of_a_steps_budget_first(n_decode: int, tokens: int, budget: int, steps: int) -> None:
    assert carrying_steps(n_decode=n_decode, n_prefill_tokens=tokens, max_num_batched_tokens=budget) == steps
