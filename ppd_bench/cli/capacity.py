"""``ppd-bench capacity``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_bench.cli.console import open_console
from ppd_bench.cli.show import print_rows

if TYPE_CHECKING:  # only for signatures: --help should not wait for pandas
    import pandas as pd


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(capacity)


def capacity(
    sweep: Annotated[
        str | None,
        typer.Argument(metavar="SWEEP", help="A sweep file or name: all but its rates. Default: as 'sweep'."),
    ] = None,
    ttft: Annotated[
        float | None, typer.Option(help="Bound on the quantile of TTFT, seconds; default: the sweep's slo.")
    ] = None,
    tpot: Annotated[
        float | None, typer.Option(help="Bound on the quantile of TPOT, seconds; default: the sweep's slo.")
    ] = None,
    quantile: Annotated[float, typer.Option(help="Of all turns; failed ones count as infinitely late.")] = 0.99,
    success: Annotated[float, typer.Option(help="Share of turns that must succeed.")] = 0.95,
    repeats: Annotated[int, typer.Option(min=1, help="Of every load, pooled.")] = 3,
    start: Annotated[float, typer.Option(help="The first QPS to look at.")] = 2.0,
    lowest: Annotated[float, typer.Option(help="The search ends here.")] = 0.1,
    highest: Annotated[float, typer.Option(help="The search ends here.")] = 128.0,
    tolerance: Annotated[float, typer.Option(help="How narrow the bracket must be, as a share of the rate.")] = 0.1,
    topologies: Annotated[str | None, typer.Option(help="Comma-separated; overrides the sweep's.")] = None,
    workloads: Annotated[str | None, typer.Option(help="Comma-separated; overrides the sweep's.")] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            help="Arrival window of a load: long enough to fill the engines. Default: SWEEP's, without one 60s."
        ),
    ] = None,
    executor: Annotated[str | None, typer.Option(help="auto, sim or live.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu.")] = "cuda",
    engine_python: Annotated[Path | None, typer.Option(help="Interpreter that has vLLM.")] = None,
    model_path: Annotated[str | None, typer.Option(help="Weights that engines load.")] = None,
    endpoints: Annotated[Path | None, typer.Option(help="YAML of engines that run already.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default results/NAME-EXECUTOR.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run; default: the sweep's, -capacity and the executor.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Simulator processes; 0 means one per core.")] = 0,
) -> None:
    """The highest QPS that meets TTFT, TPOT and success objectives, per configuration: bracketing, then bisection."""
    from ppd_bench.analysis.capacity import Limits
    from ppd_bench.cli.progress import SweepProgress
    from ppd_bench.core.errors import Interrupted
    from ppd_bench.runner.capacity import CapacityRequest
    from ppd_bench.runner.capacity import capacity as runner
    from ppd_bench.runner.live import live_options
    from ppd_bench.runner.sweep import SweepRequest

    overrides = {
        "topologies": _list(topologies),
        "workloads": _list(workloads),
        "duration": duration or ("60s" if sweep is None else None),
        "executor": executor,
    }
    request = CapacityRequest(
        sweep=SweepRequest(
            source=sweep, overrides=overrides, out=out, name=name, suffix="-capacity", n_processes=jobs,
            live=live_options(device, engine_python, model_path, endpoints, None),
        ),
        limits=Limits(quantile=quantile, ttft_s=ttft, tpot_s=tpot, success_ratio=success),
        start_qps=start, lowest_qps=lowest, highest_qps=highest, tolerance_ratio=tolerance, n_repeats=repeats,
    )  # fmt: skip
    console = open_console()
    with SweepProgress(console) as progress:
        try:
            done = runner(request, progress)
        except KeyboardInterrupt:
            raise Interrupted("stopped; loads looked at are kept: give the same command again to go on") from None
    if done.notice:
        console.print(done.notice)
    console.print(done.headline)
    for workload, rows in done.table.groupby("workload", sort=False):
        head = (
            "configuration",
            "QPS met",
            "QPS missed",
            "by",
            "QPS per GPU",
            "best goodput per GPU (turns/s)",
            "frontier",
        )
        print_rows(console, str(workload), head, _rows(rows))
    for path in done.paths:
        console.print(f"wrote {path}")


def _rows(table: pd.DataFrame) -> list[tuple[str, ...]]:
    return [
        (row["configuration"], _number(row["capacity_qps"]), _number(row["missed_qps"]), row["broken"],
         _number(row["capacity_per_gpu_qps"]), _number(row["goodput_per_gpu_rps"]), "*" if row["on_frontier"] else "")
        for row in table.sort_values("capacity_qps", ascending=False).to_dict("records")
    ]  # fmt: skip


def _number(value: float) -> str:
    return "–" if value != value else f"{value:.3g}"


def _list(text: str | None) -> str | list[str] | None:
    return text if text is None or text == "paper" else [part.strip() for part in text.split(",")]
