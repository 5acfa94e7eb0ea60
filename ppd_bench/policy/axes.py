"""The three axes of a decision table and how a request finds its place on them (paper, Section B.1).

The paper's axes are data here. A table file carries its own axes, and a loaded table uses those, never these.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextClass:
    """A class of accumulated context. ``max_tokens`` is its inclusive upper edge; null means unbounded."""

    name: str
    max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadType:
    """A kind of follow-up turn: so many new input tokens, so many output tokens."""

    name: str
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Context classes (ascending edges, the last unbounded), workload types, and QPS levels (ascending).

    Every query has exactly one place: look-up is total, for zeros, negative numbers, huge integers, infinities and NaN.
    """

    contexts: tuple[ContextClass, ...]
    types: tuple[WorkloadType, ...]
    qps: tuple[float, ...]

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        return tuple(c.max_tokens for c in self.contexts if c.max_tokens is not None)

    @cached_property
    def _midpoints(self) -> tuple[float, ...]:
        return tuple((low + high) / 2 for low, high in pairwise(self.qps))

    @cached_property
    def _log_types(self) -> tuple[tuple[float, float], ...]:
        return tuple((math.log2(t.input_tokens), math.log2(t.output_tokens)) for t in self.types)

    def context_index(self, context_tokens: int) -> int:
        """Index of the first class whose upper edge is not below ``context_tokens``."""
        return bisect_left(self._edges, context_tokens)

    def qps_index(self, qps: float) -> int:
        """Index of the nearest level on the linear scale; half-way goes to the higher level, NaN to the highest.

        Overload is the costlier mistake, so doubt goes upwards.
        """
        return bisect_right(self._midpoints, qps)

    def type_index(self, input_tokens: int, output_tokens: int) -> int:
        """Index of the nearest type by Euclidean distance in (log2 input, log2 output); ties go to the first listed.

        Lengths below 1 count as 1.
        """
        x, y = math.log2(max(1, input_tokens)), math.log2(max(1, output_tokens))
        distances = [(x - tx) ** 2 + (y - ty) ** 2 for tx, ty in self._log_types]
        return distances.index(min(distances))

    def problems(self) -> list[str]:
        """What is wrong with these axes, one line each; empty when a table can stand on them."""
        edges = [c.max_tokens for c in self.contexts]
        bounded = [edge for edge in edges[:-1] if edge is not None]
        lengths = [(t.input_tokens, t.output_tokens) for t in self.types]
        names = [[c.name for c in self.contexts], [t.name for t in self.types]]
        checks = {
            "the last context class must be unbounded (max_tokens null)": bool(edges) and edges[-1] is None,
            "context edges must be numbers and ascend": len(bounded) == len(edges[:-1]) and _ascending(bounded),
            "workload types must exist and differ in lengths": bool(lengths) and len(set(lengths)) == len(lengths),
            "workload types need lengths of 1 token or more": all(min(pair) >= 1 for pair in lengths),
            "QPS levels must ascend from above 0": bool(self.qps) and _ascending((0, *self.qps)),
            "names on one axis must differ": all(len(set(axis)) == len(axis) for axis in names),
        }
        return [message for message, holds in checks.items() if not holds]


def _ascending(values: Sequence[float]) -> bool:
    return all(low < high for low, high in pairwise(values))


PAPER_CONTEXTS = (
    ContextClass(name="small", max_tokens=512),
    ContextClass(name="large", max_tokens=4096),
    ContextClass(name="huge", max_tokens=None),
)
"""Section B.1: small up to 512, large up to 4,096, huge above."""

PAPER_TYPES = tuple(
    WorkloadType(name=name, input_tokens=n_in, output_tokens=n_out)
    for name, n_in, n_out in (
        ("tiny", 16, 32),
        ("short_gen", 32, 256),
        ("long_gen", 32, 512),
        ("very_long_gen", 64, 1024),
        ("small_bal", 64, 64),
        ("mid_bal", 128, 128),
        ("mid_paste", 256, 64),
        ("big_paste", 512, 64),
        ("huge_paste", 1024, 32),
    )
)
"""The nine turn-2 settings of Section 4.2."""

PAPER_QPS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)
"""The ten levels of Section 4.2, conversations per second."""

PAPER_AXES = Axes(contexts=PAPER_CONTEXTS, types=PAPER_TYPES, qps=PAPER_QPS)
