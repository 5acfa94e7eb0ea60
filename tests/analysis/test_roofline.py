"""The roofline: the study's table to the digit, first principles, and the simulator's own formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.analysis.roofline import (
    STUDY_INTENSITIES,
    STUDY_REUSE_RATIOS,
    decode_work,
    new_tokens_of,
    prefill_work,
    ridge_point,
    roofline,
    study_steps,
)
from ppd_bench.core.errors import SpecError
from ppd_bench.core.hardware import HARDWARE
from ppd_bench.core.models import MODELS
from ppd_bench.sim.profile import roofline as simulator_roofline

QWEN = MODELS["qwen3-30b-a3b"]
LLAMA = MODELS["llama-3.1-8b"]
H20 = HARDWARE["h20"]


def test_the_studys_formula_gives_its_table_to_the_digit() -> None:
    """40,758 / 20,610 / 8,544 / 4,549 and 1.5; and its ratios to decode, which show decode's third digit."""
    found = study_steps(QWEN)[0].intensities
    assert [round(value) for value in found[:4]] == list(STUDY_INTENSITIES[:4])
    assert round(found[4], 1) == STUDY_INTENSITIES[4]
    assert [round(value / found[4]) for value in found[:4]] == [26_813, 13_559, 5_621, 2_993]


def test_the_corrections_lead_to_the_formula_used_here() -> None:
    rows = roofline(QWEN, H20, prompt_tokens=64_000, reuse_ratios=STUDY_REUSE_RATIOS).rows
    assert study_steps(QWEN)[-1].intensities == pytest.approx([row.work.intensity for row in rows])
    assert len({step.intensities for step in study_steps(QWEN)}) == len(study_steps(QWEN))


def test_the_conclusion_of_the_study_holds_with_the_corrected_figures() -> None:
    """Prefill stays bound by compute at 95 % reuse; decode does not."""
    found = roofline(QWEN, H20, prompt_tokens=64_000, reuse_ratios=STUDY_REUSE_RATIOS, decode_batches=(1, 64))
    assert found.ridge == ridge_point(H20) == 37.0
    assert [row.bound for row in found.rows] == ["compute"] * 4 + ["memory"] * 2
    assert [row.new_tokens for row in found.rows[:4]] == [64_000, 19_200, 6_400, 3_200]
    assert found.rows[3].vs_decode > 500


def test_dense_work_from_first_principles() -> None:
    """Llama-3.1-8B: 6,979,321,856 parameters in layers, 525,336,576 in the output projection, 524,288 FLOP per pair."""
    work = prefill_work(LLAMA, 1000, 500)
    assert work.flop == 2 * 6_979_321_856 * 1000 + 524_288 * (1000 * 500 + 1000**2 / 2) + 2 * 525_336_576
    assert work.bytes == 2 * (6_979_321_856 + 525_336_576) + 131_072 * 1500
    decode = decode_work(LLAMA, 8, 1000)
    assert decode.flop == 8 * (2 * (6_979_321_856 + 525_336_576) + 524_288 * 1000)
    assert decode.bytes == 2 * (6_979_321_856 + 525_336_576) + 131_072 * 8000


@pytest.mark.parametrize("model", sorted(MODELS))
@given(new=st.integers(1, 9000), cached=st.integers(0, 100_000), n=st.integers(1, 300), context=st.integers(1, 50_000))
def test_the_simulator_divides_the_same_work_by_its_rates(
    model: str, new: int, cached: int, n: int, context: int
) -> None:
    """With efficiencies of 1 a step's time is the roofline's."""
    ideal = replace(H20, compute_efficiency_ratio=1.0, weight_bandwidth_ratio=1.0, kv_bandwidth_ratio=1.0)
    cost = simulator_roofline(ideal, MODELS[model], 1)
    ratio = cached / (new + cached)
    found = roofline(MODELS[model], ideal, prompt_tokens=new + cached, reuse_ratios=[ratio]).rows[0]
    pairs = found.new_tokens * (new + cached - found.new_tokens) + found.new_tokens**2 / 2
    simulated = cost.mixed_s(found.new_tokens, 1, pairs, new + cached, 0, 0)
    assert found.seconds == pytest.approx(simulated, rel=1e-9)
    decodes = roofline(MODELS[model], ideal, prompt_tokens=context, reuse_ratios=[], decode_batches=[n]).rows[0]
    assert decodes.seconds == pytest.approx(cost.decode_line(n).at(n * context), rel=1e-9)


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 200_000))
def test_reuse_lowers_the_intensity_and_the_work(model: str, prompt_tokens: int) -> None:
    rows = roofline(MODELS[model], H20, prompt_tokens=prompt_tokens, reuse_ratios=[0.0, 0.5, 0.9, 1.0]).rows[:4]
    flop = [row.work.flop for row in rows]
    assert flop == sorted(flop, reverse=True)
    assert all(row.new_tokens >= 1 for row in rows)
    assert all(row.flop_per_s <= H20.peak_flop_per_s for row in rows)
    assert all(row.seconds == pytest.approx(row.work.flop / row.flop_per_s) for row in rows)


def test_the_last_token_is_always_computed() -> None:
    assert new_tokens_of(100, 1.0) == 1
    assert new_tokens_of(100, 0.0) == 100


def test_arguments_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(SpecError) as raised:
        roofline(QWEN, H20, prompt_tokens=0, reuse_ratios=[1.5, 0.5], decode_batches=[0])
    assert raised.value.problems == (
        "prompt tokens 0; allowed: 1 or more", "reuse 1.5; allowed: 0 to 1", "decode batch 0; allowed: 1 or more",
    )  # fmt: skip
