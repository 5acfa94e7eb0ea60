"""The command line. Each verb turns arguments into a request, calls its runner function and prints what came of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from ppd_bench import __version__
from ppd_bench.cli import calibrate, capacity, drift, interference, replay, reproduce, reuse, roofline, router, study
from ppd_bench.cli.console import open_console
from ppd_bench.cli.errors import guarded
from ppd_bench.cli.trace import trace_app
from ppd_bench.core.errors import Interrupted, SpecError

HELP = """Measure how to split GPUs between prefill and decode, and where to prefill follow-up turns.

A first session:

\b
  ppd-bench plan                  what the paper's sweep would cost, live and simulated
  ppd-bench sweep --quick         a small sweep: tables, plots and a page in results/quick-sim
  ppd-bench sweep                 the paper's 3,060 points
  ppd-bench build-table results/paper-sim --w-ttft 1 --w-tpot 3
  ppd-bench reproduce paper results/paper-sim
"""

app = typer.Typer(help=HELP, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False)
table_app = typer.Typer(help="Look at decision tables.", rich_markup_mode=None, no_args_is_help=True)
app.add_typer(table_app, name="table")
app.add_typer(trace_app, name="trace")
reuse.register(trace_app)

SweepArg = Annotated[
    str | None,
    typer.Argument(
        metavar="SWEEP",
        help="A sweep file, or the name of one in ./sweeps or bundled. Default: the paper's grid, 'paper' on the simulator, "
        "'vllm-nixl' on engines (vLLM no longer has the paper's connector); with --device cpu 'cpu'.",
    ),
]
RunArg = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as results/paper-sim.")]
TableArg = Annotated[
    Path, typer.Argument(metavar="TABLE", help="A decision table, such as results/paper-sim/tables/2P_2D.json.")
]
OutOption = Annotated[Path | None, typer.Option(help="Where to write; default: inside the run folder.")]
WTtft = Annotated[float, typer.Option(min=0.0, help="Weight of TTFT in Equation 1.")]
WTpot = Annotated[float, typer.Option(min=0.0, help="Weight of TPOT in Equation 1.")]
SweepWeight = Annotated[
    float | None, typer.Option(min=0.0, help="Weight in Equation 1; default: that of the table that is there, else 1.")
]
SuccessBound = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of turns that must succeed for a side to count.")
]
Quick = Annotated[bool, typer.Option("--quick", help="The small sweep (sweeps/quick.yaml) instead of the paper's.")]
ExecutorOption = Annotated[
    str | None, typer.Option(help="auto, sim or live. auto: live where GPUs are visible, else the simulator.")
]
Names = Annotated[str | None, typer.Option(help="Comma-separated, or 'paper'; overrides the file.")]
X = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Request-level x: share of follow-up turns prefilled on D.")
]
Device = Annotated[str, typer.Option(help="cuda, or cpu: real engines on this machine's CPU, for proving paths.")]
EnginePython = Annotated[
    Path | None, typer.Option(help="Interpreter that has vLLM; default: the one that runs ppd-bench.")
]
ModelPath = Annotated[str | None, typer.Option(help="Folder or Hugging Face name of the weights that engines load.")]
Endpoints = Annotated[Path | None, typer.Option(help="YAML of engines that run already; nothing is launched.")]
Handoff = Annotated[str | None, typer.Option(help="push_blocking (P2P NCCL) or pull_async (NIXL).")]
Model = Annotated[str | None, typer.Option(help="Model profile, or a path to a Hugging Face config.json.")]
Gpu = Annotated[str | None, typer.Option(help="GPU profile, such as h100-80g.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs available.")]
Duration = Annotated[str | None, typer.Option(help="Arrival window of a point, such as 10s.")]
Timeout = Annotated[str | None, typer.Option(help="Per-turn time-out, such as 30s.")]
ThinkTime = Annotated[str | None, typer.Option(help="Pause before a follow-up turn, such as 2s.")]
Clean = Annotated[bool, typer.Option("--clean", help="End engines that a killed ppd-bench left behind.")]
ForTable = Annotated[
    bool, typer.Option("--for-table", help="Only what a decision table needs: x=0 and x=1 of each layout.")
]
ForSplit = Annotated[
    bool, typer.Option("--for-split", help="What a choice of split needs: the same, replicas and hybrids.")
]
Jobs = Annotated[int, typer.Option(min=0, help="Simulator processes; 0 means one per core.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"ppd-bench {__version__}")
        raise typer.Exit


@app.command()
def plan(
    sweep: SweepArg = None,
    quick: Quick = False,
    executor: ExecutorOption = None,
    topologies: Names = None,
    workloads: Names = None,
    qps: Annotated[str | None, typer.Option(help="Comma-separated conversations per second.")] = None,
    handoff: Handoff = None,
    model: Model = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    duration: Duration = None,
    timeout: Timeout = None,
    think_time: ThinkTime = None,
    repeats: Annotated[int | None, typer.Option(min=1)] = None,
    for_table: ForTable = False,
    for_split: ForSplit = False,
    jobs: Jobs = 0,
    commands: Annotated[bool, typer.Option("--commands", help="Print the engines' commands for every launch.")] = False,
    device: Device = "cuda",
    engine_python: EnginePython = None,
    model_path: ModelPath = None,
) -> None:
    """What a sweep would cost: points, launches, GPU-seconds, wall time. Runs nothing."""
    from ppd_bench.cli.show import show_plan
    from ppd_bench.runner.plan import plan as make_plan
    from ppd_bench.runner.plan import prepare_plan
    from ppd_bench.runner.sweep import SweepRequest

    overrides = _overrides(
        executor=executor, topologies=topologies, workloads=workloads, qps=qps, model=model, gpu=gpu, gpus=gpus,
        duration=duration, timeout=timeout, think_time=think_time, repeats=repeats, engine={"handoff": handoff},
    )  # fmt: skip
    live = _live(device, engine_python, model_path)
    request = SweepRequest(
        source="quick" if quick else sweep,
        overrides=overrides,
        n_processes=jobs,
        live=live,
        goal=_goal(for_table, for_split),
    )
    prepared, here = prepare_plan(request)
    found = make_plan(prepared)
    show_plan(open_console(), found, here)
    for line in found.goals:
        typer.echo(line)
    if commands:
        from ppd_bench.runner.plan import launch_texts

        for text in launch_texts(prepared.spec, live):
            typer.echo(text)


@app.command()
def sweep(
    sweep: SweepArg = None,
    quick: Quick = False,
    executor: ExecutorOption = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default results/NAME-EXECUTOR.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: the sweep's and the executor.")] = None,
    topologies: Names = None,
    workloads: Names = None,
    qps: Annotated[str | None, typer.Option(help="Comma-separated conversations per second.")] = None,
    x: X = None,
    policy: Annotated[
        str | None, typer.Option(help="Route decider: node, always_pd, always_local, threshold, table.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="Decision table file, for --policy table.")] = None,
    max_uncached_tokens: Annotated[
        int | None, typer.Option(min=0, help="For --policy threshold: go local up to so many uncached tokens (512).")
    ] = None,
    handoff: Handoff = None,
    model: Model = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    duration: Duration = None,
    timeout: Timeout = None,
    think_time: ThinkTime = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Repeats of every point, each with its own arrivals.")
    ] = None,
    token_gaps: Annotated[bool | None, typer.Option("--token-gaps", help="Keep every token gap (large).")] = None,
    device: Device = "cuda",
    engine_python: EnginePython = None,
    model_path: ModelPath = None,
    endpoints: Endpoints = None,
    via: Annotated[str | None, typer.Option(help="Send everything through one router, http://HOST:PORT.")] = None,
    clients: Annotated[
        str, typer.Option(metavar="N|auto", help="Processes that send requests; auto: as many as a point needs.")
    ] = "1",
    clean: Clean = False,
    log_json: Annotated[
        str | None, typer.Option(metavar="PATH|-", help="Also write events as JSON lines; - is standard output.")
    ] = None,
    w_ttft: SweepWeight = None,
    w_tpot: SweepWeight = None,
    for_table: ForTable = False,
    for_split: ForSplit = False,
    refine: Annotated[
        bool, typer.Option("--refine", help="Every cell once, then repeats where a decision is uncertain and matters.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(metavar="GPU_SECONDS", help="With --refine: stop before more is spent.")
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="With --refine: stop when every cell's decision is right with this chance.")
    ] = 0.95,
    jobs: Jobs = 0,
    report: Annotated[bool, typer.Option(help="Also write tables, plots and the page.")] = True,
) -> None:
    """Run a sweep: with no argument the paper's 3,060 points. Stopped at any moment, the same command goes on."""
    overrides = _overrides(
        executor=executor, topologies=topologies, workloads=workloads, qps=qps, model=model, gpu=gpu, gpus=gpus,
        duration=duration, timeout=timeout, think_time=think_time, seed=seed, repeats=repeats, token_gaps=token_gaps,
        engine={"handoff": handoff},
        policy=_policy(x, policy, table, max_uncached_tokens),
    )  # fmt: skip
    from ppd_bench.runner.artefacts import TableOptions
    from ppd_bench.runner.refine import refine_options
    from ppd_bench.runner.sweep import SweepRequest

    _run_sweep(SweepRequest(
        source="quick" if quick else sweep, overrides=overrides, name=name, out=out, n_processes=jobs,
        tables=TableOptions(w_ttft=w_ttft, w_tpot=w_tpot), with_report=report,
        live=_live(device, engine_python, model_path, endpoints, via, clients),
        goal=_goal(for_table, for_split), refine=refine_options(refine, budget, confidence),
    ), clean=clean, log_json=log_json)  # fmt: skip


