"""An engine's /metrics, under this project's names. The names are those of vLLM 0.32; what an engine lacks is null, never 0."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from ppd_bench.engine.control import explain
from ppd_bench.engine.endpoints import Endpoint

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By metric name: every sample's labels and value."""

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGauges:
    """What an engine looked like at one instant."""

    n_running: float | None = None
    n_waiting: float | None = None
    n_waiting_for_capacity: float | None = None
    n_waiting_deferred: float | None = None
    kv_cache_usage_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """What an engine has done since it started, or, as a difference, between two scrapes.

    ``local_compute_tokens``, ``local_cache_hit_tokens`` and ``external_kv_transfer_tokens`` split the prompt tokens by
    source and prove which path turns took. Prefix queries and hits count a waiting request again and again under KV
    pressure, so that hits / queries is then no hit rate.
    """

    local_compute_tokens: float | None = None
    local_cache_hit_tokens: float | None = None
    external_kv_transfer_tokens: float | None = None
    generated_tokens: float | None = None
    prefix_queries_tokens: float | None = None
    prefix_hits_tokens: float | None = None
    external_queries_tokens: float | None = None
    external_hits_tokens: float | None = None
    n_preemptions: float | None = None
    n_transfers: float | None = None
    transferred_bytes: float | None = None
    transfer_s: float | None = None
    n_failed_transfers: float | None = None
    n_failed_notifications: float | None = None
    n_expired_requests: float | None = None
    n_notifications_after_expiry: float | None = None
    n_queued_requests: float | None = None
    queue_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineScrape:
    """One reading of one engine. ``engine_start_s`` is the engine's own Unix time of start: it changes with a restart."""

    engine_start_s: float | None
    gauges: EngineGauges
    counters: EngineCounters


Source = tuple[str, dict[str, str]]
"""A metric's name and the labels that its samples must have; samples that match are added up."""

GAUGES: dict[str, Source] = {
    "n_running": ("vllm:num_requests_running", {}),
    "n_waiting": ("vllm:num_requests_waiting", {}),
    "n_waiting_for_capacity": ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}),
    "n_waiting_deferred": ("vllm:num_requests_waiting_by_reason", {"reason": "deferred"}),
    "kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", {}),
}

COUNTERS: dict[str, Source] = {
    "local_compute_tokens": ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    "local_cache_hit_tokens": ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
    "external_kv_transfer_tokens": ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
    "generated_tokens": ("vllm:generation_tokens_total", {}),
    "prefix_queries_tokens": ("vllm:prefix_cache_queries_total", {}),
    "prefix_hits_tokens": ("vllm:prefix_cache_hits_total", {}),
    "external_queries_tokens": ("vllm:external_prefix_cache_queries_total", {}),
    "external_hits_tokens": ("vllm:external_prefix_cache_hits_total", {}),
    "n_preemptions": ("vllm:num_preemptions_total", {}),
    "n_transfers": ("vllm:nixl_bytes_transferred_count", {}),
    "transferred_bytes": ("vllm:nixl_bytes_transferred_sum", {}),
    "transfer_s": ("vllm:nixl_xfer_time_seconds_sum", {}),
    "n_failed_transfers": ("vllm:nixl_num_failed_transfers_total", {}),
    "n_failed_notifications": ("vllm:nixl_num_failed_notifications_total", {}),
    "n_expired_requests": ("vllm:nixl_num_kv_expired_reqs_total", {}),
    "n_notifications_after_expiry": ("vllm:nixl_num_notifications_after_expiry_total", {}),
    "n_queued_requests": ("vllm:request_queue_time_seconds_count", {}),
    "queue_s": ("vllm:request_queue_time_seconds_sum", {}),
}

START = "process_start_time_seconds"

WANTED = frozenset({START, *(name for name, _ in (*GAUGES.values(), *COUNTERS.values()))})


def parse_exposition(text: str, wanted: frozenset[str] = WANTED) -> Samples:
    """Samples of the wanted metrics from the Prometheus text format.

    Our own few lines and not prometheus_client's parser: that one is another dependency, builds objects for all of the
    thousand samples (most are histogram buckets that nobody reads here), and runs beside a load generator.
    """
    found: Samples = {}
    for line in text.splitlines():
        if line.partition("{")[0].partition(" ")[0] in wanted and (match := _SAMPLE.match(line)):
            labels = dict(_LABEL.findall(match[2] or ""))
            found.setdefault(match[1], []).append((labels, float(match[3])))
    return found


def read_scrape(text: str) -> EngineScrape:
    """A scrape from the text of /metrics."""
    samples = parse_exposition(text)
    return EngineScrape(
        engine_start_s=_total(samples, (START, {})),
        gauges=EngineGauges(**{name: _total(samples, source) for name, source in GAUGES.items()}),
        counters=EngineCounters(**{name: _total(samples, source) for name, source in COUNTERS.items()}),
    )


def _total(samples: Samples, source: Source) -> float | None:
    name, wanted = source
    values = [value for labels, value in samples.get(name, ()) if wanted.items() <= labels.items()]
    return sum(values) if values else None


async def scrape(client: httpx.AsyncClient, endpoint: Endpoint) -> EngineScrape:
    """Read an engine's metrics.

    Raises:
        NotReady: the engine does not answer.
    """
    with explain(endpoint, "read /metrics"):
        answer = await client.get(f"{endpoint.url}/metrics")
        answer.raise_for_status()
    return read_scrape(answer.text)


def counters_between(before: EngineScrape, after: EngineScrape) -> EngineCounters:
    """What an engine did between two scrapes; null where either lacks the counter or the engine started anew."""
    restarted = before.engine_start_s != after.engine_start_s
    return EngineCounters(**{name: None if restarted else rest for name, rest in _differences(before, after)})


def _differences(before: EngineScrape, after: EngineScrape) -> Iterator[tuple[str, float | None]]:
    for field in dataclasses.fields(EngineCounters):
        then, now = getattr(before.counters, field.name), getattr(after.counters, field.name)
        defined = then is not None and now is not None and now >= then  # a counter that fell was set back
        yield field.name, now - then if defined else None
