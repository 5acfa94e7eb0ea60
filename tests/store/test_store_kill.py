from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import store_crash_driver
import store_fabricated as fabricated

from ppd_bench.core.errors import StoreError
from ppd_bench.store.read import read_records

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parents[1])))}


def drive(*arguments: str) -> Any:
    command = [sys.executable, str(HERE / "store_crash_driver.py"), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_killed_at_random_moments_ends_equal_to_an_uninterrupted_one(tmp_path: Path) -> None:
    assert drive(str(tmp_path / "killed"), "random", "0")["n_kills"] >= 3
    store_crash_driver.write_run(tmp_path / "whole", 40)
    assert (tmp_path / "killed/records.parquet").read_bytes() == (tmp_path / "whole/records.parquet").read_bytes()
    records = read_records(tmp_path / "killed")
    expected = [f"{p}-{row}" for p in fabricated.ids(40) if int(p[-4:]) % 3 != 1 for row in range(5)]
    assert records["request_id"].tolist() == expected


@pytest.mark.slow
def test_a_kill_before_any_single_file_operation_is_harmless(tmp_path: Path) -> None:
    result = drive(str(tmp_path / "runs"), "every-step")
    assert result["n_kills"] > 20
    assert result["n_different_records"] == 1


HOLD = """
import os, sys, time
from pathlib import Path
import store_fabricated as fabricated
with fabricated.open_run(Path(sys.argv[1]), fabricated.ids(2)) as run:
    run.append("point0000", fabricated.columns("point0000"))
    run.flush()
    child = os.fork() if sys.argv[2] == "fork" else 1
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("with_child", ["alone", "fork"])
def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path, with_child: str) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder), with_child]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(StoreError) as refusal:
                fabricated.open_run(folder, fabricated.ids(2))
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        assert str(folder) in str(refusal.value)
        assert f"process {holder.pid} on {os.uname().nodename} is writing to this run folder" in str(refusal.value)
        assert "--name" in str(refusal.value)
        try:
            # A worker that outlives its killed parent must not keep the folder locked.
            with fabricated.open_run(folder, fabricated.ids(2)) as run:
                assert run.finished == {"point0000"}
        finally:
            if with_child == "fork":
                os.kill(child, signal.SIGKILL)


def test_a_refusal_without_a_readable_holder_says_another_process(tmp_path: Path) -> None:
    with fabricated.open_run(tmp_path, fabricated.ids(1)):
        (tmp_path / ".holder.json").write_text("{")
        with pytest.raises(StoreError, match="another process is writing to this run folder"):
            fabricated.open_run(tmp_path, fabricated.ids(1))