def _run_sweep(request: Any, *, clean: bool, log_json: str | None) -> None:
    from ppd_bench.cli.event_log import STANDARD_OUTPUT, EventLog
    from ppd_bench.cli.orphans import orphan_question
    from ppd_bench.cli.progress import SweepProgress
    from ppd_bench.runner import sweep as runner
    from ppd_bench.runner.listeners import Listeners

    console = open_console(stderr=log_json == STANDARD_OUTPUT)
    prepared = runner.prepare(request, end_orphans=orphan_question(console, clean=clean))
    console.print(runner.evidence_line(prepared))
    count = "" if prepared.request.refine is None else "at most "
    console.print(f"sweep: {prepared.shown}, {count}{len(prepared.points):,} points; run folder: {prepared.folder}")
    with ExitStack() as stack:
        logs = [] if log_json is None else [stack.enter_context(EventLog(log_json, prepared))]
        progress = stack.enter_context(SweepProgress(console))
        try:
            outcome = runner.run_sweep(prepared, Listeners(progress, *logs))
        except KeyboardInterrupt:
            raise Interrupted("stopped; finished points are kept: give the same command again to go on") from None
        for log in logs:
            log.finished(outcome)
    if outcome.notice:
        console.print(outcome.notice)
    for line in _wrote(outcome.artefacts):
        console.print(line)
    for warning in outcome.warnings:
        console.print(f"warning: {warning}")


