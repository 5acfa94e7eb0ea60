"""``ppd-bench calibrate``: fit the simulator to a run, score it on points that were held out, write the profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ppd_bench import __version__
from ppd_bench.analysis.calibration import Fit, TransferLine, lacking, transfer_line
from ppd_bench.analysis.comparison import error_table, errors, same_points
from ppd_bench.analysis.metrics import labels
from ppd_bench.analysis.summary import summarise
from ppd_bench.core.enums import Status
from ppd_bench.core.errors import SpecError
from ppd_bench.core.fitted_profile import PROFILE_SETTINGS, FittedProfile
from ppd_bench.core.point import Point, SimSettings, canonical_json, content_hash
from ppd_bench.core.topology import parse_topology
from ppd_bench.report.compare_plots import figure_compared
from ppd_bench.report.style import save
from ppd_bench.runner.compare import run_doubts
from ppd_bench.runner.fitting import Fitted, Played, fit_simulator, predicted
from ppd_bench.runner.runs import Run, open_run
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.runner.sweep import point_words
from ppd_bench.runner.traffic import sessions_of
from ppd_bench.sim.profile import SIM_VERSION
from ppd_bench.store import layout
from ppd_bench.store.atomic import make_folder, write_bytes
from ppd_bench.store.frames import read_frame
from ppd_bench.store.read import read_records

FOLDER = "calibration"
"""Inside the run folder, unless told otherwise."""
PROFILE_FILE = "profile.json"
METHOD = (
    "least squares over the simulator's own predictions of the same conversations: softened log ratios of each turn's TTFT and "
    "TPOT and of their means"
)

BUILT_IN, FITTED, HELD_OUT, REPEATED = "built-in profile", "fitted points", "held-out points", "repeated points"
"""Sets of errors: of the simulator before the fit, on held-out points where there are some; after it; and of a second run."""

_KEYS: dict[str, Callable[[Point], str]] = {
    "topology": lambda p: p.topology,
    "workload": lambda p: p.workload.name,
    "qps": lambda p: f"{p.qps:g}",
    "repeat": lambda p: f"{p.repeat}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    """What was asked for. ``points`` and ``holdout`` are filters (``chosen``); without the first all, without the second none.

    ``beside`` is a second run of the same points, whose difference from the first is what repeating alone gives. ``max_steps`` is
    the most steps that the solver takes. ``out`` is a folder, or the path of the profile (``.json``), whose errors then stay
    in the run folder.
    """

    run: Path
    points: tuple[str, ...] = ()
    holdout: tuple[str, ...] = ()
    beside: Path | None = None
    max_steps: int = 20
    name: str | None = None
    out: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A profile, what it rests on, and its errors: ``errors`` has a row per point and figure, ``table`` per set and figure."""

    headline: str
    profile: FittedProfile
    fit: Fit
    transfers: TransferLine | None
    errors: pd.DataFrame
    table: pd.DataFrame
    notes: tuple[str, ...]
    paths: tuple[Path, ...]


def chosen(points: Sequence[Point], filters: Sequence[str], flag: str) -> list[Point]:
    """Points that any filter fits. A filter is terms like ``topology=2R,1P_1D qps=1``, all of which a point must meet.

    Raises:
        SpecError: a term that says nothing, names no key, or a value that no point has.
    """
    problems: list[str] = []
    parsed = [_terms(text, points, flag, problems) for text in filters]
    if problems:
        raise SpecError(problems)
    return [p for p in points if any(all(_KEYS[key](p) in values for key, values in terms.items()) for terms in parsed)]


