"""Engines that outlive their ppd-bench are found by pid and start time, and ended; nothing else is."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppd_bench.core.errors import LaunchError
from ppd_bench.engine.orphans import (
    EngineRegister,
    RegisteredEngine,
    clean_orphans,
    default_state_folder,
    find_orphans,
)
from ppd_bench.engine.proc_fs import ProcessGroup, identify, machine_id

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fakes"))
from left_behind import leave_an_orphan


def test_an_orphan_is_found_by_the_next_start_and_ended(tmp_path: Path) -> None:
    pid = leave_an_orphan(tmp_path)
    found = find_orphans(tmp_path)
    assert [(o.engine.worker_id, o.engine.port, o.engine.group.group_id) for o in found] == [("D0", 1234, pid)]
    assert clean_orphans(tmp_path, grace_s=5.0) == found
    assert identify(pid) is None
    assert find_orphans(tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


def test_another_process_with_a_reused_pid_is_never_touched(tmp_path: Path) -> None:
    pid = leave_an_orphan(tmp_path)
    path = next(tmp_path.iterdir())
    content = json.loads(path.read_text())
    content["engines"][0]["known"][0]["start_ticks"] -= 1  # as if that pid now belonged to somebody who came later
    path.write_text(json.dumps(content))
    try:
        assert find_orphans(tmp_path) == ()
        assert clean_orphans(tmp_path) == ()
        assert identify(pid) is not None
        assert list(tmp_path.iterdir()) == []  # and the file, which names nobody alive, is gone
    finally:
        os.killpg(pid, 9)


def test_engines_of_a_living_owner_are_not_orphans(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        me = identify(sleeper.pid)
        assert me is not None
        register = EngineRegister(tmp_path)
        group = ProcessGroup(group_id=sleeper.pid, known=(me,))
        register.write([RegisteredEngine(worker_id="R0", port=1, log="R0.log", group=group)])
        assert find_orphans(tmp_path) == ()
        assert clean_orphans(tmp_path) == ()
        assert sleeper.poll() is None
        register.remove()
        register.remove()
        assert list(tmp_path.iterdir()) == []
    finally:
        sleeper.kill()
        sleeper.wait()


def test_files_of_other_boots_machines_and_damaged_ones_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / f"other-boot-{'1-2-3.json'}", tmp_path / f"{machine_id()}-1-2-3.json"]
    for path in others:
        path.write_text('{"owner": {"pid": 1')
    assert clean_orphans(tmp_path) == ()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_folder_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot be written .*set XDG_STATE_HOME"):
        EngineRegister(tmp_path / "file").write([])


def test_state_goes_where_the_desktop_standard_says() -> None:
    assert default_state_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/ppd-bench/engines")
    assert default_state_folder({}) == Path.home() / ".local/state/ppd-bench/engines"


def test_a_group_with_a_living_known_member_is_ended_although_its_leader_is_gone(tmp_path: Path) -> None:
    code = "import subprocess as s, time; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL).pid, flush=True); time.sleep(600)"
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    me = identify(child)
    assert me is not None
    pid = leave_an_orphan(tmp_path)
    os.killpg(pid, 9)
    path = next(tmp_path.iterdir())
    content = json.loads(path.read_text())
    content["engines"][0] |= {"group_id": leader.pid, "known": [dataclasses.asdict(me)]}
    path.write_text(json.dumps(content))
    leader.kill()
    leader.wait()
    leader.stdout.close()
    assert len(clean_orphans(tmp_path, grace_s=5.0)) == 1
    assert identify(child) is None
