"""``ppd-bench sweep``: from a sweep file to a finished run folder with tables, plots and page."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ppd_bench.analysis.pairing import pair_arms
from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import SpecError, TableError
from ppd_bench.core.point import Point
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.deciders import DECIDERS
from ppd_bench.policy.placements import PLACEMENTS
from ppd_bench.policy.table import DecisionTable
from ppd_bench.runner.artefacts import (
    TableOptions,
    draw_plots,
    long_workloads,
    weak_tables,
    write_plots,
    write_report,
    write_tables,
)
from ppd_bench.runner.checks import record_checks, write_engine_metrics
from ppd_bench.runner.executors import Choice, choose_executor, visible_gpus
from ppd_bench.runner.live import LiveOptions, LiveTarget, Played, inspect_target, play_points
from ppd_bench.runner.pool import simulated
from ppd_bench.runner.runs import open_run, stored_spec
from ppd_bench.runner.summaries import write_summaries
from ppd_bench.sim.kernel import kernel_status
from ppd_bench.sim.profile import SIM_VERSION, check_fits, profile_hash
from ppd_bench.sim.simulate import SimOptions
from ppd_bench.store import layout
from ppd_bench.store.manifest import new_manifest
from ppd_bench.store.run_folder import RunFolder
from ppd_bench.sweep.expand import expand
from ppd_bench.sweep.library import resolve_sweep
from ppd_bench.sweep.spec import SweepSpec, load_sweep
from ppd_bench.workload.spec import NAME_ALLOWED, NAME_PATTERN

RESULTS = Path("results")
"""Where run folders go unless told otherwise, relative to the current folder."""

PARAMETERS: dict[str, tuple[str, ...]] = {
    "fraction": ("x",),
    "threshold": ("max_uncached_tokens",),
    "cache_aware": ("alpha", "affinity_max_load"),
}
"""Parameters of deciders and placements, for those that have any."""


class Listener(Protocol):
    """Who is told how a sweep goes on."""

    def started(self, n_points: int, n_finished: int) -> None:
        """The points are known; ``n_finished`` of them were there already."""

    def point_done(self, point: Point, n_turns: int, n_ok: int) -> None:
        """A point has been appended."""

    def stage(self, text: str) -> None:
        """What comes next, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What was asked for. ``out`` null means ``results/NAME-EXECUTOR``; ``n_processes`` 0 means all cores."""

    source: str = "paper"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    out: Path | None = None
    n_processes: int = 0
    tables: TableOptions = TableOptions()
    with_report: bool = True
    live: LiveOptions = LiveOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A sweep that is ready to run."""

    request: SweepRequest
    spec: SweepSpec
    shown: str
    choice: Choice
    points: tuple[Point, ...]
    stored: dict[str, Any]
    folder: Path
    name: str
    target: LiveTarget | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a sweep left behind. ``warnings`` each carry advice."""

    folder: Path
    artefacts: tuple[Path, ...]
    notice: str
    warnings: tuple[str, ...]


def load_spec(source: str, overrides: Mapping[str, Any]) -> tuple[SweepSpec, str]:
    """The sweep and how messages call its file."""
    text, shown = resolve_sweep(source)
    spec = load_sweep(
        text,
        file=shown,
        deciders=DECIDERS,
        placements=PLACEMENTS,
        parameters={name: PARAMETERS.get(name, ()) for name in (*DECIDERS, *PLACEMENTS)},
        overrides=overrides,
    )
    return spec, shown


def prepare(request: SweepRequest) -> Prepared:
    """Read the sweep, choose the executor and expand the points. Changes nothing on disk.

    Raises:
        SpecError: everything that is wrong with the sweep.
        LaunchError: live is wanted and cannot run here.
    """
    if request.name is not None and not re.fullmatch(NAME_PATTERN, request.name):
        raise SpecError(f"command line: --name {request.name!r} cannot be used; allowed: {NAME_ALLOWED}")
    request.tables.check()
    spec, shown = load_spec(request.source, request.overrides)
    choice = choose_executor(spec.executor, engines_given=request.live.given)
    _check_table(spec)
    target, stored = _identity(spec, choice, request.live)
    points = expand(
        spec, executor=choice.executor, engine_version=stored["engine_version"], profile_hash=stored["profile_hash"]
    )
    name = request.name or f"{spec.name}-{choice.executor.value}"
    return Prepared(
        request=request,
        spec=spec,
        shown=shown,
        choice=choice,
        points=points,
        stored=stored,
        folder=request.out or RESULTS / name,
        name=name,
        target=target,
    )


def _identity(spec: SweepSpec, choice: Choice, options: LiveOptions) -> tuple[LiveTarget | None, dict[str, Any]]:
    """What the numbers will be numbers of: the simulator's profile, or engines of a version."""
    if choice.executor is Executor.SIM:
        check_fits(spec.gpu, spec.model_profile, spec.engine, spec.sim, spec.topologies)
        return None, stored_spec(spec, SIM_VERSION, profile_hash(spec.gpu, spec.model_profile, spec.sim))
    target = inspect_target(options, spec)
    return target, stored_spec(spec, target.engine_version, "")


