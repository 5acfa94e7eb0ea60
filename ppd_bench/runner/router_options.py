"""What ``ppd-bench router`` is given, and everything about it that can be checked before anything listens."""

from __future__ import annotations

import functools
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Params, PlacementSpec, PolicySpec
from ppd_bench.core.topology import Topology, parse_topology
from ppd_bench.engine.handoff import find_connector
from ppd_bench.policy.deciders import DECIDERS
from ppd_bench.policy.placements import PLACEMENTS
from ppd_bench.policy.policy import GUARD_PARAM
from ppd_bench.router.decision_log import LogSettings
from ppd_bench.router.discovery import HeartbeatListener
from ppd_bench.router.fleet import FleetSettings
from ppd_bench.router.prompt_size import load_tokenizer
from ppd_bench.router.settings import RouterSettings
from ppd_bench.router.tables import PolicyBox
from ppd_bench.router.token_model import CountTokens

DECISION_SEED = 0
"""Of hashed choices: the same in every process, so that a restart, or a second router, places conversations alike (B21)."""
MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """What the command line says. ``decider`` null: ``table`` where there is a table, else ``node``.

    ``table`` is a file, looked at again while the router runs. ``model`` and ``gpu``: what the table must be made for; null takes
    what the first one says. ``certificate``/``key``: PEM files, which turn TLS on.
    """

    topology: str
    endpoints: Path | None = None
    discovery: str | None = None
    discovery_token: str = ""
    fleet: FleetSettings = field(default_factory=FleetSettings)
    table: Path | None = None
    w_ttft: float | None = None
    w_tpot: float | None = None
    max_unknown_ratio: float | None = None
    model: str | None = None
    gpu: str | None = None
    decider: str | None = None
    x: float | None = None
    max_uncached_tokens: int | None = None
    placement: str = PlacementSpec().decode
    prefill_placement: str = PlacementSpec().prefill
    sticky: bool = True
    alpha: float | None = None
    max_kv_usage_ratio: float | None = None
    connector: str = "NixlConnector"
    lease_s: float = 30.0
    tokenizer: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    key: Path | None = None
    log: LogSettings | None = None
    settings: RouterSettings = field(default_factory=RouterSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A router that could be started: everything that can be checked without engines has been."""

    options: RouterOptions
    topology: Topology
    policies: PolicyBox
    listener: HeartbeatListener | None
    count_tokens: CountTokens | None
    tls: ssl.SSLContext | None


def prepare_router(options: RouterOptions) -> Prepared:
    """Check what can be checked before anything listens (B33).

    Raises:
        SpecError: arguments or files that cannot be used.
        TableError: a table that cannot be read, was made for something else, or knows too little.
        LaunchError: no hand-off is known for the connector.
    """
    topology = parse_topology(options.topology)
    if topology.n_prefill:
        find_connector(options.connector)
    _check_company(options)
    listener = _listener(options)
    policy, placement = _policy_spec(options), _placement_spec(options)
    load = None
    if options.table is not None:
        from ppd_bench.runner.tables import (
            table_text,
        )  # here, for it brings pandas, and a router may do without a table

        load = functools.partial(table_text, options.table, w_ttft=options.w_ttft, w_tpot=options.w_tpot)
    policies = PolicyBox(
        topology,
        policy,
        placement,
        seed=DECISION_SEED,
        load=load,
        model=options.model,
        gpu=options.gpu,
        max_unknown_ratio=options.max_unknown_ratio,
    )
    count_tokens = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    return Prepared(
        options=options,
        topology=topology,
        policies=policies,
        listener=listener,
        count_tokens=count_tokens,
        tls=_tls(options),
    )


def _check_company(options: RouterOptions) -> None:
    """Refuse options that would silently do nothing without another one."""
    is_scored = "cache_aware" in (options.placement, options.prefill_placement)
    table = "--table FILE, whose cells and domain it judges"
    rules = (
        (
            options.settings.shed and options.max_kv_usage_ratio is None,
            "--shed",
            "--max-kv-usage RATIO, above which it sheds",
        ),
        (options.alpha is not None and not is_scored, "--alpha", "--placement cache_aware, whose score it weighs"),
        (bool(options.discovery_token) and options.discovery is None, "--discovery-token", "--discovery HOST:PORT"),
        (options.model is not None and options.table is None, "--model", table),
        (options.gpu is not None and options.table is None, "--gpu", table),
        (options.max_unknown_ratio is not None and options.table is None, "--max-unknown", table),
    )
    problems = [f"command line: {option} needs {needed}" for is_alone, option, needed in rules if is_alone]
    if problems:
        raise SpecError(problems)


def _listener(options: RouterOptions) -> HeartbeatListener | None:
    if options.discovery is None:
        if options.endpoints is None:
            raise SpecError(
                "command line: where are the engines? give --endpoints FILE, or --discovery HOST:PORT, or both"
            )
        return None
    host, _, port = options.discovery.rpartition(":")
    if not host or not port.isdigit() or int(port) > MAX_PORT:
        raise SpecError(
            f"command line: --discovery must be HOST:PORT, got {options.discovery!r}; such as 127.0.0.1:30001"
        )
    return HeartbeatListener(host=host.strip("[]"), port=int(port), token=options.discovery_token)


def _policy_spec(options: RouterOptions) -> PolicySpec:
    given = {"table": options.table, "fraction": options.x, "threshold": options.max_uncached_tokens}
    implied = [name for name, value in given.items() if value is not None]
    decider = options.decider or (implied[0] if implied else PolicySpec().decider)
    problems = [
        f"command line: {_OPTIONS[name]} is of no use to --policy {decider}; leave one of them out"
        for name in implied
        if name != decider
    ]
    if decider not in DECIDERS:
        problems = [f"command line: --policy {decider!r} is not known; allowed: {', '.join(DECIDERS)}"]
    if decider == "table" and options.table is None:
        problems.append("command line: --policy table needs --table FILE; 'ppd-bench build-table' writes one")
    if decider == "fraction" and options.x is None:
        problems.append("command line: --policy fraction needs --x SHARE, 0 to 1")
    if options.table is None and (options.w_ttft is not None or options.w_tpot is not None):
        problems.append("command line: --w-ttft and --w-tpot weigh a table; give --table FILE with them")
    if problems:
        raise SpecError(problems)
    params = {"x": options.x, "max_uncached_tokens": options.max_uncached_tokens}
    return PolicySpec(decider=decider, params=_params(params))


_OPTIONS = {"table": "--table", "fraction": "--x", "threshold": "--max-uncached-tokens"}


def _placement_spec(options: RouterOptions) -> PlacementSpec:
    problems = [
        f"command line: {option} {name!r} is not known; allowed: {', '.join(PLACEMENTS)}"
        for option, name in (("--placement", options.placement), ("--prefill-placement", options.prefill_placement))
        if name not in PLACEMENTS
    ]
    if problems:
        raise SpecError(problems)
    return PlacementSpec(
        prefill=options.prefill_placement,
        decode=options.placement,
        replica=options.placement,
        sticky=options.sticky,
        params=_params({"alpha": options.alpha, GUARD_PARAM: options.max_kv_usage_ratio}),
    )


def _params(values: dict[str, float | None]) -> Params:
    return tuple(sorted((name, value) for name, value in values.items() if value is not None))


def _tls(options: RouterOptions) -> ssl.SSLContext | None:
    if options.certificate is None:
        if options.key is not None:
            raise SpecError("command line: --tls-key needs --tls-cert FILE")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.certificate, options.key)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(
            f"command line: --tls-cert {options.certificate} and its key cannot be used ({error}); give PEM files"
        ) from error
    return context
