"""``ppd-bench trace``: what recorded traffic looks like, and traces in other forms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_bench.cli.console import open_console

if TYPE_CHECKING:  # only for signatures: --help should not wait for numpy
    from ppd_bench.workload.traces import Trace

trace_app = typer.Typer(
    help="Look at recorded traffic: conversations and production traces.", rich_markup_mode=None, no_args_is_help=True
)

TraceArg = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace or conversation file, or a folder of such.")]
FormatOption = Annotated[str | None, typer.Option("--format", help="Name of the format; default: detected.")]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="Text: a tokenizer.json or a model's folder; default: an estimate that is labelled."),
]
BlockTokens = Annotated[
    int | None, typer.Option(help="Block size of recorded ids where it is not the format's; of text: 16.")
]
TimeUnit = Annotated[str | None, typer.Option(help="Unit of recorded times where it is not the format's: s, ms, us.")]
TailOption = Annotated[
    str | None, typer.Option("--tail", help="Whether a partial last block has an id (ceil) or none (floor).")
]
OutFile = Annotated[Path, typer.Argument(metavar="OUT", help="Where to write: a path ending in .jsonl or .parquet.")]


def opened(
    path: Path, format: str | None, tokenizer: Path | None, block_tokens: int | None, time_unit: str | None,
    tail: str | None,
) -> Trace:  # fmt: skip
    """The trace as the command line describes it."""
    from ppd_bench.workload.traces import open_trace

    return open_trace(
        path, format=format, tokenizer=tokenizer, block_tokens=block_tokens, time_unit=time_unit, tail=tail
    )


@trace_app.command(name="describe")
def trace_describe(
    trace: TraceArg,
    format: FormatOption = None,
    tokenizer: TokenizerOption = None,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
    tail: TailOption = None,
    sessions: Annotated[
        str, typer.Option(help="Where a trace names none: chain derives them from block ids, none leaves them out.")
    ] = "chain",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for describe.json and the plots (PNG, SVG).")] = None,
) -> None:
    """Lengths, sessions, think time, arrivals, context classes, and what an infinite prefix cache leaves to prefill."""
    from ppd_bench.runner.trace_describe import describe_trace, write_description

    description = describe_trace(opened(trace, format, tokenizer, block_tokens, time_unit, tail), sessions)
    if as_json:
        typer.echo(description.to_json(), nl=False)
    else:
        from ppd_bench.cli.show_trace import show_description

        show_description(open_console(), description)
    for path in write_description(description, out) if out else ():
        typer.echo(f"wrote {path}", err=as_json)


@trace_app.command(name="convert")
def trace_convert(
    trace: TraceArg,
    out: OutFile,
    format: FormatOption = None,
    tokenizer: TokenizerOption = None,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
    tail: TailOption = None,
) -> None:
    """Write any trace in ppd-bench's own form, JSON lines or Parquet: read once, faster from then on."""
    from ppd_bench.cli.show_trace import show_converted
    from ppd_bench.runner.trace_convert import convert_trace

    show_converted(open_console(), convert_trace(opened(trace, format, tokenizer, block_tokens, time_unit, tail), out))


@trace_app.command(name="anonymise")
def trace_anonymise(
    trace: TraceArg,
    out: OutFile,
    format: FormatOption = None,
    tokenizer: TokenizerOption = None,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
    tail: TailOption = None,
    salt: Annotated[
        str | None,
        typer.Option(envvar="PPD_BENCH_SALT", help="16 to 64 bytes, for equal ids in several files; default: random."),
    ] = None,
) -> None:
    """Write a trace without text and with salted ids; lengths and times stay, the salt is not stored."""
    import secrets

    from ppd_bench.cli.show_trace import show_converted
    from ppd_bench.runner.trace_convert import anonymise_trace

    key = secrets.token_bytes(32) if salt is None else salt.encode()
    source = opened(trace, format, tokenizer, block_tokens, time_unit, tail)
    show_converted(open_console(), anonymise_trace(source, out, key))
