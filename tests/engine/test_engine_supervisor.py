"""The supervisor with fake engines as real processes: starts, deaths, hangs, restarts, and every way of being left."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from engine_plans import driver_plan

from ppd_bench.core.errors import LaunchError, NotReady, WorkerDied
from ppd_bench.engine.launch_plan import LaunchPlan
from ppd_bench.engine.orphans import clean_orphans, find_orphans
from ppd_bench.engine.ports import port_taken
from ppd_bench.engine.proc_fs import group_members
from ppd_bench.engine.supervisor import Progress, Stage, Supervisor, SupervisorLimits

LIMITS = SupervisorLimits(ready_s=30.0, warm_s=30.0, stop_grace_s=5.0, max_restarts=1)
OWNER = Path(__file__).with_name("engine_owner.py")

Use = Callable[[Supervisor], Coroutine[None, None, None]]


async def nothing(supervisor: Supervisor) -> None:
    pass


def supervised(
    plan: LaunchPlan, folder: Path, use: Use = nothing, limits: SupervisorLimits = LIMITS
) -> tuple[list[Progress], dict[str, int]]:
    """Run ``use`` on the plan's engines; what was told, and the pids. Afterwards nothing may be left, however it went."""
    told: list[Progress] = []
    pids: dict[str, int] = {}

    async def scenario() -> None:
        supervisor = Supervisor(
            plan, log_folder=folder / "logs", state_folder=folder / "state", limits=limits, on_progress=told.append
        )
        async with supervisor:
            pids.update(supervisor.pids)
            await use(supervisor)

    try:
        asyncio.run(scenario())
    finally:
        started = [int(p.detail.split()[1]) for p in told if p.detail.startswith("pid ")]
        assert not any(group_members(pid) for pid in started)
        assert not any(port_taken(c.host, c.port) for c in plan.commands)
        assert list((folder / "state").glob("*")) == []
    return told, pids


def test_a_layout_starts_generates_warms_every_pair_and_ends(tmp_path: Path) -> None:
    async def use(supervisor: Supervisor) -> None:
        assert [(t.prefill_worker, t.decode_worker, t.moved_tokens) for t in supervisor.transfers] == [
            ("P0", "D0", 33),
            ("P0", "D1", 33),
        ]
        assert [e.worker_id for e in supervisor.engines.endpoints] == ["R0", "P0", "D0", "D1"]
        assert set(supervisor.startup_s) == {"R0", "P0", "D0", "D1"}
        assert len(list((tmp_path / "state").iterdir())) == 1
        supervisor.check()

    told, pids = supervised(driver_plan("1R_1P_2D"), tmp_path, use)
    assert len(set(pids.values())) == 4
    by_stage = {stage: [p.worker_id for p in told if p.stage is stage] for stage in Stage}
    assert sorted(by_stage[Stage.READY]) == ["D0", "D1", "P0", "R0"]
    assert by_stage[Stage.WARM] == ["1R_1P_2D"]
    assert (tmp_path / "logs" / "D1.log").read_text().count("serving on") == 1


def test_cpu_engines_start_two_by_two(tmp_path: Path) -> None:
    told, _ = supervised(dataclasses.replace(driver_plan("3R"), device="cpu"), tmp_path)
    stages = [(p.worker_id, p.stage) for p in told if p.stage is Stage.READY or p.detail.startswith("pid")]
    assert stages[:2] == [("R0", Stage.STARTING), ("R1", Stage.STARTING)]
    assert set(stages[2:4]) == {("R0", Stage.READY), ("R1", Stage.READY)}
    assert stages[4:] == [("R2", Stage.STARTING), ("R2", Stage.READY)]


