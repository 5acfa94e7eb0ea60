"""A step surface of four numbers: what ``calibrate`` fits where a run is too short to tell eighteen knots."""

from __future__ import annotations

import json

from ppd_bench.core.point import canonical_json, plain
from ppd_bench.sim.cost import StepCost
from ppd_bench.sim.step_tables.surface import StepTable

SMOOTHNESS = 3.0
"""S(T) = (floor^k + (token T)^k)^(1/k). See ``tests/sim/test_sim_smooth.py`` for how near it comes to a measured surface."""
KNOTS = tuple(2**k for k in range(14))
"""Tokens of a step, 1 to 8,192."""

_FAR_TOKENS = 4096
_FAR_CONTEXT = 1_000_000


def smooth_table(
    *, floor_s: float, token_s: float, context_s: float, pair_s: float, name: str, source: str
) -> StepTable:
    """The surface from seconds of an almost empty step, per token of a large one, per context token of a decode, and per token
    pair of a prefill's attention."""
    k = SMOOTHNESS
    knots = tuple((float(t), (floor_s**k + (token_s * t) ** k) ** (1 / k)) for t in KNOTS)
    return StepTable(name=name, source=source, knots=knots, decode=(0.0, 0.0, context_s), prefill=(0.0, pair_s))


def smooth_numbers(cost: StepCost) -> dict[str, float]:
    """The same four numbers of any cost model: where a fit starts."""
    line = cost.decode_line(1)
    far, farther = (cost.mixed_s(n, 1, 0.0, 0, 0, 0) for n in (_FAR_TOKENS, 2 * _FAR_TOKENS))
    pairs = 1e9
    return {
        "floor_s": line.at(1),
        "token_s": (farther - far) / _FAR_TOKENS,
        "context_s": (line.at(2 * _FAR_CONTEXT) - line.at(_FAR_CONTEXT)) / _FAR_CONTEXT,
        "pair_s": (cost.mixed_s(_FAR_TOKENS, 1, pairs, 0, 0, 0) - far) / pairs,
    }


def step_table_text(table: StepTable) -> str:
    """The JSON that ``parse_step_table`` reads."""
    return canonical_json(json.loads(json.dumps(plain(table))))
