"""``ppd-bench table check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppd_bench.cli.console import open_console

TableArg = Annotated[
    Path, typer.Argument(metavar="TABLE", help="A decision table, such as results/paper-sim/tables/2P_2D.json.")
]


def register(table_app: typer.Typer) -> None:
    """Add the verb below ``table``."""
    table_app.command(name="check")(check)


def check(
    table: TableArg,
    records: Annotated[Path | None, typer.Option(metavar="RUN", help="Turns of a run folder.")] = None,
    router_log: Annotated[Path | None, typer.Option(help="Turns of a router's decision log.")] = None,
    w_ttft: Annotated[float | None, typer.Option(min=0.0, help="As the router was given it, if it was.")] = None,
    w_tpot: Annotated[float | None, typer.Option(min=0.0, help="As the router was given it, if it was.")] = None,
    alpha: Annotated[
        float, typer.Option(help="False-alarm rate of the whole table, however often it is checked.")
    ] = 0.05,
    tolerance: Annotated[float, typer.Option(help="How far a mean may be from the table's, as a share.")] = 0.25,
    outside: Annotated[float, typer.Option(help="Share of conversations outside the domain that is tolerated.")] = 0.05,
    window: Annotated[float, typer.Option(help="Seconds of traffic that count as one draw.")] = 30.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of drift.json and sweeps; default: drift in the source.")
    ] = None,
) -> None:
    """Has traffic left what the table was measured on? Writes the shortest sweeps that measure it again."""
    from ppd_bench.analysis.drift import DriftOptions
    from ppd_bench.runner.drift import CheckRequest, check_table

    options = DriftOptions(alpha=alpha, tolerance_ratio=tolerance, outside_ratio=outside)
    done = check_table(
        CheckRequest(
            table=table,
            w_ttft=w_ttft,
            w_tpot=w_tpot,
            records=records,
            router_log=router_log,
            options=options,
            window_s=window,
            out=out,
        )
    )
    console = open_console()
    for line in (*done.lines, *(f"wrote {path}" for path in done.paths)):
        console.print(line)
