"""``ppd-bench calibrate`` and ``ppd-bench compare``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_bench.cli.show import print_rows

if TYPE_CHECKING:  # only for signatures: --help should not wait for pandas
    import pandas as pd

    from ppd_bench.runner.calibrate import Calibration

RunArg = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as results/cpu-live.")]
FILTER = "terms that a point must meet, such as 'topology=2R,1P_1D qps=1'; give it again for more points"


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command()(calibrate)
    app.command()(compare)


def calibrate(
    run: RunArg,
    points: Annotated[
        list[str] | None, typer.Option(help=f"Points to fit; default: all. {FILTER.capitalize()}.")
    ] = None,
    holdout: Annotated[
        list[str] | None, typer.Option(help=f"Points to keep out of the fit and score it on: {FILTER}.")
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A second run of the same points: shows what repeating them gives."),
    ] = None,
    max_steps: Annotated[
        int, typer.Option(min=1, help="Most steps of the solver; each simulates every point 20 times.")
    ] = 20,
    name: Annotated[str | None, typer.Option(help="Name of the profile; default: the run's.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The profile's path (.json), or a folder for all files; default RUN/calibration."),
    ] = None,
) -> None:
    """Fit the simulator to a measured run and write a profile that sweeps take (simulator: {profile: FILE})."""
    from ppd_bench.cli.console import open_console
    from ppd_bench.runner.calibrate import CalibrateRequest
    from ppd_bench.runner.calibrate import calibrate as runner

    terminal = open_console()
    done = runner(
        CalibrateRequest(
            run=run, points=tuple(points or ()), holdout=tuple(holdout or ()), beside=beside, max_steps=max_steps,
            name=name, out=out,
        ),
        tell=terminal.print,
    )  # fmt: skip
    terminal.print(done.headline)
    print_rows(terminal, "Fitted", ("parameter", "value", "start", "error", "of"), _parameter_rows(done))
    if done.transfers is not None:
        found = done.transfers
        rate = "no rate can be told" if found.bytes_per_s is None else f"{found.bytes_per_s / 1e6:,.3g} MB/s"
        terminal.print(
            f"the engines' own counters: {found.n_transfers:,} transfers of {found.mean_bytes / 1e6:.3g} MB took "
            f"{1e3 * found.mean_s:,.3g} ms each; as a line, {1e3 * found.base_s:,.3g} ms and {rate}"
        )
    for which, rows in done.table.groupby("set", sort=False):
        print_rows(terminal, f"Errors, {which}, all turns", ERROR_HEAD, _error_rows(rows[rows["slice"] == "all"]))
    _close(terminal.print, done.notes, done.paths)


def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="The reference, such as a measured run.")],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="A run of the same points, such as a simulated one.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the CSV and plots; default results/compare-A-B.")] = None,
) -> None:
    """Errors of one run against another of the same points: mean, p50, p90 and p99 of TTFT, TPOT, E2E, and throughput."""
    from ppd_bench.cli.console import open_console
    from ppd_bench.runner.compare import compare as runner

    terminal = open_console()
    done = runner(first, second, out)
    terminal.print(done.headline)
    for name, rows in done.table.groupby("slice", sort=False):
        print_rows(terminal, f"Errors, {name}", ERROR_HEAD, _error_rows(rows))
    _close(terminal.print, done.notes, done.paths)


ERROR_HEAD = ("metric", "statistic", "points", "median", "median absolute", "worst", "worst at")


def _error_rows(table: pd.DataFrame) -> list[tuple[str, ...]]:
    return [
        (row["metric"], row["statistic"], f"{row['n_points']}", _signed(row["median_error_ratio"]),
         _percent(row["median_absolute_error_ratio"]), _signed(row["worst_error_ratio"]), row["worst_at"])
        for row in table.to_dict("records")
    ]  # fmt: skip


def _parameter_rows(done: Calibration) -> list[tuple[str, ...]]:
    return [
        (e.name, f"{e.value:.4g} {e.unit}", f"{e.start:.4g} {e.unit}", f"{e.error_ratio:.0%}", e.meaning)
        for e in done.fit.estimates
    ]


def _signed(ratio: float) -> str:
    return "–" if ratio != ratio else f"{ratio:+.1%}"


def _percent(ratio: float) -> str:
    return "–" if ratio != ratio else f"{ratio:.1%}"


def _close(say: Callable[[str], None], notes: tuple[str, ...], paths: tuple[Path, ...]) -> None:
    for note in notes:
        say(f"note: {note}")
    for path in paths:
        say(f"wrote {path}")
