"""Parts of ``ppd-bench reproduce`` by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable

from ppd_bench.core.errors import SpecError
from ppd_bench.runner.reproduce_handoff import handoff
from ppd_bench.runner.reproduce_interference import figure2, figure7, figure8
from ppd_bench.runner.reproduce_parts import Part, PartRequest, Tell, write_part
from ppd_bench.runner.reproduce_scaling import figure1, figure5, figure10
from ppd_bench.runner.reproduce_traffic import figure4, figure11, table3
from ppd_bench.runner.reproduce_weights import figure6

QUICK = "--quick: fewer points and shorter arrivals than stated below, which is what runs without it; a first look, no result"

PARTS: dict[str, Callable[[PartRequest, Tell], Part]] = {
    "figure4": figure4,
    "figure11": figure11,
    "table3": table3,
    "figure1": figure1,
    "figure10": figure10,
    "figure5": figure5,
    "figure2": figure2,
    "figure7": figure7,
    "figure8": figure8,
    "figure6": figure6,
    "handoff": handoff,
}
"""What each simulates is in ``sweeps/``, in the file that its module names."""


def reproduce_part(name: str, request: PartRequest, tell: Tell) -> Part:
    """Simulate a part and write its folder.

    Raises:
        SpecError: there is no such part, or its data cannot be used.
        StoreError: its folder holds results of other settings: give another --out.
    """
    part = PARTS.get(name.lower().replace(" ", ""))
    if part is None:
        close = difflib.get_close_matches(name, PARTS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise SpecError(f"command line: {name!r} cannot be reproduced{hint}; allowed: paper, {', '.join(PARTS)}")
    done = part(request, tell)
    if request.quick:
        done = dataclasses.replace(done, assumptions=(QUICK, *done.assumptions))
    return write_part(done)
