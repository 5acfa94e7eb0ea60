"""Simulated turns per second and core, beside ai-dynamo's offline replay where that is installed.

    python tests/benchmarks/bench_sim.py [--conversations 4000] [--repeats 3]

Two-turn conversations, 1,024->128 then 256->128 tokens, 8 per second, on 4R and 1P_3D, Llama-3.1-8B on H100, one process. A
request is a turn. The runs of both programs alternate, because shared cores are noisy: read the ratio. The peer is an extra:
``pip install --no-deps ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ppd_bench.core.enums import Executor
from ppd_bench.core.models import MODELS
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.workload import TurnLengths, WorkloadSpec
from ppd_bench.sim.kernel import kernel_status
from ppd_bench.sim.simulate import simulate
from ppd_bench.workload.generate import generate_sessions

QPS = 8.0
TURNS = ((1024, 128), (256, 128))


def bench_point(topology: str, n_conversations: int) -> Point:
    turns = tuple(TurnLengths(input_tokens=i, output_tokens=o) for i, o in TURNS)
    return Point(
        topology=topology,
        model="llama-3.1-8b",
        gpu="h100-80g",
        workload=WorkloadSpec(name="bench", category="balanced", turns=turns, max_output_tokens=2048),
        qps=QPS,
        duration_s=n_conversations / QPS,
        timeout_s=30.0,
        think_time_s=0.0,
        seed=0,
        repeat=0,
        executor=Executor.SIM,
        policy=PolicySpec(),
        placement=PlacementSpec(),
        engine=EngineSettings(),
        engine_version="bench",
        sim=SimSettings(),
    )


def ours(topology: str, n_conversations: int) -> float:
    """Turns per CPU-second, from the sessions' generation to finished records."""
    point = bench_point(topology, n_conversations)
    began_s = time.process_time()
    sessions = generate_sessions(
        point.workload, qps=QPS, duration_s=point.duration_s, think_time_s=0.0, seed=0, repeat=0
    )
    records = simulate(point, sessions, MODELS[point.model])
    return len(records["status"]) / (time.process_time() - began_s)


def peer(topology: str, n_conversations: int) -> float | None:
    """Turns per CPU-second of ai-dynamo's replay; null where it is not installed."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from dynamo_peer import dynamo_replay

        n_turns, _, cpu_s = dynamo_replay(topology, n_conversations, QPS, 1)
    except ImportError:
        return None
    return n_turns / cpu_s


def rate(run: Callable[[], float | None], repeats: list[float]) -> None:
    value = run()
    if value is not None:
        repeats.append(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"simulator kernel: {kernel_status()}")
    for topology in ("4R", "1P_3D"):
        mine: list[float] = []
        theirs: list[float] = []
        for _ in range(options.repeats):
            rate(lambda topology=topology: ours(topology, options.conversations), mine)
            rate(lambda topology=topology: peer(topology, options.conversations), theirs)
        told = f"{topology}: ppd-bench {statistics.median(mine):,.0f} turns per CPU-second"
        if theirs:
            ratio = statistics.median(mine) / statistics.median(theirs)
            told += f", ai-dynamo replay {statistics.median(theirs):,.0f}, ratio {ratio:.2f}"
        else:
            told += " (ai-dynamo is not installed: no comparison)"
        print(told, flush=True)


if __name__ == "__main__":
    main()
