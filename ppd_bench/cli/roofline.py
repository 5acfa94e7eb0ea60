"""``ppd-bench roofline``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_bench.cli.console import open_console
from ppd_bench.cli.show import print_rows

if TYPE_CHECKING:  # only for signatures: help should not wait for numpy
    from rich.console import Console

    from ppd_bench.runner.roofline import RooflineResult

Model = Annotated[str, typer.Option(help="Model profile, or a path to a Hugging Face config.json.")]
Gpu = Annotated[str, typer.Option(help="GPU profile, such as h20.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of the prompt, and context of the decodes.")]
ReuseRatios = Annotated[str, typer.Option("--reuse", help="Comma-separated shares of the prompt that are cached.")]
Batches = Annotated[str, typer.Option("--batch", help="Comma-separated decode batch sizes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Out = Annotated[Path | None, typer.Option(help="Folder for roofline.json and the plot.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(roofline)


def roofline(
    model: Model = "qwen3-30b-a3b",
    gpu: Gpu = "h20",
    tokens: Tokens = 64_000,
    reuse: ReuseRatios = "0,0.7,0.9,0.95",
    batch: Batches = "1,8,64",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Arithmetic intensity of prefill under prefix reuse and of decode; by default the agentic study's Section 4.2."""
    from ppd_bench.runner.numbers import numbers, whole_numbers
    from ppd_bench.runner.roofline import RooflineRequest, run_roofline, write_roofline

    result = run_roofline(RooflineRequest(
        model=model, gpu=gpu, prompt_tokens=tokens, reuse_ratios=numbers(reuse, "--reuse"),
        decode_batches=whole_numbers(batch, "--batch"),
    ))  # fmt: skip
    if as_json:
        typer.echo(result.to_json(), nl=False)
    else:
        _show(open_console(), result)
    for path in write_roofline(result, out) if out else ():
        typer.echo(f"wrote {path}", err=as_json)


def _show(to: Console, result: RooflineResult) -> None:
    from ppd_bench.runner.roofline import BASIS

    found = result.roofline
    to.print(f"{found.model} on {found.gpu}, ridge point {found.ridge:.4g} FLOP/byte; {BASIS}")
    rows = [
        (r.name if r.reuse_ratio is None else f"{r.name}, {r.reuse_ratio:.0%} reused", f"{r.new_tokens:,}", f"{r.work.flop:.3e}",
         f"{r.work.bytes:.3e}", f"{r.work.intensity:,.4g}" if r.work.intensity < 100 else f"{r.work.intensity:,.0f}",
         r.bound, f"{r.vs_decode:,.1f}", f"{1000 * r.seconds:,.2f}") for r in found.rows
    ]  # fmt: skip
    print_rows(to, f"{found.prompt_tokens:,} tokens", ("step", "new tokens", "FLOP", "bytes",
               "FLOP/byte", "bound", "x decode", "ms at peak"), rows)  # fmt: skip
    if result.published:
        steps = [("published", *(f"{v:,.4g}" if v < 100 else f"{v:,.0f}" for v in result.published.intensities))]
        steps += [(s.change, *(f"{v:,.3g}" if v < 100 else f"{v:,.0f}" for v in s.intensities))
                  for s in result.published.steps]  # fmt: skip
        print_rows(to, "Agentic study, Section 4.2, FLOP/byte: its figures, its formula, and each correction on top",
                   ("formula", "0 %", "70 %", "90 %", "95 %", "decode"), steps)  # fmt: skip
