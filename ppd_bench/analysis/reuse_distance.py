"""Hit ratio against cache size: an LRU cache of every size at once, from the stack distances of one pass (Mattson et al., 1970).

The cache is vLLM's: a block's id stands for its whole prefix, and what a request touched leaves tail first, so a block's prefix
is always younger than the block and the leading run of held blocks is simply the blocks whose stack distance is within the
cache. A request finds what the requests before it left; answers, and blocks that running requests hold, take no room here.

Large traces are sampled by block (SHARDS; Waldspurger et al., FAST 2015): a block takes part where a hash of its number falls
below the rate, and distances are divided by the rate. The number of re-uses in the sample is set right in the smallest distance
(SHARDS-adj), since the blocks that one sample holds too many or too few of are the hottest. Memory and time fall with the rate;
the standard error comes from disjoint parts of the sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ppd_bench.analysis.reuse import block_weights, first_requests
from ppd_bench.analysis.trace_blocks import PIECE_IDS, Flags, Floats, Ints, TraceBlocks

EXACT_BLOCK_USES = 8_000_000
"""Block uses up to which distances are exact unless a rate is given: about 20 s and 1 GB."""
SAMPLED_BLOCK_USES = 4_000_000
"""Block uses that a sample is made to hold."""
N_PARTS = 4
"""Disjoint parts of a sample that give the standard error."""
_SALT = np.uint64(0xD1B54A32D192ED03)
_UNIT = float(1 << 53)
Small = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distances:
    """Re-uses in ascending order of stack distance.

    ``blocks``: capacity in blocks from which the re-use hits. ``tokens``: the tokens that it then saves, added up to here.
    ``missing_tokens``: what the sample lacks (or, below 0, has too much) of ``rate`` times all re-used tokens.
    ``prompt_tokens``: of the whole trace.
    """

    blocks: Floats
    tokens: Ints
    rate: float
    missing_tokens: float
    prompt_tokens: int
    block_tokens: int

    def hit_ratios(self, capacity_tokens: Floats) -> Floats:
        """Hit tokens / prompt tokens of LRU caches of these sizes."""
        within = np.searchsorted(self.blocks, capacity_tokens / self.block_tokens, side="right")
        saved = np.concatenate([[0.0], self.tokens])[within]
        # What the sample lacks are mostly uses of the hottest blocks, which every cache of a block or more holds.
        held = np.where(capacity_tokens < self.block_tokens, 0.0, saved + self.missing_tokens)
        return np.asarray(np.clip(held / (self.rate * max(1, self.prompt_tokens)), 0.0, 1.0), dtype=np.float64)

    def quantile_tokens(self, share: float) -> float:
        """The cache size in tokens from which this share of all re-used tokens hits; of a trace with re-uses."""
        wanted = share * (self.tokens[-1] + self.missing_tokens) - self.missing_tokens
        at = min(int(np.searchsorted(self.tokens, wanted)), self.blocks.size - 1)
        return float(self.blocks[at] * self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """An LRU cache of one size. ``standard_error`` is null where the curve is exact."""

    capacity_tokens: float
    hit_ratio: float
    standard_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Hit ratio against cache size. ``rate`` is 1 where exact; ``quantiles_tokens``: (share of re-used tokens, cache size from
    which it hits), the reuse-distance curve read the other way; empty without re-uses.
    """

    rate: float
    points: tuple[CurvePoint, ...]
    quantiles_tokens: tuple[tuple[float, float], ...]

    @property
    def exact(self) -> bool:
        return self.rate == 1.0


QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def lru_curve(trace: TraceBlocks, capacity_tokens: tuple[float, ...] = (), *, rate: float | None = None) -> Curve:
    """The curve over powers of two blocks up to what holds everything, and over ``capacity_tokens``.

    A sample says nothing of caches below 1 / rate blocks: such powers are left out. ``rate`` null takes 1 for traces of up to
    ``EXACT_BLOCK_USES`` block uses, else what gives ``SAMPLED_BLOCK_USES``.
    """
    rate = default_rate(trace) if rate is None else rate
    uses = _draw(trace, rate)
    distances = _distances(uses)
    sizes = np.unique(np.array([*_powers(distances), *capacity_tokens], dtype=np.float64))
    ratios = distances.hit_ratios(sizes)
    errors = None if rate == 1.0 else _standard_errors(uses, sizes)
    return Curve(
        rate=rate,
        points=tuple(
            CurvePoint(
                capacity_tokens=float(size),
                hit_ratio=float(ratio),
                standard_error=None if errors is None else float(errors[at]),
            )
            for at, (size, ratio) in enumerate(zip(sizes, ratios, strict=True))
        ),
        quantiles_tokens=tuple((q, distances.quantile_tokens(q)) for q in QUANTILES if distances.blocks.size),
    )


def default_rate(trace: TraceBlocks) -> float:
    """1 for traces that are computed exactly, else the sampling rate."""
    return 1.0 if trace.blocks.size <= EXACT_BLOCK_USES else SAMPLED_BLOCK_USES / trace.blocks.size


def reuse_distances(trace: TraceBlocks, *, rate: float = 1.0) -> Distances:
    """Stack distances of all re-uses, or of those of a sample of the blocks."""
    return _distances(_draw(trace, rate))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Uses:
    """Uses of the blocks that take part, request by request, and in each request from the tail of the prompt to its head.

    ``reused_tokens``, ``prompt_tokens``: of the whole trace.
    """

    block: Small
    request: Small
    tokens: Small
    rate: float
    reused_tokens: int
    prompt_tokens: int
    block_tokens: int

    def only(self, kept: Flags, rate: float) -> _Uses:
        """Some of them, at the rate that these make of the whole."""
        return replace(self, block=self.block[kept], request=self.request[kept], tokens=self.tokens[kept], rate=rate)


def _draw(trace: TraceBlocks, rate: float) -> _Uses:
    """One pass over the trace."""
    chosen = np.ones(trace.n_blocks, dtype=np.bool_)
    for start in range(0, trace.n_blocks if rate < 1.0 else 0, PIECE_IDS):
        numbers = np.arange(start, min(trace.n_blocks, start + PIECE_IDS))
        chosen[numbers] = _unit(numbers) < rate
    first = first_requests(trace)
    reused = 0
    parts: list[tuple[Small, Small, Small]] = []
    for piece in trace.pieces():
        weights = block_weights(trace, piece)
        request = piece.request
        reused += int(weights[first[piece.blocks] < request].sum())
        at = np.flatnonzero(chosen[piece.blocks])
        parts.append((piece.blocks[at], request[at], weights[at].astype(np.int32)))
    block, request, tokens = (np.concatenate(column) for column in zip(*parts, strict=True))
    tail_first = _tail_first(request)
    return _Uses(
        block=block[tail_first], request=request[tail_first], tokens=tokens[tail_first], rate=rate, reused_tokens=reused,
        prompt_tokens=int(trace.prompt_tokens.sum()), block_tokens=trace.block_tokens,
    )  # fmt: skip


def _distances(uses: _Uses) -> Distances:
    previous = _previous(uses.block)
    twice = (previous >= 0) & (uses.request[previous] == uses.request)
    if twice.any():  # A prompt that names a block twice uses it once.
        return _distances(uses.only(~twice, uses.rate))
    again = np.flatnonzero(previous >= 0)
    distances = _stack_distances(previous, _starts(uses.request), again) / uses.rate
    order = np.argsort(distances, kind="stable")
    saved = np.cumsum(uses.tokens[again][order], dtype=np.int64)
    missing = 0.0 if uses.rate == 1.0 else uses.rate * uses.reused_tokens - (int(saved[-1]) if saved.size else 0)
    return Distances(
        blocks=distances[order], tokens=saved, rate=uses.rate, missing_tokens=missing,
        prompt_tokens=uses.prompt_tokens, block_tokens=uses.block_tokens,
    )  # fmt: skip


