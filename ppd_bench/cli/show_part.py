"""A part of ``ppd-bench reproduce`` on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from ppd_bench.cli.show import print_rows

if TYPE_CHECKING:  # only for signatures: --help should not wait for pandas
    from ppd_bench.runner.reproduce_parts import Part


def show_part(console: Console, part: Part) -> None:
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
