"""What keeps a live point from winning, from its records to the page: failing loses, not measuring is no evidence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest
from live_cases import Fakes, Watcher, live_sweep

from ppd_bench.analysis.winners import winners
from ppd_bench.runner.artefacts import TableOptions, write_report, write_tables
from ppd_bench.runner.runs import Run, open_run
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.runner.sweep import prepare, run_sweep
from ppd_bench.runner.tables import load_table
from ppd_bench.store.read import read_records

X0, X1 = "1P_1D", "1P_1pD"


def d_is_overloaded(fakes: Fakes) -> None:
    fakes.engines[
        1
    ].behaviour.prefill_s_per_token = 10.0  # what P sends costs D nothing; what it prefills itself times out


def d_stops_short(fakes: Fakes) -> None:
    fakes.engines[1].behaviour.stop_short = 1


def d_dies(fakes: Fakes) -> None:
    fakes.run(fakes.engines[1].stop())


def the_client_is_late(fakes: Fakes) -> None:
    for tenths in range(1, 8):
        asyncio.get_running_loop().call_later(tenths / 10, time.sleep, 0.08)


@dataclass
class Case:
    """How the x=1 arm is spoilt, and what must come of it."""

    spoil: Callable[[Fakes], None]
    valid: bool
    reason: str
    decision: tuple[str, str, str] = ("pd", "insufficient", "undefined")
    statuses: set[str] = field(default_factory=lambda: {"ok"})
    gpu: str = "cpu"


CASES = {
    "too many failures": Case(
        spoil=d_is_overloaded,
        valid=True,
        reason="",
        decision=("pd", "measured", "x1_failed"),
        statuses={"ok", "timeout"},
    ),
    "wrong lengths": Case(
        spoil=d_stops_short,
        valid=False,
        reason="answers were not what was asked (first: s",
        statuses={"error", "unsent"},
    ),
    "an engine's death": Case(spoil=d_dies, valid=False, reason="an engine is gone: D0", statuses={"error", "unsent"}),
    "a late client": Case(
        spoil=the_client_is_late, valid=False, reason="client late: its event loop woke up", gpu="h100-80g"
    ),
}


def played(tmp_path: Path, case: Case) -> tuple[Run, Watcher]:
    """Both arms on one pair of fakes, the second one spoilt."""
    with Fakes("PD") as fakes:
        n_started: list[None] = []

        def on_start() -> None:
            n_started.append(None)
            if len(n_started) == 2:
                case.spoil(fakes)

        watcher = Watcher(point_started=on_start)
        overrides = {"timeout": "1s", "gpu": case.gpu, "duration": "400ms"}
        run_sweep(prepare(live_sweep(tmp_path, fakes, f"{X0}, {X1}", overrides=overrides)), watcher)
    return open_run(tmp_path / "run"), watcher


def all_turns(summaries: pd.DataFrame, topology: str) -> pd.Series:
    row: pd.Series = summaries[(summaries["topology"] == topology) & (summaries["slice"] == "all")].iloc[0]
    return row


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_spoilt_point_is_kept_and_shown_and_never_wins(case: Case, tmp_path: Path) -> None:
    run, watcher = played(tmp_path, case)
    records = read_records(run.path)
    assert set(records.loc[records["topology"] == X1, "status"]) == case.statuses
    summaries = summaries_of(run)
    spoilt = all_turns(summaries, X1)
    assert bool(spoilt["valid"]) is case.valid
    assert case.reason in spoilt["invalid_reasons"]
    told = dict(watcher.of("point_judged"))  # type: ignore[arg-type]
    assert bool(told[X1]) is not case.valid
    assert case.reason in "; ".join(told[X1])

    won = winners(summaries)
    assert X1 not in set(won["winner"].dropna())

    cell = next(c for c in load_table(write_tables(run, TableOptions(max_unknown_ratio=1.0))[0]).cells if c.visited)
    assert (cell.decision, cell.evidence, cell.rule) == case.decision
    page = write_report(run, plots=[]).read_text()
    assert f"{X1}: fails in 1 of 1 cells" in page
    assert case.reason in page


def test_an_unspoilt_pair_is_valid_on_both_sides_and_somebody_wins(tmp_path: Path) -> None:
    run, watcher = played(tmp_path, Case(spoil=lambda fakes: None, valid=True, reason=""))
    summaries = summaries_of(run)
    assert [all_turns(summaries, name)["invalid_reasons"] for name in (X0, X1)] == ["", ""]
    assert dict(watcher.of("point_judged")) == {X0: (), X1: ()}  # type: ignore[arg-type]
    assert set(winners(summaries)["winner"].dropna()) <= {X0, X1}
    cell = next(c for c in load_table(write_tables(run, TableOptions())[0]).cells if c.visited)
    assert cell.rule == "equation1"


def test_the_failing_side_loses_although_none_of_its_turns_has_a_latency(tmp_path: Path) -> None:
    def d_refuses(fakes: Fakes) -> None:
        fakes.engines[1].behaviour.status = 503

    run, _ = played(tmp_path, Case(spoil=d_refuses, valid=False, reason="no turn succeeded"))
    assert all_turns(summaries_of(run), X1)["invalid_reasons"] == "no turn succeeded"
    cell = next(c for c in load_table(write_tables(run, TableOptions())[0]).cells if c.visited)
    assert (cell.decision, cell.evidence, cell.rule) == ("pd", "measured", "x1_failed")
