"""The sweeps that ship with the project."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import EngineSettings, PlacementSpec, PolicySpec, SimSettings
from ppd_bench.core.slo import SLO
from ppd_bench.core.topology import PAPER_TOPOLOGIES
from ppd_bench.sweep.keys import EngineKeys, PlacementKeys, SimulatorKeys, SloKeys, SweepKeys
from ppd_bench.sweep.library import SWEEPS, resolve_sweep
from ppd_bench.sweep.spec import SweepSpec
from ppd_bench.workload.library import PAPER_WORKLOADS
from ppd_bench.workload.strict_model import model_keys, nested_model

Load = Callable[..., SweepSpec]


def names_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def differing(one: SweepSpec, other: SweepSpec) -> set[str]:
    return {f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(other, f.name)}


def test_the_default_is_the_papers_sweep_as_the_issue_states_it(bundled: Load) -> None:
    assert resolve_sweep() == resolve_sweep("paper")
    spec = bundled("paper")
    assert spec.topologies == PAPER_TOPOLOGIES
    assert tuple(w.name for w in spec.workloads) == PAPER_WORKLOADS
    assert spec.qps == (0.5, 1, 2, 4, 6, 8, 10, 12, 16, 20)
    assert (spec.n_gpus, spec.gpu, spec.model) == (4, "h100-80g", "llama-3.1-8b")
    assert (spec.duration_s, spec.timeout_s, spec.think_time_s, spec.n_repeats) == (10, 30, 0, 1)
    assert spec.policy == PolicySpec(decider="node")
    assert spec.placement == PlacementSpec(
        prefill="round_robin", decode="least_inflight", replica="least_inflight", sticky=True
    )
    assert spec.engine == EngineSettings(
        handoff="push_blocking", kv_connector="P2pNcclConnector", kv_link_bytes_per_s=150e9,
        gpu_memory_utilization_ratio=0.85, max_model_len=8192,
    )  # fmt: skip


def test_the_nixl_sweep_differs_from_the_papers_in_the_hand_off_only(bundled: Load) -> None:
    paper, nixl = bundled("paper"), bundled("vllm-nixl")
    assert differing(paper, nixl) == {"name", "description", "engine"}
    assert nixl.engine == dataclasses.replace(paper.engine, handoff="pull_async", kv_connector="NixlConnector")


def test_the_quick_sweep_is_a_part_of_the_papers(bundled: Load) -> None:
    paper, quick = bundled("paper"), bundled("quick")
    assert differing(paper, quick) == {"name", "description", "topologies", "workloads", "qps"}
    assert quick.topologies == ("4R", "1P_3D", "2P_2D", "2P_2pD", "1P_3pD", "2P_1D_1pD")
    assert len(quick.workloads) == 4
    assert set(quick.workloads) < set(paper.workloads)
    assert len({w.category for w in quick.workloads}) == 3
    assert set(quick.qps) == {2.0, 8.0, 20.0} < set(paper.qps)


def test_every_bundled_sweep_is_valid_and_named_as_its_file(bundled: Load) -> None:
    assert set(SWEEPS.names()) >= {"paper", "vllm-nixl", "quick", "all-keys"}
    for name in SWEEPS.names():
        assert bundled(name).name == name


def test_no_key_of_a_core_type_is_missing_from_a_sweep_file() -> None:
    assert set(EngineKeys.model_fields) == names_of(EngineSettings)
    assert set(SimulatorKeys.model_fields) - {"step_table", "profile"} == names_of(SimSettings) - {
        "profile_hash",
        "step_table_json",
        "fitted_profile",
    }
    assert set(SloKeys.model_fields) == names_of(SLO)
    assert set(PlacementKeys.model_fields) == names_of(PlacementSpec) - {"params"}


def all_paths(model: type[BaseModel], prefix: str = "") -> set[str]:
    paths = set()
    for key, field in model_keys(model).items():
        section = nested_model(field)
        paths |= all_paths(section, f"{prefix}{key}.") if section else {f"{prefix}{key}"}
    return paths


def test_all_keys_shows_every_key_with_a_comment_near_it() -> None:
    text, _ = resolve_sweep("all-keys")
    shown = set()
    for key, value in yaml.safe_load(text.replace("# table:", "table:")).items():
        shown |= {f"{key}.{name}" for name in value} if isinstance(value, dict) else {key}
    assert shown - {"policy.x"} == all_paths(SweepKeys)
    assert text.count("#") > 35


def test_the_values_of_all_keys_are_the_defaults_as_its_heading_promises(bundled: Load) -> None:
    spec = bundled("all-keys")
    assert (spec.engine, spec.sim, spec.placement) == (EngineSettings(), SimSettings(), PlacementSpec())
    defaults = SweepKeys()
    assert (spec.duration_s, spec.timeout_s, spec.think_time_s) == (
        defaults.duration, defaults.timeout, defaults.think_time,
    )  # fmt: skip
    assert (spec.seed, spec.n_repeats, spec.executor) == (defaults.seed, defaults.repeats, defaults.executor)
    assert (spec.success_bound_ratio, spec.token_gaps) == (defaults.success_bound, defaults.token_gaps)


def test_a_copy_in_the_current_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_sweep("paper")[1] == "sweeps/paper.yaml (bundled)"
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "paper.yaml").write_text("name: mine")
    assert resolve_sweep("paper") == ("name: mine", "sweeps/paper.yaml")
    assert resolve_sweep("sweeps/paper.yaml") == ("name: mine", "sweeps/paper.yaml")


def test_an_unknown_sweep_gets_the_names_that_exist() -> None:
    with pytest.raises(
        SpecError, match=r"^unknown sweep 'papre', did you mean 'paper'\?; allowed: .*all-keys, cpu, .*paper"
    ):
        resolve_sweep("papre")
