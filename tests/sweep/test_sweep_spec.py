"""Sweep files: strict, complete, and all errors at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.core.models import MODELS
from ppd_bench.core.point import EngineSettings, PlacementSpec, PolicySpec, SimSettings
from ppd_bench.core.slo import SLO
from ppd_bench.sweep.spec import SweepSpec, load_sweep

Load = Callable[..., SweepSpec]

OWN_WORKLOAD = "name: {name}\ncategory: balanced\nturns: [{{input_tokens: {n}, output_tokens: 1}}]\n"
HF_CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 6,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def problems(load: Load, *args: Any, **keys: Any) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        load(*args, **keys)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_what_a_file_leaves_out_takes_the_core_types_defaults(load: Load) -> None:
    spec = load()
    assert (spec.engine, spec.sim, spec.slo) == (EngineSettings(), SimSettings(), SLO())
    assert (spec.policy, spec.placement) == (PolicySpec(), PlacementSpec())
    assert (spec.duration_s, spec.timeout_s, spec.think_time_s) == (10.0, 30.0, 0.0)
    assert (spec.seed, spec.n_repeats, spec.executor) == (0, 1, "auto")
    assert (spec.success_bound_ratio, spec.token_gaps) == (0.95, False)
    assert spec.model_profile is MODELS["llama-3.1-8b"]
    assert (spec.topologies, spec.qps) == (("4R", "1P_3D"), (1.0, 2.0))


def test_friendly_units_reach_the_core_types_as_seconds_and_bytes(load: Load) -> None:
    spec = load(
        duration="500ms",
        think_time="2min",
        engine="{kv_link_bandwidth: 150GB/s, kv_link_latency: 0.5ms, gpu_memory_utilization: 1}",
        simulator="{activation_reserve: 2GiB, sequence_overhead: 7.5us}",
        slo="{ttft: 250ms}",
    )
    assert (spec.duration_s, spec.think_time_s) == (0.5, 120.0)
    assert spec.engine.kv_link_bytes_per_s == 150e9
    assert spec.engine.kv_link_latency_s == 0.0005
    assert spec.engine.gpu_memory_utilization_ratio == 1.0
    assert spec.sim.activation_reserve_bytes == 2**31
    assert spec.sim.sequence_overhead_s == 7.5e-6
    assert spec.slo == SLO(ttft_s=0.25)


def test_sections_with_every_key_commented_out_are_empty_sections(load: Load) -> None:
    assert load(engine="", policy="", slo="~") == load()


def test_an_empty_file_misses_every_required_key_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        load_sweep("seed: 1", file="s.yaml", deciders=(), placements=("round_robin", "least_inflight"))
    missing = [line.split(": ")[1] for line in caught.value.problems if ": is missing; allowed: " in line]
    assert missing == ["name", "gpus", "gpu", "model", "topologies", "workloads", "qps"]


BAD_FAMILIES = [
    ({"extra": "thnk_time: 1"}, "thnk_time", "did you mean 'think_time'?", "think_time, seed"),
    ({"engine": "{block_sise: 1}"}, "engine.block_sise", "did you mean 'block_size'?", "block_size, gpu_memory"),
    ({"engine": "{kv_link_latency_s: 1}"}, "engine.kv_link_latency_s", "did you mean 'kv_link_latency'?", "kv_lease"),
    ({"simulator": "{profile_hash: x}"}, "simulator.profile_hash", "unknown key", "cost_model"),
    ({"slo": "{ttfs: 1}"}, "slo.ttfs", "did you mean 'ttft'?", "ttft, tpot, e2e"),
    ({"duration": "10 parsecs"}, "duration", "unknown unit 'parsecs'", "us, ms, s, min, h"),
    ({"engine": "{kv_link_bandwidth: 150GBps}"}, "engine.kv_link_bandwidth", "unknown unit 'GBps'", "GB/s"),
    ({"simulator": "{activation_reserve: 2gb}"}, "simulator.activation_reserve", "unknown unit 'gb'", "GB"),
    ({"engine": "7"}, "engine", "must be a mapping of keys, got 7", "the keys max_num_batched_tokens"),
    ({"think_time": "-1s"}, "think_time", "greater than or equal to 0", "seconds"),
    ({"timeout": "0"}, "timeout", "greater than 0", "seconds"),
    ({"timeout": ".inf"}, "timeout", "must be a duration, got inf", "seconds"),
    ({"repeats": "true"}, "repeats", "must be a valid integer, got True", "1 or more"),
    ({"repeats": "1.0"}, "repeats", "must be a valid integer", "1 or more"),
    ({"seed": "-1"}, "seed", "greater than or equal to 0", "0 or more"),
    ({"gpus": "0"}, "gpus", "greater than or equal to 1", "1 or more"),
    ({"success_bound": "95"}, "success_bound", "less than or equal to 1", "at most 1"),
    ({"success_bound": "true"}, "success_bound", "must be a valid number, got True", "at most 1"),
    ({"token_gaps": "1"}, "token_gaps", "must be a valid boolean", "true, false"),
    ({"executor": "gpu"}, "executor", "got 'gpu'", "auto, sim, live"),
    ({"engine": "{handoff: nixl}"}, "engine.handoff", "got 'nixl'", "push_blocking, pull_async"),
    ({"name": "a b"}, "name", "got 'a b'", "letters"),
    ({"gpu": "h10-80g"}, "gpu", "did you mean 'h100-80g'?", "h100-80g, h200"),
    ({"model": "llama-3.1"}, "model", "did you mean 'llama-3.1-8b'?", "qwen2.5-14b"),
    ({"model": "no/such/config.json"}, "model", "cannot be read", "the path of a config.json"),
    ({"topologies": "4R"}, "topologies", "must be a list", "'paper', or a list"),
    ({"topologies": "[]"}, "topologies", "must be a list", "'paper', or a list"),
    ({"topologies": "[4R, foo]"}, "topologies[1]", "'foo' is not understood", "parts like 4R"),
    ({"topologies": "[1D_1P]"}, "topologies[0]", "not canonical; write '1P_1D'", "names like 4R"),
    ({"topologies": "[2P]"}, "topologies[0]", "lacks a decode node", "names like 4R"),
    ({"topologies": "[4R, 5R]"}, "topologies[1]", "5R needs 5 GPUs, gpus is 4", "at most 4"),
    ({"topologies": "[2R@tp4]"}, "topologies[0]", "2R@tp4 needs 8 GPUs, gpus is 4", "at most 4"),
    ({"topologies": "[1R@tp3]"}, "topologies[0]", "@tp3 does not divide llama-3.1-8b's 32 heads", "divisor"),
    ({"topologies": "[4R, 1P_3D, 4R]"}, "topologies[2]", "'4R' is already listed as topologies[0]", "each once"),
    ({"workloads": "[small_tny]"}, "workloads[0]", "did you mean 'small_tiny'?", "large_big_paste"),
    ({"workloads": "[small_tiny, 3]"}, "workloads[1]", "must be a workload name or path, got 3", "'paper'"),
    ({"workloads": "[small_tiny, small_tiny]"}, "workloads[1]", "already listed as workloads[0]", "each once"),
    ({"qps": "[1, 2, 1.0]"}, "qps[2]", "already listed as qps[0]", "each once"),
    ({"qps": "[0]"}, "qps[0]", "must be a number above 0, got 0", "numbers above 0"),
    ({"qps": "[true]"}, "qps[0]", "must be a number above 0, got True", "numbers above 0"),
    ({"qps": "[.nan]"}, "qps[0]", "must be a number above 0, got nan", "numbers above 0"),
    ({"policy": "{decider: frction}"}, "policy.decider", "did you mean 'fraction'?", "always_pd"),
    ({"policy": "{decider: fraction}"}, "policy.x", "is missing", "from 0 to 1"),
    ({"policy": "{decider: fraction, x: 2}"}, "policy.x", "must be a ratio, got 2", "from 0 to 1"),
    ({"policy": "{decider: threshold, y: [1]}"}, "policy.y", "must be one value, got [1]", "finite number"),
    ({"policy": "{decider: table}"}, "policy.table", "is missing", "table.json"),
    ({"policy": "{decider: table, table: none.json}"}, "policy.table", "cannot be read", "table.json"),
    ({"policy": "{table: none.json}"}, "policy.table", "belongs to decider 'table', not to 'node'", "table.json"),
    ({"placement": "{prefill: rr}"}, "placement.prefill", "unknown placement 'rr'", "round_robin"),
    ({"placement": "{sticky: 1}"}, "placement.sticky", "must be a valid boolean", "true, false"),
    ({"engine": "{max_model_len: 303}"}, "engine.max_model_len", "small_tiny, which needs 304", "at least 304"),
    ({"engine": "{max_model_len: 200000}"}, "engine.max_model_len", "llama-3.1-8b can hold", "at most 131072"),
    (
        {"engine": "{max_num_batched_tokens: 15, max_num_seqs: 4}"},
        "engine.max_num_batched_tokens",
        "15 is less than block_size (16)",
        "at least 16",
    ),
    ({"engine": "{max_num_batched_tokens: 99}"}, "engine.max_num_batched_tokens", "max_num_seqs (256)", "256"),
    ({"extra": "seed: 1\nseed: 2"}, "seed", "written twice", "each key once"),
    ({"extra": "7: 2"}, "7", "is not text", "text keys"),
]


@pytest.mark.parametrize(("keys", "where", "what", "allowed"), BAD_FAMILIES, ids=[f"{k}" for k, *_ in BAD_FAMILIES])
def test_one_mistake_gives_one_line_with_file_key_path_and_what_is_allowed(
    load: Load, keys: dict[str, str], where: str, what: str, allowed: str
) -> None:
    (line,) = problems(load, **keys)
    assert line.startswith(f"s.yaml: {where}: ")
    told, _, options = line.rpartition("allowed: ")
    assert what in told
    assert allowed in options


def test_mistakes_in_all_parts_of_a_file_are_reported_together(load: Load) -> None:
    found = problems(
        load,
        gpus="3",
        gpu="abacus",
        topologies="[4R, foo, 1R]",
        workloads="[nothing, large_huge_paste]",
        qps="[-1]",
        duration="1 day",
        engine="{max_model_len: 2000, blocks: 1}",
        policy="{decider: oracle}",
        placement="{decode: best}",
        extra="x: 1\ngpus: 3",
    )
    assert sorted(line.split(": ")[1] for line in found) == sorted(
        [
            "gpus", "gpu", "topologies[0]", "topologies[1]", "workloads[0]", "qps[0]", "duration",
            "engine.max_model_len", "engine.blocks", "policy.decider", "placement.decode", "x",
        ]
    )  # fmt: skip


def test_a_wrong_value_is_not_judged_again_by_what_depends_on_it(load: Load) -> None:
    (line,) = problems(load, gpus="none", topologies="[64R]")
    assert line.startswith("s.yaml: gpus: ")
    (line,) = problems(load, engine="{max_model_len: 0}", workloads="paper")
    assert line.startswith("s.yaml: engine.max_model_len: ")


def test_the_longest_workload_decides_over_max_model_len(load: Load) -> None:
    """large_huge_paste: 1024 + 1024 + 1024 + 32 = 3104; large_very_long_gen: 1024 + 1024 + 64 + 1024 = 3136."""
    assert load(workloads="paper", engine="{max_model_len: 3136}").engine.max_model_len == 3136
    (line,) = problems(load, workloads="paper", engine="{max_model_len: 3135}")
    assert "large_very_long_gen, which needs 3136 tokens" in line


def test_workloads_by_path_join_the_bundled_ones(load: Load, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN_WORKLOAD.format(name="mine", n=5))
    spec = load(workloads=f"[small_tiny, {tmp_path}/mine.yaml]")
    assert [w.name for w in spec.workloads] == ["small_tiny", "mine"]


def test_two_files_with_one_workload_name_are_refused_because_results_are_labelled_by_it(
    load: Load, tmp_path: Path
) -> None:
    (tmp_path / "small_tiny.yaml").write_text(OWN_WORKLOAD.format(name="small_tiny", n=5))
    (line,) = problems(load, workloads=f"[small_tiny, {tmp_path}/small_tiny.yaml]")
    assert "is already listed as workloads[0]" in line


def test_every_problem_of_a_workload_file_is_told_through_the_sweep(load: Load, tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("name: w\ncategory: odd\nturns: [{input_tokens: 0, output_tokens: 1}]\n")
    found = problems(load, workloads=f"[{tmp_path}/w.yaml]")
    assert [line.startswith("s.yaml: workloads[0]: ") for line in found] == [True, True]
    assert "w.yaml: category: " in found[0]
    assert "w.yaml: turns[0].input_tokens: " in found[1]


def test_a_hugging_face_config_is_a_model_whose_name_follows_its_content(load: Load, tmp_path: Path) -> None:
    names = []
    for layers, folder in [(2, "a/tiny"), (2, "b/tiny"), (3, "c/tiny")]:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps({**HF_CONFIG, "num_hidden_layers": layers}))
        spec = load(model=f"{tmp_path}/{folder}/config.json", engine="{max_model_len: 4096}")
        assert spec.model == spec.model_profile.name
        assert spec.model_profile.n_layers == layers
        assert load(model=f"{tmp_path}/{folder}", engine="{max_model_len: 4096}") == spec
        names.append(spec.model)
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("tiny-")


def test_an_unusable_hugging_face_config_says_why(load: Load, tmp_path: Path) -> None:
    for text, what in [("{", "is not JSON"), ("[]", "holds no JSON object"), ("{}", "'num_hidden_layers' must be")]:
        (tmp_path / "config.json").write_text(text)
        found = problems(load, model=f"{tmp_path}/config.json")
        assert found[0].startswith("s.yaml: model: ")
        assert what in found[0]


def test_a_decision_table_is_part_of_the_policy_by_its_text_not_its_path(load: Load, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.json").write_text('{"v": 1}')
    specs = [load(policy=f"{{decider: table, table: {tmp_path}/{folder}/t.json}}") for folder in ("a", "b")]
    assert specs[0].policy == PolicySpec(decider="table", table_json='{"v": 1}')
    assert specs[0] == specs[1]


def test_parameters_are_sorted_and_have_one_spelling(load: Load) -> None:
    spec = load(policy="{z: 1.0, decider: fraction, x: 0.5, b: true}", placement="{alpha: 2.0, prefill: cache_aware}")
    assert spec.policy.params == (("b", True), ("x", 0.5), ("z", 1))
    assert repr(spec.policy.params) == "(('b', True), ('x', 0.5), ('z', 1))"
    assert spec.placement == PlacementSpec(prefill="cache_aware", params=(("alpha", 2),))


def test_names_with_their_parameters_make_unknown_parameters_errors() -> None:
    text = (
        "{name: m, gpus: 4, gpu: h200, model: llama-3.1-8b, topologies: [4R], workloads: [small_tiny], qps: [1],"
        " policy: {decider: fraction, x: 1, z: 2}, placement: {decode: cache_aware, alpha: 1, alhpa: 2}}"
    )
    parameters = {"fraction": ("x",), "cache_aware": ("alpha",)}
    placements = ("round_robin", "least_inflight", "cache_aware")
    with pytest.raises(SpecError) as caught:
        load_sweep(text, file="s.yaml", deciders=("fraction",), placements=placements, parameters=parameters)
    assert [line.partition(";")[0] for line in caught.value.problems] == [
        "s.yaml: policy.z: unknown key 'z'",
        "s.yaml: placement.alhpa: unknown key 'alhpa', did you mean 'alpha'?",
    ]


def test_overrides_win_over_the_file_and_nulls_are_not_given(load: Load) -> None:
    spec = load(
        {"qps": [4.0], "seed": None, "engine": {"block_size": 32, "handoff": None}},
        seed="7",
        engine="{block_size: 8, handoff: pull_async}",
    )
    assert (spec.qps, spec.seed) == ((4.0,), 7)
    assert (spec.engine.block_size, spec.engine.handoff) == (32, "pull_async")


def test_an_override_of_the_decider_drops_the_files_parameters(load: Load) -> None:
    keys = {"policy": "{decider: fraction, x: 0.5}"}
    assert load({"policy": {"decider": "always_pd"}}, **keys).policy == PolicySpec(decider="always_pd")
    assert load({"policy": {"x": 0.25}}, **keys).policy.params == (("x", 0.25),)


def test_errors_of_overrides_name_the_flag(load: Load) -> None:
    found = problems(load, {"think_time": "soon", "qps": [0], "engine": {"max_num_seqs": 0}, "sede": 1})
    assert [line.partition("; ")[0] for line in found] == [
        "command line: --think-time: must be a duration, got 'soon'",
        "command line: --max-num-seqs: must be greater than or equal to 1, got 0",
        "command line: --sede: unknown key 'sede', did you mean 'seed'?",
        "command line: --qps: must be a number above 0, got 0",
    ]


def test_the_effective_spec_is_plain_json_and_equal_for_equal_sweeps(load: Load) -> None:
    effective = load(duration="10s", qps="[1]").effective()
    assert json.loads(json.dumps(effective)) == effective
    assert effective == load(duration="10000ms", qps="[1.0]").effective()
    assert effective != load(duration="11s", qps="[1]").effective()
    assert effective["workloads"][0]["turns"][1] == {"input_tokens": 16, "output_tokens": 32}
    assert effective["engine"]["block_size"] == 16


def test_the_result_cannot_be_changed(load: Load) -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        load().seed = 1  # type: ignore[misc]


def test_yaml_that_refers_to_itself_is_refused_without_hanging(load: Load) -> None:
    (line,) = problems(load, policy="&p {decider: node, y: *p}")
    assert line.startswith("s.yaml: policy.y: ")
    (line,) = problems(load, qps="&q [*q]")
    assert line.startswith("s.yaml: qps[0]: ")
