"""``ppd-bench study agentic``: the agentic study's comparison and its mechanisms, on any trace: simulated, and
measured where engines are given."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import SimSettings, plain
from ppd_bench.core.workload import Loop
from ppd_bench.runner.pool import spread
from ppd_bench.runner.replay import REPLAY_SWEEP
from ppd_bench.runner.study_figures import PointFigures, figures_of, frame_of, plain_figures
from ppd_bench.runner.study_live import MEASURED, Measured, play_arms, prepare_arms
from ppd_bench.runner.study_points import N_GPUS, Case, Setup, cases, unique_points
from ppd_bench.runner.traffic import Traffic, TrafficWish, read_traffic
from ppd_bench.sim.profile import SIM_VERSION, find_hardware, find_model
from ppd_bench.store.atomic import make_folder, replacing, write_bytes
from ppd_bench.workload import agentic
from ppd_bench.workload.traces.writer import write_rows

STUDIES = ("agentic",)
GENERATED = "generated_agentic.jsonl"
RESULTS = Path("results")
PARTS = ("main", "kv_capacity", "decode_share", "reuse", "in_flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest:
    """What was asked. ``trace`` null generates one (``workload.agentic``) of about ``n_requests``.

    Of a recorded trace, whole conversations in order of arrival are taken until ``n_requests`` requests (0: all). Defaults are
    the study's: dependent turns, 8 conversations in flight, ten times as fast, requests of at most 200,000 tokens.
    ``step_overhead_s`` null is the simulator's. ``endpoints``: a file of engines that run; the arms of their layout are also
    measured on them, with the engine settings of ``sweep``.
    """

    trace: Path | None = None
    format: str | None = None
    tokenizer: Path | None = None
    sessions: str = "chain"
    loop: Loop = "completion"
    n_requests: int = 1000
    time_scale: float = 10.0
    max_inflight_sessions: int = 8
    max_request_tokens: int = 200_000
    timeout_s: float = 600.0
    gpu: str = "h20"
    model: str = "qwen3-coder-30b-a3b"
    step_overhead_s: float | None = None
    seed: int = 0
    with_sweeps: bool = True
    n_processes: int = 0
    out: Path | None = None
    endpoints: Path | None = None
    sweep: str = REPLAY_SWEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What came of it. ``frames`` by part; ``changes`` are the study's relative changes beside its published ones."""

    setup: Setup
    traffic: Traffic
    generated: bool
    cases: tuple[Case, ...]
    figures: Mapping[str, PointFigures]
    frames: Mapping[str, pd.DataFrame]
    changes: pd.DataFrame
    published: Mapping[str, Any]
    folder: Path
    paths: tuple[Path, ...] = ()
    measured: tuple[Measured, ...] = ()

    def of(self, case: Case) -> PointFigures:
        return self.figures[case.point.point_id]

    def main(self) -> list[tuple[Case, PointFigures]]:
        """The comparison's arms with their figures."""
        return [(case, self.of(case)) for case in self.cases if case.part == "main"]

    @property
    def evidence_line(self) -> str:
        """What every number below is worth."""
        source = "a generated trace (not recorded)" if self.generated else self.traffic.spec.source
        on = f"{self.setup.model.name} on {N_GPUS} x {self.setup.gpu}"
        if not self.measured:
            return f"simulated ({SIM_VERSION}): no number below was measured; {on}, traffic: {source}"
        arms = ", ".join(one.case.arm.label for one in self.measured)
        return (
            f"simulated ({SIM_VERSION}), {on}; beside it measured on engines ({arms}), in the tables that say so; "
            f"traffic: {source}"
        )


def run_study(what: str, request: StudyRequest, tell: Callable[[str], None]) -> Study:
    """Simulate every point of the study, play what the engines can be, if there are any, and write the study's folder.

    Raises:
        SpecError: an unknown study, a trace that cannot be played, a model that does not fit, or engines that are no arm.
        NotReady: an engine does not answer.
        StoreError: the folder cannot be written.
    """
    if what not in STUDIES:
        raise SpecError(f"command line: there is no study {what!r}; allowed: {', '.join(STUDIES)}")
    folder = request.out or RESULTS / "study-agentic"
    make_folder(folder)
    traffic = _traffic(request, folder)
    setup = _setup(request, traffic)
    found = cases(setup, with_sweeps=request.with_sweeps)
    measured = _measured(request, setup, traffic, folder, tell)
    figures = _simulated(found, setup, traffic, request.n_processes, tell)
    published = published_figures()
    frames = {part: frame_of([c for c in found if c.part == part], figures) for part in PARTS}
    frames[MEASURED] = _measured_frame(measured)
    study = Study(
        setup=setup,
        traffic=traffic,
        generated=request.trace is None,
        cases=tuple(found),
        figures=figures,
        frames={part: frame for part, frame in frames.items() if len(frame)},
        changes=changes(frames["main"], published["changes"]),
        published=published,
        folder=folder,
        measured=measured,
    )
    tell("Writing tables, plots and the page")
    return dataclasses.replace(study, paths=tuple(_write(study)))


def _traffic(request: StudyRequest, folder: Path) -> Traffic:
    path = request.trace
    if path is None:
        path = folder / GENERATED
        with replacing(path) as file:
            rows = agentic.agentic_rows(request.n_requests or 1000, seed=request.seed)
            write_rows(file, "jsonl", agentic.FORMAT, rows, agentic.NOTES)
    return read_traffic(
        TrafficWish(
            path=path,
            format=request.format,
            tokenizer=request.tokenizer,
            sessions=request.sessions,
            loop=request.loop,
            time_scale=request.time_scale,
            max_request_tokens=min(request.max_request_tokens, find_model(request.model).max_model_len),
            max_requests=request.n_requests or None,
            max_inflight_sessions=request.max_inflight_sessions,
        )
    )


