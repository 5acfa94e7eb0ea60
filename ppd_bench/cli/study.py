"""``ppd-bench study``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_bench.cli.show import print_rows

if TYPE_CHECKING:  # only for signatures: --help should not wait for pandas
    from rich.console import Console

    from ppd_bench.runner.study import Study

What = Annotated[str, typer.Argument(help="The study: agentic.")]
TraceArg = Annotated[
    Path | None,
    typer.Argument(metavar="[TRACE]", help="A trace or folder; default: one generated from published quantiles."),
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(study)


def study(
    what: What,
    trace: TraceArg = None,
    format: Annotated[str | None, typer.Option("--format", help="Format of the trace; default: detected.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="For traces of text: a tokenizer.json or its folder.")] = None,
    sessions: Annotated[
        str, typer.Option(help="Where the trace names none: chain derives them, none does not.")
    ] = "chain",
    requests: Annotated[int, typer.Option(min=0, help="Requests, in whole conversations; 0: the whole trace.")] = 1000,
    time_scale: Annotated[float, typer.Option(help="Recorded times are divided by this.")] = 10.0,
    max_inflight_sessions: Annotated[int, typer.Option(min=1, help="Conversations in flight, at most.")] = 8,
    max_request_tokens: Annotated[
        int, typer.Option(min=1, help="Longer requests are left out, and counted.")
    ] = 200_000,
    timeout: Annotated[float, typer.Option(min=0.1, help="Per-turn time-out, seconds.")] = 600.0,
    gpu: Annotated[str, typer.Option(help="GPU profile.")] = "h20",
    model: Annotated[str, typer.Option(help="Model profile.")] = "qwen3-coder-30b-a3b",
    step_overhead: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds per engine step beyond its kernels; default: the simulator's."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the generated trace and of ties.")] = 0,
    sweeps: Annotated[bool, typer.Option(help="Also sweep KV capacity, decode share, reuse and load.")] = True,
    endpoints: Annotated[
        Path | None,
        typer.Option(
            help="YAML of eight engines that run, of one layout: 8R, 4P_4D or 6P_2D. Its arms are also measured."
        ),
    ] = None,
    sweep: Annotated[str, typer.Option(help="With --endpoints: sweep with the engines' settings.")] = "replay",
    jobs: Annotated[int, typer.Option(min=0, help="Simulator processes; 0 means one per core.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder; default results/study-agentic.")] = None,
) -> None:
    """The agentic study's comparison (replicas against P/D splits) on a trace, beside its published figures: simulated, and
    with --endpoints also measured on engines, one layout at a time."""
    from ppd_bench.cli.console import open_console
    from ppd_bench.runner.study import StudyRequest, run_study

    terminal = open_console()
    done = run_study(
        what,
        StudyRequest(
            trace=trace, format=format, tokenizer=tokenizer, sessions=sessions, n_requests=requests, time_scale=time_scale,
            max_inflight_sessions=max_inflight_sessions, max_request_tokens=max_request_tokens, timeout_s=timeout, gpu=gpu,
            model=model, step_overhead_s=step_overhead, seed=seed, with_sweeps=sweeps, n_processes=jobs, out=out,
            endpoints=endpoints, sweep=sweep,
        ),
        tell=terminal.print,
    )  # fmt: skip
    _show(terminal, done)


def _show(console: Console, done: Study) -> None:
    from ppd_bench.runner.study_words import differences, main_tables, subtitle

    console.print(done.evidence_line)
    console.print(subtitle(done))
    for table in main_tables(done):
        print_rows(console, table.caption, table.head, table.rows)
        if table.note:
            console.print(table.note)
    console.print("Why simulated and published differ:")
    for sentence in differences(done):
        console.print(f"- {sentence}")
    console.print(f"wrote {done.folder}/ ({len(done.paths)} files; the page is study.html)")
