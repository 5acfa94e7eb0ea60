"""What a policy answers.

A named tuple, like the other messages of the policy room: it is made for every turn, and costs a fifth of a frozen dataclass.
"""

from __future__ import annotations

from typing import NamedTuple

from ppd_bench.core.enums import Route


class Decision(NamedTuple):
    """Where one turn is prefilled and decoded.

    ``prefill_worker`` and ``decode_worker`` are indices into ``Topology.workers``. For ``local`` and ``replica`` both name
    the same worker. ``reason`` names the rule (and, for a table, the cell and its evidence) that decided.
    """

    route: Route
    prefill_worker: int
    decode_worker: int
    reason: str
