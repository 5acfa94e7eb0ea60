"""Launch plans whose engines are ``engine_driver.py``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from ppd_bench.core.point import EngineSettings
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.launch_plan import EngineCommand, LaunchPlan
from ppd_bench.engine.ports import free_ports

DRIVER = Path(__file__).with_name("engine_driver.py")
SETTINGS = EngineSettings(kv_connector="NixlConnector", block_size=16)


def driver_plan(name: str, how: Mapping[str, str] | None = None) -> LaunchPlan:
    """The plan of a topology; ``how`` gives words for the driver by worker id."""
    layout = parse_topology(name).layout
    commands = tuple(
        EngineCommand(
            worker_id=worker.worker_id,
            role=worker.role,
            argv=(sys.executable, str(DRIVER), str(port), *(how or {}).get(worker.worker_id, "").split()),
            env={},
            host="127.0.0.1",
            port=port,
            side_channel_port=None,
            gpu_ids=worker.gpu_ids,
        )
        for worker, port in zip(layout.workers, free_ports(layout.n_workers, 1), strict=True)
    )
    connector = "NixlConnector" if layout.n_prefill else None
    return LaunchPlan(
        layout=layout.name, model="fake", device="cuda", connector=connector, engine=SETTINGS, commands=commands
    )
