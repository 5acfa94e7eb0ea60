"""``ppd-bench trace reuse`` and ``ppd-bench trace sample``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_bench.cli.console import open_console
from ppd_bench.cli.show import print_rows
from ppd_bench.cli.trace import BlockTokens, FormatOption, TailOption, TimeUnit, TokenizerOption, TraceArg, opened

if TYPE_CHECKING:  # only for signatures: help should not wait for numpy
    from rich.console import Console

    from ppd_bench.analysis.reuse_instances import InstanceReuse
    from ppd_bench.runner.trace_reuse import ReuseResult
    from ppd_bench.runner.trace_sample import Sampled

Sessions = Annotated[str, typer.Option(help="Where the trace names no sessions: chain derives them, none does not.")]
Model = Annotated[str | None, typer.Option(help="Model whose KV gives cache sizes in GiB; or a path to a config.json.")]
Capacity = Annotated[
    str | None, typer.Option(help="Comma-separated cache sizes of one instance: tokens, or 28GiB with --model.")
]
Policies = Annotated[str, typer.Option(help="Comma-separated placements to spread the trace with; empty: none.")]
Instances = Annotated[str, typer.Option(help="Comma-separated numbers of instances.")]
Rate = Annotated[
    float | None,
    typer.Option(help="Share of the blocks whose reuse distances are computed; 1 is exact. Default: by size."),
]
PrefillRate = Annotated[float, typer.Option(help="Assumed prompt tokens/s of a request in flight, for loads.")]
DecodeRate = Annotated[float, typer.Option(help="Assumed output tokens/s of a request in flight, for loads.")]
RouterSees = Annotated[
    str | None, typer.Option(help="What cache_aware knows: ids (sent where), or conversations. Default: by size.")
]
Seed = Annotated[int, typer.Option(min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Requests = Annotated[int | None, typer.Option(min=1, help="About so many requests, in whole sessions.")]
RatePerS = Annotated[float | None, typer.Option("--rate", help="About so many requests per second, in whole sessions.")]
Window = Annotated[str | None, typer.Option(help="Sessions that begin in a window of this length, such as 10min.")]
Start = Annotated[str | None, typer.Option(help="Where the window begins, such as 30min; default: the seed says.")]


def register(trace_app: typer.Typer) -> None:
    """Add the verbs to ``trace``."""
    trace_app.command()(reuse)
    trace_app.command()(sample)


def reuse(
    trace: TraceArg,
    format: FormatOption = None,
    tokenizer: TokenizerOption = None,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
    tail: TailOption = None,
    sessions: Sessions = "chain",
    model: Model = None,
    capacity: Capacity = None,
    policies: Policies = "round_robin,session_affinity,cache_aware",
    instances: Instances = "2,4,8",
    rate: Rate = None,
    prefill_tokens_per_s: PrefillRate = 10_000.0,
    decode_tokens_per_s: DecodeRate = 30.0,
    router_sees: RouterSees = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Folder for reuse.json and the plots.")] = None,
) -> None:
    """How much prefix reuse a trace allows, what a cache of each size finds, and what routing over N instances leaves of it."""
    from ppd_bench.analysis.reuse_instances import Service
    from ppd_bench.runner.numbers import whole_numbers
    from ppd_bench.runner.trace_reuse import ReuseRequest, trace_reuse, write_reuse

    result = trace_reuse(
        opened(trace, format, tokenizer, block_tokens, time_unit, tail),
        ReuseRequest(
            sessions=sessions, model=model, capacities=_parts(capacity), policies=_parts(policies),
            instances=whole_numbers(instances, "--instances"), rate=rate, seed=seed,
            sees=router_sees,
            service=Service(prefill_tokens_per_s=prefill_tokens_per_s, decode_tokens_per_s=decode_tokens_per_s),
        ),
    )  # fmt: skip
    if as_json:
        typer.echo(result.to_json(), nl=False)
    else:
        show_reuse(open_console(), result)
    for path in write_reuse(result, out) if out else ():
        typer.echo(f"wrote {path}", err=as_json)


def sample(
    trace: TraceArg,
    out: Annotated[Path, typer.Option(help="Where to write the sample: .jsonl or .parquet.")],
    requests: Requests = None,
    rate: RatePerS = None,
    duration: Window = None,
    start: Start = None,
    seed: Seed = 0,
    sessions: Sessions = "chain",
    format: FormatOption = None,
    tokenizer: TokenizerOption = None,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
    tail: TailOption = None,
    as_json: AsJson = False,
) -> None:
    """A smaller trace of whole sessions with their block ids, and what the sampling did to reuse, lengths and rate."""
    from ppd_bench.analysis.sampling import SampleTarget
    from ppd_bench.runner.numbers import seconds_of
    from ppd_bench.runner.trace_sample import sample_trace

    target = SampleTarget(
        n_requests=requests, rate_rps=rate, duration_s=seconds_of(duration, "--duration"),
        start_s=seconds_of(start, "--start"), seed=seed,
    )  # fmt: skip
    result = sample_trace(
        opened(trace, format, tokenizer, block_tokens, time_unit, tail), out, target, sessions=sessions
    )
    if as_json:
        typer.echo(result.to_json(), nl=False)
    else:
        show_sample(open_console(), result)


def _parts(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def show_reuse(to: Console, result: ReuseResult) -> None:
    """Every figure under its own name, then cache sizes, policies and the hottest blocks."""
    from ppd_bench.runner.trace_reuse import BASIS

    found = result.reuse
    to.print(f"{result.source} ({result.format_name}): {found.n_requests:,} requests, {found.prompt_tokens:,} prompt tokens "
             f"({result.token_count}), {found.n_block_uses:,} uses of {found.n_blocks:,} distinct blocks of "
             f"{found.block_tokens} tokens; sessions: {result.sessions}")  # fmt: skip
    to.print(f"{BASIS}: prompt {result.service.prefill_tokens_per_s:,.0f}, "
             f"output {result.service.decode_tokens_per_s:,.0f} tokens/s")  # fmt: skip
    rows = [
        ("hit ratio", found.hit_ratio, "leading run of blocks seen in earlier prompts, token-weighted"),
        ("full-block hit ratio", found.full_block_hit_ratio, "the same, of full blocks only"),
        ("mean request hit ratio", found.mean_request_hit_ratio, "hit tokens / prompt tokens, mean over requests"),
        ("mean request block hit ratio", found.mean_request_block_hit_ratio, "hit blocks / blocks, mean over requests"),
        ("shared-anywhere ratio", found.shared_anywhere_ratio, "tokens in blocks that occur twice or more; no cache"),
        ("intra-session ratio", found.intra_session_ratio, "of the hit ratio: held by the same session before"),
        ("cross-session ratio", found.cross_session_ratio, "of the hit ratio: held by other sessions only"),
        ("shared block ratio", found.shared_block_ratio, "distinct blocks that occur twice or more / distinct blocks"),
    ]
    print_rows(to, "Reuse in one cache without bound", ("figure", "value", "meaning"),
               [(name, _ratio(value), meaning) for name, value, meaning in rows])  # fmt: skip
    _show_curve(to, result)
    if result.instances:
        columns = ("policy", "router sees", "instances", "tokens each", "hit ratio", "of possible", "busiest / mean")
        print_rows(to, "Over N instances", columns, [_instance_row(r) for r in result.instances])
    print_rows(to, "Hottest blocks", ("block id", "prompts", "position"),
               [(f"{b.block_id}", f"{b.n_requests:,}", f"{b.position}") for b in found.hottest])  # fmt: skip
    for note in result.notes:
        to.print(f"note: {note}")


def _instance_row(r: InstanceReuse) -> tuple[str, ...]:
    capacity = "∞" if r.capacity_tokens is None else f"{r.capacity_tokens:,.0f}"
    return (r.policy, r.sees or "–", f"{r.n_instances}", capacity, _ratio(r.hit_ratio),
            _ratio(r.share_of_possible_ratio), f"{r.busiest_ratio:.2f}")  # fmt: skip


def _show_curve(to: Console, result: ReuseResult) -> None:
    curve, kv_bytes = result.curve, result.kv_bytes_per_token
    how = "exact" if curve.exact else f"sampled: {curve.rate:.3%} of the blocks"
    head, rows = ["tokens", "hit ratio"], [[f"{p.capacity_tokens:,.0f}", _ratio(p.hit_ratio)] for p in curve.points]
    if kv_bytes is not None:
        head.append(f"GiB {result.model or ''}".strip())
        rows = [
            [*row, f"{p.capacity_tokens * kv_bytes / 2**30:,.2f}"] for row, p in zip(rows, curve.points, strict=True)
        ]
    if not curve.exact:
        head.append("standard error")
        rows = [[*row, _ratio(p.standard_error)] for row, p in zip(rows, curve.points, strict=True)]
    print_rows(to, f"One LRU cache ({how})", head, rows)
    if kv_bytes is None:
        to.print("--model NAME also gives these sizes in GiB")
    shares = ", ".join(f"{share:.0%}: {tokens:,.0f}" for share, tokens in curve.quantiles_tokens)
    to.print(f"cache size in tokens from which a share of all re-used tokens hits: {shares or 'nothing is re-used'}")


def show_sample(to: Console, result: Sampled) -> None:
    """Original and sample side by side."""
    from ppd_bench.runner.trace_sample import changes

    rows = [(name, _figure(before), _figure(after)) for name, before, after in changes(result)]
    to.print(f"token counts are {result.basis}")
    print_rows(to, f"What sampling (seed {result.seed}) did", ("figure", "original", "sample"), rows)
    for note in result.notes:
        to.print(f"note: {note}")
    to.print(f"wrote {result.path}")


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"
