"""The cells of a refined sweep and ``refine.jsonl``: which got repeats, why, and where every round left the search.

Lines of kind ``point`` tell of one more repeat of both arms of a cell, in the order in which rounds chose them; ``standing``
where the search was after a round; ``stop`` why it ended.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ppd_bench.analysis.metrics import Floats, floats
from ppd_bench.analysis.pairing import pair_arms
from ppd_bench.analysis.refine import Candidate, Standing, value_per_gpu_s
from ppd_bench.core.errors import StoreError
from ppd_bench.core.point import Point, canonical_json
from ppd_bench.core.topology import parse_topology
from ppd_bench.store import layout
from ppd_bench.store.atomic import make_folder, write_bytes
from ppd_bench.sweep.estimate import LAUNCH_S, point_gpu_seconds

Repeats = dict[tuple[str, str, float], int]
"""Repeats of a (topology, workload, QPS); 1 where it is not named."""


class Cell(NamedTuple):
    """A (layout, workload, QPS) whose arms are compared. ``arms``: topologies at x=0 and x=1."""

    arms: tuple[str, str]
    workload: str
    qps: float
    cost_gpu_s: float


class Grid:
    """The cells of a sweep's points, and what everything costs."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = tuple(points)
        pairs = [(x0.name, x1.name) for x0, x1 in pair_arms(points)]
        first = {(p.topology, p.workload.name, p.qps): p for p in points if p.repeat == 0}
        self.cells = [
            Cell(arms, workload, qps, 2 * point_gpu_seconds(point))
            for arms in pairs
            for (topology, workload, qps), point in first.items()
            if topology == arms[0]
        ]
        self.max_repeats = 1 + max((p.repeat for p in points), default=0)
        layouts = dict.fromkeys(parse_topology(p.topology).layout for p in points)
        self.launches = {found.name: LAUNCH_S * found.n_gpus for found in layouts}
        self.coarse_gpu_s = sum(map(point_gpu_seconds, first.values())) + sum(self.launches.values())

    @property
    def round_launch_gpu_s(self) -> float:
        """Of all layouts that have cells, which is what a round costs at most before it plays a point."""
        return sum(self.launches[name] for name in {parse_topology(cell.arms[0]).layout.name for cell in self.cells})

    def round_gpu_s(self, cells: Sequence[Cell]) -> float:
        """One more repeat of these cells, with the launches that it takes."""
        layouts = {parse_topology(cell.arms[0]).layout.name for cell in cells}
        return sum(cell.cost_gpu_s for cell in cells) + sum(self.launches[name] for name in layouts)

    def chosen(self, repeats: Repeats) -> tuple[Point, ...]:
        return tuple(p for p in self.points if p.repeat < repeats.get((p.topology, p.workload.name, p.qps), 1))


