"""One process: identity, group, log, end; and threads that spin."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_plans import driver_plan

from ppd_bench.core.errors import LaunchError
from ppd_bench.engine.launch_plan import EngineCommand
from ppd_bench.engine.proc_fs import ProcessGroup, ProcessId, group_members, identify, is_alive, thread_cpu_ticks
from ppd_bench.engine.processes import EngineProcess, demote_spinners, last_lines, log_tail, spawn

SPINNER = """
import threading, time
def spin():
    while True: sum(range(10000))
threading.Thread(target=spin, daemon=True).start()
while True: time.sleep(0.05)
"""


def command_of(*argv: str) -> EngineCommand:
    return dataclasses.replace(driver_plan("1R").commands[0], argv=argv)


def python_command(code: str) -> EngineCommand:
    return command_of(sys.executable, "-c", code)


async def printed(process: EngineProcess, word: str) -> None:
    async with asyncio.timeout(20.0):
        while word not in "\n".join(last_lines(process.log_path)):
            await asyncio.sleep(0.01)


def test_a_process_is_named_by_pid_and_start_and_a_zombie_is_not_alive() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert is_alive(me)
    assert not is_alive(ProcessId(pid=me.pid, start_ticks=me.start_ticks + 1))
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 20.0
    while identify(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert identify(child.pid) is None  # ended, and nobody has asked for its status yet
    assert child.wait() == 0


def test_a_group_is_ours_only_while_a_known_member_lives(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = await spawn(
            python_command("print('up', flush=True); import time; time.sleep(600)"), tmp_path / "a.log", os.environ
        )
        members = group_members(process.pid)
        assert members == (identify(process.pid),)
        stranger = ProcessGroup(group_id=process.pid, known=(ProcessId(pid=process.pid, start_ticks=1),))
        assert not stranger.signal(signal.SIGKILL)
        assert process.exit_status is None
        assert process.group().signal(signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL
        assert process.ending() == "was killed by SIGKILL"
        assert process.group().members() == ()

    asyncio.run(scenario())


def test_stopping_ends_children_that_outlive_a_killed_leader(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"

    async def scenario() -> None:
        process = await spawn(python_command(code), tmp_path / "a.log", os.environ)
        await printed(process, "\nup")
        assert len(process.group().known) == 2
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert len(process.group().members()) == 1
        await process.stop(5.0)
        assert process.group().members() == ()

    asyncio.run(scenario())


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )

    async def scenario() -> float:
        process = await spawn(python_command(code), tmp_path / "a.log", os.environ)
        await printed(process, "\nup")
        started_s = time.monotonic()
        await process.stop(0.3)
        assert process.exit_status == -signal.SIGKILL
        return time.monotonic() - started_s

    assert asyncio.run(scenario()) >= 0.3


def test_output_goes_to_the_log_after_the_command_and_is_appended(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "R0.log"

    async def scenario() -> None:
        for word in ("one", "two"):
            process = await spawn(python_command(f"print('{word}'); raise SystemExit(7)"), log, os.environ)
            assert await process.wait() == 7
            assert process.ending() == "ended with exit status 7"

    asyncio.run(scenario())
    lines = log.read_text().splitlines()
    assert [line for line in lines if not line.startswith("---")] == ["one", "two"]
    assert " R0: env " in lines[0]


def test_a_tail_is_short_whatever_the_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 200_000 + b"\n" + b"\n".join(b"line %d \xff" % i for i in range(50)) + b"\n\n")
    assert last_lines(log, 2) == ["line 48 \ufffd", "line 49 \ufffd"]
    assert log_tail(log, 1) == f"the last lines of {log}:\n    line 49 \ufffd"
    assert log_tail(tmp_path / "absent") == f"the last lines of {tmp_path / 'absent'}:\n    (empty)"


def test_a_program_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"R0: /no/such/python cannot be started \(No such file or directory\)"):
        asyncio.run(spawn(command_of("/no/such/python"), tmp_path / "a.log", os.environ))


def test_only_the_thread_that_spins_is_demoted_and_only_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = await spawn(python_command(SPINNER), tmp_path / "a.log", os.environ)
        try:
            async with asyncio.timeout(30.0):
                while len(thread_cpu_ticks(process.pid)) < 2:
                    await asyncio.sleep(0.01)
            assert await demote_spinners(process.group(), 0.2, skip_pid=process.pid) == []
            demoted = await demote_spinners(process.group(), 0.4)
            assert demoted == [tid for tid in thread_cpu_ticks(process.pid) if tid != process.pid]
            assert os.sched_getscheduler(demoted[0]) == os.SCHED_IDLE
            assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
            assert await demote_spinners(process.group(), 0.4) == []
        finally:
            await process.stop(0.0)

    asyncio.run(scenario())