def _wrote(paths: Sequence[Path]) -> list[str]:
    """Where artefacts are: one line each, and one line for a folder of many."""
    many = [
        folder for folder, n in Counter(path.parent for path in paths).items() if folder.name in ("plots", "tables")
    ]
    lines = [f"wrote {folder}/ ({sum(path.parent == folder for path in paths)} files)" for folder in many]
    return [*lines, *(f"wrote {path}" for path in paths if path.parent not in many)]


@app.command(name="build-table")
def build_table(
    run: RunArg,
    w_ttft: WTtft = 1.0,
    w_tpot: WTpot = 1.0,
    success_bound: SuccessBound = 0.95,
    fallback: Annotated[str, typer.Option(help="Answer of cells without evidence: pd or local.")] = "pd",
    max_unknown: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of visited cells that may lack evidence.")
    ] = 0.25,
    out: OutOption = None,
) -> None:
    """Compile Equation 1 into one decision table per (x=0, x=1) pair of the run."""
    from ppd_bench.runner import artefacts
    from ppd_bench.runner.runs import open_run

    options = artefacts.table_options(w_ttft, w_tpot, success_bound, fallback, max_unknown)
    opened = open_run(run)
    paths = artefacts.write_tables(opened, options, out)
    console = open_console()
    for line in [f"evidence: {opened.evidence}", *(f"wrote {path}" for path in paths)]:
        console.print(line)
    for warning in [*artefacts.weak_tables(paths), *artefacts.long_workloads(opened)]:
        console.print(f"warning: {warning}")
    if out is None:
        console.print(
            f"plots and page show the earlier tables until 'ppd-bench report {run}' and 'plot' draw them anew"
        )


