"""``ppd-bench sweep``: from a sweep file to a finished run folder with tables, plots and page."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppd_bench.analysis.pairing import pair_arms
from ppd_bench.analysis.summary import configuration_name
from ppd_bench.core.enums import Executor, Status
from ppd_bench.core.errors import LaunchError, SpecError, TableError
from ppd_bench.core.point import Point
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.orphans import Orphan
from ppd_bench.policy.deciders import DECIDERS
from ppd_bench.policy.placements import PLACEMENTS
from ppd_bench.policy.table import DecisionTable
from ppd_bench.runner.artefacts import (
    TableOptions,
    draw_plots,
    long_workloads,
    table_at,
    weak_tables,
    write_plots,
    write_report,
    write_tables,
)
from ppd_bench.runner.checks import invalidities, limit_for, record_checks, write_engine_metrics
from ppd_bench.runner.executors import Choice, choose_executor, visible_gpus
from ppd_bench.runner.goals import Goal, for_goal
from ppd_bench.runner.listeners import DetailedListener, Listener
from ppd_bench.runner.live import LiveOptions, LiveTarget, clear_orphans, inspect_target
from ppd_bench.runner.live_points import Played, play_points
from ppd_bench.runner.pool import simulated
from ppd_bench.runner.refine import DEFAULT_MAX_REPEATS, RefineOptions, refine
from ppd_bench.runner.runs import open_run, stored_spec
from ppd_bench.runner.summaries import write_summaries
from ppd_bench.runner.traffic import Traffic, read_dataset, told
from ppd_bench.sim.kernel import kernel_status
from ppd_bench.sim.profile import SIM_VERSION, check_fits, profile_hash
from ppd_bench.sim.simulate import SimOptions
from ppd_bench.store import layout
from ppd_bench.store.manifest import new_manifest
from ppd_bench.store.read import read_records
from ppd_bench.store.run_folder import RunFolder
from ppd_bench.sweep.datasets import Dataset, DatasetKeys
from ppd_bench.sweep.expand import expand
from ppd_bench.sweep.library import resolve_sweep
from ppd_bench.sweep.spec import SweepSpec, load_sweep
from ppd_bench.workload.spec import NAME_ALLOWED, NAME_PATTERN

RESULTS = Path("results")
"""Where run folders go unless told otherwise, relative to the current folder."""

REFINED = (
    "this run was refined: the confidence of its rounds also counts how other cells under like strain vary, and the certainty in "
    "a table rests on a cell's own repeats alone; so cells that were settled early stand there without an interval. Where "
    "every cell needs one, sweep without --refine and with --repeats 5 or more"
)
"""Why a refined run's rounds call cells decided that its tables say have no interval."""

DEFAULT_SWEEPS = {Executor.SIM: "paper", Executor.LIVE: "vllm-nixl"}

NO_TABLE = (
    "no decision table: the sweep has no layout with both an all-D and an all-pD configuration "
    "and workloads of two turns or more that come at a rate"
)

PARAMETERS: dict[str, tuple[str, ...]] = {
    "fraction": ("x",),
    "threshold": ("max_uncached_tokens",),
    "cache_aware": ("alpha", "affinity_max_load"),
}
"""Parameters of deciders and placements, for those that have any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What was asked for. ``source`` null means ``default_source``, ``out`` null ``results/NAME-EXECUTOR``; ``n_processes`` 0
    means all cores. ``suffix`` goes between the sweep's name and the executor where no ``name`` is given. ``goal`` leaves out
    topologies that it does not need (``runner.goals``). With ``refine``, ``repeats`` of the sweep are those that a cell gets at
    most (``runner.refine``; ``DEFAULT_MAX_REPEATS`` where the sweep has one)."""

    source: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    suffix: str = ""
    out: Path | None = None
    n_processes: int = 0
    tables: TableOptions = TableOptions()
    with_report: bool = True
    live: LiveOptions = LiveOptions()
    goal: Goal | None = None
    refine: RefineOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A sweep that is ready to run. ``points``: all that may be played; a refined sweep plays some of them."""

    request: SweepRequest
    spec: SweepSpec
    shown: str
    choice: Choice
    points: tuple[Point, ...]
    stored: dict[str, Any]
    folder: Path
    name: str
    target: LiveTarget | None
    traffics: tuple[Traffic, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a sweep left behind. ``warnings`` each carry advice."""

    folder: Path
    artefacts: tuple[Path, ...]
    notice: str
    warnings: tuple[str, ...]


