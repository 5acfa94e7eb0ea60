"""Decision tables for the router's tests."""

from __future__ import annotations

from itertools import product
from typing import Any

from ppd_bench.policy.axes import PAPER_AXES
from ppd_bench.policy.table import Cell, DecisionTable, Domain, Rules, Weights, cell_key


def a_table(decision: str = "local", **changes: Any) -> str:
    """A table's text that gives one answer everywhere. Under weights (1, 3) local has the better TTFT and the worse TPOT, and
    wins; under (0, 1) P wins everywhere."""
    domain = {
        "model": "fake-model", "gpu": "cpu", "layout": "2P_2D", "baseline": "2P_2D", "candidate": "2P_2pD",
        "executor": "measured", "engine_version": "fake", "kv_connector": "NixlConnector", "handoff": "pull_async",
        "timeout_s": 30.0,
    }  # fmt: skip
    cell = {"evidence": "measured", "rule": "equation1", "workloads": ("w",)}
    for name in changes:
        target = domain if name in domain else cell
        target[name] = changes[name]
    places = product(PAPER_AXES.contexts, PAPER_AXES.types, PAPER_AXES.qps)
    return DecisionTable(
        domain=Domain(**domain),  # type: ignore[arg-type]
        axes=PAPER_AXES,
        weights=Weights(w_ttft=1.0, w_tpot=3.0),
        rules=Rules(success_bound=0.95, fallback="pd", max_unknown_ratio=0.25),
        inputs_hash="0" * 16,
        cells=tuple(_cell(c.name, t.name, q, decision, cell) for c, t, q in places),
    ).to_json()


def _cell(context: str, kind: str, qps: float, decision: str, more: dict[str, Any]) -> Cell:
    content: dict[str, Any] = {
        "key": cell_key(context, kind, qps), "context": context, "type": kind, "qps": qps, "decision": decision,
        "score": 0.2, "delta_ttft": 0.5, "delta_tpot": 0.1, "ttft_x0_s": 0.2, "ttft_x1_s": 0.1, "tpot_x0_s": 0.010,
        "tpot_x1_s": 0.011, "success_x0_ratio": 1.0, "success_x1_ratio": 1.0, "n_pairs": 80,
    }  # fmt: skip
    return Cell(**{**content, **more})
