"""KV blocks and prefix cache of one engine, with runs of blocks as the unit of account.

vLLM keys its prefix cache by chained block hashes: a block's id stands for its whole prefix (vllm/v1/core/kv_cache_utils.py).
Here a block id is an integer with the same meaning, and consecutive ids are one ``Run``, so that the cost is per run and not
per block while every count is exact. Freed blocks stay cached and leave in LRU order, the tail of a prefix before its head.

Invariant I4: used + cached + free = total.
"""

from __future__ import annotations

Chain = list[tuple[int, int]]
"""Content of a sequence as half-open ranges of block ids, in order."""


class Run:
    """``length`` cached blocks with ids from ``start``; ``parent`` is the run before it in the prefix."""

    def __init__(self, start: int, length: int, parent: Run | None, n_refs: int) -> None:
        self.start = start
        self.length = length
        self.parent = parent
        self.n_refs = n_refs
        self.n_children = 0


class Match:
    """Longest cached prefix of a chain: it ends ``take`` blocks into ``run``; ``n_idle`` of its blocks are in no use."""

    def __init__(self, run: Run | None, take: int, n_blocks: int, n_idle: int) -> None:
        self.run = run
        self.take = take
        self.n_blocks = n_blocks
        self.n_idle = n_idle


class KvPool:
    """Block accounting of one engine. ``caching`` false keeps nothing after release."""

    def __init__(self, total_blocks: int, caching: bool) -> None:
        self.total = total_blocks
        self.free = total_blocks
        self.cached = 0  # blocks of runs that no sequence uses
        self.caching = caching
        self.n_evicted = 0
        self._by_start: dict[int, Run] = {}
        self._lru: dict[Run, None] = {}  # runs without users, oldest first

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.total - self.free - self.cached

    def available(self) -> int:
        """Blocks that an allocation can get, by eviction where needed."""
        return self.free + self.cached

    def match(self, chain: Chain, max_blocks: int) -> Match:
        """Longest cached prefix of ``chain``, at most ``max_blocks`` blocks. Changes nothing."""
        last: Run | None = None
        take = 0
        n_blocks = 0
        n_idle = 0
        for start, end in chain:
            position = start
            while position < end and n_blocks < max_blocks:
                run = self._by_start.get(position)
                if run is None:
                    return Match(last, take, n_blocks, n_idle)
                take = min(run.length, end - position, max_blocks - n_blocks)
                last = run
                n_blocks += take
                if run.n_refs == 0:
                    n_idle += take
                position += take
                if take < run.length:
                    return Match(last, take, n_blocks, n_idle)
        return Match(last, take, n_blocks, n_idle)

    def acquire(self, match: Match) -> Run | None:
        """Take a matched prefix into use; returns the run that it ends with, for ``extend`` and ``release``."""
        run = match.run
        if run is None:
            return None
        if match.take < run.length:
            run = self._split(run, match.take)
        node: Run | None = run
        while node is not None:
            if node.n_refs == 0:
                del self._lru[node]
                self.cached -= node.length
            node.n_refs += 1
            node = node.parent
        return run

    def _split(self, run: Run, take: int) -> Run:
        """Cut the first ``take`` blocks off as a new run before ``run``. Users of ``run`` use both."""
        head = Run(run.start, take, run.parent, run.n_refs)
        head.n_children = 1
        run.start += take
        run.length -= take
        run.parent = head
        self._by_start[head.start] = head
        self._by_start[run.start] = run
        if head.n_refs == 0:
            self._lru[head] = None  # acquired by the caller at once; younger than its tail in any case
        return head

    def allocate(self, n_blocks: int) -> bool:
        """Take ``n_blocks`` private blocks, evicting what is cached and unused; false, and no change, if they do not fit."""
        if n_blocks > self.free + self.cached:
            return False
        if n_blocks > self.free:
            self._evict(n_blocks - self.free)
        self.free -= n_blocks
        return True

    def _evict(self, n_blocks: int) -> None:
        while n_blocks > 0:
            run = next(iter(self._lru))
            n = min(n_blocks, run.length)
            run.length -= n
            self.cached -= n
            self.free += n
            self.n_evicted += n
            n_blocks -= n
            if run.length == 0:
                self._drop(run)

    def _drop(self, run: Run) -> None:
        del self._lru[run]
        del self._by_start[run.start]
        if run.parent is not None:
            run.parent.n_children -= 1

    def extend(self, run: Run | None, chain: Chain, n_shared: int, n_full: int) -> tuple[Run | None, int]:
        """Make private blocks ``n_shared``..``n_full`` of a sequence findable by others.

        Returns the run that the sequence's shared prefix now ends with, and how many blocks it shares. Content that another
        sequence cached meanwhile stays private here, as vLLM keeps the duplicate.
        """
        if not self.caching:
            return run, n_shared
        skip = n_shared
        shared = n_shared
        for start, end in chain:
            length = end - start
            if skip >= length:
                skip -= length
                continue
            first = start + skip
            n = min(end - first, n_full - shared)
            skip = 0
            if n <= 0 or first in self._by_start:
                break
            run = self._append(run, first, n)
            shared += n
        return run, shared

    def _append(self, run: Run | None, first: int, n: int) -> Run:
        if run is not None and run.start + run.length == first and run.n_refs == 1 and run.n_children == 0:
            run.length += n
            return run
        child = Run(first, n, run, 1)
        if run is not None:
            run.n_children += 1
        self._by_start[first] = child
        return child

    def release(self, run: Run | None, n_private: int) -> None:
        """A sequence lets go of its shared prefix (which stays cached) and of its private blocks (which become free)."""
        self.free += n_private
        while run is not None:
            run.n_refs -= 1
            if run.n_refs == 0:
                self._lru[run] = None
                self.cached += run.length
            run = run.parent

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        idle = 0
        held = 0
        for run in self._by_start.values():
            assert run.length > 0
            assert run.n_refs >= 0
            assert self._by_start[run.start] is run
            assert run.parent is None or run.parent.n_refs >= run.n_refs
            assert (run in self._lru) == (run.n_refs == 0)
            idle += run.length if run.n_refs == 0 else 0
            held += run.length if run.n_refs else 0
        assert idle == self.cached
        assert self.free >= 0
        assert self.used >= held
        seen: set[Run] = set()
        for run in self._lru:
            assert run.parent is None or run.parent not in seen, "a prefix would be evicted before its tail"
            seen.add(run)