def load_spec(
    source: str, overrides: Mapping[str, Any], traffics: list[Traffic] | None = None
) -> tuple[SweepSpec, str]:
    """The sweep and how messages call its file. ``traffics`` collects the recorded traffic that was read for it."""

    def open_dataset(keys: DatasetKeys) -> Dataset:
        traffic = read_dataset(keys)
        if traffics is not None:
            traffics.append(traffic)
        return traffic.workload, traffic.source

    text, shown = resolve_sweep(source)
    spec = load_sweep(
        text,
        file=shown,
        deciders=DECIDERS,
        placements=PLACEMENTS,
        parameters={name: PARAMETERS.get(name, ()) for name in (*DECIDERS, *PLACEMENTS)},
        overrides=overrides,
        open_dataset=open_dataset,
    )
    return spec, shown


def default_source(asked: str, live: LiveOptions) -> str:
    """The paper's grid with the hand-off that the executor has: vLLM no longer has the paper's own connector. On CPU engines,
    where that grid would outlast its time-outs, the path proof.

    Raises:
        LaunchError: live is asked for and cannot run here.
    """
    executor = choose_executor(asked, engines_given=live.given).executor
    return "cpu" if executor is Executor.LIVE and live.device == "cpu" else DEFAULT_SWEEPS[executor]


def _leave(orphans: Sequence[Orphan]) -> bool:
    return False


def prepare(request: SweepRequest, *, end_orphans: Callable[[tuple[Orphan, ...]], bool] = _leave) -> Prepared:
    """Read the sweep, choose the executor and expand the points. Changes nothing on disk.

    ``end_orphans`` is asked where engines are to be launched and some are there that a killed ppd-bench left behind, before
    anything is checked that they may stand in the way of.

    Raises:
        SpecError: everything that is wrong with the sweep.
        LaunchError: live is wanted and cannot run here.
    """
    if request.name is not None and not re.fullmatch(NAME_PATTERN, request.name):
        raise SpecError(f"command line: --name {request.name!r} cannot be used; allowed: {NAME_ALLOWED}")
    request.tables.check()
    source = request.source or default_source(request.overrides.get("executor") or "auto", request.live)
    traffics: list[Traffic] = []
    spec, shown = load_spec(source, request.overrides, traffics)
    spec = for_goal(spec, request.goal)
    if request.refine is not None:
        request.refine.check()
        spec = dataclasses.replace(spec, n_repeats=spec.n_repeats if spec.n_repeats > 1 else DEFAULT_MAX_REPEATS)
    choice = choose_executor(spec.executor, engines_given=request.live.given)
    _check_table(spec)
    if choice.executor is Executor.LIVE and request.live.endpoints is None:
        clear_orphans(end_orphans)
    target, stored = _identity(spec, choice, request.live)
    points = expand(
        spec, executor=choice.executor, engine_version=stored["engine_version"], profile_hash=stored["profile_hash"]
    )
    name = request.name or f"{spec.name}{request.suffix}-{choice.executor.value}"
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
        traffics=tuple(traffics),
    )


