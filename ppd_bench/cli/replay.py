"""``ppd-bench replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppd_bench.cli.show import print_rows
from ppd_bench.core.errors import Interrupted, SpecError

if TYPE_CHECKING:  # only for signatures: --help should not wait for pandas
    from ppd_bench.core.workload import Loop

LOOPS: dict[str, Loop] = {"timestamps": "timestamps", "completion": "completion"}

TraceArg = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace or conversation file, or a folder of such.")]
Format = Annotated[str | None, typer.Option("--format", help="Format of the trace; default: detected.")]
Tokenizer = Annotated[Path | None, typer.Option(help="For traces of text: a tokenizer.json or its folder.")]
BlockTokens = Annotated[int | None, typer.Option(min=1, help="Block size of its ids where it is not the format's.")]
Sessions = Annotated[str, typer.Option(help="Where the trace names none: chain derives them, none does not.")]
LoopOption = Annotated[
    str | None,
    typer.Option("--loop", help="timestamps (open loop) or completion (after the answer); default: the trace's."),
]
TimeScale = Annotated[float, typer.Option(help="Recorded times are divided by this.")]
Qps = Annotated[float | None, typer.Option(help="Draw whole conversations at this rate, not their recorded arrivals.")]
Topologies = Annotated[str | None, typer.Option(help="Comma-separated; default 4R,2P_2D.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longer requests are left out, and counted.")]
MaxRequests = Annotated[int | None, typer.Option(min=1, help="Whole conversations until so many requests.")]
MaxInflight = Annotated[int | None, typer.Option(min=1, help="Conversations in flight, at most; the wait is recorded.")]
Sweep = Annotated[str, typer.Option(help="Sweep with engine, placement and simulator settings.")]
Executor = Annotated[str | None, typer.Option(help="sim or live; default: live with --endpoints or --device cpu.")]
Placement = Annotated[str | None, typer.Option(help="For P, D and R: round_robin, cache_aware, session_affinity, ...")]
Via = Annotated[str | None, typer.Option(help="Send everything through one router, http://HOST:PORT.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(replay)


def replay(
    trace: TraceArg,
    format: Format = None,
    tokenizer: Tokenizer = None,
    block_tokens: BlockTokens = None,
    sessions: Sessions = "chain",
    loop: LoopOption = None,
    time_scale: TimeScale = 1.0,
    qps: Qps = None,
    duration: Annotated[str | None, typer.Option(help="Arrival window with --qps, such as 60s.")] = None,
    topologies: Topologies = None,
    model: Annotated[str | None, typer.Option(help="Model profile, or a config.json.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU profile, such as h20.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs available.")] = None,
    placement: Placement = None,
    timeout: Annotated[str | None, typer.Option(help="Per-turn time-out, such as 120s.")] = None,
    max_request_tokens: MaxTokens = None,
    max_requests: MaxRequests = None,
    max_inflight_sessions: MaxInflight = None,
    sweep: Sweep = "replay",
    executor: Executor = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu: real engines on this machine's CPU.")] = "cuda",
    engine_python: Annotated[Path | None, typer.Option(help="Interpreter that has vLLM.")] = None,
    model_path: Annotated[str | None, typer.Option(help="Weights that engines load.")] = None,
    endpoints: Annotated[Path | None, typer.Option(help="YAML of engines that run already.")] = None,
    via: Via = None,
    jobs: Annotated[int, typer.Option(min=0, help="Simulator processes; 0 means one per core.")] = 0,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default results/replay-TRACE-EXECUTOR.")] = None,
    report: Annotated[bool, typer.Option(help="Also write plots and the page.")] = True,
) -> None:
    """Play recorded traffic: simulated, on engines (--endpoints, --device cpu) or through a router (--via). Writes a run
    folder."""
    from ppd_bench.runner.live import live_options
    from ppd_bench.runner.replay import ReplayRequest

    places = {} if placement is None else dict.fromkeys(("prefill", "decode", "replica"), _placement(placement))
    overrides: dict[str, Any] = {
        "executor": executor, "topologies": topologies and [part.strip() for part in topologies.split(",")],
        "model": model, "gpu": gpu, "gpus": gpus, "timeout": timeout, "duration": duration, "placement": places,
    }  # fmt: skip
    _run(ReplayRequest(
        trace=trace, format=format, tokenizer=tokenizer, block_tokens=block_tokens, sessions=sessions, loop=_loop(loop),
        time_scale=time_scale, qps=qps, max_request_tokens=max_request_tokens, max_requests=max_requests,
        max_inflight_sessions=max_inflight_sessions, sweep=sweep, overrides=overrides, name=name, out=out, n_processes=jobs,
        with_report=report, live=live_options(device, engine_python, model_path, endpoints, via),
    ))  # fmt: skip


def _loop(name: str | None) -> Loop | None:
    if name is not None and name not in LOOPS:
        raise SpecError(f"command line: --loop {name!r} is not known; allowed: {', '.join(LOOPS)}")
    return None if name is None else LOOPS[name]


def _placement(name: str) -> str:
    from ppd_bench.policy.placements import PLACEMENTS

    if name not in PLACEMENTS:
        raise SpecError(f"command line: --placement {name!r} is not known; allowed: {', '.join(PLACEMENTS)}")
    return name


def _run(request: Any) -> None:
    from ppd_bench.cli.console import open_console
    from ppd_bench.cli.progress import SweepProgress
    from ppd_bench.runner.replay import breakdown_tables, prepare_replay, run_replay
    from ppd_bench.runner.sweep import evidence_line

    prepared = prepare_replay(request)
    terminal = open_console()
    terminal.print(evidence_line(prepared))
    terminal.print(f"trace: {request.trace}, {len(prepared.points)} points; run folder: {prepared.folder}")
    with SweepProgress(terminal) as progress:
        try:
            outcome, found = run_replay(prepared, progress)
        except KeyboardInterrupt:
            raise Interrupted("stopped; finished points are kept: give the same command again to go on") from None
    for table in breakdown_tables(found):
        print_rows(terminal, table.caption, table.head, table.rows)
        if table.note:
            terminal.print(table.note)
    for path in outcome.artefacts:
        if path.parent.name not in ("plots", "tables"):
            terminal.print(f"wrote {path}")
    for warning in outcome.warnings:
        terminal.print(f"note: {warning}")
