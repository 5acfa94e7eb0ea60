"""Fitting a simulator to a run: what the data can tell, the residuals, and the least squares.

The simulator is not known here: ``fit`` is given a function from parameters to predicted latencies of the same turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares, nnls

from ppd_bench.analysis.grouping import counts, means
from ppd_bench.analysis.metrics import Floats, floats, labels, prefix_hit_tokens, prompt_tokens

FITTED_METRICS = ("ttft_s", "tpot_s")
"""What the fit looks at; E2E follows from them."""

MIN_TURNS = 60
"""Successful turns that a fit needs."""
MIN_PATH_TURNS = 10
"""Successful turns on a path (through P, or prefilled where they decode) before it counts as seen."""
MIN_PROMPT_SPREAD = 1.5
"""The longest prefill must exceed the shortest by this factor, or the cost of a token and of a visit are one number."""

SOFTENING = 0.25
"""Log ratio from which a turn's residual grows with its square root: a stall of the machine must not decide a fit."""
MISSING_RESIDUAL = 2.0
"""Log ratio of a turn that was measured and that the simulator fails."""
PRIOR_WEIGHT = 0.005
"""Residual of a parameter that leaves its start by a factor of e. It is as much as a group of turns that is off by 0.5 %."""
MAX_FACTOR = 1000.0
"""How far a parameter may go from its start, either way."""
STEP = 0.03
"""Half the step of the numerical derivative, log. Wide, because a simulator's answer jumps where one turn overtakes another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A positive number to be fitted. ``start`` is what is believed without data: the built-in profile's figure."""

    name: str
    unit: str
    start: float
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A fitted parameter. ``error_ratio`` is its standard error over its value, as the curvature of the loss has it.

    Parameters that can stand in for each other, such as an empty step and a step's overhead, are told apart by the form of the
    model as much as by data: their sum is better known than each.
    """

    name: str
    unit: str
    meaning: str
    start: float
    value: float
    error_ratio: float

    @property
    def identified(self) -> bool:
        """Whether the data tell its size: a standard error below half of it."""
        return self.error_ratio < 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The parameters, and the loss before and after (half the sum of squared residuals)."""

    estimates: tuple[Estimate, ...]
    loss_before: float
    loss_after: float
    n_predictions: int

    def values(self) -> dict[str, float]:
        """Values by name."""
        return {estimate.name: estimate.value for estimate in self.estimates}


class Turns:
    """Measured turns of a fit: latencies, and groups of one point and kind of turn, each of which weighs the same.

    Args:
        latencies: successful turns with ``ttft_s`` and ``tpot_s`` (``metrics.with_latencies``), ``point_id`` and ``turn``.
    """

    def __init__(self, latencies: pd.DataFrame) -> None:
        first = floats(latencies, "turn") == 1
        codes = pd.factorize(latencies["point_id"])[0].astype(np.int64) * 2 + first
        self._groups: npt.NDArray[np.int64] = pd.factorize(codes)[0].astype(np.int64)
        self._n_groups = int(self._groups.max(initial=-1)) + 1
        self._measured = {name: floats(latencies, name) for name in FITTED_METRICS}
        self.n_turns = len(latencies)

    def residuals(self, predicted: Mapping[str, Floats]) -> Floats:
        """Log ratios of predicted and measured latencies: of every turn, softened, and of every group's mean.

        ``predicted`` has the metrics of the same turns in the same order, NaN where the simulator failed the turn.
        """
        parts: list[Floats] = []
        for name, measured in self._measured.items():
            known = measured > 0
            log = _log_ratio(predicted[name][known], measured[known])
            groups = self._groups[known]
            n = counts(groups, self._n_groups)
            parts.append(_softened(log) / np.sqrt(n[groups]))
            found = np.where(np.isnan(predicted[name]), measured * np.exp(MISSING_RESIDUAL), predicted[name])[known]
            mean = _log_ratio(means(found, groups, self._n_groups), means(measured[known], groups, self._n_groups))
            parts.append(_softened(mean[n > 0]))
        return np.concatenate(parts)