def _setup(request: StudyRequest, traffic: Traffic) -> Setup:
    find_hardware(request.gpu)
    sim = SimSettings()
    if request.step_overhead_s is not None:
        sim = dataclasses.replace(sim, step_overhead_s=request.step_overhead_s)
    return Setup(
        gpu=request.gpu,
        model=find_model(request.model),
        workload=traffic.workload,
        qps=traffic.spec.sessions_per_s,
        duration_s=traffic.spec.window_s,
        timeout_s=request.timeout_s,
        seed=request.seed,
        max_inflight_sessions=request.max_inflight_sessions,
        sim=sim,
    )


def _measured(
    request: StudyRequest, setup: Setup, traffic: Traffic, folder: Path, tell: Callable[[str], None]
) -> tuple[Measured, ...]:
    if request.endpoints is None:
        return ()
    return tuple(play_arms(prepare_arms(request.endpoints, request.sweep, setup, traffic, folder), tell))


def _measured_frame(measured: tuple[Measured, ...]) -> pd.DataFrame:
    """One row per arm that engines played, with what is against it."""
    frame = frame_of([one.case for one in measured], {one.case.point.point_id: one.figures for one in measured})
    return frame.assign(invalid_reasons=[one.invalid for one in measured])


def _simulated(
    found: list[Case], setup: Setup, traffic: Traffic, n_processes: int, tell: Callable[[str], None]
) -> dict[str, PointFigures]:
    points = unique_points(found)
    tell(f"Simulating {len(points)} points of {traffic.recording.figures.n_requests:,} requests")
    work = functools.partial(figures_of, model=setup.model, sources=(traffic.source,))
    figures: dict[str, PointFigures] = {}
    for point, one in spread(work, points, n_processes or os.cpu_count() or 1):
        figures[point.point_id] = one
        if len(figures) % 10 == 0:
            tell(f"{len(figures)} of {len(points)} points")
    return figures


def published_figures() -> dict[str, Any]:
    """The study's published figures (``published/agentic.yaml``)."""
    text = files("ppd_bench.runner.published").joinpath("agentic.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


CHANGES = {
    "round_robin_to_cache_aware": ("8R_round_robin", "8R_cache_aware"),
    "combined_to_pd": ("8R_cache_aware", "4P_4D"),
    "4P_4D_to_6P_2D": ("4P_4D", "6P_2D"),
    "await_to_fire_and_forget": ("6P_2D", "6P_2D_fire_and_forget"),
}
"""The study's relative changes (3.4, 4.4): from which arm to which."""


def changes(main: pd.DataFrame, published: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """Change of the second arm against the first, simulated and published: TTFT p50 and TPOT p90 in percent, APC in points."""
    arms = main.set_index("arm")
    rows = []
    for name, (first, second) in CHANGES.items():
        before, after = arms.loc[first], arms.loc[second]
        simulated = {
            "ttft_pct": 100.0 * (after["ttft_p50_s"] / before["ttft_p50_s"] - 1.0),
            "tpot_p90_pct": 100.0 * (after["tpot_p90_s"] / before["tpot_p90_s"] - 1.0),
            "apc_points": 100.0 * (after["prefix_hit_ratio"] - before["prefix_hit_ratio"]),
        }
        told = published.get(name, {})
        rows += [
            {"change": name, "figure": figure, "simulated": value, "published": told.get(figure, float("nan"))}
            for figure, value in simulated.items()
        ]
    return pd.DataFrame(rows)


def _write(study: Study) -> list[Path]:
    from ppd_bench.report.study_page import StudyPage, render_study, study_plots
    from ppd_bench.report.style import save
    from ppd_bench.runner.study_words import differences, main_tables, subtitle

    paths = []
    for part, frame in study.frames.items():
        paths.append(_text(study.folder / f"{part}.csv", frame.to_csv(index=False)))
    paths.append(_text(study.folder / "changes.csv", study.changes.to_csv(index=False)))
    content = {
        "evidence": study.evidence_line,
        "figures": {
            **{case.part + "/" + case.arm.key: plain_figures(f) for case, f in study.main()},
            **{f"{MEASURED}/{one.case.arm.key}": plain_figures(one.figures) for one in study.measured},
        },
        "points": [{"part": c.part, "arm": c.arm.key, "value": c.value, "point": plain(c.point)} for c in study.cases],
    }
    paths.append(_text(study.folder / "study.json", json.dumps(content, indent=1, sort_keys=True) + "\n"))
    plots = study_plots(study.frames, kv_bytes_per_token=study.setup.model.kv_bytes_per_token)
    folder = study.folder / "plots"
    make_folder(folder)
    paths += [path for plot in plots for path in save(plot.figure, folder / plot.name)]
    page = StudyPage(
        title="Agentic study", evidence=study.evidence_line, subtitle=subtitle(study), tables=main_tables(study),
        differences=differences(study), plots=plots,
        tables_title="Simulated, measured and published" if study.measured else "Simulated beside published",
    )  # fmt: skip
    paths.append(_text(study.folder / "study.html", render_study(page)))
    return paths


def _text(path: Path, text: str) -> Path:
    write_bytes(path, text.encode())
    return path
