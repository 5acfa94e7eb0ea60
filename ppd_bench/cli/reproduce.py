"""``ppd-bench reproduce``: the paper's tables from a run, and its figures as parts that are simulated here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_bench.cli.console import open_console
from ppd_bench.cli.show import print_rows

if TYPE_CHECKING:  # only for signatures: --help should not wait for pandas
    from rich.console import Console

    from ppd_bench.runner.reproduce_parts import Part

What = Annotated[
    str,
    typer.Argument(
        help="paper (its tables, from RUN), or a part: figure1, 2, 4, 5, 6, 7, 8, 10, 11, table3 or handoff."
    ),
]
RunArg = Annotated[Path, typer.Argument(metavar="RUN", help="With paper: a run folder, such as results/paper-sim.")]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset", help="Conversations for a part: PATH, or wildchat=PATH or sharegpt=PATH for the paper's own."
    ),
]
Tables = Annotated[
    Path | None, typer.Option(help="Folder of decision tables for a part; default: compiled from the paper's grid.")
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(reproduce)


def reproduce(
    what: What,
    run: RunArg = Path("results/paper-sim"),
    part: Annotated[str | None, typer.Option(help="With paper: one part instead of its tables.")] = None,
    dataset: Datasets = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="For conversations of text: a tokenizer.json or its folder.")
    ] = None,
    tables: Tables = None,
    quick: Annotated[bool, typer.Option("--quick", help="A part with few points: a first look.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Simulator processes; 0 means one per core.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Tables: also write them as CSV. A part: its folder; default results/reproduce.")
    ] = None,
) -> None:
    """The paper's Tables 1, 2, 5 and its 92.2 % figure from a run, or one of its figures simulated, beside the published ones."""
    console = open_console()
    if what == "paper" and part is None:
        _show_tables(console, what, run, out)
        return
    from ppd_bench.runner.reproduce_parts import PartRequest
    from ppd_bench.runner.reproduce_registry import reproduce_part

    request = PartRequest(
        datasets=tuple(dataset or ()), tokenizer=tokenizer, tables=tables, quick=quick, n_processes=jobs, out=out
    )
    _show_part(console, reproduce_part(part or what, request, console.print))


def _show_tables(console: Console, what: str, run: Path, out: Path | None) -> None:
    from ppd_bench.cli.show import show_comparison, show_constants
    from ppd_bench.runner import reproduce as runner
    from ppd_bench.runner.runs import open_run

    opened = open_run(run)
    result = runner.reproduce(what, opened, out)
    console.print(result.headline)
    show_comparison(console, result.comparison, opened.evidence)
    if result.constants:
        show_constants(console, result.constants)
    if result.path:
        console.print(f"wrote {result.path}")


def _show_part(console: Console, part: Part) -> None:
    """Published beside simulated, the part's tables, and why they differ."""
    console.print(part.evidence, markup=False)
    for table in (part.comparison, *part.tables):
        print_rows(console, table.caption, table.head, table.rows)
        if table.note:
            console.print(table.note, markup=False)
    for head, lines in (
        ("Why it differs:", part.differences),
        ("Assumed where the paper leaves it open:", part.assumptions),
        ("Data:", part.notes),
    ):
        if lines:
            console.print(head)
        for line in lines:
            console.print(f"- {line}", markup=False)
    console.print(f"wrote {part.folder}/ ({len(part.paths)} files; the page is {part.key}.html)", markup=False)
