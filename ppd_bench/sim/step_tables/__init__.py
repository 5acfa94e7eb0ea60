"""Step surfaces by (gpu, model). Adding one costs one file and one line here."""

from __future__ import annotations

from ppd_bench.sim.step_tables import h100_80g_llama_3_1_8b
from ppd_bench.sim.step_tables.surface import StepTable, parse_step_table

STEP_TABLES: dict[tuple[str, str], StepTable] = {
    ("h100-80g", "llama-3.1-8b"): h100_80g_llama_3_1_8b.TABLE,
}

__all__ = ["STEP_TABLES", "StepTable", "parse_step_table"]
