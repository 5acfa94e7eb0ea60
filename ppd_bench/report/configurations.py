"""The kind that a configuration belongs to, and the order in which configurations and workloads are shown."""

from __future__ import annotations

import pandas as pd

from ppd_bench.core.topology import parse_topology

CATEGORY_TITLES = {"decode_heavy": "decode-heavy", "balanced": "balanced", "prefill_heavy": "prefill-heavy"}
"""The paper's columns, in its order."""

FIXED_X = {"always_pd": 0.0, "always_local": 1.0}


def kind_of(topology: str, policy: str, request_x_ratio: float) -> str:
    """A key of ``style.KINDS``: what x the roles and the policy amount to (GLOSSARY: x).

    A policy whose x follows from the requests (a table, a threshold) counts as ``0 < x < 1``.
    """
    parsed = parse_topology(topology)
    if parsed.category == "replica":
        return "replica"
    decider = policy.split(" ")[0]
    by_decider = {**FIXED_X, "node": parsed.node_x_ratio, "fraction": request_x_ratio}
    x = by_decider.get(decider)
    if parsed.category == "hybrid":
        return "hybrid_x0" if x == 0 else "hybrid_local"
    return {0.0: "x0", 1.0: "x1"}.get(0.5 if x is None else x, "partial")


def with_kinds(summaries: pd.DataFrame) -> pd.DataFrame:
    """The rows with one more column: ``kind``, a key of ``style.KINDS``."""
    # NaN never equals itself, so it cannot be part of a key.
    asked = summaries["request_x_ratio"].astype(float).fillna(-1.0)
    rows = list(zip(summaries["topology"], summaries["policy"], asked, strict=True))
    kinds = {row: kind_of(*row) for row in dict.fromkeys(rows)}
    return summaries.assign(kind=pd.Series([kinds[row] for row in rows], index=summaries.index, dtype="object"))


def order_key(topology: str) -> tuple[int, int, int, int]:
    """Replicas, then P/D by layout and x, then hybrids."""
    parsed = parse_topology(topology)
    rank = {"replica": 0, "hybrid": 2}.get(parsed.category, 1)
    return (rank, parsed.n_replica, parsed.n_prefill, parsed.n_decode_local)


def ordered_configurations(summaries: pd.DataFrame) -> list[str]:
    """All configuration names: replicas, P/D by layout and x, hybrids."""
    known = dict(zip(summaries["configuration"], summaries["topology"], strict=True))
    return sorted(map(str, known), key=lambda name: (order_key(known[name]), name))


def ordered_workloads(summaries: pd.DataFrame) -> list[str]:
    """All workload names by the paper's category order, then as the run has them."""
    known = dict(zip(summaries["workload"], summaries["workload_category"], strict=True))
    rank = {name: index for index, name in enumerate(CATEGORY_TITLES)}
    return sorted(map(str, known), key=lambda name: rank.get(known[name], len(rank)))


def ordered_categories(summaries: pd.DataFrame) -> list[str]:
    """The paper's three categories in its order, then any other that the run has."""
    found = [str(name) for name in summaries["workload_category"].dropna().unique()]
    return [c for c in CATEGORY_TITLES if c in found] + sorted(c for c in found if c not in CATEGORY_TITLES)
