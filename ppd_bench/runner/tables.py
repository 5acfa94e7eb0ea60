"""``table show`` and ``table diff``."""

from __future__ import annotations

from pathlib import Path

from ppd_bench.analysis.compile_table import CellChange, diff_tables, reweigh
from ppd_bench.core.errors import TableError
from ppd_bench.policy.table import DecisionTable
from ppd_bench.store.atomic import write_bytes


def load_table(path: Path, *, w_ttft: float | None = None, w_tpot: float | None = None) -> DecisionTable:
    """A table from its file, under other weights where they are given.

    Raises:
        TableError: the file cannot be read, is damaged, or has another major schema version.
    """
    return DecisionTable.from_json(table_text(path, w_ttft=w_ttft, w_tpot=w_tpot))


def table_text(path: Path, *, w_ttft: float | None = None, w_tpot: float | None = None) -> str:
    """The checked text of a table's file, under other weights where they are given: what to keep where its hash must stay.

    A loaded table of another minor version, written anew, would have another hash.

    Raises:
        TableError: as ``load_table``.
    """
    text = read_table(path)
    try:
        weights = DecisionTable.from_json(text).weights
        if w_ttft is None and w_tpot is None:
            return text
        return reweigh(text, weights.w_ttft if w_ttft is None else w_ttft, weights.w_tpot if w_tpot is None else w_tpot)
    except TableError as error:
        raise type(error)(f"{path}: {error}") from error


def draw_scores(table: DecisionTable, path: Path) -> Path:
    """Every cell's score with its interval as a PNG file. Returns its path.

    Raises:
        StoreError: the path cannot be written.
    """
    from ppd_bench.report.control_plot import figure_scores  # matplotlib takes a second
    from ppd_bench.report.style import png_bytes

    write_bytes(path, png_bytes(figure_scores(table)))
    return path


def diff(first: Path, second: Path) -> list[CellChange]:
    """Cells in which two table files differ."""
    load_table(first)
    load_table(second)
    return diff_tables(read_table(first), read_table(second))


def read_table(path: Path) -> str:
    """The text of a table file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TableError(f"{path}: cannot be read ({error.strerror}); give a file that build-table wrote") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: is not a decision table (not text); give a file that build-table wrote") from error
