"""Points, conversations and single engines for the simulator's tests."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from ppd_bench.core.enums import Executor
from ppd_bench.core.models import MODELS
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.record import Columns
from ppd_bench.core.workload import Session, Turn, TurnLengths, WorkloadSpec
from ppd_bench.sim import simulate as simulate_module
from ppd_bench.sim.cluster import Cluster
from ppd_bench.sim.cost import StepCost, TableCost
from ppd_bench.sim.kv import KvPool
from ppd_bench.sim.simulate import SimOptions, run_cluster
from ppd_bench.sim.worker import LOCAL, Seq, Worker

LLAMA = MODELS["llama-3.1-8b"]


def workload(*turns: tuple[int, int]) -> WorkloadSpec:
    """A workload of (input, output) lengths."""
    lengths = tuple(TurnLengths(input_tokens=a, output_tokens=b) for a, b in turns)
    return WorkloadSpec(name="test", category="balanced", turns=lengths, max_output_tokens=4096)


def make_point(
    topology: str,
    work: WorkloadSpec,
    *,
    qps: float = 1.0,
    duration_s: float = 10.0,
    timeout_s: float = 30.0,
    think_time_s: float = 0.0,
    seed: int = 0,
    gpu: str = "h100-80g",
    policy: PolicySpec | None = None,
    placement: PlacementSpec | None = None,
    sim: SimSettings | None = None,
    **engine: Any,
) -> Point:
    """A simulated point of Llama-3.1-8B; ``engine`` are EngineSettings."""
    return Point(
        topology=topology,
        model="llama-3.1-8b",
        gpu=gpu,
        workload=work,
        qps=qps,
        duration_s=duration_s,
        timeout_s=timeout_s,
        think_time_s=think_time_s,
        seed=seed,
        repeat=0,
        executor=Executor.SIM,
        policy=policy or PolicySpec(),
        placement=placement or PlacementSpec(),
        engine=EngineSettings(**engine),
        engine_version="sim",
        sim=sim or SimSettings(),
    )


def session(name: str, start_s: float, *turns: tuple[int, int], think_time_s: float = 0.0) -> Session:
    """One conversation of (input, output) lengths whose first turn is scheduled at ``start_s``."""
    context = 0
    found = []
    for k, (n_in, n_out) in enumerate(turns, start=1):
        found.append(
            Turn(
                request_id=f"{name}.t{k}",
                session_id=name,
                turn=k,
                scheduled_s=start_s if k == 1 else None,
                think_time_s=None if k == 1 else think_time_s,
                context_tokens=context,
                input_tokens=n_in,
                output_tokens=n_out,
                max_output_tokens=4096,
            )
        )
        context += n_in + n_out
    return tuple(found)


def traced(name: str, start_s: float, block_ids: tuple[int, ...], n_in: int, n_out: int) -> Session:
    """A conversation of one turn whose prompt has content ids."""
    (turn,) = session(name, start_s, (n_in, n_out))
    return (dataclasses.replace(turn, block_ids=block_ids),)


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """Columns as one dict per turn."""
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def cluster_of(point: Point, sessions: list[Session] | tuple[Session, ...], *, cap: int = 96) -> Cluster:
    """The finished cluster, with its log."""
    return run_cluster(point, sessions, LLAMA, SimOptions(stretch_cap=cap, keep_log=True))


def constant_cost(seconds: float) -> TableCost:
    """Every step takes the same time. A TableCost, since compiled classes take no interpreted subclass."""
    return TableCost([(1.0, seconds), (2.0, seconds)], (0.0, 0.0, 0.0), (0.0, 0.0))


def use_cost(monkeypatch: Any, cost: StepCost) -> None:
    """Every engine of every point costs this from now on."""
    monkeypatch.setattr(simulate_module, "make_cost", lambda *args: cost)


def use_blocks(monkeypatch: Any, n_blocks: int) -> None:
    """Every engine has so many KV blocks from now on."""
    monkeypatch.setattr(simulate_module, "kv_capacity_blocks", lambda *args: n_blocks)


def make_worker(
    cost: StepCost,
    *,
    n_blocks: int = 1000,
    block_size: int = 16,
    budget: int = 8192,
    max_num_seqs: int = 256,
    caching: bool = True,
    step_overhead_s: float = 0.0,
    sequence_overhead_s: float = 0.0,
    receiver_cost_s: float = 0.0,
    cap: int = 96,
) -> Worker:
    """One engine without overheads."""
    return Worker(
        index=0,
        pool=KvPool(n_blocks, caching),
        cost=cost,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        step_overhead_s=step_overhead_s,
        sequence_overhead_s=sequence_overhead_s,
        receiver_cost_s=receiver_cost_s,
        stretch_cap=cap,
    )


def make_seq(owner: int, n_in: int, n_out: int, *, first_block: int | None = None, remote: int = LOCAL) -> Seq:
    """A request of ``n_in`` prompt and ``n_out`` generated tokens with private content."""
    start = owner * 100_000 if first_block is None else first_block
    return Seq(owner, [(start, start + 10_000)], n_in, n_in + n_out, remote)


@dataclasses.dataclass
class Step:
    """What one engine step did: instants, decodes, and tokens of each prefill by owner."""

    start_s: float
    end_s: float
    n_decode: int
    chunks: dict[int, int]
    n_running: int

    @property
    def n_tokens(self) -> int:
        return self.n_decode + sum(self.chunks.values())


def drive(worker: Worker, arrivals: list[tuple[float, Seq]]) -> tuple[list[Step], dict[int, float]]:
    """Run a plain stepper's worker (cap 1) on arrivals (ascending); returns its steps and the instant each owner ended."""
    queue = deque(arrivals)
    steps: list[Step] = []
    ended: dict[int, float] = {}
    now_s = 0.0
    while True:
        while queue and queue[0][0] <= now_s:
            worker.add(queue.popleft()[1])
        if not worker.start(now_s):
            if not queue:
                return steps, ended
            now_s = queue[0][0]
            continue
        chunks = {seq.owner: seq.chunk for seq in worker.scheduled}
        steps.append(Step(now_s, worker.busy_until_s, worker._n_decoding, chunks, len(worker.running)))
        now_s = worker.busy_until_s
        for seq in worker.finish_step():
            worker.release(seq)
            ended[seq.owner] = now_s


class Watched:
    """A cluster that is looked at after every event."""

    def __init__(self, observe: Callable[[Cluster], None], **settings: Any) -> None:
        self.cluster = Cluster(**settings)
        self.observe = observe

    def load(self, *args: Any) -> None:
        self.cluster.load(*args)

    def run(self) -> None:
        while self.cluster._heap:
            self.cluster.next_event()
            self.observe(self.cluster)


def watch(monkeypatch: Any, observe: Callable[[Cluster], None]) -> None:
    """From now on ``observe`` sees every cluster after each of its events."""
    monkeypatch.setattr(simulate_module, "Cluster", lambda **settings: Watched(observe, **settings))
