"""How sure a decision table is, on the terminal."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from rich.console import Console

from ppd_bench.cli.show import interval_bar, show_table
from ppd_bench.policy.axes import Axes, ContextClass, WorkloadType
from ppd_bench.policy.table import Cell, DecisionTable, Domain, Rules, Weights, cell_key

AXES = Axes(
    contexts=(ContextClass(name="all", max_tokens=None),),
    types=(WorkloadType(name="tiny", input_tokens=16, output_tokens=32),),
    qps=(1.0, 2.0, 4.0, 8.0),
)


def a_table(*changes: dict[str, Any], min_repeats: int | None = 5) -> DecisionTable:
    cells = []
    for (context, kind, qps), change in zip(itertools.product(("all",), ("tiny",), AXES.qps), changes, strict=True):
        content: dict[str, Any] = {
            "key": cell_key(context, kind, qps), "context": context, "type": kind, "qps": qps, "workloads": ("w",),
            "decision": "local", "evidence": "measured", "rule": "equation1", "score": 0.4, "delta_ttft": 0.5,
            "delta_tpot": 0.1, "ttft_x0_s": 0.2, "ttft_x1_s": 0.1, "tpot_x0_s": 0.01, "tpot_x1_s": 0.011,
            "success_x0_ratio": 1.0, "success_x1_ratio": 1.0, "n_pairs": 80, "n_repeats": 6,
        }  # fmt: skip
        cells.append(Cell(**(content | change)))
    return DecisionTable(
        domain=Domain(
            model="m", gpu="g", layout="2P_2D", baseline="2P_2D", candidate="2P_2pD", executor="measured",
            engine_version="1", kv_connector="c", handoff="pull_async", timeout_s=30.0,
        ),
        axes=AXES,
        weights=Weights(w_ttft=1.0, w_tpot=1.0),
        rules=Rules(success_bound=0.95, fallback="pd", max_unknown_ratio=0.25, min_repeats=min_repeats),
        inputs_hash="0" * 16,
        cells=tuple(cells),
    )  # fmt: skip


def shown(table: DecisionTable, *, every_cell: bool = False) -> str:
    out = io.StringIO()
    show_table(Console(file=out, highlight=False, width=160), table, every_cell=every_cell)
    return out.getvalue()


SURE = {"certainty": "decided", "score_interval": (0.3, 0.5), "probability": 0.999, "delta_ttft_interval": (0.4, 0.6)}
TIE = {"certainty": "tie", "decision": "pd", "score": 0.1, "score_interval": (-0.2, 0.4), "probability": 0.75}
BLIND = {"certainty": "no_interval", "n_repeats": 1}
UNKNOWN = {"certainty": None, "evidence": "insufficient", "rule": "both_failed", "score": None, "decision": "pd"}


def test_marks_tell_sure_cells_from_ties_and_from_cells_without_interval() -> None:
    text = shown(a_table(SURE, TIE, BLIND, UNKNOWN))
    (row,) = [line for line in text.splitlines() if "tiny" in line and "│" in line]
    assert [part.strip() for part in row.split("│")[2:-1]] == ["L", "P=", "L°", "?"]
    assert "1 of 3 cells with evidence are decided with certainty" in text
    assert (
        "1 of 3 cells with evidence: NO INTERVAL, because fewer than 5 repeats stand behind them (fewest: 1)"
        in " ".join(text.split())
    )
    assert "the fallback 'pd' answers" in text


def test_every_cell_has_its_interval_as_numbers_and_drawn() -> None:
    text = shown(a_table(SURE, TIE, BLIND, UNKNOWN), every_cell=True)
    assert "+0.400 ±0.100" in text
    assert "+0.500 ±0.100" in text
    assert interval_bar(0.1, (-0.2, 0.4), 0.5) in text
    assert "insufficient" in text


def test_a_table_of_before_there_were_intervals_says_so() -> None:
    old = {"certainty": None, "n_repeats": 0}
    text = shown(a_table(old, old, old, old, min_repeats=None))
    assert "warning: NO INTERVALS" in text
    assert "L°" in text


@pytest.mark.parametrize(
    ("value", "interval", "bar"),
    [
        (0.0, (-1.0, 1.0), "────────●────────"),
        (0.5, (0.25, 0.75), "········│·──●──··"),
        (-1.0, (-9.0, 0.0), "●───────┼········"),
        (1.0, None, "········│·······●"),
        (None, None, ""),
    ],
)
def test_a_bar_shows_value_interval_and_zero(
    value: float | None, interval: tuple[float, float] | None, bar: str
) -> None:
    assert interval_bar(value, interval, 1.0) == bar
