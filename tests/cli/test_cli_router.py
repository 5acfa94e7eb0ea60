"""``ppd-bench router``: every option reaches the setting that it names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import typer

from ppd_bench.cli.router import register
from ppd_bench.router.decision_log import LogSettings
from ppd_bench.runner import router as runner
from ppd_bench.runner.router import RouterOptions

GIVEN = {
    "--topology": "2P_2D", "--endpoints": "e.yaml", "--discovery": "127.0.0.1:7", "--discovery-token": "t", "--table": "t.json",
    "--w-ttft": "2", "--w-tpot": "3", "--max-unknown": "0.5", "--model": "m", "--gpu": "g", "--policy": "table", "--x": "0.25",
    "--max-uncached-tokens": "11", "--placement": "cache_aware", "--prefill-placement": "least_tokens", "--alpha": "1.5",
    "--max-kv-usage": "0.9", "--connector": "C", "--kv-lease": "12", "--retries": "5", "--connect-timeout": "21",
    "--prefill-timeout": "22", "--first-byte-timeout": "23", "--idle-timeout": "24", "--answer-timeout": "25",
    "--session-ttl": "26", "--max-sessions": "27", "--tokenizer": "k.json", "--breaker-failures": "8", "--probe-interval": "31",
    "--scrape-interval": "32", "--host": "::1", "--port": "1234", "--tls-cert": "c.pem", "--tls-key": "k.pem", "--log": "log",
    "--log-size": "2", "--log-files": "3", "--drain": "33",
}  # fmt: skip
PLAIN = RouterOptions(topology="")
FLAGS = ["--no-sticky", "--shed", "--no-local-fallback", "--use-cache-key", "--explain"]


def options_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> RouterOptions:
    """What the runner is given for a command line."""
    taken: list[RouterOptions] = []
    monkeypatch.setattr(runner, "route", lambda options, *, tell: taken.append(options))
    app = typer.Typer(pretty_exceptions_enable=False)
    register(app)
    app(["router", *arguments], standalone_mode=False)
    return taken[0]


def test_every_option_reaches_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of([*(word for pair in GIVEN.items() for word in pair), *FLAGS], monkeypatch)
    settings, fleet = options.settings, options.fleet
    assert dataclasses.replace(options, settings=PLAIN.settings, fleet=PLAIN.fleet) == RouterOptions(
        topology="2P_2D", endpoints=Path("e.yaml"), discovery="127.0.0.1:7", discovery_token="t", table=Path("t.json"),
        w_ttft=2.0, w_tpot=3.0, max_unknown_ratio=0.5, model="m", gpu="g", decider="table", x=0.25, max_uncached_tokens=11,
        placement="cache_aware", prefill_placement="least_tokens", sticky=False, alpha=1.5, max_kv_usage_ratio=0.9,
        connector="C", lease_s=12.0, tokenizer=Path("k.json"), host="::1", port=1234, certificate=Path("c.pem"),
        key=Path("k.pem"), log=LogSettings(folder=Path("log"), max_bytes=2_000_000, max_files=3),
        settings=PLAIN.settings, fleet=PLAIN.fleet,
    )  # fmt: skip
    assert (settings.connect_s, settings.prefill_s, settings.first_byte_s, settings.idle_s) == (21.0, 22.0, 23.0, 24.0)
    assert (settings.answer_s, settings.session_ttl_s, settings.max_sessions, settings.drain_s) == (
        25.0,
        26.0,
        27,
        33.0,
    )
    assert (settings.n_retries, settings.local_fallback, settings.explain) == (5, False, True)
    assert (settings.shed, settings.use_cache_key) == (True, True)
    assert (fleet.breaker.n_failures, fleet.probe_s, fleet.scrape_s) == (8, 31.0, 32.0)


def test_the_options_that_are_not_given_are_the_runners_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(["--topology", "4R"], monkeypatch) == RouterOptions(topology="4R")


def test_a_token_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPD_BENCH_DISCOVERY_TOKEN", "from-the-environment")
    assert options_of(["--topology", "4R"], monkeypatch).discovery_token == "from-the-environment"
