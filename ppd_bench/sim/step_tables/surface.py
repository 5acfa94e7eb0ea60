"""The form of a step surface, built in or brought by a user as JSON."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

from ppd_bench.core.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """``S(T) + [nd>0](d0 + d1 nd + d2 C) + [prefill](p0 + p1 sum(n c + n^2/2))``; see ``sim.cost.TableCost``.

    ``knots``: (tokens T, seconds S), ascending in T. ``decode``: d0 s, d1 s per sequence, d2 s per context token.
    ``prefill``: p0 s, p1 s per token pair. ``source`` says where the figures come from.
    """

    name: str
    source: str
    knots: tuple[tuple[float, float], ...]
    decode: tuple[float, float, float]
    prefill: tuple[float, float]

    def __post_init__(self) -> None:
        tokens = [t for t, _ in self.knots]
        if len(tokens) < 2 or any(a >= b for a, b in itertools.pairwise(tokens)):
            raise SpecError(f"step table {self.name!r}: knots must be at least two, ascending in tokens")
        if min(s for _, s in self.knots) <= 0.0 or min(*self.decode, *self.prefill) < 0.0:
            raise SpecError(f"step table {self.name!r}: seconds must be positive and coefficients not negative")


def parse_step_table(text: str, *, file: str) -> StepTable:
    """Read a user's step table: JSON with name, source, knots, decode, prefill (units as in ``StepTable``).

    Raises:
        SpecError: what is wrong, with the file.
    """
    try:
        content = json.loads(text)
        return StepTable(
            name=str(content["name"]),
            source=str(content["source"]),
            knots=tuple((float(t), float(s)) for t, s in content["knots"]),
            decode=(float(content["decode"][0]), float(content["decode"][1]), float(content["decode"][2])),
            prefill=(float(content["prefill"][0]), float(content["prefill"][1])),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        keys = "name, source, knots [[tokens, seconds], ...], decode [3 numbers], prefill [2 numbers]"
        raise SpecError(f"{file}: not a step table ({error}); needed keys: {keys}") from error