def _terms(text: str, points: Sequence[Point], flag: str, problems: list[str]) -> dict[str, set[str]]:
    terms: dict[str, set[str]] = {}
    for term in text.split():
        key, equals, listed = term.partition("=")
        if not equals or key not in _KEYS:
            problems.append(
                f"command line: {flag}: {term!r} cannot be used; allowed: KEY=VALUE,... with KEY {', '.join(_KEYS)}"
            )
            continue
        have = dict.fromkeys(_KEYS[key](point) for point in points)
        values = {f"{float(v):g}" if key == "qps" and _is_number(v) else v for v in listed.split(",")}
        problems += [f"command line: {flag}: no point has {key} {value!r}; the run has {', '.join(have)}"
                     for value in sorted(values - set(have))]  # fmt: skip
        terms[key] = values
    return terms


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def calibrate(request: CalibrateRequest, tell: Callable[[str], None] = lambda text: None) -> Calibration:
    """The verb.

    Raises:
        SpecError: filters that fit nothing, points of several tensor parallel sizes, or data too thin to fit; says what lacks.
        StoreError: a run that cannot be read.
    """
    run = open_run(request.run)
    usable, notes = _valid_points(run)
    wanted = chosen(usable, request.points, "--points") if request.points else usable
    held_out = chosen(usable, request.holdout, "--holdout")
    to_fit = [point for point in wanted if point not in held_out]
    records = _ok_records(run, to_fit)
    _check(run, to_fit, records)
    transfers = _transfers(run, to_fit)
    tell(
        f"fitting {len(to_fit)} points, {len(records):,} turns; held out: {len(held_out)} points; at most "
        f"{request.max_steps} steps, each simulates every fitted point about 20 times"
    )
    start = _start(run)
    name = request.name or run.manifest.name
    fitted = fit_simulator(
        [_played(run, point) for point in to_fit],
        records,
        run.spec.model_profile,
        start=start,
        source=f"fitted to run {run.manifest.name} ({run.evidence})",
        transfers=transfers,
        max_steps=request.max_steps,
    )
    found = _all_errors(run, fitted, start, to_fit, held_out, request.beside)
    table = pd.concat([error_table(part).assign(set=which) for which, part in found.groupby("set", sort=False)])
    profile = _profile(name, run, fitted, to_fit, held_out, table, len(records), transfers)
    return Calibration(
        headline=(
            f"run {run.manifest.name}: {run.evidence}; {len(to_fit)} points and {len(records):,} turns fitted, "
            f"{len(held_out)} points held out"
        ),
        profile=profile,
        fit=fitted.fit,
        transfers=transfers,
        errors=found,
        table=table.reset_index(drop=True),
        notes=(*notes, *_circular(run), *_unidentified(fitted.fit)),
        paths=_write(request.out, run, profile, found),
    )


def _valid_points(run: Run) -> tuple[list[Point], list[str]]:
    """Points that measured what they should; the others are said and left out."""
    doubted = run_doubts(run)
    words = [point_words(point) for point in run.points if point.point_id in doubted]
    usable = [point for point in run.points if point.point_id not in doubted]
    return usable, [f"left out, because they are invalid: {', '.join(words)}"] if words else []


def _ok_records(run: Run, points: Sequence[Point]) -> pd.DataFrame:
    records = read_records(run.path, point_ids=[point.point_id for point in points])
    return records[labels(records, "status", Status.OK.value)].reset_index(drop=True)


def _check(run: Run, points: Sequence[Point], records: pd.DataFrame) -> None:
    if not points:
        raise SpecError(f"{run.path}: no valid point is left to fit; give other --points or --holdout")
    degrees = sorted({parse_topology(point.topology).tensor_parallel_size for point in points})
    if len(degrees) > 1:
        raise SpecError(
            f"{run.path}: points of tensor parallel sizes {', '.join(map(str, degrees))}: a step has one cost in each; choose "
            "one with --points"
        )
    problems = lacking(records)
    if problems:
        raise SpecError([f"{run.path}: too little to calibrate on: {problem}" for problem in problems])


def _start(run: Run) -> SimSettings:
    """Where the fit starts: the built-in figures of what is fitted, and the sweep's own settings of the rest."""
    kept = ("cost_model", "kv_capacity_tokens", "activation_reserve_bytes", "snapshot_interval_s", "snapshot_delay_s")
    return SimSettings(**{name: getattr(run.spec.sim, name) for name in kept})


def _played(run: Run, point: Point) -> Played:
    return Played(point=point, sessions=sessions_of(point, run.spec.sources))


def _transfers(run: Run, points: Sequence[Point]) -> TransferLine | None:
    path = run.path / layout.ENGINE_METRICS
    if not path.exists():
        return None
    readings = read_frame(path, "engine_metrics")[0]
    return transfer_line(readings[readings["point_id"].isin({point.point_id for point in points})])


def _all_errors(
    run: Run,
    fitted: Fitted,
    start: SimSettings,
    to_fit: Sequence[Point],
    held_out: Sequence[Point],
    beside: Path | None,
) -> pd.DataFrame:
    scored = list(held_out or to_fit)
    parts = [
        _simulated_errors(run, scored, start).assign(set=BUILT_IN),
        _simulated_errors(run, to_fit, fitted.settings).assign(set=FITTED),
    ]
    if held_out:
        parts.append(_simulated_errors(run, held_out, fitted.settings).assign(set=HELD_OUT))
    if beside is not None:
        other = open_run(beside)
        doubted = run_doubts(other)
        pairs = [pair for pair in same_points(scored, other.points) if pair[1].point_id not in doubted]
        parts.append(errors(pairs, summaries_of(run), summaries_of(other)).assign(set=REPEATED))
    return pd.concat(parts, ignore_index=True)


