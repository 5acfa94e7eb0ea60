"""What a policy answers."""

from __future__ import annotations

from dataclasses import dataclass

from ppd_bench.core.enums import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where one turn is prefilled and decoded.

    ``prefill_worker`` and ``decode_worker`` are indices into ``Topology.workers``. For ``local`` and ``replica`` both name
    the same worker. ``reason`` names the rule (and, for a table, the cell and its evidence) that decided.
    """

    route: Route
    prefill_worker: int
    decode_worker: int
    reason: str
