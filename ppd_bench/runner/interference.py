"""``ppd-bench interference``: what full and append prefills cost a running decode batch, simulated or on one live engine.

Every mix is a small trace that the ordinary sweep plays, on either executor: decode streams at time 0, and prefills at an
instant at which all of them run. A first play without prefills (the pilot) finds that instant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from ppd_bench.analysis.interference import DECODE, PREFILL, Slowdown, carrying_steps, slowdown
from ppd_bench.core.enums import Executor
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import content_hash
from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.runner.live import LiveOptions
from ppd_bench.runner.reproduce_parts import PlayListener
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep
from ppd_bench.runner.trace_convert import write_trace
from ppd_bench.store.atomic import make_folder
from ppd_bench.store.frames import write_frame
from ppd_bench.store.read import read_records

SWEEP = "interference"
RESULTS = Path("results") / "interference"
FRAME = "interference.parquet"
MAX_NUM_SEQS = 256
SPARE_TOKENS = 64
"""Tokens that a stream generates beyond what is planned: engines differ from the plan by a few steps."""
LIVE_SPARE_S = 0.5
"""A live engine starts its streams sooner or later than in the pilot, by so much at most; more and the mix is told as missing."""

Kind = Literal["full", "append"]
KINDS: tuple[Kind, ...] = ("full", "append")
Tell = Callable[[str], None]

_DECLARED = TraceFormat(
    name="interference", time_unit="s", block_tokens=None, tail=None, id_scope=None, row_means="full_prompt", loop="timestamps",
    token_count="recorded",
)  # fmt: skip

UNITS = {
    **dict.fromkeys(("name", "evidence", "kind"), ""),
    **dict.fromkeys(("n_decode", "n_prefills", "n_streams", "n_carrying_steps"), "1"),
    **dict.fromkeys(("decode_context_tokens", "context_tokens", "new_tokens"), "tokens"),
    **dict.fromkeys(("max_num_batched_tokens", "window_tokens"), "tokens"),
    **dict.fromkeys(("baseline_tpot_s", "excess_s", "prefill_s"), "s"),
    **dict.fromkeys(("carrying_slowdown_ratio", "step_slowdown_ratio", "window_slowdown_ratio"), "1"),
}  # fmt: skip
"""Columns of the result with their units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """One cell. ``total_tokens``: of each prefill's prompt; an append prefills the last ``append_tokens`` of them, the rest is
    cached."""

    n_decode: int
    decode_context_tokens: int
    kind: Kind
    n_prefills: int
    total_tokens: int
    append_tokens: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.n_prefills}-b{self.n_decode}-c{self.total_tokens}"

    @property
    def new_tokens(self) -> int:
        """Tokens that each prefill computes."""
        return self.total_tokens if self.kind == "full" else self.append_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceRequest:
    """What was asked. Every batch x total length x number of prefills x kind x budget is a cell. ``endpoints`` null simulates;
    a live engine has one step budget, so give the one that it was started with."""

    batches: tuple[int, ...] = (1, 25, 50, 100, 200)
    totals: tuple[int, ...] = (1024,)
    n_prefills: tuple[int, ...] = (1, 4)
    append_tokens: int = 32
    decode_context_tokens: int = 256
    budgets: tuple[int, ...] = (512, 2048, 8192)
    window_tokens: int = 16
    gpu: str | None = None
    model: str | None = None
    endpoints: Path | None = None
    n_processes: int = 0
    out: Path | None = None

    @property
    def mixes(self) -> tuple[Mix, ...]:
        return tuple(
            Mix(
                n_decode=batch, decode_context_tokens=self.decode_context_tokens, kind=kind, n_prefills=n, total_tokens=total,
                append_tokens=self.append_tokens,
            )
            for total in self.totals
            for n in self.n_prefills
            for batch in self.batches
            for kind in KINDS
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A mix as it is played. ``instant_s`` null leaves the prefills out. ``spare_tokens``: what streams generate beyond the
    plan."""

    mix: Mix
    instant_s: float | None = None
    spare_tokens: int = SPARE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceResult:
    """Cells with the columns ``UNITS``; ``missing`` names those that could not be told, with advice."""

    frame: pd.DataFrame
    evidence: str
    folder: Path
    paths: tuple[Path, ...]
    missing: tuple[str, ...] = ()


def run_interference(request: InterferenceRequest, tell: Tell) -> InterferenceResult:
    """Play every cell, and write the table and the plot.

    Raises:
        SpecError: cells that cannot be played (too long for the model, more sequences than the engine takes).
        EngineError: a live engine that does not answer.
    """
    _check(request)
    folder = request.out or _default_folder(request)
    rows: list[dict[str, object]] = []
    missing: list[str] = []
    evidence = ""
    for budget in request.budgets:
        where = folder / f"budget-{budget}"
        pilots, _ = _play(request, budget, where / "pilot", [_Plan(mix=mix) for mix in request.mixes], tell)
        plans = [_planned(mix, pilots[mix.name], request) for mix in request.mixes]
        told = [
            f"{p.mix.name} at budget {budget}: the decode streams did not all run" for p in plans if p.instant_s is None
        ]
        played = [plan for plan in plans if plan.instant_s is not None]
        records, evidence = _play(request, budget, where / "mixes", played, tell)
        for mix in (plan.mix for plan in played):
            found = slowdown(records[mix.name], n_carrying=_carrying(mix, budget), window_tokens=request.window_tokens)
            if found is None:
                told.append(f"{mix.name} at budget {budget}: a turn failed, or streams ended before the window did")
            else:
                rows.append(_row(mix, budget, request.window_tokens, found, evidence))
        missing += told
    frame = pd.DataFrame(rows, columns=list(UNITS))
    return InterferenceResult(
        frame=frame,
        evidence=evidence,
        folder=folder,
        paths=tuple(_write(folder, frame, evidence)),
        missing=tuple(missing),
    )


def _default_folder(request: InterferenceRequest) -> Path:
    """Studies with other axes than the default's lie beside it, for a folder holds one study."""
    name = "live" if request.endpoints else "sim"
    plain = InterferenceRequest()
    axes = [
        field.name for field in dataclasses.fields(request) if field.name not in ("endpoints", "n_processes", "out")
    ]
    asked = {axis: getattr(request, axis) for axis in axes if getattr(request, axis) != getattr(plain, axis)}
    return RESULTS / (f"{name}-{content_hash(asked)[:8]}" if asked else name)


def _check(request: InterferenceRequest) -> None:
    problems = [
        f"command line: {flag}: whole numbers of 1 or more are needed, each once"
        for flag, values in (
            ("--batches", request.batches),
            ("--totals", request.totals),
            ("--prefills", request.n_prefills),
            ("--budgets", request.budgets),
        )
        if not values or min(values) < 1 or len(set(values)) < len(values)
    ]
    if problems:
        raise SpecError(problems)
    if request.endpoints is not None and len(request.budgets) != 1:
        problems.append(
            "command line: --budgets: a live engine has one step budget; give the max_num_batched_tokens it was started with"
        )
    if min(request.totals) <= request.append_tokens:
        problems.append(
            f"command line: --append-tokens {request.append_tokens}: an append needs a context; give fewer tokens than --totals"
        )
    for budget in request.budgets:
        if budget <= max(request.batches):
            problems.append(
                f"command line: --budgets {budget}: {max(request.batches)} decodes leave no token of a step to a prefill"
            )
    if problems:
        raise SpecError(problems)


def _carrying(mix: Mix, budget: int) -> int:
    n_tokens = mix.n_prefills * mix.new_tokens
    return carrying_steps(n_decode=mix.n_decode, n_prefill_tokens=n_tokens, max_num_batched_tokens=budget)


def _play(
    request: InterferenceRequest, budget: int, folder: Path, plans: Sequence[_Plan], tell: Tell
) -> tuple[dict[str, pd.DataFrame], str]:
    """Records by mix, and what they are worth."""
    if not plans:
        return {}, ""
    entries = []
    for plan in plans:
        path = folder / "traces" / f"{plan.mix.name}.jsonl"
        write_trace(path, _DECLARED, _rows(plan, _stream_tokens(plan, budget, request.window_tokens)))
        entries.append({"dataset": str(path), "name": plan.mix.name, "arrivals": "recorded", "sessions": "none"})
    overrides: dict[str, Any] = {
        "workloads": entries, "gpu": request.gpu, "model": request.model, "engine": _engine(request, budget, plans),
        "executor": "sim" if request.endpoints is None else "live",
    }  # fmt: skip
    prepared = prepare(
        SweepRequest(
            source=SWEEP, overrides=overrides, name=f"interference-{budget}", out=folder / "run", n_processes=request.n_processes,
            with_report=False, live=LiveOptions(endpoints=request.endpoints),
        )
    )  # fmt: skip
    run_sweep(prepared, PlayListener(tell, f"budget {budget}, {folder.name}"))
    run = open_run(folder / "run")
    records = read_records(
        run.path, columns=("workload", "session_id", "turn", "sent_s", "first_token_s", "itl_s", "status")
    )
    by_mix = {str(name): found for name, found in records.groupby("workload", observed=True)}
    return by_mix, run.executor.evidence


def _engine(request: InterferenceRequest, budget: int, plans: Sequence[_Plan]) -> dict[str, int]:
    """The smallest engine that takes every mix: of a live one these are only what is asked of it."""
    streams = max(p.mix.decode_context_tokens + _stream_tokens(p, budget, request.window_tokens) for p in plans)
    n_seqs = max(mix.n_decode + mix.n_prefills for mix in request.mixes)
    return {
        "max_num_batched_tokens": budget,
        "max_num_seqs": max(n_seqs, min(MAX_NUM_SEQS, budget)),
        "max_model_len": max(streams, *(total + 1 for total in request.totals)),
    }


def _rows(plan: _Plan, stream_tokens: int) -> Iterator[TraceRow]:
    """A mix as requests: contexts of appends first, then the streams, then the prefills."""
    mix, instant_s = plan.mix, plan.instant_s
    sent: list[tuple[str, int, float, int, int]] = []
    if mix.kind == "append":
        cached = mix.total_tokens - mix.append_tokens
        sent += [(f"{PREFILL}-{i:03}", 1, 0.0, cached, 1) for i in range(mix.n_prefills)]
    sent += [(f"{DECODE}-{i:03}", 1, 0.0, mix.decode_context_tokens, stream_tokens) for i in range(mix.n_decode)]
    if instant_s is not None:
        turn = 2 if mix.kind == "append" else 1
        sent += [(f"{PREFILL}-{i:03}", turn, instant_s, mix.total_tokens, 1) for i in range(mix.n_prefills)]
    for number, (session_id, turn, at_s, prompt, output) in enumerate(sent):
        yield TraceRow(number, f"{session_id}-{turn}", session_id, turn, at_s, None, prompt, output, ())


def _stream_tokens(plan: _Plan, budget: int, window: int) -> int:
    """What a stream must generate to run from the first one's begin to the end of the window: the ramp, two windows, the carrying
    steps, and some more."""
    mix = plan.mix
    contexts = mix.n_decode * mix.decode_context_tokens
    if mix.kind == "append":
        contexts += mix.n_prefills * mix.total_tokens
    ramp = math.ceil(contexts / max(1, budget - mix.n_decode))
    return ramp + 3 * window + _carrying(mix, budget) + plan.spare_tokens


def _planned(mix: Mix, pilot: pd.DataFrame, request: InterferenceRequest) -> _Plan:
    """When to send the prefills: all streams have run for a window and a little more. No instant where a stream failed."""
    streams = pilot[pilot["session_id"].astype(str).str.startswith(DECODE)]
    if streams.empty or (pilot["status"] != "ok").any():
        return _Plan(mix=mix)
    window = request.window_tokens
    step_s = float(
        np.median(np.concatenate([np.asarray(gaps, dtype=np.float64)[-window:] for gaps in streams["itl_s"]]))
    )
    spare_s = 0.0 if request.endpoints is None else LIVE_SPARE_S
    return _Plan(
        mix=mix,
        instant_s=float(streams["first_token_s"].max()) + (window + 4) * step_s,
        spare_tokens=SPARE_TOKENS + math.ceil(spare_s / max(step_s, 1e-3)),
    )


def _row(mix: Mix, budget: int, window: int, found: Slowdown, evidence: str) -> dict[str, object]:
    return {
        "name": mix.name,
        "evidence": evidence,
        "kind": mix.kind,
        "n_decode": mix.n_decode,
        "decode_context_tokens": mix.decode_context_tokens,
        "n_prefills": mix.n_prefills,
        "context_tokens": mix.total_tokens,
        "new_tokens": mix.new_tokens,
        "max_num_batched_tokens": budget,
        "window_tokens": window,
        **dataclasses.asdict(found),
    }


def _write(folder: Path, frame: pd.DataFrame, evidence: str) -> list[Path]:
    from ppd_bench.report.interference_plot import interference_plots
    from ppd_bench.report.style import save

    make_folder(folder)
    path = folder / FRAME
    executor = Executor.SIM if evidence == Executor.SIM.evidence else Executor.LIVE
    write_frame(path, frame, UNITS, "interference", executor=executor)
    return [
        path,
        *(p for plot in interference_plots(frame, evidence=evidence) for p in save(plot.figure, folder / plot.name)),
    ]
