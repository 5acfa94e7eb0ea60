"""``reproduce`` parts and ``interference`` as people call them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ppd_bench.cli.main import app
from ppd_bench.core.errors import SpecError

RUNNER = CliRunner(env={"COLUMNS": "200"})


def test_interference_prints_a_table_per_budget_and_says_what_it_wrote(tmp_path: Path) -> None:
    done = RUNNER.invoke(
        app,
        [
            "interference",
            "--batches",
            "4,16",
            "--prefills",
            "1",
            "--budgets",
            "512,8192",
            "--jobs",
            "1",
            "--out",
            str(tmp_path / "i"),
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert "Step budget 512 tokens" in done.output
    assert "Step budget 8,192 tokens" in done.output
    assert "simulated; slowdowns are medians" in done.output
    assert (tmp_path / "i" / "interference.parquet").exists()


def test_a_part_is_printed_beside_the_published_figures(tmp_path: Path) -> None:
    arguments = ["reproduce", "paper", "--part", "figure1", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    done = RUNNER.invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    for told in (
        "no number below was measured",
        "not the paper's data",
        "Why it differs:",
        "Assumed where the paper leaves it open:",
    ):
        assert told in done.output
    assert (tmp_path / "quick" / "figure1" / "figure1.html").exists()


def test_an_unknown_part_gets_the_names_that_exist() -> None:
    with pytest.raises(
        SpecError, match=r"'tabel3' cannot be reproduced, did you mean 'table3'\?; allowed: paper, figure4"
    ):
        RUNNER.invoke(app, ["reproduce", "tabel3"], catch_exceptions=False)
