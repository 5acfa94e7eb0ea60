"""A sweep that takes a fitted profile: by value, below its own keys, and only where it was fitted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.core.fitted_profile import FittedProfile
from ppd_bench.sweep.spec import SweepSpec

Load = Callable[..., SweepSpec]
PROFILE = FittedProfile(
    name="mine",
    gpu="h100-80g",
    model="llama-3.1-8b",
    tensor_parallel_size=1,
    handoff="push_blocking",
    settings=(("step_overhead_s", 0.002), ("visit_overhead_s", 0.03)),
    step_table='{"decode":[0,0,0],"knots":[[1,2],[2,3]],"name":"n","prefill":[0,0],"source":"s"}',
    basis="{}",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json())
    return path


def section(path: Path, *more: str) -> str:
    return "\n".join(["simulator:", f"  profile: {path}", *(f"  {line}" for line in more)])


def test_a_profile_travels_by_value(load: Load, file: Path) -> None:
    sim = load(extra=section(file)).sim
    assert (sim.step_overhead_s, sim.visit_overhead_s, sim.fitted_profile) == (0.002, 0.03, PROFILE.label)
    assert json.loads(sim.step_table_json or "") == json.loads(PROFILE.step_table)
    assert sim.sequence_overhead_s == load().sim.sequence_overhead_s


def test_keys_of_the_sweep_go_before_the_profile(load: Load, file: Path) -> None:
    sim = load(extra=section(file, "visit_overhead: 1ms", "transfer_base: 2ms", "transfer_bandwidth: 3GB/s")).sim
    assert (sim.visit_overhead_s, sim.step_overhead_s) == (0.001, 0.002)
    assert (sim.transfer_base_s, sim.transfer_bytes_per_s) == (0.002, 3e9)


def test_the_command_line_takes_a_profile_too(load: Load, file: Path) -> None:
    assert load({"simulator": {"profile": str(file)}}).sim.fitted_profile == PROFILE.label


def test_a_profile_of_something_else_is_refused_with_every_difference(load: Load, file: Path) -> None:
    settings = (*PROFILE.settings, ("transfer_base_s", 0.1))
    file.write_text(dataclasses.replace(PROFILE, handoff="pull_async", settings=settings).to_json())
    with pytest.raises(SpecError) as refused:
        load(extra=section(file), gpu="h20", model="qwen2.5-14b", topologies="[2R@tp2, 1P_3D]")
    assert [problem.split(": ", 2)[2].split(",")[0] for problem in refused.value.problems] == [
        "was fitted with gpu h100-80g",
        "was fitted with model llama-3.1-8b",
        "was fitted with engine.handoff pull_async",
        "was fitted with tensor parallel size 1",
    ]
    assert all(p.startswith("s.yaml: simulator.profile: ") for p in refused.value.problems)


def test_a_profile_without_transfers_suits_every_hand_off(load: Load, file: Path) -> None:
    assert load(extra=section(file) + "\nengine: {handoff: pull_async}").sim.fitted_profile


@pytest.mark.parametrize(("text", "told"), [(None, "cannot be read"), ("{}", "not a simulator profile")])
def test_a_file_that_is_none_is_refused(load: Load, tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match=f"s.yaml: simulator.profile: .*{told}"):
        load(extra=section(path))