def _starts(request: Small) -> Ints:
    """Where the run of equal values around each position begins."""
    here = np.arange(request.size)
    changes = np.concatenate([[True], request[1:] != request[:-1]])[: request.size]
    return np.maximum.accumulate(np.where(changes, here, 0)) if request.size else here


def _tail_first(request: Small) -> Ints:
    """The positions with every request's own in reverse."""
    starts = _starts(request)
    ends = request.size - 1 - _starts(request[::-1])[::-1]
    return starts + ends - np.arange(request.size)


def _previous(block: Small) -> Ints:
    """The position before of the same value, -1 without one."""
    order = np.argsort(block, kind="stable")
    previous = np.full(block.size, -1, dtype=np.int64)
    same = block[order][1:] == block[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _stack_distances(previous: Ints, start: Ints, again: Ints) -> Ints:
    """1 + distinct blocks used after the previous use and before the request.

    ``start``: where each use's request begins. Of the uses in between, those that a later use before the request repeats are no
    new blocks: they are counted by the re-uses of earlier requests whose previous use is younger.
    """
    before, begin = previous[again], start[again]
    # Inside a request ascending by previous use: then none of its own re-uses counts as an earlier one.
    order = np.lexsort((before, begin))
    repeated = np.empty(again.size, dtype=np.int64)
    repeated[order] = n_greater_before(before[order])
    return begin - before - repeated


def n_greater_before(values: Ints) -> Ints:
    """Per position, how many values before it are greater. Values are distinct and not negative.

    From the highest bit on: among values that agree in the bits above, every 1 before a 0 is greater. O(n log max) in vector
    operations.
    """
    counts = np.zeros(values.size, dtype=np.int64)
    value, origin = values.copy(), np.arange(values.size)
    here, start = np.arange(values.size), np.zeros(values.size, dtype=np.int64)
    for bit in reversed(range(int(values.max(initial=0)).bit_length())):
        one = (value >> bit) & 1
        ones_before = np.cumsum(one) - one
        ones_before -= ones_before[start]
        zero = one == 0
        counts[origin[zero]] += ones_before[zero]
        zeros_before = here - start - ones_before
        begin = np.where(zero, start, start + _zeros_of_group(zero, start, here))
        place = begin + np.where(zero, zeros_before, ones_before)
        value, origin, start = _moved(value, place), _moved(origin, place), _moved(begin, place)
    return counts


def _zeros_of_group(zero: Flags, start: Ints, here: Ints) -> Ints:
    firsts = np.flatnonzero(start == here)
    sizes = np.diff(np.concatenate([firsts, [here.size]]))
    return np.repeat(np.add.reduceat(zero.astype(np.int64), firsts), sizes)


def _moved(values: Ints, place: Ints) -> Ints:
    moved = np.empty_like(values)
    moved[place] = values
    return moved


def _unit(blocks: Ints | Small) -> Floats:
    """A number in [0, 1) for each block: the finaliser of splitmix64, its upper 53 bits."""
    mixed = (blocks.astype(np.uint64) + np.uint64(1)) * _SALT
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / _UNIT)


def _standard_errors(uses: _Uses, sizes: Floats) -> Floats:
    """Of the mean over disjoint parts of the sample, per cache size."""
    part = np.minimum(_unit(uses.block) / uses.rate * N_PARTS, N_PARTS - 1).astype(np.int64)
    ratios = [_distances(uses.only(part == k, uses.rate / N_PARTS)).hit_ratios(sizes) for k in range(N_PARTS)]
    return np.asarray(np.std(ratios, axis=0, ddof=1) / np.sqrt(N_PARTS), dtype=np.float64)


def _powers(distances: Distances) -> list[float]:
    """Cache sizes in tokens: powers of two blocks from what the sample resolves to the first that holds every re-use."""
    most = float(distances.blocks[-1]) if distances.blocks.size else 1.0
    first, last = (int(np.ceil(np.log2(max(n, 1.0)))) for n in (1.0 / distances.rate, most))
    return [float(distances.block_tokens * (1 << k)) for k in range(first, last + 1)]
