"""The agentic study's arms on engines that run: the same traffic, measured, each arm an ordinary run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ppd_bench.analysis.breakdown import RoleLoad, longest_short_wait, role_loads, stage_figures, start_waits_s
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.endpoints import EndpointSet
from ppd_bench.runner.live import LiveOptions, read_endpoints
from ppd_bench.runner.replay import RECORD_COLUMNS
from ppd_bench.runner.runs import Run, open_run
from ppd_bench.runner.study_figures import SHORT_PROMPT_TOKENS, SUMMARY_FIGURES, PointFigures, possible_hit_ratio
from ppd_bench.runner.study_points import MAIN_ARMS, N_GPUS, Arm, Case, Setup
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.runner.sweep import Prepared, SweepRequest, prepare, run_sweep
from ppd_bench.runner.traffic import Traffic, sessions_of
from ppd_bench.store import layout
from ppd_bench.store.frames import read_frame
from ppd_bench.store.read import read_records

MEASURED = "measured"
"""The part of the study, and the folder of its runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An arm that engines played. ``invalid``: why it is no evidence, empty where it is."""

    case: Case
    figures: PointFigures
    invalid: str
    folder: Path


def arms_of(endpoints: EndpointSet, file: Path) -> list[Arm]:
    """The study's arms that these engines can be. Telling D at once is simulated only.

    Raises:
        SpecError: the study has no arm of this layout.
    """
    arms = [arm for arm in MAIN_ARMS if arm.dispatch == "await" and _is(endpoints, arm)]
    if not arms:
        raise SpecError(
            f"{file}: these engines are {endpoints.layout.name}, and the study compares "
            f"{', '.join(dict.fromkeys(arm.topology for arm in MAIN_ARMS))}; list {N_GPUS} engines of one of these layouts, or "
            "play the trace on these with 'ppd-bench replay TRACE --endpoints FILE'"
        )
    return arms


def _is(endpoints: EndpointSet, arm: Arm) -> bool:
    return parse_topology(arm.topology).layout == endpoints.layout


def prepare_arms(file: Path, sweep: str, setup: Setup, traffic: Traffic, folder: Path) -> list[tuple[Arm, Prepared]]:
    """What is to be played on the engines of ``file``; ``sweep`` has their engine settings. Changes nothing on disk.

    Raises:
        SpecError: an endpoints file that cannot be used, or a layout that is no arm's.
        NotReady: an engine does not answer.
    """
    return [
        (arm, prepare(_request(arm, file, sweep, setup, traffic, folder / MEASURED / arm.key)))
        for arm in arms_of(read_endpoints(file), file)
    ]


def _request(arm: Arm, file: Path, sweep: str, setup: Setup, traffic: Traffic, out: Path) -> SweepRequest:
    place = arm.placement
    overrides: dict[str, Any] = {
        "executor": "live",
        "topologies": [arm.topology],
        "workloads": [_entry(traffic)],
        "qps": [1.0],
        "gpus": N_GPUS,
        "gpu": setup.gpu,
        "model": setup.model.name,
        "timeout": setup.timeout_s,
        "placement": {
            "prefill": place.prefill,
            "decode": place.decode,
            "replica": place.replica,
            "sticky": place.sticky,
        },
        "engine": {"max_model_len": setup.engine.max_model_len},
    }
    return SweepRequest(
        source=sweep,
        overrides=overrides,
        name=f"study-{arm.key}",
        out=out,
        with_report=False,
        live=LiveOptions(endpoints=file, clients=0),
    )


def _entry(traffic: Traffic) -> dict[str, Any]:
    """The traffic that was read, as a sweep's workload."""
    source, spec = traffic.source, traffic.spec
    entry = {
        "dataset": source.path, "format": source.format, "tokenizer": source.tokenizer, "block_tokens": source.block_tokens,
        "sessions": spec.sessions, "loop": spec.loop, "arrivals": spec.arrivals, "time_scale": spec.time_scale,
        "max_request_tokens": spec.max_request_tokens, "max_requests": spec.max_requests,
        "max_inflight_sessions": spec.max_inflight_sessions,
    }  # fmt: skip
    return {name: value for name, value in entry.items() if value is not None}


class _Teller:
    """A listener that passes words on."""

    def __init__(self, arm: Arm, tell: Callable[[str], None]) -> None:
        self._arm, self._tell = arm, tell

    def started(self, n_points: int, n_finished: int) -> None:
        self._tell(f"{self._arm.label} on engines: {'was played before' if n_finished else 'playing'}")

    def point_done(self, point: Point, n_turns: int, n_ok: int) -> None:
        self._tell(f"{self._arm.label} on engines: {n_ok:,} of {n_turns:,} turns ok")

    def stage(self, text: str) -> None:
        """Of no interest here, except what is against a point."""
        if " is invalid: " in text:
            self._tell(text)


def play_arms(prepared: list[tuple[Arm, Prepared]], tell: Callable[[str], None]) -> list[Measured]:
    """Play each arm; stopped and called again, arms that are done are kept."""
    return [_played(arm, one, tell) for arm, one in prepared]


def _played(arm: Arm, prepared: Prepared, tell: Callable[[str], None]) -> Measured:
    run_sweep(prepared, _Teller(arm, tell))
    run = open_run(prepared.folder)
    (point,) = run.points
    summaries = summaries_of(run)
    overall = summaries[summaries["slice"] == "all"].iloc[0]
    return Measured(
        case=Case(part=MEASURED, arm=arm, value=None, point=point),
        figures=_figures(run, point, overall, prepared),
        invalid="" if overall["valid"] else str(overall["invalid_reasons"]),
        folder=prepared.folder,
    )


def _figures(run: Run, point: Point, overall: pd.Series[Any], prepared: Prepared) -> PointFigures:
    records = read_records(run.path, columns=RECORD_COLUMNS)
    waits = start_waits_s(records)
    return PointFigures(
        summary={name: float(overall[name]) for name in SUMMARY_FIGURES},
        stages=tuple(stage_figures(records)),
        loads=tuple(_loads(run, point)),
        short_wait=longest_short_wait(records, SHORT_PROMPT_TOKENS),
        start_wait_s=float(waits.sum()),
        longest_start_wait_s=float(waits.max()) if len(waits) else 0.0,
        possible_hit_ratio=possible_hit_ratio(sessions_of(point, prepared.spec.sources)),
    )


def _loads(run: Run, point: Point) -> list[RoleLoad]:
    """Of the engines' own readings; how long their steps took they do not tell."""
    if not (run.path / layout.ENGINE_METRICS).exists():
        return []
    readings = read_frame(run.path / layout.ENGINE_METRICS, "engine_metrics")[0]
    roles = {worker.worker_id: worker.role.value for worker in parse_topology(point.topology).workers}
    return role_loads(readings.assign(busy_s=float("nan")), roles)
