"""The command line as a user meets it: exit codes, messages, output."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = [sys.executable, "-c", "from ppd_bench.cli.main import main; main()"]
VERBS = (
    "plan", "sweep", "build-table", "plot", "report", "reproduce", "doctor", "serve", "table", "topologies", "workloads", "trace",
    "router", "announce", "replay", "study", "roofline", "calibrate", "compare", "interference", "capacity",
)  # fmt: skip
SMALL = ["--topologies", "4R,1P_3D,1P_3pD", "--workloads", "small_tiny,large_huge_paste", "--qps", "1,4"]


def ppd_bench(*arguments: str, cwd: Path, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160", "PYTHONWARNINGS": "error::DeprecationWarning:ppd_bench"}
    done = subprocess.run(
        [*PROGRAM, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, made by the command."""
    folder = tmp_path_factory.mktemp("cli")
    ppd_bench("sweep", *SMALL, "--duration", "4s", "--out", "run", "--no-report", cwd=folder)
    return folder / "run"


def test_the_first_line_says_who_runs_and_what_numbers_are_worth(tmp_path: Path) -> None:
    done = ppd_bench("sweep", *SMALL, "--duration", "2s", "--no-report", "--executor", "sim", cwd=tmp_path)
    assert done.stdout.splitlines()[0] == "executor: sim (asked for); simulated: no number below was measured"
    assert "wrote results/paper-sim/summaries.parquet" in done.stdout
    assert (tmp_path / "results/paper-sim/records.parquet").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["sweep", "nowhere"], 2, "nowhere"),
        (["sweep", "--qps", "1,fast"], 2, "fast"),
        (["sweep", "--topologies", "9R"], 2, "9"),
        (["sweep", "--topologies", "1P"], 2, "1P"),
        (["sweep", "--executor", "guess"], 2, "guess"),
        (["sweep", "--executor", "live"], 3, "--executor sim"),
        (["sweep", "sweeps/nowhere.yaml", "--device", "cpu"], 2, "nowhere"),
        (["sweep", "cpu", "--device", "cpu", "--engine-python", "/nowhere/python"], 3, "/nowhere/python"),
        (["sweep", "cpu", "--device", "abacus"], 2, "cuda, cpu"),
        (["sweep", "cpu", "--endpoints", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["doctor", "3D_1P"], 2, "1P_3D"),
        (["serve", "2P_2D", "--device", "cpu", "--engine-python", "/nowhere/python"], 3, "/nowhere/python"),
        (["sweep", "--duration", "10 parsecs"], 2, "parsecs"),
        (["sweep", "--model", "gpt-9"], 2, "llama-3.1-8b"),
        (["sweep", "--handoff", "pigeon"], 2, "pull_async"),
        (["sweep", "--policy", "table"], 2, "table"),
        (["plot", "nowhere"], 4, "nowhere"),
        (["report", "."], 4, "not a run folder"),
        (["build-table", "nowhere"], 4, "nowhere"),
        (["reproduce", "paper", "nowhere"], 4, "nowhere"),
        (["table", "show", "nowhere.json"], 5, "nowhere.json"),
        (["topologies", "3D_1P"], 2, "1P_3D"),
    ],
)
def test_every_mistake_gets_one_message_and_its_exit_code(
    arguments: list[str], code: int, told: str, tmp_path: Path
) -> None:
    done = ppd_bench(*arguments, cwd=tmp_path, check=code)
    assert done.stderr.startswith("error: ")
    assert told in done.stderr


def test_all_mistakes_of_a_sweep_file_come_at_once_each_with_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "name: bad\ngpus: 4\ngpu: h101\nmodel: llama-3.1-8b\ntopologies: [4R, 5R]\nworkloads: [small_tiny]\n"
        "qps: [1]\nduraton: 10s\ntimeout: 30 lightyears\n"
    )
    done = ppd_bench("sweep", "bad.yaml", cwd=tmp_path, check=2)
    lines = done.stderr.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("error: bad.yaml: ") for line in lines)
    for key, allowed in (("gpu", "h100-80g"), ("topologies", "4"), ("duraton", "duration"), ("timeout", "ms")):
        assert any(key in line and allowed in line for line in lines), (key, lines)


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"schema_version": "1.0"')
    assert "t.json" in ppd_bench("table", "show", "t.json", cwd=tmp_path, check=5).stderr


def test_help_of_every_verb_names_its_options_and_imports_nothing_heavy(tmp_path: Path) -> None:
    told = ppd_bench("--help", cwd=tmp_path).stdout
    assert all(re.search(rf"^  {verb} ", told, re.MULTILINE) for verb in VERBS)
    for verb in VERBS:
        assert "Usage:" in ppd_bench(verb, "--help", cwd=tmp_path).stdout
    code = (
        "import sys; sys.argv = ['ppd-bench', '--help']\n"
        "from ppd_bench.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'pandas', 'pyarrow', 'pydantic', 'matplotlib', 'scipy', 'rich', 'yaml'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, f"--help imports {done.stderr}"


def test_completion_can_be_installed(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "_PPD_BENCH_COMPLETE": "complete_bash",
        "COMP_WORDS": "ppd-bench rep",
        "COMP_CWORD": "1",
    }
    program = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'ppd-bench'\nfrom ppd_bench.cli.main import main; main()",
    ]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert sorted(done.stdout.split()) == ["replay", "report", "reproduce"]


