"""One P and one D, fake or real, and ways to talk to them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fakes"))
from fake_engine import Behaviour, FakeEngine

from ppd_bench.core.point import EngineSettings
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.client import Client
from ppd_bench.engine.control import control_client
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.launch_plan import launch_plan, ports_per_engine
from ppd_bench.engine.ports import free_ports
from ppd_bench.engine.supervisor import Supervisor
from ppd_bench.engine.tiny_model import FLAGS, write_tiny_model
from ppd_bench.engine.vllm_install import inspect_install

T = TypeVar("T")

PYTHON = os.environ.get("PPD_BENCH_ENGINE_PYTHON")
BLOCK = 32
MAX_MODEL_LEN = 1024
TOPOLOGY = parse_topology("1P_1D")
SETTINGS = EngineSettings(
    kv_connector="NixlConnector",
    handoff="pull_async",
    kv_lease_s=300.0,
    block_size=BLOCK,
    max_model_len=MAX_MODEL_LEN,
    max_num_batched_tokens=MAX_MODEL_LEN,
    max_num_seqs=16,
)


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The engines, and ways to talk to them. ``do`` runs a coroutine function with the client and the control client."""

    kind: str
    engines: Engines
    loop: asyncio.AbstractEventLoop

    @property
    def p(self) -> Endpoint:
        return self.engines.endpoints[0]

    @property
    def d(self) -> Endpoint:
        return self.engines.endpoints[1]

    def do(self, work: Callable[[Client, httpx.AsyncClient], Coroutine[Any, Any, T]], within_s: float = 90.0) -> T:
        async def main() -> T:
            async with Client(self.loop.time) as client, control_client() as control:
                return await asyncio.wait_for(work(client, control), within_s)

        return asyncio.run_coroutine_threadsafe(main(), self.loop).result(within_s + 10.0)


async def fake_engines(stack: AsyncExitStack) -> Engines:
    behaviour = {"step_s": 0.005, "max_model_len": MAX_MODEL_LEN}
    endpoints = []
    for worker in TOPOLOGY.workers:
        fake = FakeEngine(worker.worker_id, block_size=BLOCK, behaviour=Behaviour(**behaviour))  # type: ignore[arg-type]
        await fake.start()
        stack.push_async_callback(fake.stop)
        endpoints.append(Endpoint(worker_id=worker.worker_id, role=worker.role, host=fake.host, port=fake.port))
    return Engines(endpoints=tuple(endpoints))


async def real_engines(stack: AsyncExitStack, folder: Path) -> Engines:
    write_tiny_model(folder / "model")
    plan = launch_plan(
        TOPOLOGY,
        model_path=str(folder / "model"),
        engine=SETTINGS,
        install=inspect_install(Path(str(PYTHON))),
        device="cpu",
        ports=free_ports(TOPOLOGY.n_workers, ports_per_engine(TOPOLOGY)),
        seed=0,
        extra_flags=FLAGS,
    )
    supervisor = Supervisor(plan, log_folder=folder / "logs", state_folder=folder / "state")
    return (await stack.enter_async_context(supervisor)).engines
