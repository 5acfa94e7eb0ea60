"""The KV pool, which accounts by runs of blocks, against one that accounts block by block (I4)."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ppd_bench.sim.kv import Chain, KvPool, Run


class BlockByBlock:
    """vLLM's free queue, one block at a time: cached blocks leave oldest first, a freed sequence's tail before its head.

    Blocks that never held findable content are used before any cached one.
    """

    def __init__(self, total: int, caching: bool) -> None:
        self.free = total
        self.caching = caching
        self.n_users: dict[int, int] = {}  # cached content, by block id
        self.idle: OrderedDict[int, None] = OrderedDict()

    def hit(self, ids: list[int]) -> int:
        n = 0
        while n < len(ids) and ids[n] in self.n_users:
            n += 1
        return n

    def fits(self, ids: list[int], n_hit: int, n_new: int) -> bool:
        return n_new + sum(i in self.idle for i in ids[:n_hit]) <= self.free + len(self.idle)

    def take(self, ids: list[int], n_hit: int) -> None:
        for i in ids[:n_hit]:
            self.n_users[i] += 1
            self.idle.pop(i, None)

    def allocate(self, n: int) -> bool:
        if n > self.free + len(self.idle):
            return False
        for _ in range(n - self.free):
            oldest, _ = self.idle.popitem(last=False)
            del self.n_users[oldest]
            self.free += 1
        self.free -= n
        return True

    def extend(self, ids: list[int], n_shared: int, n_full: int) -> int:
        while self.caching and n_shared < min(n_full, len(ids)) and ids[n_shared] not in self.n_users:
            self.n_users[ids[n_shared]] = 1
            n_shared += 1
        return n_shared

    def release(self, ids: list[int], n_shared: int, n_private: int) -> None:
        self.free += n_private
        for i in reversed(ids[:n_shared]):
            self.n_users[i] -= 1
            if self.n_users[i] == 0:
                self.idle[i] = None


class Held:
    """One sequence that both pools serve."""

    def __init__(self, chain: Chain, run: Run | None, n_shared: int, n_private: int) -> None:
        self.chain = chain
        self.ids = ids_of(chain)
        self.run = run
        self.n_shared = n_shared
        self.n_private = n_private


def ids_of(chain: Chain) -> list[int]:
    return [i for start, end in chain for i in range(start, end)]


def chain_of(trunk: int, fork: int, branch: int, length: int) -> Chain:
    """``fork`` blocks of a trunk that many share, then content of one branch; ids stand for their whole prefix."""
    shared = [(1000 * trunk, 1000 * trunk + fork)] if fork else []
    start = 100_000 * (1 + trunk if fork else 50) + 10_000 * branch + 100 * fork
    return [*shared, (start, start + length)]


class Pools(RuleBasedStateMachine):
    @initialize(total=st.sampled_from([8, 20, 60]), caching=st.sampled_from([True, True, True, False]))
    def build(self, total: int, caching: bool) -> None:
        self.total = total
        self.pool = KvPool(total, caching)
        self.naive = BlockByBlock(total, caching)
        self.held: list[Held] = []

    @rule(
        trunk=st.integers(0, 1),
        fork=st.integers(0, 8),
        branch=st.integers(0, 2),
        length=st.integers(1, 10),
        uncached=st.integers(0, 2),
    )
    def admit(self, trunk: int, fork: int, branch: int, length: int, uncached: int) -> None:
        chain = chain_of(trunk, fork, branch, length)
        ids = ids_of(chain)
        searched = max(0, len(ids) - uncached)
        match = self.pool.match(chain, searched)
        n_hit = self.naive.hit(ids[:searched])
        assert match.n_blocks == n_hit
        need = len(ids) - n_hit
        fits = need + match.n_idle <= self.pool.available()
        assert fits == self.naive.fits(ids, n_hit, need)
        if fits:
            run = self.pool.acquire(match)
            self.naive.take(ids, n_hit)
            assert self.pool.allocate(need)
            assert self.naive.allocate(need)
            self.held.append(Held(chain, run, n_hit, need))

    @rule(which=st.integers(0, 9), n=st.integers(0, 5))
    def grow(self, which: int, n: int) -> None:
        if self.held:
            fitted = self.pool.allocate(n)
            assert fitted == self.naive.allocate(n)
            self.held[which % len(self.held)].n_private += n if fitted else 0

    @rule(which=st.integers(0, 9), n_full=st.integers(0, 18))
    def share(self, which: int, n_full: int) -> None:
        if self.held:
            self._share(self.held[which % len(self.held)], n_full)

    def _share(self, seq: Held, n_full: int) -> None:
        n_full = max(seq.n_shared, min(n_full, seq.n_shared + seq.n_private, len(seq.ids)))
        run, shared = self.pool.extend(seq.run, seq.chain, seq.n_shared, n_full)
        assert shared == self.naive.extend(seq.ids, seq.n_shared, n_full)
        seq.n_private -= shared - seq.n_shared
        seq.run, seq.n_shared = run, shared

    @rule(which=st.integers(0, 9), n_full=st.integers(0, 18))
    def release(self, which: int, n_full: int) -> None:
        if self.held:
            seq = self.held.pop(which % len(self.held))
            self._share(seq, n_full)
            self.pool.release(seq.run, seq.n_private)
            self.naive.release(seq.ids, seq.n_shared, seq.n_private)

    @invariant()
    def same_account(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.free == self.naive.free
            assert self.pool.cached == len(self.naive.idle)
            assert self.pool.used + self.pool.cached + self.pool.free == self.total
            in_use = sum(users > 0 for users in self.naive.n_users.values()) + sum(s.n_private for s in self.held)
            assert self.pool.used == in_use

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            while self.held:
                self.release(0, 18)
            self.same_account()
            assert self.pool.used == 0


TestRunsAndSingleBlocksAgree = Pools.TestCase
TestRunsAndSingleBlocksAgree.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def _hold(pool: KvPool, chain: Chain, n: int) -> tuple[Run | None, int]:
    match = pool.match(chain, n)
    run = pool.acquire(match)
    assert pool.allocate(n - match.n_blocks)
    run, shared = pool.extend(run, chain, match.n_blocks, n)
    return run, n - shared


def test_the_tail_of_a_freed_prefix_is_evicted_before_its_head() -> None:
    pool = KvPool(10, True)
    pool.release(*_hold(pool, [(0, 8)], 8))
    assert pool.allocate(5)  # 2 were free, so 3 cached blocks go
    assert pool.match([(0, 8)], 8).n_blocks == 5
    assert (pool.free, pool.cached, pool.used) == (0, 5, 5)


def test_the_prefix_that_was_freed_first_is_evicted_first() -> None:
    pool = KvPool(8, True)
    older, younger = _hold(pool, [(0, 4)], 4), _hold(pool, [(100, 104)], 4)
    pool.release(*older)
    pool.release(*younger)
    assert pool.allocate(4)
    assert pool.match([(0, 4)], 4).n_blocks == 0
    assert pool.match([(100, 104)], 4).n_blocks == 4


def test_a_hit_makes_a_prefix_young_again() -> None:
    pool = KvPool(8, True)
    pool.release(*_hold(pool, [(0, 4)], 4))
    pool.release(*_hold(pool, [(100, 104)], 4))
    pool.release(*_hold(pool, [(0, 4)], 4))
    assert pool.allocate(4)
    assert pool.match([(0, 4)], 4).n_blocks == 4
    assert pool.match([(100, 104)], 4).n_blocks == 0


def test_a_prefix_in_use_is_never_evicted() -> None:
    pool = KvPool(8, True)
    run, private = _hold(pool, [(0, 4)], 4)
    assert not pool.allocate(5)
    assert pool.allocate(4)
    assert pool.match([(0, 4)], 4).n_blocks == 4
    pool.release(run, private)
    pool.check()


def test_a_prefix_shared_by_two_is_held_until_both_let_go() -> None:
    pool = KvPool(10, True)
    first = _hold(pool, [(0, 4)], 4)
    second = _hold(pool, [(0, 2), (50, 52)], 4)  # 2 shared and 2 of its own
    assert pool.used == 6
    pool.release(*first)
    assert (pool.used, pool.cached) == (4, 2)
    pool.release(*second)
    assert (pool.used, pool.cached) == (0, 6)


def test_without_caching_nothing_is_found_again() -> None:
    pool = KvPool(8, False)
    pool.release(*_hold(pool, [(0, 4)], 4))
    assert pool.match([(0, 4)], 4).n_blocks == 0
    assert (pool.free, pool.cached) == (8, 0)


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = KvPool(8, True)
    pool.release(*_hold(pool, [(0, 4)], 4))
    assert not pool.allocate(9)
    assert (pool.free, pool.cached, pool.n_evicted) == (4, 4, 0)


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5])
def test_a_match_is_no_longer_than_asked_for(limit: int) -> None:
    pool = KvPool(10, True)
    pool.release(*_hold(pool, [(0, 4)], 4))
    assert pool.match([(0, 10)], limit).n_blocks == min(limit, 4)