def _log_ratio(predicted: Floats, measured: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.log(predicted / measured)
    return np.where(np.isfinite(log), log, MISSING_RESIDUAL)


def _softened(log: Floats) -> Floats:
    """Pseudo-Huber: the square of the result is 2 s^2 (sqrt(1 + (r / s)^2) - 1), quadratic near 0 and linear far away."""
    scaled = log / SOFTENING
    soft: Floats = np.sign(log) * SOFTENING * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
    return soft


def fit(
    parameters: Sequence[Parameter],
    predict: Callable[[dict[str, float]], Mapping[str, Floats]],
    turns: Turns,
    *,
    max_steps: int = 20,
) -> Fit:
    """Least squares over logarithms of parameters, with a weak pull of each to its start (``PRIOR_WEIGHT``).

    The pull only decides what the data leave open, such as the split of a step's time into kernel and overhead.

    Args:
        predict: latencies by metric of the turns, in their order, from parameter values by name.
        max_steps: most steps of the solver; each costs two predictions per parameter.
    """
    names = [parameter.name for parameter in parameters]
    start = np.array([parameter.start for parameter in parameters])
    n_predictions = 0

    def from_data(log: Floats) -> Floats:
        nonlocal n_predictions
        n_predictions += 1
        return turns.residuals(predict(dict(zip(names, (start * np.exp(log)).tolist(), strict=True))))

    def loss(log: Floats) -> Floats:
        return np.concatenate([from_data(log), PRIOR_WEIGHT * log])

    def slopes(log: Floats) -> Floats:
        steps = STEP * np.eye(len(start))
        return np.column_stack([(loss(log + step) - loss(log - step)) / (2 * STEP) for step in steps])

    before = from_data(np.zeros(len(start)))
    limit = np.log(MAX_FACTOR)
    found = least_squares(
        loss, np.zeros(len(start)), jac=slopes, bounds=(-limit, limit), max_nfev=max_steps, xtol=1e-3, ftol=1e-4
    )
    spread = _errors(np.asarray(found.jac, dtype=np.float64), found.fun)
    estimates = tuple(
        Estimate(
            name=p.name, unit=p.unit, meaning=p.meaning, start=p.start, value=float(p.start * np.exp(x)), error_ratio=error
        )
        for p, x, error in zip(parameters, found.x, spread, strict=True)
    )  # fmt: skip
    after = found.fun[: len(before)]
    return Fit(
        estimates=estimates,
        loss_before=float(0.5 * before @ before),
        loss_after=float(0.5 * after @ after),
        n_predictions=n_predictions,
    )


def _errors(jacobian: Floats, residuals: Floats) -> list[float]:
    """Standard errors of the logarithms. The pull to the start is in the Jacobian, so that it can be inverted."""
    variance = float(residuals @ residuals) / max(1, len(residuals) - jacobian.shape[1])
    errors: list[float] = np.sqrt(variance * np.diag(np.linalg.inv(jacobian.T @ jacobian))).tolist()
    return errors


def lacking(records: pd.DataFrame) -> list[str]:
    """What successful turns lack for a fit, one sentence each; empty where they suffice.

    Args:
        records: successful turns (``core.record``), of all points that are to be fitted.
    """
    new = _computed_tokens(records)
    n_through_p = int(through_prefill(records).sum())
    problems = []
    if len(records) < MIN_TURNS:
        problems.append(f"{len(records):,} successful turns, {MIN_TURNS} are needed: run more points, or for longer")
    if not len(new) or new.max() < MIN_PROMPT_SPREAD * max(1.0, new.min()):
        seen = f"all prefills are of about {new.max():,.0f} tokens" if len(new) else "no prefill was seen"
        problems.append(
            f"{seen}, so that the cost of a token and of a visit cannot be told apart: add a workload whose prompts differ by a "
            f"factor of {MIN_PROMPT_SPREAD:g} or more"
        )
    if n_through_p and len(records) - n_through_p < MIN_PATH_TURNS:
        problems.append(
            f"{len(records) - n_through_p} turns were prefilled where they decode, {MIN_PATH_TURNS} are needed, or a visit and a "
            "KV transfer cannot be told apart: add a topology with R or pD, such as 2R"
        )
    return problems


def through_prefill(records: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which turns were prefilled on P."""
    return labels(records, "route", "pd") | labels(records, "route", "pd_readback")


def sees_transfers(records: pd.DataFrame) -> bool:
    """Whether enough turns went through P to fit a transfer."""
    return int(through_prefill(records).sum()) >= MIN_PATH_TURNS


def _computed_tokens(records: pd.DataFrame) -> Floats:
    """Prompt tokens that had to be computed: those not in the cache where the prompt was prefilled."""
    hits = np.nan_to_num(prefix_hit_tokens(records))
    return prompt_tokens(records) - hits


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLine:
    """What engines say of KV transfers: ``base_s`` each, plus bytes at ``bytes_per_s`` (null where sizes do not tell)."""

    n_transfers: int
    mean_s: float
    mean_bytes: float
    base_s: float
    bytes_per_s: float | None


def transfer_line(readings: pd.DataFrame) -> TransferLine | None:
    """Regression of the engines' transfer counters: seconds of an interval on its transfers and bytes, neither negative.

    Args:
        readings: ``engine_metrics`` of a run: point_id, worker_id, time_s, n_transfers, transferred_bytes, transfer_s.

    Returns:
        Null without a transfer.
    """
    columns = ["n_transfers", "transferred_bytes", "transfer_s"]
    ordered = readings.sort_values(["point_id", "worker_id", "time_s"])
    steps = ordered.groupby(["point_id", "worker_id"])[columns].diff().dropna()
    steps = steps[(steps["n_transfers"] > 0) & (steps >= 0).all(axis=1)]
    if steps.empty:
        return None
    n, n_bytes, seconds = (steps[name].to_numpy(dtype=np.float64) for name in columns)
    per_mb = n_bytes / 1e6  # of the size of the counts, for the solver
    (base_s, s_per_mb), _ = nnls(np.column_stack([n, per_mb]), seconds)
    return TransferLine(
        n_transfers=int(n.sum()),
        mean_s=float(seconds.sum() / n.sum()),
        mean_bytes=float(n_bytes.sum() / n.sum()),
        base_s=float(base_s),
        bytes_per_s=float(1e6 / s_per_mb) if s_per_mb > 0 else None,
    )
