"""A registered engine, played by a sleeper, whose owner was killed with -9."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LEAVE = """
import os, subprocess, sys
from pathlib import Path
from ppd_bench.engine.orphans import EngineRegister, RegisteredEngine
from ppd_bench.engine.proc_fs import ProcessGroup, identify
sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
group = ProcessGroup(group_id=sleeper.pid, known=(identify(sleeper.pid),))
EngineRegister(Path(sys.argv[1])).write([RegisteredEngine(worker_id="D0", port=1234, log="D0.log", group=group)])
print(sleeper.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def leave_an_orphan(folder: Path) -> int:
    """A process registers a sleeper and is killed; the sleeper's pid."""
    owner = subprocess.run([sys.executable, "-c", LEAVE, str(folder)], capture_output=True, text=True)
    assert owner.returncode == -9, owner.stderr
    return int(owner.stdout)