@app.command()
def plot(run: RunArg, out: OutOption = None) -> None:
    """Draw Pareto panels, winner maps, load curves and the control surface as PNG and SVG."""
    from ppd_bench.runner import artefacts
    from ppd_bench.runner.runs import open_run

    for path in artefacts.write_plots(open_run(run), out):
        open_console().print(f"wrote {path}")


@app.command()
def report(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run folder, such as results/paper-sim.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page's path; default RUN/report.html.")] = None,
    router_log: Annotated[
        Path | None, typer.Option(help="Instead: what a router's decision log says of tables, stages and errors.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --router-log: as JSON.")] = False,
) -> None:
    """Write the one-page HTML report of a run: words first, then plots and tables. Or read a router's decision log."""
    if (run is None) == (router_log is None):
        raise SpecError("command line: give either a run folder or --router-log FOLDER")
    if (run is None and out is not None) or (run is not None and as_json):
        raise SpecError("command line: --out goes with a run folder, --json with --router-log")
    if router_log is not None:
        return router.report_router_log(router_log, as_json=as_json)
    assert run is not None
    from ppd_bench.runner import artefacts
    from ppd_bench.runner.runs import open_run

    open_console().print(f"wrote {artefacts.write_report(open_run(run), out)}")


@table_app.command(name="show")
def table_show(
    table: TableArg,
    cells: Annotated[bool, typer.Option("--cells", help="Also list every visited cell with its deltas.")] = False,
    w_ttft: Annotated[
        float | None, typer.Option(min=0.0, help="Show it under another weight; no sweep is needed.")
    ] = None,
    w_tpot: Annotated[
        float | None, typer.Option(min=0.0, help="Show it under another weight; no sweep is needed.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Also draw every score with its interval into this PNG file.")
    ] = None,
) -> None:
    """Draw a decision table: which cells go local, on what evidence, and how sure it is."""
    from ppd_bench.cli.show import show_table
    from ppd_bench.runner.tables import draw_scores, load_table

    console, loaded = open_console(), load_table(table, w_ttft=w_ttft, w_tpot=w_tpot)
    show_table(console, loaded, every_cell=cells)
    if png is not None:
        console.print(f"wrote {draw_scores(loaded, png)}")


@table_app.command(name="diff")
def table_diff(first: TableArg, second: TableArg) -> None:
    """Cells that two tables answer differently, or on other evidence."""
    from ppd_bench.cli.show import show_changes
    from ppd_bench.runner.tables import diff, load_table

    changes = diff(first, second)
    for path in (first, second):
        table = load_table(path)
        weights = f"w_ttft {table.weights.w_ttft:g}, w_tpot {table.weights.w_tpot:g}"
        open_console().print(f"{path}: {table.domain.layout}, {table.domain.executor}, {weights}")
    show_changes(open_console(), changes)