class Journal:
    """``refine.jsonl``: what was chosen, why, and where that left the search. Written whole at every change."""

    def __init__(self, path: Path, grid: Grid) -> None:
        self.repeats: Repeats = {}
        self._path = path
        self._grid = grid
        self._lines: list[dict[str, Any]] = [line for line in _read(path) if line["kind"] == "point"]
        self._standings = [line for line in _read(path) if line["kind"] == "standing"]
        self._found: Standing | None = None
        cells = {(cell.arms[0], cell.workload, cell.qps): cell for cell in grid.cells}
        for line in self._lines:
            cell = cells.get((line["layout"], line["workload"], line["qps"]))
            if cell is None or line["repeat"] != self.n_repeats(cell) or line["repeat"] >= grid.max_repeats:
                raise StoreError(
                    f"{path}: does not fit this sweep: {canonical_json(line)[:200]}; use another --out or --name"
                )
            self._count(cell)

    @property
    def n_rounds(self) -> int:
        return max((line["round"] for line in self._lines), default=0)

    @property
    def spent_gpu_s(self) -> float:
        """Of the coarse pass and all rounds that are written down, as ``plan`` counts."""
        cells = {(cell.arms[0], cell.workload, cell.qps): cell for cell in self._grid.cells}
        rounds: dict[int, list[Cell]] = {}
        for line in self._lines:
            rounds.setdefault(line["round"], []).append(cells[line["layout"], line["workload"], line["qps"]])
        return self._grid.coarse_gpu_s + sum(map(self._grid.round_gpu_s, rounds.values()))

    def n_repeats(self, cell: Cell) -> int:
        return self.repeats.get((cell.arms[0], cell.workload, cell.qps), 1)

    def all_repeats(self) -> Floats:
        return floats(pd.DataFrame({"n": [self.n_repeats(cell) for cell in self._grid.cells]}), "n")

    def stand(self, found: Standing, confidence: float) -> None:
        """Note where the rounds so far left the search."""
        self._found = found
        line = {
            "kind": "standing",
            "round": self.n_rounds,
            "gpu_s": self.spent_gpu_s,
            "n_cells": len(found.confidence),
            "n_decided": int((found.confidence >= confidence).sum()),
            "confidence": confidence,
            "mean_confidence": float(found.confidence.mean()),
            "expected_loss": float(found.loss.sum()),
        }
        self._standings = [old for old in self._standings if old["round"] < self.n_rounds] + [line]
        self._write()

    def add(self, chosen: Sequence[Candidate], found: Standing, n_seen: Floats) -> None:
        """Write the next round down, before it is played."""
        number = self.n_rounds + 1
        counted = self.all_repeats()
        for place, candidate in enumerate(chosen, 1):
            cell = self._grid.cells[candidate.row]
            line = {
                "kind": "point",
                "round": number,
                "place": place,
                "layout": cell.arms[0],
                "arms": list(cell.arms),
                "workload": cell.workload,
                "qps": cell.qps,
                "repeat": self.n_repeats(cell),
                "gpu_s": cell.cost_gpu_s,
                "score": _plain(found.score[candidate.row]),
                "spread": _plain(found.spread[candidate.row]),
                "side": str(found.side[candidate.row]),
                "confidence": float(found.confidence[candidate.row]),
                "expected_loss": float(found.loss[candidate.row]),
                "value_per_gpu_s": value_per_gpu_s(found, counted, candidate),
                "why": _why(candidate, found, int(n_seen[candidate.row])),
            }
            self._lines.append(line)
            self._count(cell)
        self._write()

    def stop(self, why: str) -> None:
        self._write({"kind": "stop", "round": self.n_rounds, "gpu_s": self.spent_gpu_s, "why": why})

    def words(self, budget_gpu_s: float | None) -> str:
        """Where the search is, for people."""
        line = self._standings[-1]
        budget = "" if budget_gpu_s is None else f" of {budget_gpu_s:,.0f}"
        return (
            f"round {line['round']}: {line['n_decided']} of {line['n_cells']} cells decided with a confidence of "
            f"{line['confidence']:g} or more; {line['gpu_s']:,.0f}{budget} GPU-seconds, as plan counts them"
        )

    def _count(self, cell: Cell) -> None:
        for arm in cell.arms:
            key = (arm, cell.workload, cell.qps)
            self.repeats[key] = self.repeats.get(key, 1) + 1

    def _write(self, *more: dict[str, Any]) -> None:
        ordered = sorted([*self._lines, *self._standings], key=lambda line: (line["round"], line["kind"]))
        make_folder(self._path.parent)
        write_bytes(self._path, "".join(canonical_json(line) + "\n" for line in (*ordered, *more)).encode())


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: cannot be read ({error}); use another --out or --name, or delete the folder"
        ) from error
    return lines


def read_standings(folder: Path) -> pd.DataFrame:
    """Where every round of a refined run left the search: ``round``, ``gpu_s``, ``n_cells``, ``n_decided``, ``mean_confidence``,
    ``expected_loss``; empty where the run was not refined."""
    return pd.DataFrame([line for line in _read(folder / layout.REFINE) if line["kind"] == "standing"])


def _plain(value: float) -> float | None:
    return float(value) if value == value and abs(value) != float("inf") else None


def _why(candidate: Candidate, found: Standing, n_seen: int) -> str:
    """In words, why this cell gets a repeat now."""
    row = candidate.row
    if not n_seen:
        return "nothing was seen of it yet that both arms have"
    s = found.score[row]
    if not found.pooled[row]:
        return (
            f"S is {s:+.3f} after {n_seen}, and too few cells under like strain have two repeats to say how it varies; of those "
            "without, being wrong here costs most per GPU-second"
        )
    if found.score[row] != found.score[row]:
        return f"S is not defined after {n_seen} repeats, and a side that may fail costs most"
    error = found.spread[row] / n_seen**0.5
    return (
        f"S is {s:+.3f} with a standard error of about {error:.3f} after {n_seen}: '{found.side[row]}' is right with "
        f"{found.confidence[row]:.0%}; being wrong costs {found.loss[row]:.4f} of S on average, most per GPU-second"
    )
