"""Scrapes: the text format, missing names, differences."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from scripted_server import scripted_server

from ppd_bench.core.errors import NotReady
from ppd_bench.engine.control import control_client
from ppd_bench.engine.metrics import (
    EngineCounters,
    EngineGauges,
    counters_between,
    parse_exposition,
    read_scrape,
    scrape,
)

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/m{odd},\\"name\\""} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 64.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="m",source="local_compute"} 1.79e+09
vllm:nixl_bytes_transferred_bucket{engine="0",le="1024.0",model_name="m"} 1.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1.048576e+06
process_start_time_seconds 1.79598927679e+09 1395066363000
"""


def test_samples_are_read_with_odd_labels_exponents_and_timestamps() -> None:
    samples = parse_exposition(PAGE)
    assert samples["vllm:num_requests_running"] == [
        ({"engine": "0", "model_name": '/m{odd},\\"name\\"'}, 3.0),
        ({"engine": "1", "model_name": "m"}, 2.0),
    ]
    assert samples["process_start_time_seconds"] == [({}, 1795989276.79)]
    assert "vllm:prompt_tokens_by_source_created" not in samples


def test_engines_behind_one_page_are_added_up_and_labels_select() -> None:
    gauges = read_scrape(PAGE).gauges
    assert gauges == EngineGauges(
        n_running=5.0, n_waiting=None, n_waiting_for_capacity=4.0, n_waiting_deferred=1.0, kv_cache_usage_ratio=0.25
    )


def test_what_an_engine_lacks_is_null_and_never_zero() -> None:
    counters = read_scrape(PAGE).counters
    assert counters == EngineCounters(
        local_compute_tokens=100.0, local_cache_hit_tokens=64.0, transferred_bytes=1048576.0
    )
    assert read_scrape("").counters == EngineCounters()


def test_differences_exist_only_where_both_scrapes_have_the_counter() -> None:
    before = read_scrape('vllm:num_preemptions_total 2\nvllm:generation_tokens_total{a="b"} 10\n')
    after = read_scrape(
        'vllm:num_preemptions_total 2\nvllm:generation_tokens_total{a="b"} 17.5\nvllm:nixl_num_failed_transfers_total 1'
    )
    assert counters_between(before, after) == EngineCounters(n_preemptions=0.0, generated_tokens=7.5)


def test_a_counter_that_fell_or_a_restarted_engine_gives_no_difference() -> None:
    before = dataclasses.replace(
        read_scrape("vllm:num_preemptions_total 5\nvllm:generation_tokens_total 1"), engine_start_s=1.0
    )
    after = dataclasses.replace(
        read_scrape("vllm:num_preemptions_total 4\nvllm:generation_tokens_total 3"), engine_start_s=1.0
    )
    assert counters_between(before, after) == EngineCounters(generated_tokens=2.0)
    assert counters_between(before, dataclasses.replace(after, engine_start_s=2.0)) == EngineCounters()


def test_an_engine_is_read_over_http_and_one_that_refuses_is_named() -> None:
    async def both() -> None:
        async with control_client() as client:
            with scripted_server({"GET /metrics": [(200, PAGE), (503, "warming up")]}) as (endpoint, _):
                assert (await scrape(client, endpoint)).gauges.n_running == 5.0
                with pytest.raises(
                    NotReady, match=r"D0 \(http://127.0.0.1:\d+\): cannot read /metrics: HTTP 503 warming up"
                ):
                    await scrape(client, endpoint)
            with pytest.raises(NotReady, match=r"D0 .*cannot read /metrics: ConnectError"):
                await scrape(client, endpoint)

    asyncio.run(both())
