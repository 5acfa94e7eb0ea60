"""Live sweeps on fake engines that run in a thread of their own, and listeners that remember everything."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fakes"))
from fake_engine import Behaviour, FakeEngine
from left_behind import leave_an_orphan as leave_an_orphan

from ppd_bench.core.point import Point
from ppd_bench.runner.listeners import TurnStatistics
from ppd_bench.runner.live import LiveOptions
from ppd_bench.runner.sweep import SweepRequest

SWEEP = """
name: live
gpus: 4
gpu: cpu
model: tiny-llama
topologies: [{topologies}]
workloads: [cpu_chat]
qps: [20]
duration: 500ms
timeout: 20s
engine: {{max_model_len: 1024, kv_connector: NixlConnector, handoff: pull_async}}
"""


class Fakes:
    """Fake engines in a thread of their own, so that the sweep's event loop does not share theirs."""

    def __init__(self, roles: str) -> None:
        self.engines = [FakeEngine(f"{role}{i}", behaviour=Behaviour()) for i, role in enumerate(roles)]
        self.roles = roles
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Fakes:
        self._thread.start()
        for engine in self.engines:
            self.run(engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            self.run(engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def run(self, work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    def write(self, path: Path) -> Path:
        entries = "".join(
            f"  - {{role: {role}, url: 'http://127.0.0.1:{engine.port}'}}\n"
            for role, engine in zip(self.roles, self.engines, strict=True)
        )
        path.write_text(f"engines:\n{entries}")
        return path


class Watcher:
    """A detailed listener that remembers, and calls ``hooks`` by event name."""

    def __init__(self, **hooks: Callable[[], object]) -> None:
        self.events: list[tuple[str, object]] = []
        self.hooks = hooks

    def _told(self, event: str, content: object) -> None:
        self.events.append((event, content))
        if event in self.hooks:
            self.hooks[event]()

    def of(self, event: str) -> list[object]:
        return [content for name, content in self.events if name == event]

    def started(self, n_points: int, n_finished: int) -> None:
        self._told("started", (n_points, n_finished))

    def kept(self, n_turns: int, n_ok: int) -> None:
        self._told("kept", (n_turns, n_ok))

    def stage(self, text: str) -> None:
        self._told("stage", text)

    def point_started(self, point: Point, n_turns: int) -> None:
        self._told("point_started", (point.topology, n_turns))

    def turns(self, statistics: TurnStatistics) -> None:
        self._told("turns", statistics)

    def point_judged(self, point: Point, problems: Sequence[str]) -> None:
        self._told("point_judged", (point.topology, tuple(problems)))

    def point_done(self, point: Point, n_turns: int, n_ok: int) -> None:
        self._told("point_done", (point.topology, n_turns, n_ok))


def live_sweep(tmp_path: Path, fakes: Fakes, topologies: str, *, clients: int = 1, **more: object) -> SweepRequest:
    sweep = tmp_path / "live.yaml"
    sweep.write_text(SWEEP.format(topologies=topologies))
    live = LiveOptions(endpoints=fakes.write(tmp_path / "engines.yaml"), clients=clients)
    return SweepRequest(source=str(sweep), out=tmp_path / "run", live=live, **{"with_report": False, **more})  # type: ignore[arg-type]
