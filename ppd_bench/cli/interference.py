"""``ppd-bench interference``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_bench.cli.console import open_console
from ppd_bench.cli.show import print_rows

if TYPE_CHECKING:  # only for signatures: --help should not wait for pandas
    from rich.console import Console

    from ppd_bench.runner.interference import InterferenceResult

Counts = Annotated[str, typer.Option(help="Comma-separated numbers of running decodes.")]
Totals = Annotated[str, typer.Option(help="Comma-separated lengths of a prefill's whole prompt, tokens.")]
Prefills = Annotated[str, typer.Option(help="Comma-separated numbers of prefills that are sent together.")]
Budgets = Annotated[
    str, typer.Option(help="Comma-separated step budgets (max_num_batched_tokens); one of a live engine.")
]
Endpoints = Annotated[Path | None, typer.Option(help="YAML with one running R engine; without it, simulated.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(interference)


def interference(
    batches: Counts = "1,25,50,100,200",
    totals: Totals = "1024",
    prefills: Prefills = "1,4",
    append_tokens: Annotated[
        int, typer.Option(min=1, help="New tokens of an append; the rest of its prompt is cached.")
    ] = 32,
    decode_context: Annotated[int, typer.Option(min=1, help="Prompt tokens of each running decode.")] = 256,
    budgets: Budgets = "512,2048,8192",
    window: Annotated[int, typer.Option(min=1, help="Tokens over which the window slowdown is taken.")] = 16,
    gpu: Annotated[str | None, typer.Option(help="GPU profile; default h100-80g.")] = None,
    model: Annotated[str | None, typer.Option(help="Model profile; default llama-3.1-8b.")] = None,
    endpoints: Endpoints = None,
    jobs: Annotated[int, typer.Option(min=0, help="Simulator processes; 0 means one per core.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder; default results/interference/sim or live, with a name of its own for other axes."),
    ] = None,
) -> None:
    """TPOT of a running decode batch beside full and append prefills, over batch size, context and step budget (Figures 2, 7,
    8)."""
    from ppd_bench.runner.interference import InterferenceRequest, run_interference
    from ppd_bench.runner.numbers import whole_numbers

    console = open_console()
    request = InterferenceRequest(
        batches=whole_numbers(batches, "--batches"), totals=whole_numbers(totals, "--totals"),
        n_prefills=whole_numbers(prefills, "--prefills"), append_tokens=append_tokens, decode_context_tokens=decode_context,
        budgets=whole_numbers(budgets, "--budgets"), window_tokens=window, gpu=gpu, model=model, endpoints=endpoints,
        n_processes=jobs, out=out,
    )  # fmt: skip
    _show(console, run_interference(request, console.print))


def _show(console: Console, result: InterferenceResult) -> None:
    console.print(
        f"{result.evidence}; slowdowns are medians over the decode streams, each against itself before the prefills"
    )
    for budget, rows in result.frame.groupby("max_num_batched_tokens", sort=False):
        printed = [
            (f"{r['n_decode']}", f"{r['context_tokens']:,}", f"{r['n_prefills']} {r['kind']}", f"{r['new_tokens']:,}",
             f"{1e3 * r['baseline_tpot_s']:.2f}",
             *(f"{100 * r[f'{name}_slowdown_ratio']:+.1f}" for name in ("carrying", "step", "window")),
             f"{1e3 * r['excess_s']:.1f}", f"{r['n_carrying_steps']}")
            for r in rows.to_dict("records")
        ]  # fmt: skip
        print_rows(console, f"Step budget {budget:,} tokens", ("decodes", "prompt", "prefills", "new tokens", "TPOT before (ms)",
                   "carrying steps (%)", "slowest step (%)", "window (%)", "lost (ms)", "steps"), printed)  # fmt: skip
    for line in result.missing:
        console.print(f"warning: {line}", markup=False)
    for path in result.paths:
        console.print(f"wrote {path}", markup=False)
