"""What a step costs: an interface with two implementations, ``TableCost`` (a measured surface) and ``RooflineCost``.

Both see a step's exact mix through sums that the scheduler keeps: T new prompt tokens in n prefills, their attention work
sum(n c + n^2 / 2) and context sum(c + n), nd decodes and the sum of their contexts. Seconds throughout.

A pure decode step must cost ``max(a1 + b1 C, a2 + b2 C)`` with C the summed context, so that the worker can run stretches of
decode steps in one loop with the same arithmetic as one by one.
"""

from __future__ import annotations

from ppd_bench.core.profiles import experts_touched


class DecodeLine:
    """Coefficients of a decode step with a fixed number of sequences: ``max(a1 + b1 C, a2 + b2 C)`` seconds."""

    def __init__(self, a1: float, b1: float, a2: float, b2: float) -> None:
        self.a1 = a1
        self.b1 = b1
        self.a2 = a2
        self.b2 = b2

    def at(self, context_tokens: int) -> float:
        """Seconds of one step with summed context C."""
        first = self.a1 + self.b1 * context_tokens
        second = self.a2 + self.b2 * context_tokens
        return second if second > first else first


class StepCost:
    """Interface: seconds of device time per step, scheduler overheads not included."""

    def decode_line(self, n_decode: int) -> DecodeLine:
        """Cost of a step of ``n_decode`` >= 1 decodes and nothing else."""
        raise NotImplementedError

    def mixed_s(
        self, prefill_tokens: int, n_prefill: int, attention: float, prefill_context: int, n_decode: int, context: int
    ) -> float:
        """Cost of a step with at least one prefill chunk. ``attention`` is sum(n c + n^2/2) in token pairs."""
        raise NotImplementedError


class TableCost(StepCost):
    """A step surface: base S(T) linear between knots, plus linear terms for decodes and prefill attention.

    ``S(T) + [nd>0](d0 + d1 nd + d2 C) + [prefill](p0 + p1 sum(n c + n^2/2))``, T = prefill tokens + nd (COST_MODEL.md).
    Beyond the last knot the last slope continues.
    """

    def __init__(
        self, knots: list[tuple[float, float]], decode: tuple[float, float, float], prefill: tuple[float, float]
    ):
        self._tokens: list[float] = [tokens for tokens, _ in knots]
        self._seconds: list[float] = [seconds for _, seconds in knots]
        self._d0, self._d1, self._d2 = decode
        self._p0, self._p1 = prefill
        self._lines: dict[int, DecodeLine] = {}

    def base_s(self, n_tokens: int) -> float:
        """S(T), seconds."""
        tokens = self._tokens
        low = 0
        high = len(tokens) - 2
        while low < high:
            middle = (low + high + 1) // 2
            if tokens[middle] <= n_tokens:
                low = middle
            else:
                high = middle - 1
        slope = (self._seconds[low + 1] - self._seconds[low]) / (tokens[low + 1] - tokens[low])
        return self._seconds[low] + slope * (max(float(n_tokens), tokens[0]) - tokens[low])

    def decode_line(self, n_decode: int) -> DecodeLine:
        line = self._lines.get(n_decode)
        if line is None:
            a = self.base_s(n_decode) + self._d0 + self._d1 * n_decode
            line = DecodeLine(a, self._d2, a, self._d2)
            self._lines[n_decode] = line
        return line

    def mixed_s(
        self, prefill_tokens: int, n_prefill: int, attention: float, prefill_context: int, n_decode: int, context: int
    ) -> float:
        seconds = self.base_s(prefill_tokens + n_decode) + self._p0 + self._p1 * attention
        if n_decode:
            seconds += self._d0 + self._d1 * n_decode + self._d2 * context
        return seconds


class RooflineCost(StepCost):
    """max(compute, memory traffic) of the step's exact mix, plus tensor-parallel all-reduces.

    All rates are effective (peak times efficiency) and per GPU group; weights of a MoE model are read for the experts that T
    tokens are expected to touch (``experts_touched``).
    """

    def __init__(
        self,
        *,
        flop_per_token: float,
        flop_per_pair: float,
        flop_per_sample: float,
        flop_per_s: float,
        dense_bytes: float,
        expert_bytes: float,
        n_experts: int,
        n_experts_active: int,
        kv_bytes_per_token: float,
        weight_bytes_per_s: float,
        kv_bytes_per_s: float,
        reduce_base_s: float,
        reduce_s_per_token: float,
    ) -> None:
        self._token_s = flop_per_token / flop_per_s
        self._pair_s = flop_per_pair / flop_per_s
        self._sample_s = flop_per_sample / flop_per_s
        self._dense_s = dense_bytes / weight_bytes_per_s
        self._expert_s = expert_bytes / weight_bytes_per_s
        self._n_experts = n_experts
        self._n_experts_active = n_experts_active
        self._kv_s = kv_bytes_per_token / kv_bytes_per_s
        self._reduce_base_s = reduce_base_s
        self._reduce_s_per_token = reduce_s_per_token
        self._lines: dict[int, DecodeLine] = {}

    def _weights_s(self, n_tokens: int) -> float:
        return self._dense_s + self._expert_s * experts_touched(self._n_experts, self._n_experts_active, n_tokens)

    def _reduce_s(self, n_tokens: int) -> float:
        return self._reduce_base_s + self._reduce_s_per_token * n_tokens

    def decode_line(self, n_decode: int) -> DecodeLine:
        line = self._lines.get(n_decode)
        if line is None:
            reduce_s = self._reduce_s(n_decode)
            compute = n_decode * (self._token_s + self._sample_s) + reduce_s
            line = DecodeLine(compute, self._pair_s, self._weights_s(n_decode) + reduce_s, self._kv_s)
            self._lines[n_decode] = line
        return line

    def mixed_s(
        self, prefill_tokens: int, n_prefill: int, attention: float, prefill_context: int, n_decode: int, context: int
    ) -> float:
        n_tokens = prefill_tokens + n_decode
        compute = n_tokens * self._token_s + (attention + context) * self._pair_s
        compute += (n_prefill + n_decode) * self._sample_s
        memory = self._weights_s(n_tokens) + (prefill_context + context) * self._kv_s
        return max(compute, memory) + self._reduce_s(n_tokens)
