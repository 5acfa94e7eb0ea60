"""A trace in memory as columns, its blocks numbered: what every reuse figure and every sample is computed from.

Per request about 50 bytes, per block of a prompt 4 bytes, per distinct block 8 bytes (and up to 32 while the index is built). The
prompts' blocks are one long array with the offsets of its rows, so that everything works on pieces of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ppd_bench.analysis.block_index import BlockIndex
from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceRow

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Numbers = NDArray[np.int32]
Flags = NDArray[np.bool_]

_BATCH_IDS = 1 << 20
PIECE_IDS = 1 << 22
"""Blocks that one vector operation handles at a time: bounds the memory of temporaries."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceBlocks:
    """Requests in order of arrival, file order where some have no arrival time.

    All arrays have one entry per request, but ``blocks`` (numbers of distinct blocks, all prompts one after another; those of
    request i are ``blocks[offsets[i]:offsets[i + 1]]``) and ``block_ids`` (the source's id of every number). ``row``: position
    in the source. ``session``: a number; a request without session is a session of its own. ``arrival_s`` is NaN where unknown.
    """

    block_tokens: int
    has_sessions: bool
    row: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    arrival_s: Floats
    session: Ints
    offsets: Ints
    blocks: Numbers
    block_ids: Ints

    @property
    def n_requests(self) -> int:
        return self.row.size

    @property
    def n_blocks(self) -> int:
        """Distinct blocks."""
        return self.block_ids.size

    @property
    def has_arrivals(self) -> bool:
        return self.n_requests > 0 and not bool(np.isnan(self.arrival_s).any())

    def pieces(self) -> Iterator[Piece]:
        """The requests in order, a few million blocks at a time; never less than a request."""
        start = 0
        while start < self.n_requests:
            limit = self.offsets[start] + PIECE_IDS
            end = max(start + 1, int(np.searchsorted(self.offsets, limit, side="right")) - 1)
            low, high = self.offsets[start], self.offsets[end]
            yield Piece(start=start, end=end, offsets=self.offsets[start : end + 1] - low, blocks=self.blocks[low:high])
            start = end

    def select(self, requests: Ints) -> TraceBlocks:
        """These requests alone, in the order given; numbers and ids of blocks stay as they are."""
        counts = self.offsets[requests + 1] - self.offsets[requests]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        blocks = np.empty(int(offsets[-1]), dtype=np.int32)
        for start in range(0, requests.size, _ROWS_PER_COPY):
            end = min(requests.size, start + _ROWS_PER_COPY)
            low, high = offsets[start], offsets[end]
            shift = self.offsets[requests[start:end]] - offsets[start:end]
            blocks[low:high] = self.blocks[np.arange(low, high) + np.repeat(shift, counts[start:end])]
        return TraceBlocks(
            block_tokens=self.block_tokens, has_sessions=self.has_sessions, row=self.row[requests],
            prompt_tokens=self.prompt_tokens[requests], output_tokens=self.output_tokens[requests],
            arrival_s=self.arrival_s[requests], session=self.session[requests], offsets=offsets, blocks=blocks,
            block_ids=self.block_ids,
        )  # fmt: skip


_ROWS_PER_COPY = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Requests ``start`` to ``end`` of a trace; ``offsets`` begin at 0."""

    start: int
    end: int
    offsets: Ints
    blocks: Numbers

    @property
    def request(self) -> Numbers:
        """The request of every block."""
        return np.repeat(np.arange(self.start, self.end, dtype=np.int32), np.diff(self.offsets))

    def leading(self, held: Flags) -> Ints:
        """Per request, how many of its first blocks are held: the run ends at the first that is not."""
        lengths = np.diff(self.offsets)
        missing = np.flatnonzero(~held)
        request = np.searchsorted(self.offsets, missing, side="right") - 1
        # Of a repeated index the last value stays, so reversed order leaves the first missing block.
        lengths[request[::-1]] = (missing - self.offsets[request])[::-1]
        return lengths


def number_blocks(rows: Iterable[TraceRow], *, block_tokens: int, needs_ids: bool = True) -> TraceBlocks:
    """Read rows into memory and number their blocks, in order of arrival where every row has an arrival time.

    ``block_tokens``: tokens of a block, as the trace's format declares. ``needs_ids``: rows without any block id are refused.

    Raises:
        SpecError: no rows, no row with block ids, or more distinct blocks than a number can name.
    """
    loading = _Loading()
    for row in rows:
        loading.add(row)
    trace = loading.finish(block_tokens)
    if not trace.n_requests or (needs_ids and not trace.blocks.size):
        what = "no request has block ids" if trace.n_requests else "no requests"
        raise SpecError(f"{what}: prefix reuse needs a trace with hash ids, or text that a reader can cut into blocks")
    arrivals = trace.arrival_s
    if trace.has_arrivals and bool((np.diff(arrivals) < 0).any()):
        return trace.select(np.argsort(arrivals, kind="stable"))
    return trace


class _Loading:
    """Columns that grow row by row; blocks are numbered in batches."""

    def __init__(self) -> None:
        self._index = BlockIndex()
        self._numbers: list[Numbers] = []
        self._batch = array("q")
        self._row, self._prompt, self._output = array("q"), array("q"), array("q")
        self._session, self._n_ids = array("q"), array("q")
        self._arrival = array("d")
        self._sessions: dict[str, int] = {}
        self._n_alone = 0

    def add(self, row: TraceRow) -> None:
        self._row.append(row.row)
        self._prompt.append(row.prompt_tokens)
        self._output.append(row.output_tokens)
        self._arrival.append(float("nan") if row.arrival_s is None else row.arrival_s)
        self._session.append(self._session_number(row.session_id))
        self._n_ids.append(len(row.block_ids))
        self._batch.extend(row.block_ids)
        if len(self._batch) >= _BATCH_IDS:
            self._number_batch()

    def _session_number(self, session_id: str | None) -> int:
        if session_id is not None:
            return self._sessions.setdefault(session_id, len(self._sessions))
        self._n_alone += 1
        return -self._n_alone

    def _number_batch(self) -> None:
        if self._batch:
            self._numbers.append(self._index.number(np.frombuffer(self._batch, dtype=np.int64)))
        self._batch = array("q")

    def finish(self, block_tokens: int) -> TraceBlocks:
        self._number_batch()
        block_ids = self._index.ids.copy()
        del self._index  # before the blocks are joined: its slots are the largest part
        offsets = np.concatenate([[0], np.cumsum(_column(self._n_ids))])
        blocks = np.empty(int(offsets[-1]), dtype=np.int32)
        at = 0
        for numbers in self._numbers:
            blocks[at : at + numbers.size] = numbers
            at += numbers.size
        return TraceBlocks(
            block_tokens=block_tokens, has_sessions=bool(self._sessions), row=_column(self._row),
            prompt_tokens=_column(self._prompt), output_tokens=_column(self._output),
            arrival_s=np.frombuffer(self._arrival, dtype=np.float64) if self._arrival else np.empty(0),
            session=_column(self._session), offsets=offsets, blocks=blocks, block_ids=block_ids,
        )  # fmt: skip


def _column(values: array[int]) -> Ints:
    return np.frombuffer(values, dtype=np.int64) if values else np.empty(0, dtype=np.int64)
