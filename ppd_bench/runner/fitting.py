"""Fit the simulator to measured turns: least squares over its own predictions of the same conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ppd_bench.analysis.calibration import (
    FITTED_METRICS,
    Fit,
    Parameter,
    TransferLine,
    Turns,
    fit,
    sees_transfers,
)
from ppd_bench.analysis.metrics import Floats, floats, labels, with_latencies
from ppd_bench.core.enums import Executor, Status
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point, SimSettings
from ppd_bench.core.profiles import ModelProfile
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import parse_topology
from ppd_bench.core.workload import Session
from ppd_bench.sim.profile import find_hardware, link_bytes_per_s, link_latency_s, make_cost
from ppd_bench.sim.simulate import simulate
from ppd_bench.sim.step_tables.smooth import smooth_numbers, smooth_table, step_table_text

SMALLEST_START = 1e-6
"""A setting of 0 has no logarithm to start from."""

_SURFACE = {
    "floor_s": "an almost empty step",
    "token_s": "a token of a large step",
    "context_s": "a token of context of a decode",
    "pair_s": "a pair of tokens in the attention of a prefill",
}
_OVERHEADS = {
    "step_overhead_s": "beside a step's kernels",
    "sequence_overhead_s": "a sequence in a step",
    "visit_overhead_s": "a visit of a request to an engine",
}
_TRANSFERS = {
    "transfer_base_s": ("s", "a KV transfer, whatever its size"),
    "transfer_bytes_per_s": ("bytes/s", "the rate of a KV transfer"),
}
_NEEDED = ("scheduled_s", "sent_s", "first_token_s", "last_token_s", "generated_tokens", "status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A point and the conversations that were played in it."""

    point: Point
    sessions: Sequence[Session]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a fit gives. ``settings`` go into every point that is to be predicted."""

    fit: Fit
    settings: SimSettings


def fit_simulator(
    played: Sequence[Played],
    records: pd.DataFrame,
    model: ModelProfile,
    *,
    start: SimSettings,
    source: str,
    transfers: TransferLine | None = None,
    max_steps: int = 20,
) -> Fitted:
    """Fit step surface, overheads and transfers to the TTFT and TPOT of measured turns.

    Args:
        played: points of one tensor parallel size, with all of their conversations.
        records: successful turns that the fit may look at; others are simulated and not looked at.
        start: settings of what is not fitted, and where the rest starts.
        source: what the step surface says of its origin.
        transfers: the engines' own account. Where it tells a rate, the rate is taken from it and only the base is fitted.
    """
    if sees_transfers(records) and transfers is not None and transfers.bytes_per_s is not None:
        start = dataclasses.replace(start, transfer_bytes_per_s=transfers.bytes_per_s)
    parameters = _parameters(played[0].point, model, start, with_transfers=sees_transfers(records))
    turns = Turns(with_latencies(records))
    positions = _positions(played, records)

    def predict(values: dict[str, float]) -> Mapping[str, Floats]:
        return _latencies(predicted(played, _settings(start, values, source), model), positions)

    found = fit(parameters, predict, turns, max_steps=max_steps)
    return Fitted(fit=found, settings=_settings(start, found.values(), source))


def predicted(played: Sequence[Played], settings: SimSettings, model: ModelProfile) -> list[tuple[Point, Columns]]:
    """Every point under these settings, with its records."""
    points = [dataclasses.replace(p.point, executor=Executor.SIM, sim=settings) for p in played]
    return [(point, simulate(point, p.sessions, model)) for point, p in zip(points, played, strict=True)]


def _parameters(point: Point, model: ModelProfile, start: SimSettings, *, with_transfers: bool) -> list[Parameter]:
    tensor_parallel_size = parse_topology(point.topology).tensor_parallel_size
    hardware = find_hardware(point.gpu)
    cost = make_cost(hardware, model, tensor_parallel_size, start.cost_model, start.step_table_json)
    numbers = smooth_numbers(cost)
    found = [_parameter(name, "s", numbers[name], meaning) for name, meaning in _SURFACE.items()]
    found += [_parameter(name, "s", getattr(start, name), meaning) for name, meaning in _OVERHEADS.items()]
    if not with_transfers:
        return found
    simulated = dataclasses.replace(point, sim=start)
    begin = {
        "transfer_base_s": link_latency_s(simulated),
        "transfer_bytes_per_s": link_bytes_per_s(simulated, hardware),
    }
    fixed = {"transfer_bytes_per_s"} if start.transfer_bytes_per_s is not None else set()
    return found + [
        _parameter(name, unit, begin[name], meaning)
        for name, (unit, meaning) in _TRANSFERS.items()
        if name not in fixed
    ]


def _parameter(name: str, unit: str, start: float, meaning: str) -> Parameter:
    return Parameter(name=name, unit=unit, start=start if start > 0 else SMALLEST_START, meaning=meaning)


def _settings(start: SimSettings, values: Mapping[str, float], source: str) -> SimSettings:
    surface = {name: values[name] for name in _SURFACE}
    text = step_table_text(smooth_table(**surface, name="fitted", source=source))
    rest = {name: value for name, value in values.items() if name not in surface}
    return dataclasses.replace(start, cost_model="auto", step_table_json=text, **rest)  # type: ignore[arg-type]


def _positions(played: Sequence[Played], records: pd.DataFrame) -> NDArray[np.int64]:
    """Where the measured turns are among all turns that are simulated, in the order of the simulator's records."""
    keys = [
        (p.point.point_id, turn.session_id, turn.turn) for p in played for session in p.sessions for turn in session
    ]
    wanted = pd.MultiIndex.from_arrays([records["point_id"].astype(str), records["session_id"], records["turn"]])
    found = pd.MultiIndex.from_tuples(keys).get_indexer(wanted).astype(np.int64)
    if (found < 0).any():
        raise SpecError(
            f"{int((found < 0).sum())} measured turns are not among those that the sweep describes: the records were made by "
            "another version; run the sweep again"
        )
    return found


def _latencies(points: Sequence[tuple[Point, Columns]], positions: NDArray[np.int64]) -> dict[str, Floats]:
    frames = [pd.DataFrame({name: columns[name] for name in _NEEDED}) for _, columns in points]
    latencies = with_latencies(pd.concat(frames, ignore_index=True))
    ok = labels(latencies, "status", Status.OK.value)
    return {name: np.where(ok, floats(latencies, name), np.nan)[positions] for name in FITTED_METRICS}