def _check_table(spec: SweepSpec) -> None:
    """A table policy is for one layout, model and GPU: any other topology of the sweep is refused before it runs."""
    if spec.policy.table_json is None:
        return
    try:
        table = DecisionTable.from_json(spec.policy.table_json)
    except TableError as error:
        raise type(error)(f"policy.table: {error}") from error
    table.check_evidence()
    for name in spec.topologies:
        topology = parse_topology(name)
        if topology.n_prefill:
            table.check_domain(topology=topology, model=spec.model, gpu=spec.gpu)


def run_sweep(prepared: Prepared, listener: Listener) -> Outcome:
    """Run what is missing of a sweep, then write what follows from it. Stopped at any moment, the same call goes on."""
    notice = _run_points(prepared, listener)
    listener.stage("Summarising")
    run = open_run(prepared.folder)
    artefacts = [run.path / layout.RECORDS, write_summaries(run), *write_engine_metrics(run)]
    warnings: list[str] = []
    if prepared.request.with_report:
        listener.stage("Compiling decision tables")
        if pair_arms(prepared.points):
            tables = write_tables(run, prepared.request.tables)
            warnings += [*weak_tables(tables), *long_workloads(run)]
            artefacts += tables
        else:
            warnings.append("no decision table: the sweep has no layout with both an all-D and an all-pD configuration")
        listener.stage("Drawing plots")
        plots = draw_plots(run)
        artefacts += write_plots(run, plots=plots)
        listener.stage("Writing the report")
        artefacts.append(write_report(run, plots=plots))
    return Outcome(folder=prepared.folder, artefacts=tuple(artefacts), notice=notice, warnings=tuple(warnings))


def _run_points(prepared: Prepared, listener: Listener) -> str:
    ids = {point: point.point_id for point in prepared.points}
    order = list(ids.values())
    manifest = new_manifest(
        name=prepared.name,
        executor=prepared.choice.executor,
        spec=prepared.stored,
        seed=prepared.spec.seed,
        points_order=order,
        machine=machine_description(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    with RunFolder.open(prepared.folder, manifest=manifest, points_order=order) as run:
        todo = [point for point, point_id in ids.items() if point_id not in run.finished]
        listener.started(len(order), len(order) - len(todo))
        _play(prepared, run, todo, listener)
        listener.stage("Merging records")
        run.finalise()
        return run.notice


def _play(prepared: Prepared, run: RunFolder, todo: list[Point], listener: Listener) -> None:
    """Run the points on whatever the executor is, and store each as it ends."""

    def store(point: Point, columns: Columns) -> None:
        run.append(point.point_id, columns)
        listener.point_done(point, len(columns["status"]), columns["status"].count("ok"))

    def take(played: Played) -> None:
        record_checks(prepared.folder, played)
        store(played.point, played.columns)
        run.flush()  # a live point took its time: it is not to be played again
        if played.problems:
            listener.stage(f"{played.point.topology} {played.point.workload.name} QPS {played.point.qps:g} is invalid: "
                           + "; ".join(played.problems))  # fmt: skip

    if prepared.target is not None:
        play_points(prepared.target, prepared.spec, todo, prepared.folder, tell=listener.stage, take=take)
        return
    options = SimOptions(keep_gaps=prepared.spec.token_gaps)
    n_processes = prepared.request.n_processes or os.cpu_count() or 1
    for point, columns in simulated(todo, prepared.spec.model_profile, options, n_processes):
        store(point, columns)


def machine_description() -> dict[str, Any]:
    """What a manifest says of the machine: enough to compare runs, nothing that identifies it."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "n_cpus": os.cpu_count() or 0,
        "simulator_kernel": kernel_status(),
        "gpus": list(visible_gpus()),
    }


def evidence_line(prepared: Prepared) -> str:
    """The first line of output: who runs it, and what its numbers are worth."""
    choice = prepared.choice
    what = "simulated: no number below was measured" if choice.executor is Executor.SIM else "measured on real engines"
    return f"executor: {choice.executor.value} ({choice.reason}); {what}"
