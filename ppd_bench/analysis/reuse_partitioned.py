"""Hit blocks of a trace in pieces that never meet: the exact infinite-cache figures where one machine's memory does not hold
the trace.

One machine holds about 200 million block uses of 60 million distinct blocks in 4 GiB (``trace_blocks``). Beyond, the trace goes
through Parquet (``ppd-bench trace convert``; request = place in order of arrival) and three steps, each a plain function of
arrays:

1. Explode every prompt into uses (block id, request, position) and partition them by ``partition_of`` the block id.
2. In each partition alone, keep the uses whose block no earlier request had: ``missing``.
3. By request, the first position that is missing ends the leading run: ``leading``. All formulas of ``reuse`` follow from it.

Ray Data: ``read_parquet(trace).flat_map(explode)``, ``.groupby("partition").map_groups(...)`` with ``missing``, then
``.groupby("request").min("position")``. Spark or any SQL engine: ``LEADING_SQL``; its two GROUP BYs are the two shuffles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ppd_bench.analysis.trace_blocks import Flags, Ints

LEADING_SQL = """
WITH uses AS (
    SELECT request, block_id, position FROM block_uses
), firsts AS (
    SELECT block_id, MIN(request) AS request FROM uses GROUP BY block_id
), ends AS (
    SELECT uses.request, MIN(uses.position) AS hit_blocks
    FROM uses JOIN firsts ON uses.block_id = firsts.block_id AND uses.request = firsts.request
    GROUP BY uses.request
)
SELECT requests.request, COALESCE(ends.hit_blocks, requests.n_blocks) AS hit_blocks
FROM requests LEFT JOIN ends ON requests.request = ends.request
ORDER BY requests.request
"""
"""Hit blocks per request, from ``block_uses(request, block_id, position)`` and ``requests(request, n_blocks)``. Standard SQL."""

_MIX = np.uint64(0xBF58476D1CE4E5B9)


def partition_of(block_ids: Ints, n_partitions: int) -> Ints:
    """The partition of each id, even for ids that count up: the same in every process and on every machine."""
    raw = np.ascontiguousarray(block_ids, dtype=np.int64).view(np.uint64)
    mixed = (raw ^ (raw >> np.uint64(29))) * _MIX
    return np.asarray((mixed >> np.uint64(33)) % np.uint64(n_partitions), dtype=np.int64)


def missing(block_ids: Ints, requests: Ints) -> Flags:
    """Of the uses in one partition, in any order: those whose block no earlier request had."""
    _, inverse = np.unique(block_ids, return_inverse=True)
    first = np.full(int(inverse.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, inverse, requests)
    return np.asarray(first[inverse] == requests)


def leading(n_blocks: Ints, requests: Ints, positions: Ints) -> NDArray[np.int64]:
    """Hit blocks of requests 0, 1, ... with so many blocks each, from the missing uses of all partitions, in any order."""
    hits = n_blocks.astype(np.int64, copy=True)
    np.minimum.at(hits, requests, positions)
    return hits