def test_plan_topologies_and_workloads_print_the_papers_counts(tmp_path: Path) -> None:
    assert "3,060" in ppd_bench("plan", cwd=tmp_path).stdout
    assert "17 configurations, 7 layouts" in ppd_bench("topologies", cwd=tmp_path).stdout
    listed = ppd_bench("workloads", cwd=tmp_path).stdout
    assert all(name in listed for name in ("small_tiny", "large_huge_paste", "cpu_chat"))
    assert "6P_2D" in ppd_bench("topologies", "6P_2D", "8R", cwd=tmp_path).stdout


def test_tables_plots_and_report_follow_from_a_run(run: Path) -> None:
    cwd = run.parent
    ppd_bench("build-table", "run", "--w-ttft", "1", "--w-tpot", "3", cwd=cwd)
    assert "1P_3D (x=0) against 1P_3pD (x=1)" in ppd_bench("table", "show", "run/tables/1P_3D.json", cwd=cwd).stdout
    ppd_bench("build-table", "run", "--w-tpot", "1000", "--out", "other", cwd=cwd)
    assert "cells differ" in ppd_bench("table", "diff", "run/tables/1P_3D.json", "other/1P_3D.json", cwd=cwd).stdout
    assert "run/report.html" in ppd_bench("report", "run", cwd=cwd).stdout
    assert "run/plots/pareto.png" in ppd_bench("plot", "run", cwd=cwd).stdout
    compared = ppd_bench("reproduce", "paper", "run", "--out", "run/paper.csv", cwd=cwd).stdout
    assert "simulated" in compared
    assert "push_blocking" in compared
    assert len(pd.read_csv(run / "paper.csv")) == 49


def records(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "records.parquet")


@pytest.mark.slow
def test_a_sweep_killed_again_and_again_ends_with_the_content_of_an_undisturbed_one(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "tables", ignore_errors=True)
    ppd_bench("build-table", "run", cwd=run.parent)
    command = [*PROGRAM, "sweep", *SMALL, "--duration", "4s", "--out", "run"]
    for delay_s in (0.8, 1.4, 2.0, 2.6):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay_s)
        process.kill()
        process.wait()
    done = ppd_bench("sweep", *SMALL, "--duration", "4s", "--out", "run", cwd=tmp_path)
    assert "wrote run/report.html" in done.stdout
    assert_frame_equal(records(tmp_path / "run"), records(run))
    for name in ("summaries.parquet", "deltas.parquet"):
        assert_frame_equal(pd.read_parquet(tmp_path / "run" / name), pd.read_parquet(run / name))
    assert (tmp_path / "run/tables/1P_3D.json").read_bytes() == (run / "tables/1P_3D.json").read_bytes()


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc to see child processes")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_leaves_no_process_behind(how: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen([*PROGRAM, "sweep", "--jobs", "2", "--out", "run"], cwd=tmp_path, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    children: list[int] = []
    until = time.monotonic() + 60
    while len(children) < 3 and time.monotonic() < until:  # two workers and multiprocessing's resource tracker
        time.sleep(0.1)
        children = children_of(process.pid)
    assert len(children) >= 3
    time.sleep(1.0)
    process.send_signal(how)
    _, told = process.communicate(timeout=60)
    until = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert "the same command again" in told


def test_a_second_process_on_the_same_run_folder_is_refused(tmp_path: Path) -> None:
    first = subprocess.Popen([*PROGRAM, "sweep", "--jobs", "1", "--out", "run"], cwd=tmp_path, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "run/manifest.json").exists() and time.monotonic() < until:
            time.sleep(0.1)
        done = ppd_bench("sweep", "--out", "run", cwd=tmp_path, check=4)
        assert str(first.pid) in done.stderr
    finally:
        first.kill()
        first.wait()


def test_the_readme_names_only_verbs_and_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"^(?:\S*/)?ppd-bench ([a-z-]+)", text, re.MULTILINE))
    assert verbs <= {*VERBS}
    assert {"sweep", "build-table"} <= verbs
    for path in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in path:
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("given", "points"),
    [((), "3,060"), (("--device", "cpu"), "20"), (("--executor", "sim", "--device", "cpu"), "3,060")],
)
def test_a_sweep_without_a_name_is_the_one_that_its_executor_can_run(
    given: tuple[str, ...], points: str, tmp_path: Path
) -> None:
    shown = ppd_bench("plan", *given, cwd=tmp_path).stdout
    assert re.search(rf"points\s+│ {points}\s", shown)