def test_an_engine_that_dies_at_its_start_is_named_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied) as caught:
        supervised(driver_plan("2R", {"R1": "dies"}), tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"R1 ended with exit status 3; the last lines of {tmp_path / 'logs' / 'R1.log'}:"
    assert lines[-2:] == ["    loading shard 29", "    RuntimeError: out of luck"]
    assert len(lines) == 21


@pytest.mark.parametrize("how", ["hangs", "deaf"])
def test_an_engine_that_never_answers_is_not_ready_and_is_ended(tmp_path: Path, how: str) -> None:
    limits = dataclasses.replace(LIMITS, ready_s=1.5)
    with pytest.raises(NotReady, match=r"R0: does not generate after 1\.5 s"):
        supervised(driver_plan("1R", {"R0": how}), tmp_path, limits=limits)


def test_a_pair_that_answers_but_moves_no_kv_is_not_ready(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="no KV went from P0 to D0 in 3 attempts: both answered, but D0 pulled nothing"):
        supervised(driver_plan("1P_1D", {"D0": "no-kv"}), tmp_path)


def test_a_taken_port_is_found_before_anything_starts(tmp_path: Path) -> None:
    plan = driver_plan("2R")
    with socket.create_server((plan.commands[1].host, plan.commands[1].port)):

        async def scenario() -> None:
            async with Supervisor(plan, log_folder=tmp_path, state_folder=tmp_path / "state"):
                raise AssertionError("started")

        with pytest.raises(LaunchError, match=f"R1: port {plan.commands[1].port} is taken on 127.0.0.1"):
            asyncio.run(scenario())
    assert not (tmp_path / "R0.log").exists()


def test_a_death_in_use_is_noticed_at_once_and_the_engine_comes_back_so_often_and_no_more(tmp_path: Path) -> None:
    async def use(supervisor: Supervisor) -> None:
        for _ in range(2):
            old = supervisor.pids["D0"]
            os.kill(old, signal.SIGKILL)
            assert await asyncio.wait_for(supervisor.wait_for_death(), 5.0) == "D0"
            assert supervisor.dead() == ("D0",)
            with pytest.raises(WorkerDied, match="D0 was killed by SIGKILL"):
                supervisor.check()
            await supervisor.restart("D0")
            assert supervisor.pids["D0"] != old
            assert [(t.prefill_worker, t.decode_worker) for t in supervisor.transfers] == [("P0", "D0"), ("P1", "D0")]
            supervisor.check()

    with pytest.raises(WorkerDied, match="D0 was restarted 1 times already and is given up"):
        supervised(driver_plan("2P_2D"), tmp_path, use)


def test_engines_that_died_together_come_back_together(tmp_path: Path) -> None:
    async def use(supervisor: Supervisor) -> None:
        for worker_id in ("P0", "D1"):
            os.kill(supervisor.pids[worker_id], signal.SIGKILL)
        async with asyncio.timeout(10.0):
            while len(supervisor.dead()) < 2:
                await asyncio.sleep(0.01)
        await supervisor.restart(*supervisor.dead())
        assert [(t.prefill_worker, t.decode_worker) for t in supervisor.transfers] == [("P0", "D0"), ("P0", "D1")]
        supervisor.check()

    supervised(driver_plan("1P_2D"), tmp_path, use)


def test_an_engine_that_dies_again_while_it_is_restarted_is_an_error_with_its_log(tmp_path: Path) -> None:
    async def use(supervisor: Supervisor) -> None:
        marker.unlink()  # from now on it dies at its start
        os.kill(supervisor.pids["R0"], signal.SIGKILL)
        await supervisor.wait_for_death()
        with pytest.raises(WorkerDied, match="R0 ended with exit status 3"):
            await supervisor.restart("R0")

    marker = tmp_path / "marker"
    marker.touch()
    supervised(driver_plan("1R", {"R0": f"dies-once={marker}"}), tmp_path, use)


def test_an_exception_in_use_ends_the_engines_and_passes_on(tmp_path: Path) -> None:
    async def use(supervisor: Supervisor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        supervised(driver_plan("1R", {"R0": "child"}), tmp_path, use)


def test_stubborn_engines_and_their_children_are_killed_after_the_grace(tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, stop_grace_s=0.3)
    supervised(driver_plan("1R", {"R0": "stubborn child"}), tmp_path, limits=limits)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, "Interrupted: stopped by SIGTERM; all engines were ended"),
        (signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_signal_to_the_owner_ends_the_engines_first(tmp_path: Path, number: signal.Signals, words: str) -> None:
    with owner(tmp_path, "2R") as (process, pids):
        process.send_signal(number)
        _, errors = process.communicate(timeout=20.0)
        assert words in errors
        assert not any(group_members(pid) for pid in pids)
        assert list((tmp_path / "state").iterdir()) == []


def test_a_closed_terminal_while_engines_start_ends_them_too(tmp_path: Path) -> None:
    with owner(tmp_path, "1R", {"R0": "deaf"}) as (process, pids):
        process.send_signal(signal.SIGHUP)
        _, errors = process.communicate(timeout=20.0)
        assert "Interrupted: stopped by SIGHUP" in errors
        assert not any(group_members(pid) for pid in pids)


def test_a_second_ctrl_c_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    with owner(tmp_path, "1R", {"R0": "stubborn"}) as (process, pids):
        started_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20.0)
        assert time.monotonic() - started_s < 15.0  # the owner's grace is 60 s
        assert not any(group_members(pid) for pid in pids)


def test_engines_of_a_killed_owner_are_found_and_cleaned_by_the_next_start(tmp_path: Path) -> None:
    with owner(tmp_path, "1P_1D", {"D0": "child"}) as (process, pids):
        process.kill()
        process.communicate(timeout=20.0)
        assert all(group_members(pid) for pid in pids)
        found = find_orphans(tmp_path / "state")
        assert sorted(o.engine.worker_id for o in found) == ["D0", "P0"]
        assert {o.owner_pid for o in found} == {process.pid}
        assert clean_orphans(tmp_path / "state", grace_s=5.0) == found
        assert not any(group_members(pid) for pid in pids)


class owner:  # noqa: N801
    """A process that supervises a plan until it is told otherwise; its engines' pids once they are up (or hang)."""

    def __init__(self, folder: Path, name: str, how: dict[str, str] | None = None) -> None:
        words = [f"{worker_id}:{text}" for worker_id, text in (how or {}).items()]
        self._argv = [sys.executable, str(OWNER), str(folder), name, *words]

    def __enter__(self) -> tuple[subprocess.Popen[str], list[int]]:
        self._process = subprocess.Popen(self._argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._pids: list[int] = []
        for line in self._process.stdout:
            word, _, value = line.strip().partition(" ")
            if word == "up":
                break
            self._pids.append(int(value))
        return self._process, self._pids

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        for pid in self._pids:
            if group_members(pid):
                os.killpg(pid, signal.SIGKILL)
