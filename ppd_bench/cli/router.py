"""``ppd-bench router`` and what reads its log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TOKEN_VARIABLE = "PPD_BENCH_DISCOVERY_TOKEN"
"""Everybody on a machine can read command lines; the environment only its owner."""


def register(app: typer.Typer) -> None:
    """Add the verbs ``router`` and ``announce``."""
    app.command()(router)
    app.command()(announce)


def router(
    topology: Annotated[str, typer.Option(help="What the engines are to be used as, such as 2P_2D or 2P_1D_1pD.")],
    endpoints: Annotated[
        Path | None, typer.Option(help="YAML of the engines (see README); looked at again when it changes.")
    ] = None,
    discovery: Annotated[
        str | None, typer.Option(help="HOST:PORT for heartbeats (ZeroMQ) of engines that come and go.")
    ] = None,
    discovery_token: Annotated[
        str,
        typer.Option(
            envvar=TOKEN_VARIABLE, show_envvar=False, help=f"What heartbeats must carry; or {TOKEN_VARIABLE}."
        ),
    ] = "",
    table: Annotated[
        Path | None, typer.Option(help="Decision table; looked at again when it changes, and on SIGHUP.")
    ] = None,
    w_ttft: Annotated[float | None, typer.Option(min=0.0, help="Weigh the table anew: weight of TTFT.")] = None,
    w_tpot: Annotated[float | None, typer.Option(min=0.0, help="Weigh the table anew: weight of TPOT.")] = None,
    max_unknown: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of visited cells that may lack evidence; default: the table's."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Refuse tables that were made for another model.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Refuse tables that were made for another GPU.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="table, node, always_pd, always_local, fraction or threshold; default: table with --table, else node."
        ),
    ] = None,
    x: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of follow-up turns prefilled on D (--policy fraction)."),
    ] = None,
    max_uncached_tokens: Annotated[
        int | None, typer.Option(min=0, help="Go local up to so many uncached tokens (--policy threshold).")
    ] = None,
    placement: Annotated[
        str,
        typer.Option(
            help="Which D or R: round_robin, least_inflight, least_tokens, least_kv_usage, session_affinity, cache_aware."
        ),
    ] = "least_inflight",
    prefill_placement: Annotated[str, typer.Option(help="Which P, by the same names.")] = "round_robin",
    sticky: Annotated[bool, typer.Option(help="Follow-up turns decode where the conversation decoded before.")] = True,
    alpha: Annotated[float | None, typer.Option(help="Weight of the hit ratio in cache_aware.")] = None,
    max_kv_usage: Annotated[
        float | None,
        typer.Option(help="Avoid workers whose KV usage is above this ratio, or that lack room for what waits."),
    ] = None,
    shed: Annotated[
        bool, typer.Option("--shed", help="Answer 503 while all workers are above --max-kv-usage.")
    ] = False,
    connector: Annotated[str, typer.Option(help="KV connector of the engines.")] = "NixlConnector",
    kv_lease: Annotated[float, typer.Option(min=1.0, help="Seconds that P holds KV for D (vLLM's setting).")] = 30.0,
    local_fallback: Annotated[bool, typer.Option(help="Prefill on D where no P works.")] = True,
    retries: Annotated[int, typer.Option(min=0, help="Further engines that are tried before the first byte.")] = 2,
    connect_timeout: Annotated[float, typer.Option(min=0.01, help="Seconds to connect to an engine.")] = 5.0,
    prefill_timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for the P leg.")] = 120.0,
    first_byte_timeout: Annotated[float, typer.Option(min=0.01, help="Seconds to the first byte of a stream.")] = 120.0,
    idle_timeout: Annotated[float, typer.Option(min=0.01, help="Seconds of silence within a stream.")] = 60.0,
    answer_timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds for an answer that is not streamed.")
    ] = 600.0,
    session_ttl: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a conversation is forgotten.")
    ] = 3600.0,
    max_sessions: Annotated[int, typer.Option(min=1, help="Conversations remembered at most.")] = 200_000,
    use_cache_key: Annotated[
        bool, typer.Option("--use-cache-key", help="Also recognise conversations by prompt_cache_key and user.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json of the model: exact prompt lengths (package tokenizers).")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say in headers of each answer what was decided.")] = False,
    breaker_failures: Annotated[
        int, typer.Option(min=1, help="Failures in a row after which an engine gets no turns.")
    ] = 3,
    probe_interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a quiet engine is asked for a token.")
    ] = 10.0,
    scrape_interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between readings of an engine's /metrics.")
    ] = 1.0,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine reach only 0.0.0.0 or its own.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM); turns TLS on.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM), where it is not in the same file.")] = None,
    log: Annotated[Path | None, typer.Option(help="Folder for the decision log; without it there is none.")] = None,
    log_size: Annotated[int, typer.Option(min=1, help="Megabytes of one file of the log.")] = 64,
    log_files: Annotated[int, typer.Option(min=2, help="Files of the log that are kept.")] = 16,
    drain: Annotated[
        float, typer.Option(min=0.0, help="Seconds that answers under way get when it is stopped.")
    ] = 30.0,
) -> None:
    """Serve the OpenAI API in front of P, D and R engines, and route every turn as a decision table (or another policy) says."""
    from ppd_bench.router.breaker import BreakerSettings
    from ppd_bench.router.decision_log import LogSettings
    from ppd_bench.router.fleet import FleetSettings
    from ppd_bench.router.settings import RouterSettings
    from ppd_bench.runner.router import RouterOptions, route

    settings = RouterSettings(
        connect_s=connect_timeout, prefill_s=prefill_timeout, first_byte_s=first_byte_timeout, idle_s=idle_timeout,
        answer_s=answer_timeout, local_fallback=local_fallback, n_retries=retries, explain=explain, shed=shed,
        use_cache_key=use_cache_key, session_ttl_s=session_ttl, max_sessions=max_sessions, drain_s=drain,
    )  # fmt: skip
    options = RouterOptions(
        topology=topology, endpoints=endpoints, discovery=discovery, discovery_token=discovery_token, table=table,
        w_ttft=w_ttft, w_tpot=w_tpot,
        max_unknown_ratio=max_unknown, model=model, gpu=gpu, decider=policy, x=x, max_uncached_tokens=max_uncached_tokens,
        placement=placement, prefill_placement=prefill_placement, sticky=sticky, alpha=alpha,
        max_kv_usage_ratio=max_kv_usage, connector=connector, lease_s=kv_lease, tokenizer=tokenizer, host=host, port=port,
        certificate=tls_cert, key=tls_key, settings=settings,
        fleet=FleetSettings(
            probe_s=probe_interval, scrape_s=scrape_interval, breaker=BreakerSettings(n_failures=breaker_failures)
        ),
        log=None if log is None else LogSettings(folder=log, max_bytes=log_size * 1_000_000, max_files=log_files),
    )  # fmt: skip
    route(options, tell=lambda line: print(line, flush=True))


def announce(
    router: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where a router listens for heartbeats: its --discovery.")
    ],
    role: Annotated[str, typer.Option(help="R, P or D (a pD of a topology is a D).")],
    url: Annotated[str, typer.Option(help="The engine as the router reaches it: http://HOST:PORT.")],
    engine_id: Annotated[str | None, typer.Option(help="The name that its KV connector uses, if you know it.")] = None,
    token: Annotated[
        str, typer.Option(envvar=TOKEN_VARIABLE, show_envvar=False, help=f"The router's token; or {TOKEN_VARIABLE}.")
    ] = "",
    every: Annotated[float, typer.Option(min=0.1, max=15.0, help="Seconds; a router forgets after 30.")] = 10.0,
) -> None:
    """Tell a router of an engine for as long as it answers. vLLM does not announce itself: run one beside each engine."""
    from ppd_bench.runner.announce import AnnounceOptions, announce

    options = AnnounceOptions(router=router, role=role, url=url, engine_id=engine_id, token=token, every_s=every)
    announce(options, tell=lambda line: print(line, flush=True))


def report_router_log(folder: Path, *, as_json: bool) -> None:
    """``report --router-log``: print what a decision log says."""
    from ppd_bench.runner.router_log import read_router_log, report_json, report_lines

    found = read_router_log(folder)
    typer.echo(report_json(found) if as_json else "\n".join(report_lines(found)), nl=not as_json)