def _identity(spec: SweepSpec, choice: Choice, options: LiveOptions) -> tuple[LiveTarget | None, dict[str, Any]]:
    """What the numbers will be numbers of: the simulator's profile, or engines of a version."""
    if choice.executor is Executor.SIM:
        check_fits(spec.gpu, spec.model_profile, spec.engine, spec.sim, spec.topologies)
        return None, stored_spec(spec, SIM_VERSION, profile_hash(spec.gpu, spec.model_profile, spec.sim))
    if spec.engine.dispatch != "await":
        raise LaunchError(
            f"engine.dispatch {spec.engine.dispatch} is simulated only: the hand-offs of engines need what P answers; "
            "use await, or --executor sim"
        )
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
    notice = play_prepared(prepared, listener) if prepared.request.refine is None else _refine(prepared, listener)
    listener.stage("Summarising")
    run = open_run(prepared.folder)
    artefacts = [run.path / layout.RECORDS, write_summaries(run), *write_engine_metrics(run)]
    warnings = [line for traffic in prepared.traffics for line in told(traffic)]
    if prepared.request.with_report:
        listener.stage("Compiling decision tables")
        if pair_arms([point for point in prepared.points if point.workload.has_cell]):
            tables = write_tables(run, prepared.request.tables)
            warnings += [*weak_tables(tables), *long_workloads(run)]
            if prepared.request.refine is not None:
                warnings.append(REFINED)
            artefacts += tables
        else:
            warnings.append(NO_TABLE)
        listener.stage("Drawing plots")
        plots = draw_plots(run)
        artefacts += write_plots(run, plots=plots)
        listener.stage("Writing the report")
        artefacts.append(write_report(run, plots=plots))
    elif (run.path / layout.TABLES).exists():
        warnings.append(
            f"tables, plots and page in {run.path} may be of an earlier state of its points: give the same command without "
            "--no-report, or build-table, plot and report, to make them anew"
        )
    return Outcome(folder=prepared.folder, artefacts=tuple(artefacts), notice=notice, warnings=tuple(warnings))


def _refine(prepared: Prepared, listener: Listener) -> str:
    """Run the points that are worth it."""

    def play(points: Sequence[Point], repeats: list[list[Any]]) -> str:
        stored = {**prepared.stored, "repeats": repeats}
        return play_prepared(dataclasses.replace(prepared, points=tuple(points), stored=stored), listener)

    there = next(map(table_at, sorted((prepared.folder / layout.TABLES).glob("*.json"))), None)
    weights = prepared.request.tables.weights(there)  # those that the tables will be compiled with
    return refine(
        prepared.points,
        prepared.folder,
        prepared.request.refine or RefineOptions(),
        (weights.w_ttft, weights.w_tpot),
        prepared.spec.success_bound_ratio,
        play,
        listener.stage,
    )


def play_prepared(prepared: Prepared, listener: Listener) -> str:
    """Play what is missing of the points into the run folder; returns what the user should know of how it was opened."""
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
        if run.finished and isinstance(listener, DetailedListener):
            kept = read_records(prepared.folder, columns=("status",), allow_incomplete=True)["status"]
            listener.kept(len(kept), int(kept.eq(Status.OK.value).sum()))
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
        against = invalidities(played, limit_for(prepared.spec.gpu))
        if isinstance(listener, DetailedListener):
            listener.point_judged(played.point, against)
        store(played.point, played.columns)
        run.flush()  # a live point took its time: it is not to be played again
        if against:
            listener.stage(f"{point_words(played.point)} is invalid: {'; '.join(against)}")

    if prepared.target is not None:
        play_points(prepared.target, prepared.spec, todo, prepared.folder, listener=listener, take=take)
        return
    options = SimOptions(keep_gaps=prepared.spec.token_gaps)
    n_processes = prepared.request.n_processes or os.cpu_count() or 1
    for point, columns in simulated(todo, prepared.spec.model_profile, options, n_processes, prepared.spec.sources):
        store(point, columns)


def point_words(point: Point) -> str:
    """A point for people: ``2P_2D cpu_chat QPS 0.5``."""
    repeat = f" repeat {point.repeat + 1}" if point.repeat else ""
    return f"{configuration_name(point)} {point.workload.name} QPS {point.qps:g}{repeat}"


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