def _simulated_errors(run: Run, points: Sequence[Point], settings: SimSettings) -> pd.DataFrame:
    """Errors of the simulator under these settings against what the run measured."""
    found = predicted([_played(run, point) for point in points], settings, run.spec.model_profile)
    records = pd.concat([pd.DataFrame(columns) for _, columns in found], ignore_index=True)
    simulated = [point for point, _ in found]
    pairs = list(zip(points, simulated, strict=True))
    return errors(pairs, summaries_of(run), summarise(records, simulated))


def _circular(run: Run) -> list[str]:
    """A note where there is nothing real to fit to."""
    simulated = run.evidence == "simulated"
    return (
        ["the run is simulated: the profile says how the simulator sees itself, and nothing of engines"]
        if simulated
        else []
    )


def _unidentified(fit: Fit) -> list[str]:
    names = [estimate.name for estimate in fit.estimates if not estimate.identified]
    if len(names) == len(fit.estimates):
        return [
            "the data tell NO parameter by itself: the profile may predict points like the fitted ones and nothing else. "
            "Fit more or longer points, at several rates and prompt lengths"
        ]
    return [f"the data do not tell {', '.join(names)}: more or longer points would"] if names else []


def _profile(
    name: str, run: Run, fitted: Fitted, to_fit: Sequence[Point], held_out: Sequence[Point], table: pd.DataFrame, n_turns: int,
    transfers: TransferLine | None,
) -> FittedProfile:  # fmt: skip
    values = {key: getattr(fitted.settings, key) for key in PROFILE_SETTINGS}
    topology = parse_topology(to_fit[0].topology)
    basis: dict[str, Any] = {
        "run": run.manifest.name,
        "evidence": run.evidence,
        "engine_version": run.manifest.spec["engine_version"],
        "machine": run.manifest.machine,
        "versions": {**run.manifest.versions, "ppd_bench_calibrate": __version__, "simulator": SIM_VERSION},
        "inputs_hash": content_hash([run.manifest.records_digest, *(p.point_id for p in to_fit)]),
        "method": METHOD,
        "n_points": len(to_fit),
        "n_turns": n_turns,
        "held_out": [point_words(point) for point in held_out],
        "parameters": [dataclasses.asdict(estimate) for estimate in fitted.fit.estimates],
        "loss": {"before": fitted.fit.loss_before, "after": fitted.fit.loss_after},
        "transfer_counters": None if transfers is None else dataclasses.asdict(transfers),
        "errors": _error_basis(table),
    }
    return FittedProfile(
        name=name,
        gpu=run.spec.gpu,
        model=run.spec.model,
        tensor_parallel_size=topology.tensor_parallel_size,
        handoff=run.spec.engine.handoff,
        settings=tuple(sorted((key, float(value)) for key, value in values.items() if value is not None)),
        step_table=fitted.settings.step_table_json or "{}",
        basis=canonical_json(basis),
    )


def _error_basis(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Errors of means over all turns, by set and metric."""
    rows = table[(table["slice"] == "all") & (table["statistic"] == "mean") & (table["n_points"] > 0)]
    names = ["set", "metric", "n_points", "median_error_ratio", "median_absolute_error_ratio", "worst_error_ratio"]
    return [
        {name: row[name] if isinstance(row[name], str) else float(row[name]) for name in names}
        for row in rows[names].to_dict("records")
    ]


def _write(out: Path | None, run: Run, profile: FittedProfile, found: pd.DataFrame) -> tuple[Path, ...]:
    is_file = out is not None and out.suffix == ".json" and not out.is_dir()
    folder = run.path / FOLDER if out is None or is_file else out
    paths = [out if out is not None and is_file else folder / PROFILE_FILE, folder / "errors.csv"]
    for path in paths:
        make_folder(path.parent)
    write_bytes(paths[0], profile.to_json().encode())
    write_bytes(paths[1], found.to_csv(index=False).encode())
    shown = found[found["set"].isin([FITTED, HELD_OUT])]
    figure = figure_compared(
        shown,
        reference=run.evidence,
        candidate="simulated",
        note=f"run {run.manifest.name}, profile {profile.name}",
        by="set",
    )
    return (*paths, *save(figure, folder / "compared"))
