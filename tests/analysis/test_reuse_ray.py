"""The same partitions on Ray Data, in local mode. Skipped where Ray is not installed: it is no dependency."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from reuse_cases import mooncake_rows

from ppd_bench.analysis.reuse import hit_blocks
from ppd_bench.analysis.reuse_partitioned import leading, missing, partition_of
from ppd_bench.analysis.trace_blocks import number_blocks

ray = pytest.importorskip("ray", reason="Ray is not installed")

N_PARTITIONS = 4
N_REQUESTS = 2_000
"""The first requests of the trace: Ray's start-up is most of the time anyhow."""


@pytest.fixture
def local_ray() -> Iterator[None]:
    """Two workers on this machine, nothing else."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # workers must find this file's functions
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield
    ray.shutdown()


def with_partition(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "partition": partition_of(batch["block_id"], N_PARTITIONS)}


def ends(group: dict[str, Any]) -> dict[str, Any]:
    """The uses of one partition whose block no earlier request had."""
    kept = missing(group["block_id"], group["request"])
    return {"request": group["request"][kept], "position": group["position"][kept]}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_ray_data_finds_the_hits_of_the_whole_through_parquet(local_ray: None, shared: Path, tmp_path: Path) -> None:
    rows = list(mooncake_rows(shared / "data/mooncake/conversation_trace.jsonl"))[:N_REQUESTS]
    trace = number_blocks(iter(rows), block_tokens=512)
    n_blocks = np.diff(trace.offsets)
    pl.DataFrame(
        {
            "request": np.repeat(np.arange(trace.n_requests), n_blocks),
            "block_id": trace.block_ids[trace.blocks],
            "position": np.arange(trace.blocks.size) - np.repeat(trace.offsets[:-1], n_blocks),
        }
    ).write_parquet(tmp_path / "uses.parquet")
    uses = ray.data.read_parquet(str(tmp_path / "uses.parquet")).map_batches(with_partition, batch_format="numpy")
    found = uses.groupby("partition").map_groups(ends, batch_format="numpy").to_pandas()
    hits = leading(n_blocks, found["request"].to_numpy(), found["position"].to_numpy())
    assert hits.tolist() == hit_blocks(trace).tolist()
