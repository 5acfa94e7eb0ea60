"""The paper's tables computed from a run, beside what was published."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from ppd_bench.analysis.paper_tables import PAPER_TABLES, beside
from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import SpecError
from ppd_bench.core.hardware import HARDWARE
from ppd_bench.runner.runs import Run
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.sim.profile import step_table
from ppd_bench.store.atomic import write_bytes

TITLES = {
    "table1_ttft_change_pct": "Table 1: change of turn-2 TTFT from x=0 to x=1, percent",
    "table2_winner_pct": "Table 2: share of cells won by a class of configurations, percent",
    "table5_failure_pct": "Table 5: share of the 18 workloads that fail, percent",
    "cells_with_different_ttft_and_tpot_winner_pct": "Section 4.4: cells whose TTFT and TPOT winners differ, percent",
}
"""What people call each table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number that simulated results rest on: value, where it comes from, and which published figures it was fitted on."""

    name: str
    value: str
    source: str
    fitted_on: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A comparison, what it rests on, and where its CSV is."""

    headline: str
    comparison: pd.DataFrame
    constants: list[Constant]
    path: Path | None


def reproduce(what: str, run: Run, out: Path | None) -> Reproduction:
    """The verb: compare a run with published figures.

    Raises:
        SpecError: unknown ``what``, or a run that the paper says nothing about.
    """
    if what != "paper":
        raise SpecError(f"command line: {what!r} cannot be reproduced; allowed: paper")
    comparison = paper_comparison(run, summaries_of(run))
    if out is not None:
        write_bytes(out, comparison.to_csv(index=False).encode())
    source = published_figures()["source"]
    handoff = run.spec.engine.handoff
    return Reproduction(
        headline=f"run {run.manifest.name}: {run.evidence}, hand-off model {handoff}; published: {source}",
        comparison=comparison,
        constants=constants(run) if run.executor is Executor.SIM else [],
        path=out,
    )


def published_figures() -> dict[str, Any]:
    """The published figures that ship with the package."""
    text = files("ppd_bench.runner.published").joinpath("ppd.yaml").read_text(encoding="utf-8")
    figures: dict[str, Any] = yaml.safe_load(text)
    return figures


def is_paper_run(run: Run) -> bool:
    """Whether the run has what the paper's tables compare: its model on its GPU, some x=0 and x=1 arms or 4R."""
    return run.spec.model == "llama-3.1-8b" and run.spec.gpu == "h100-80g"


def paper_comparison(run: Run, summaries: pd.DataFrame) -> pd.DataFrame:
    """Columns table, row, column, published, computed, difference, n_cells; figures in percent.

    Raises:
        SpecError: the run is of another model or GPU than the paper's.
    """
    if not is_paper_run(run):
        raise SpecError(
            f"{run.path}: ran {run.spec.model} on {run.spec.gpu}; the paper's figures are for llama-3.1-8b on h100-80g"
        )
    figures = published_figures()
    frames = [beside(figures[key], table(summaries)).assign(table=TITLES[key]) for key, table in PAPER_TABLES.items()]
    rows = pd.concat(frames, ignore_index=True)
    return rows[["table", *(name for name in rows.columns if name != "table")]]


def published_comparison(run: Run, summaries: pd.DataFrame) -> pd.DataFrame | None:
    """The comparison for a report; null where the paper has nothing to say about the run."""
    if not is_paper_run(run):
        return None
    comparison = paper_comparison(run, summaries)
    return comparison if comparison["computed"].notna().any() else None


def constants(run: Run) -> list[Constant]:
    """Every constant behind a simulated run. Nothing was fitted on Tables 1, 2 or 5 or on the 92.2 % figure."""
    sim, engine = run.spec.sim, run.spec.engine
    overhead = "COST_MODEL.md, Overheads"
    table = step_table(run.spec.gpu, run.spec.model_profile, 1, sim.cost_model, sim.step_table_json)
    if table is not None:
        kernels = Constant(name="step surface", value=f"{len(table.knots)} knots + 5 terms", source=table.source)
    else:
        hardware = HARDWARE[run.spec.gpu]
        ratios = (hardware.compute_efficiency_ratio, hardware.weight_bandwidth_ratio, hardware.kv_bandwidth_ratio)
        kernels = Constant(name="roofline efficiencies", value=str(ratios), source=hardware.source)
    link = engine.kv_link_bytes_per_s or HARDWARE[run.spec.gpu].kv_link_bytes_per_s
    return [
        kernels,
        Constant(
            name="step overhead",
            value=f"{sim.step_overhead_s * 1e3:g} ms + {sim.sequence_overhead_s * 1e6:g} us per sequence",
            source=f"{overhead} (1.2 ms, 0 to 2.0; 5 to 10 us)",
            fitted_on="TPOT 8.1 ms at QPS 1 (Figure 5): kernels 6.6 + 1.4",
        ),
        Constant(name="visit overhead", value=f"{sim.visit_overhead_s * 1e3:g} ms", source=f"{overhead} (15 to 26 ms)"),
        Constant(
            name="router overhead", value=f"{sim.router_overhead_s * 1e3:g} ms", source="PPD paper, Section 5 (< 1 ms)"
        ),
        Constant(name="KV link", value=f"{link / 1e9:g} GB/s", source="PPD paper, Figure 5 (effective NVLink)"),
        Constant(name="KV link latency", value=f"{engine.kv_link_latency_s * 1e6:g} us", source="assumed"),
        Constant(
            name="receiver cost",
            value=f"{sim.receiver_cost_s * 1e3:g} ms",
            source="hypothesis of COST_MODEL.md; 0 unless set",
        ),
        Constant(
            name="activation reserve",
            value=f"{sim.activation_reserve_bytes / 1e9:g} GB",
            source="fitted on two derived KV capacities (COST_MODEL.md, Kernels)",
        ),
    ]
