"""A fitted profile's file: the same after a round trip, and all that is wrong with it at once."""

from __future__ import annotations

import json

import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.core.fitted_profile import PROFILE_SETTINGS, FittedProfile, parse_fitted_profile
from ppd_bench.core.point import SimSettings

PROFILE = FittedProfile(
    name="mine",
    gpu="cpu",
    model="tiny-llama",
    tensor_parallel_size=1,
    handoff="pull_async",
    settings=(("step_overhead_s", 0.002), ("transfer_base_s", 0.1)),
    step_table='{"knots":[[1.0,2.0],[2.0,3.0]]}',
    basis='{"run":"a"}',
)


def test_a_profile_is_the_same_after_a_round_trip_and_has_no_time_in_it() -> None:
    text = PROFILE.to_json()
    assert parse_fitted_profile(text, file="p.json") == PROFILE
    assert parse_fitted_profile(text, file="p.json").to_json() == text
    assert text.endswith("}\n")


def test_its_label_changes_with_its_content() -> None:
    other = parse_fitted_profile(PROFILE.to_json().replace("0.002", "0.003"), file="p.json")
    assert PROFILE.label.startswith("mine (")
    assert other.label != PROFILE.label


def test_what_it_sets_are_simulator_settings() -> None:
    settings = SimSettings(**PROFILE.sim_fields())
    assert (settings.step_overhead_s, settings.transfer_base_s) == (0.002, 0.1)
    assert settings.fitted_profile == PROFILE.label
    assert settings.step_table_json == PROFILE.step_table
    assert {f for f in PROFILE_SETTINGS if not hasattr(SimSettings(), f)} == set()


def test_every_problem_of_a_file_is_told_at_once() -> None:
    content = json.loads(PROFILE.to_json())
    content["gpu"] = 7
    content["settings"] = {"step_overhead_s": -1, "transfer_bytes_per_s": 0, "speed": 3}
    del content["step_table"]
    with pytest.raises(SpecError) as refused:
        parse_fitted_profile(json.dumps(content), file="p.json")
    assert [problem.partition(",")[0] for problem in refused.value.problems] == [
        "p.json: gpu must be text",
        "p.json: step_table must be an object",
        "p.json: settings.speed is not known; allowed: step_overhead_s",
        "p.json: settings.step_overhead_s must be a number",
        "p.json: settings.transfer_bytes_per_s must be a number",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ("[]", "not a simulator profile"),
        ('{"kind": "decision table"}', "not a simulator profile"),
        ('{"kind": "simulator profile", "schema_version": 99}', "calibrate again"),
    ],
)
def test_another_file_is_refused(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=f"^p.json: .*{told}"):
        parse_fitted_profile(text, file="p.json")