@app.command()
def doctor(
    topology: Annotated[str, typer.Argument(help="What is to be launched, such as 2P_2D.")] = "2P_2D",
    device: Device = "cuda",
    engine_python: EnginePython = None,
    model_path: ModelPath = None,
    endpoints: Endpoints = None,
    clean: Clean = False,
) -> None:
    """Check this machine, or running engines, for what a live sweep needs. Exit code 3 when something would stop it."""
    from ppd_bench.cli.show import show_findings
    from ppd_bench.runner.doctor import examine

    live = _live(device, engine_python, model_path, endpoints)
    examination = examine(topology, live, clean=clean)
    show_findings(open_console(), examination)
    examination.raise_for_errors()


@app.command()
def serve(
    topology: Annotated[str, typer.Argument(help="Layout to launch, such as 2P_2D.")],
    sweep: Annotated[str, typer.Option(help="Sweep whose model and engine settings to take.")] = "vllm-nixl",
    device: Device = "cuda",
    engine_python: EnginePython = None,
    model_path: ModelPath = None,
    out: Annotated[Path, typer.Option(help="Folder for logs and endpoints.yaml.")] = Path("results/serve"),
) -> None:
    """Launch a topology's engines and keep them up until Ctrl-C; writes an endpoints file for --endpoints."""
    from ppd_bench.runner.serve import serve as run

    console = open_console()
    run(topology, sweep, _live(device, engine_python, model_path), out, tell=console.print)


@app.command()
def topologies(
    names: Annotated[list[str] | None, typer.Argument(help="Names to explain; default: the paper's 17.")] = None,
) -> None:
    """List configurations: class, layout, workers. Any name of the grammar works, such as 6P_2D or 2P_2D@tp2."""
    from ppd_bench.cli.show import show_topologies

    show_topologies(open_console(), names or [])


@app.command()
def workloads() -> None:
    """List the workloads that a sweep can name."""
    from ppd_bench.cli.show import show_workloads
    from ppd_bench.workload.library import list_workloads

    show_workloads(open_console(), list_workloads())


def _overrides(*, topologies: str | None, workloads: str | None, qps: str | None, **others: Any) -> dict[str, Any]:
    """Command line values as a sweep file would have them; null means not given."""
    return {**others, "topologies": _list(topologies), "workloads": _list(workloads), "qps": _numbers(qps)}


def _goal(for_table: bool, for_split: bool) -> Any:
    if for_table and for_split:
        raise SpecError(
            "command line: --for-table and --for-split: give one; what a split needs holds what a table needs"
        )
    return "table" if for_table else "split" if for_split else None


def _policy(x: float | None, decider: str | None, table: str | None, tokens: int | None = None) -> dict[str, Any]:
    """Each option implies its decider; what contradicts is left for the sweep's checks."""
    given = (("fraction", x), ("table", table), ("threshold", tokens))
    implied = next((name for name, value in given if value is not None), None)
    return {"decider": decider or implied, "x": x, "table": table, "max_uncached_tokens": tokens}


def _live(
    device: str,
    engine_python: Path | None,
    model_path: str | None,
    endpoints: Path | None = None,
    via: str | None = None,
    clients: str = "1",
) -> Any:
    """Where engines come from, as the command line says."""
    from ppd_bench.runner.live import live_options

    return live_options(device, engine_python, model_path, endpoints, via, clients)


def _list(text: str | None) -> str | list[str] | None:
    return text if text is None or text == "paper" else [part.strip() for part in text.split(",")]


def _numbers(text: str | None) -> list[float | str] | None:
    """Numbers where they are numbers; anything else is left for the sweep's checks to name."""
    if text is None:
        return None
    return [_number(part.strip()) for part in text.split(",")]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


for verbs in (router, replay, study, roofline, calibrate, interference, reproduce, capacity):
    verbs.register(app)
drift.register(table_app)


def main() -> None:
    """Entry point of ``ppd-bench``."""
    sys.exit(guarded(app))
