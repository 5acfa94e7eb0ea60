"""What every part of ``ppd-bench reproduce`` shares: its request, its data, the sweeps that it plays, and what it leaves
behind."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ppd_bench.core.errors import SpecError, TableError
from ppd_bench.core.point import Point
from ppd_bench.core.trace import TraceRow
from ppd_bench.report.text_table import TextTable
from ppd_bench.runner.artefacts import TableOptions, write_tables
from ppd_bench.runner.runs import Run, open_run
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep
from ppd_bench.runner.tables import load_table
from ppd_bench.runner.trace_convert import write_trace
from ppd_bench.sim.profile import SIM_VERSION
from ppd_bench.store.atomic import make_folder, write_bytes
from ppd_bench.workload.traces import open_trace

if TYPE_CHECKING:
    from ppd_bench.report.plots import Plot  # matplotlib takes a second; only verbs that draw should pay for it

RESULTS = Path("results") / "reproduce"
PAPER_DATASETS = ("sharegpt", "wildchat")
"""Names that ``--dataset NAME=PATH`` takes for the paper's own data, each a trace format."""

MAX_CONVERSATIONS = 2000
"""Of a dataset, so many multi-turn conversations are taken, in file order: more than any point plays."""

NOT_PAPERS = "not the paper's data"
SPLITS = ("1P_3D", "2P_2D", "3P_1D")
"""The paper's P/D layouts of four GPUs."""
SPLIT_ARMS = tuple(name for layout in SPLITS for name in (layout, layout.replace("D", "pD")))
QUICK_TABLE_WORKLOADS = ["large_mid_bal", "large_huge_paste"]

