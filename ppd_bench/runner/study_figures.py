"""What the agentic study says of one simulated point, and how its parts become tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from ppd_bench.analysis.breakdown import (
    STAGES,
    BlockedWait,
    RoleLoad,
    StageFigures,
    longest_short_wait,
    role_loads,
    stage_figures,
    start_waits_s,
)
from ppd_bench.analysis.metrics import floats
from ppd_bench.analysis.reuse import hit_blocks, hit_tokens, ratio_of
from ppd_bench.analysis.summary import summarise
from ppd_bench.analysis.trace_blocks import number_blocks
from ppd_bench.core.point import Point
from ppd_bench.core.profiles import ModelProfile
from ppd_bench.core.topology import parse_topology
from ppd_bench.core.trace import TraceRow
from ppd_bench.core.workload import Session, Turn
from ppd_bench.runner.study_points import Case
from ppd_bench.runner.traffic import sessions_of
from ppd_bench.sim.simulate import SimOptions, simulate_with_gauges
from ppd_bench.workload.traffic import SourceFile

GAUGE_INTERVAL_S = 1.0
SHORT_PROMPT_TOKENS = 2048
"""A prompt of at most so many tokens is short where waits behind long ones are looked for."""

SUMMARY_FIGURES = (
    "n_ok", "n_scheduled", "n_timeout", "ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s", "e2e_p50_s", "e2e_p90_s",
    "throughput_tokens_per_s", "span_s", "prefix_hit_ratio", "n_preemptions",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFigures:
    """One simulated point. ``summary``: ``SUMMARY_FIGURES`` over all turns. ``possible_hit_ratio``: prompt tokens that an
    infinite cache would find. Start waits are of conversations that were held back until another one ended."""

    summary: Mapping[str, float]
    stages: tuple[StageFigures, ...]
    loads: tuple[RoleLoad, ...]
    short_wait: BlockedWait | None
    start_wait_s: float
    longest_start_wait_s: float
    possible_hit_ratio: float

    def load(self, role: str) -> RoleLoad | None:
        return next((load for load in self.loads if load.role == role), None)

    @property
    def decode_load(self) -> RoleLoad | None:
        """Of the engines that generate: D, else R."""
        return self.load("D") or self.load("R")

    def stage_share_ratio(self, stage: str) -> float:
        return next((s.ttft_share_ratio for s in self.stages if s.stage == stage), 0.0)


def figures_of(point: Point, model: ModelProfile, sources: tuple[SourceFile, ...]) -> PointFigures:
    """Simulate a point and say what came of it. Runs in a process of its own."""
    sessions = sessions_of(point, sources)
    columns, gauges = simulate_with_gauges(point, sessions, model, SimOptions(gauge_interval_s=GAUGE_INTERVAL_S))
    records = pd.DataFrame(columns)
    summary = summarise(records, [point])
    overall = summary[summary["slice"] == "all"]
    waits = start_waits_s(records)
    roles = {worker.worker_id: worker.role.value for worker in parse_topology(point.topology).workers}
    return PointFigures(
        summary={name: float(floats(overall, name)[0]) for name in SUMMARY_FIGURES},
        stages=tuple(stage_figures(records)),
        loads=tuple(role_loads(pd.DataFrame(gauges), roles)),
        short_wait=longest_short_wait(records, SHORT_PROMPT_TOKENS),
        start_wait_s=float(waits.sum()),
        longest_start_wait_s=float(waits.max()) if len(waits) else 0.0,
        possible_hit_ratio=possible_hit_ratio(sessions),
    )


def possible_hit_ratio(sessions: Sequence[Session]) -> float:
    """Prompt tokens that an infinite cache finds, requests in the order given (``analysis.reuse``: token-weighted hit). NaN
    without block ids."""
    turns = [turn for session in sessions for turn in session]
    block_tokens = turns[0].block_tokens if turns else None
    if block_tokens is None:
        return float("nan")
    rows = [_row_of(number, turn) for number, turn in enumerate(turns)]
    blocks = number_blocks(rows, block_tokens=block_tokens)
    return ratio_of(hit_tokens(blocks, hit_blocks(blocks)), sum(row.prompt_tokens for row in rows))


def _row_of(number: int, turn: Turn) -> TraceRow:
    ids = turn.block_ids or ()
    return TraceRow(
        number, turn.request_id, turn.session_id, turn.turn, None, None, turn.prompt_tokens, turn.output_tokens, ids
    )


def frame_of(cases: Sequence[Case], figures: Mapping[str, PointFigures]) -> pd.DataFrame:
    """One row per case: what it is, and every figure; units are in the names."""
    return pd.DataFrame([_row(case, figures[case.point.point_id]) for case in cases])


def _row(case: Case, found: PointFigures) -> dict[str, object]:
    decode, everyone, prefill = found.decode_load, found.load("all"), found.load("P")
    wait = found.short_wait
    nan = float("nan")
    return {
        "evidence": case.point.executor.evidence,
        "part": case.part,
        "arm": case.arm.key,
        "topology": case.arm.topology,
        "dispatch": case.arm.dispatch,
        "value": nan if case.value is None else case.value,
        **found.summary,
        "possible_hit_ratio": found.possible_hit_ratio,
        **{
            f"{name.removesuffix('_s')}_share_ratio": found.stage_share_ratio(name.removesuffix("_s"))
            for name in STAGES
        },
        "busy_all_ratio": everyone.busy_ratio if everyone else nan,
        "busy_prefill_ratio": prefill.busy_ratio if prefill else nan,
        "busy_decode_ratio": decode.busy_ratio if decode else nan,
        "decode_kv_mean_ratio": decode.kv_mean_ratio if decode else nan,
        "decode_kv_max_ratio": decode.kv_max_ratio if decode else nan,
        "decode_kv_full_ratio": decode.kv_full_ratio if decode else nan,
        "short_wait_s": wait.wait_s if wait else nan,
        "short_wait_prompt_tokens": wait.prompt_tokens if wait else nan,
        "short_wait_behind_tokens": wait.behind_tokens if wait else nan,
        "start_wait_s": found.start_wait_s,
        "longest_start_wait_s": found.longest_start_wait_s,
    }


def plain_figures(found: PointFigures) -> dict[str, object]:
    """For JSON."""
    content = dataclasses.asdict(found)
    content["summary"] = dict(found.summary)
    return content
