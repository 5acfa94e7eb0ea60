"""Which worker was sent which prompt, block by block: what a router that sees content ids may believe of prefix caches.

An id stands for its whole prefix, so a worker that was sent a block was sent all blocks before it, and the longest known prefix
is found by halving. Nothing is forgotten but by a reset: engines evict unseen, and a belief may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixIndex:
    """Content ids by the workers that were sent them, as a bit per worker."""

    def __init__(self, n_workers: int) -> None:
        self._n_workers = n_workers
        self._workers: dict[int, int] = {}

    @property
    def n_blocks(self) -> int:
        return len(self._workers)

    def note(self, block_ids: Sequence[int], worker: int) -> None:
        """A prompt goes to a worker. From its end, for the blocks before a known one are known."""
        bit = 1 << worker
        workers = self._workers
        for block_id in reversed(block_ids):
            known = workers.get(block_id, 0)
            if known & bit:
                return
            workers[block_id] = known | bit

    def n_known(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """By worker, how many leading blocks it was sent before."""
        return tuple([self._leading(block_ids, 1 << worker) for worker in range(self._n_workers)])

    def _leading(self, block_ids: Sequence[int], bit: int) -> int:
        low = 0
        high = len(block_ids)
        while low < high:
            middle = (low + high) // 2
            if self._workers.get(block_ids[middle], 0) & bit:
                low = middle + 1
            else:
                high = middle
        return low

    def forget(self, worker: int) -> None:
        """A worker lost its cache."""
        keep = ~(1 << worker)
        self._workers = {block_id: known & keep for block_id, known in self._workers.items() if known & keep}
