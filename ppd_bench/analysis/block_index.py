"""Numbers for block ids: from arbitrary 64-bit ids to 0, 1, 2, ... at tens of millions of ids, with vector operations only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ppd_bench.core.errors import SpecError

Ids = NDArray[np.int64]
Numbers = NDArray[np.int32]

_FIRST_BITS = 16
_MAX_LOAD_RATIO = 0.5
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MOVE_IDS = 1 << 22
MAX_BLOCKS = 2**31 - 1
"""Distinct blocks that a 32-bit number can name; their index alone would take 34 GB."""


class BlockIndex:
    """Open addressing with linear probing; slots hold numbers, the ids lie in an array beside them.

    Memory: 8 bytes per id (up to 16 while that array grows) and 4 bytes per slot, with 2 to 4 slots per id.
    """

    def __init__(self) -> None:
        self._bits = _FIRST_BITS
        self._slots: Numbers = np.full(1 << self._bits, -1, dtype=np.int32)
        self._ids: Ids = np.empty(1 << (self._bits - 1), dtype=np.int64)
        self.n_blocks = 0

    @property
    def ids(self) -> Ids:
        """The ids by number: a view."""
        return self._ids[: self.n_blocks]

    def number(self, ids: Ids) -> Numbers:
        """The number of every id; ids not met before get the next numbers, in order of first appearance."""
        numbers = self._find(ids)
        unknown = np.flatnonzero(numbers < 0)
        if unknown.size:
            fresh, first, inverse = np.unique(ids[unknown], return_index=True, return_inverse=True)
            order = np.argsort(first)
            rank = np.empty(order.size, dtype=np.int32)
            rank[order] = np.arange(order.size, dtype=np.int32)
            numbers[unknown] = rank[inverse] + np.int32(self.n_blocks)
            self._add(fresh[order])
        return numbers

    def _home(self, ids: Ids) -> Ids:
        """The slot where the search for an id begins: Fibonacci hashing (the product's high bits) of both halves of the id."""
        raw = ids.view(np.uint64)
        mixed = (raw ^ (raw >> np.uint64(32))) * _GOLDEN
        return (mixed >> np.uint64(64 - self._bits)).view(np.int64)

    def _find(self, ids: Ids) -> Numbers:
        found = np.full(ids.size, -1, dtype=np.int32)
        asked = np.arange(ids.size)
        slots = self._home(ids)
        last = (1 << self._bits) - 1
        while asked.size:
            numbers = self._slots[slots]
            there = numbers >= 0
            same = there & (self._ids[numbers] == ids)
            found[asked[same]] = numbers[same]
            on = there & ~same
            asked, ids, slots = asked[on], ids[on], (slots[on] + 1) & last
        return found

    def _add(self, ids: Ids) -> None:
        """Store ids that are new and differ from each other."""
        end = self.n_blocks + ids.size
        if end > MAX_BLOCKS:
            raise SpecError(
                f"more than {MAX_BLOCKS:,} distinct blocks: take a sample, or partition the trace by block id"
            )
        if end > self._ids.size:
            self._ids = np.concatenate([self.ids, np.empty(max(end, 2 * self.n_blocks) - self.n_blocks, np.int64)])
        self._ids[self.n_blocks : end] = ids
        if end > _MAX_LOAD_RATIO * self._slots.size:
            self._bits = max(self._bits, int(np.ceil(np.log2(end / _MAX_LOAD_RATIO))))
            self._slots = np.full(1 << self._bits, -1, dtype=np.int32)
            for start in range(0, end, _MOVE_IDS):
                self._place(start, min(end, start + _MOVE_IDS))
        else:
            self._place(self.n_blocks, end)
        self.n_blocks = end

    def _place(self, start: int, end: int) -> None:
        """Give the numbers ``start`` to ``end`` their slots. Of several that want one, one gets it and the others go on."""
        numbers = np.arange(start, end, dtype=np.int32)
        slots = self._home(self._ids[start:end])
        last = (1 << self._bits) - 1
        while numbers.size:
            free = self._slots[slots] < 0
            self._slots[slots[free]] = numbers[free]
            left = self._slots[slots] != numbers
            numbers, slots = numbers[left], (slots[left] + 1) & last