Tell = Callable[[str], None]
Overrides = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """What was asked. ``datasets``: PATH, or NAME=PATH for the paper's own; empty takes the synthetic stand-in. ``tables``:
    folder of LAYOUT.json; null compiles them from the paper's grid. ``quick`` shrinks every sweep: for a first look and for
    tests."""

    datasets: tuple[str, ...] = ()
    tokenizer: Path | None = None
    tables: Path | None = None
    quick: bool = False
    n_processes: int = 0
    out: Path | None = None

    @property
    def folder(self) -> Path:
        return (self.out or RESULTS) / ("quick" if self.quick else "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What conversations a part plays. ``workloads`` null leaves those of the sweep file; ``papers`` are the names among them
    that are the paper's own data. ``notes`` say what was read."""

    name: str
    workloads: tuple[Any, ...] | None = None
    papers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """How a part's output calls it."""
        if self.workloads is None:
            return f"synthetic workloads ({NOT_PAPERS})"
        return ", ".join(n if n in self.papers else f"{n} ({NOT_PAPERS})" for n in self.names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(entry["name"]) for entry in self.workloads or ())

    @property
    def overrides(self) -> dict[str, Any]:
        return {} if self.workloads is None else {"workloads": list(self.workloads)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A published figure beside a simulated one, in the same unit. ``published`` holds one number, or the ends of a range;
    none where the paper says it in words. ``papers_data`` false: the two are of different data, so no difference is told."""

    what: str
    unit: str
    published: tuple[float, ...]
    simulated: float
    papers_data: bool
    words: str = ""

    @property
    def difference(self) -> float:
        """Simulated - published; against a range, the distance to its nearer end, 0 inside. NaN where it means nothing."""
        if not self.papers_data or not self.published:
            return float("nan")
        nearest = min(max(self.simulated, min(self.published)), max(self.published))
        return self.simulated - nearest

    @property
    def published_text(self) -> str:
        return " to ".join(f"{value:g}" for value in self.published) or self.words or "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What came of a part: tables for people, frames for programs, plots, and why figures differ from the published ones."""

    key: str
    title: str
    data: str
    compared: tuple[Compared, ...]
    differences: tuple[str, ...]
    assumptions: tuple[str, ...]
    frames: Mapping[str, pd.DataFrame]
    tables: tuple[TextTable, ...] = ()
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()
    folder: Path = Path()
    paths: tuple[Path, ...] = field(default=())

    @property
    def evidence(self) -> str:
        return f"simulated ({SIM_VERSION}): no number below was measured; data: {self.data}"

    @property
    def comparison(self) -> TextTable:
        """Published beside simulated."""
        rows = tuple(
            (
                c.what,
                c.unit,
                c.published_text,
                f"{c.simulated:.4g}",
                "–" if c.difference != c.difference else f"{c.difference:+.3g}",
            )
            for c in self.compared
        )
        return TextTable(
            caption=self.title,
            head=("what", "unit", "published", "simulated", "difference"),
            rows=rows,
            note=""
            if all(c.papers_data for c in self.compared)
            else f"No difference is told where it is {NOT_PAPERS}.",
        )


class PlayListener:
    """A sweep's listener that passes its stages on."""

    def __init__(self, tell: Tell, what: str) -> None:
        self._tell = tell
        self._what = what

    def started(self, n_points: int, n_finished: int) -> None:
        if n_finished < n_points:
            self._tell(f"{self._what}: {n_points - n_finished} points to play")

    def point_done(self, point: Point, n_turns: int, n_ok: int) -> None:
        """Points are too many to tell of each."""

    def stage(self, text: str) -> None:
        """A part's stages are its sweeps."""


def play(request: PartRequest, name: str, sweep: str, overrides: Overrides, tell: Tell) -> Run:
    """Simulate a sweep with changes, in a run folder of its own that is gone on with when it is there.

    Raises:
        SpecError: everything that is wrong with it.
        StoreError: the folder holds another sweep: give another --out.
    """
    prepared = prepare(
        SweepRequest(
            source=sweep,
            overrides={**overrides, "executor": "sim"},
            name=name.replace("/", "-"),
            out=request.folder / name,
            n_processes=request.n_processes,
            with_report=False,
        )
    )
    run_sweep(prepared, PlayListener(tell, name))
    return open_run(prepared.folder)


def data_of(request: PartRequest, wanted: Sequence[str] = PAPER_DATASETS) -> Data:
    """The conversations to play: those of ``--dataset``, multi-turn ones only as in the paper (Section 6.1).

    Raises:
        SpecError: a file that cannot be read, holds no conversation of two turns, or is not of the format that its name claims.
    """
    if not request.datasets:
        return Data(name="synthetic")
    given = [_named(text) for text in request.datasets]
    kept = [(name, path) for name, path in given if name is None or name in wanted]
    if not kept:
        raise SpecError(f"command line: --dataset: this part takes {', '.join(wanted)}, or a path without a name")
    entries, notes = [], []
    for name, path in kept:
        called = name or path.stem
        target = request.folder / "data" / f"{called}.jsonl"
        notes += _multi_turn(path, name, request.tokenizer, target)
        entries.append({"dataset": str(target), "name": called})
    return Data(
        name="+".join(entry["name"] for entry in entries),
        workloads=tuple(entries),
        papers=tuple(name for name, _ in kept if name is not None),
        notes=tuple(notes),
    )


def _named(text: str) -> tuple[str | None, Path]:
    name, found, path = text.partition("=")
    return (name, Path(path)) if found and name in PAPER_DATASETS else (None, Path(text))


def _multi_turn(path: Path, format: str | None, tokenizer: Path | None, target: Path) -> list[str]:
    """Write a dataset's multi-turn conversations where a sweep can name them; returns what people should know of them."""
    trace = open_trace(path, tokenizer=tokenizer)
    if format is not None and trace.format.name != format:
        raise SpecError(
            f"{path}: is read as {trace.format.name}, so it is not the paper's {format}; give it without '{format}=', "
            "as other data"
        )
    counts = {"read": 0, "kept": 0}
    n_rows = write_trace(target, trace.format, _conversations(trace.rows(), counts), trace.standing_notes)
    if not n_rows:
        raise SpecError(f"{path}: none of its {counts['read']:,} conversations has two turns or more")
    told = f"{path.name}: {counts['read']:,} conversations read, {counts['kept']:,} of two turns or more kept"
    return [told, *(f"{path.name}: {note}" for note in trace.standing_notes)]


def _conversations(rows: Iterator[TraceRow], counts: dict[str, int]) -> Iterator[TraceRow]:
    for session_id, group in itertools.groupby(rows, key=lambda row: row.session_id):
        turns = list(group)
        counts["read"] += 1
        if session_id is not None and len(turns) > 1:
            counts["kept"] += 1
            yield from turns
        if counts["kept"] >= MAX_CONVERSATIONS:
            return


def tables_of(request: PartRequest, tell: Tell) -> dict[str, Path]:
    """A decision table per P/D layout: the given ones, or compiled from the paper's grid with equal weights.

    Raises:
        TableError: a given table is not there or damaged.
    """
    if request.tables is not None:
        paths = {layout: request.tables / f"{layout}.json" for layout in SPLITS}
        for path in paths.values():
            load_table(path)
        return paths
    quick = {"workloads": QUICK_TABLE_WORKLOADS, "qps": [2, 8], "duration": "4s"} if request.quick else {}
    run = play(request, "grid", "paper", {"topologies": list(SPLIT_ARMS), **quick}, tell)
    written = {path.stem: path for path in write_tables(run, TableOptions())}
    missing = [layout for layout in SPLITS if layout not in written]
    if missing:
        raise TableError(f"{run.path}: no table for {', '.join(missing)}")
    return written


def write_part(part: Part) -> Part:
    """Frames as CSV, plots, and the page; the same part with its paths."""
    from ppd_bench.report.study_page import StudyPage, render_study
    from ppd_bench.report.style import save

    make_folder(part.folder)
    paths = []
    for name, frame in {**part.frames, "comparison": comparison_frame(part)}.items():
        paths.append(part.folder / f"{name}.csv")
        write_bytes(paths[-1], frame.to_csv(index=False).encode())
    for plot in part.plots:
        paths += save(plot.figure, part.folder / plot.name)
    page = StudyPage(
        title=part.title, evidence=part.evidence, subtitle=" ".join(part.notes), tables=(part.comparison, *part.tables),
        differences=(*part.differences, *(f"Assumed: {text}" for text in part.assumptions)), plots=part.plots,
        plots_title="Plots", no_plots="This part has no plot.",
    )  # fmt: skip
    paths.append(part.folder / f"{part.key}.html")
    write_bytes(paths[-1], render_study(page).encode())
    return dataclasses.replace(part, paths=tuple(paths))


def comparison_frame(part: Part) -> pd.DataFrame:
    """Published beside simulated as numbers; a range has two ends."""
    rows = [
        {
            "part": part.key,
            "what": c.what,
            "unit": c.unit,
            "published_low": min(c.published, default=float("nan")),
            "published_high": max(c.published, default=float("nan")),
            "published_words": c.words,
            "simulated": c.simulated,
            "difference": c.difference,
            "papers_data": c.papers_data,
        }
        for c in part.compared
    ]
    return pd.DataFrame(rows)
