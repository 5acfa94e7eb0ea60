"""A generated agentic trace, made from the published figures of a production one (agentic study, Section 1).

That trace (2.1 M requests) is not public; its quantiles are. What they leave open is chosen here and named: the law of lengths
(log-normal), how follow-up turns split into warm, half warm and weak ones (the study's request profile), the pauses between
turns, and how prefixes are shared between conversations. It is generated traffic and is to be called so wherever it is shown.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

from numpy.random import PCG64

from ppd_bench.core.trace import TraceFormat, TraceRow

BLOCK_TOKENS = 64
MAX_PROMPT_TOKENS = 180_000

FORMAT = TraceFormat(
    name="generated_agentic",
    time_unit="s",
    block_tokens=BLOCK_TOKENS,
    tail="floor",
    id_scope="global",
    row_means="full_prompt",
    loop="completion",
    token_count="recorded",
)

NOTES = (
    "generated from the published quantiles of the agentic study (Section 1), not recorded",
    "chosen, not published: log-normal lengths, pauses (median 5 s), shared prefixes (60 % of conversations, 40 of them, Zipf)",
)

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class LogNormal:
    """By median and the spread of the logarithm."""

    median: float
    sigma: float

    @classmethod
    def of_mean(cls, mean: float, sigma: float) -> LogNormal:
        return cls(mean * math.exp(-sigma * sigma / 2.0), sigma)

    def at(self, unit: float) -> float:
        """The quantile of a number in (0, 1)."""
        return self.median * math.exp(self.sigma * _NORMAL.inv_cdf(unit))


# Published: output p50 80 and mean 445; new tokens by profile class 1,314 (22 % of requests), 10,052 (14 %), 38,909 (8 %) and
# 17,696 (55 %).
OUTPUT = LogNormal(80.0, math.sqrt(2.0 * math.log(445.0 / 80.0)))
FIRST = LogNormal.of_mean(12_000.0, 1.3)
FIRST_OF_MANY = LogNormal.of_mean(36_000.0, 0.9)
WARM = LogNormal.of_mean(1_314.0, 0.9)
HALF_WARM = LogNormal.of_mean(10_052.0, 0.7)
WEAK = LogNormal.of_mean(38_909.0, 0.6)
SHARED = LogNormal.of_mean(11_000.0, 0.6)
PAUSE_S = LogNormal(5.0, 1.3)

SINGLE_TURN = 0.9
"""Published: share of conversations with one turn."""
MORE_TURNS = 5.3
"""Mean turns beyond the second of the others: 2.11 M requests in 1.3 M conversations."""
WARM_SHARE, HALF_WARM_SHARE = 22 / 44, 14 / 44
SHARING = 0.6
N_SHARED = 40


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What a conversation has said so far: ids of its full blocks, and tokens."""

    ids: array[int]
    n_tokens: int


class _Units:
    """Numbers in (0, 1) from raw bits, whose stream numpy keeps over its versions."""

    def __init__(self, seed: int) -> None:
        self._bits = PCG64(seed)

    def next(self) -> float:
        return ((int(self._bits.random_raw()) >> 11) + 0.5) * 2.0**-53


class _Blocks:
    """Deals out block ids that nobody has yet."""

    def __init__(self) -> None:
        self._next = 1

    def grown(self, prompt: _Prompt, n_tokens: int) -> _Prompt:
        """The prompt with so many tokens behind it."""
        whole = prompt.n_tokens + n_tokens
        n_new = whole // BLOCK_TOKENS - len(prompt.ids)
        ids = prompt.ids + array("q", range(self._next, self._next + n_new))
        self._next += n_new
        return _Prompt(ids, whole)


def agentic_rows(n_requests: int, *, seed: int, duration_s: float = 7200.0) -> Iterator[TraceRow]:
    """About ``n_requests`` requests (whole conversations, so at least as many), conversations in order of arrival.

    Conversations arrive evenly over ``duration_s``, the study's two hours. Requests of a conversation stand together.
    """
    units, blocks = _Units(seed), _Blocks()
    shared = [blocks.grown(_Prompt(array("q"), 0), _tokens(SHARED, units)) for _ in range(N_SHARED)]
    n_turns = [*_conversations(n_requests, units)]
    arrivals = sorted(units.next() * duration_s for _ in n_turns)
    row = 0
    for number, (turns, arrival_s) in enumerate(zip(n_turns, arrivals, strict=True)):
        for made in _conversation(f"g{number}", turns, round(arrival_s, 6), units, blocks, shared):
            yield made._replace(row=row)
            row += 1


def _conversations(n_requests: int, units: _Units) -> Iterator[int]:
    """Turns of each conversation until there are enough requests."""
    left = n_requests
    while left > 0:
        turns = 1
        if units.next() >= SINGLE_TURN:
            turns = 2 + int(math.log(units.next()) / math.log(MORE_TURNS / (1.0 + MORE_TURNS)))
        yield turns
        left -= turns


def _conversation(
    name: str, turns: int, arrival_s: float, units: _Units, blocks: _Blocks, shared: list[_Prompt]
) -> Iterator[TraceRow]:
    prompt = blocks.grown(_start(units, shared), _tokens(FIRST if turns == 1 else FIRST_OF_MANY, units))
    output = 0
    for turn in range(1, turns + 1):
        if turn > 1:
            prompt = _next_prompt(prompt, output, units, blocks)
        output = _tokens(OUTPUT, units)
        delay_s = None if turn == 1 else round(PAUSE_S.at(units.next()), 6)
        at_s = arrival_s if turn == 1 else None
        yield TraceRow(0, f"{name}.t{turn}", name, turn, at_s, delay_s, prompt.n_tokens, output, prompt.ids)


def _start(units: _Units, shared: list[_Prompt]) -> _Prompt:
    """Nothing, or one of the shared beginnings: the k-th is taken 1/k as often as the first."""
    if units.next() >= SHARING:
        return _Prompt(array("q"), 0)
    weights = [1.0 / k for k in range(1, len(shared) + 1)]
    left = units.next() * sum(weights)
    for prompt, weight in zip(shared, weights, strict=True):
        left -= weight
        if left <= 0.0:
            return _Prompt(prompt.ids, len(prompt.ids) * BLOCK_TOKENS)
    return _Prompt(array("q"), 0)


def _next_prompt(prompt: _Prompt, output: int, units: _Units, blocks: _Blocks) -> _Prompt:
    """History, answer and new text; a weak turn, or one that would be too long, keeps a part of the history only."""
    kind = units.next()
    law = WARM if kind < WARM_SHARE else HALF_WARM if kind < WARM_SHARE + HALF_WARM_SHARE else WEAK
    new = _tokens(law, units)
    if law is WEAK or prompt.n_tokens + output + new > MAX_PROMPT_TOKENS:
        keep = int(len(prompt.ids) * 0.5 * units.next())
        return blocks.grown(_Prompt(prompt.ids[:keep], keep * BLOCK_TOKENS), min(new, MAX_PROMPT_TOKENS // 2))
    return blocks.grown(prompt, output + new)


def _tokens(law: LogNormal, units: _Units) -> int:
    return min(max(1, round(law.at(units.next()))), MAX_PROMPT_TOKENS // 2)
