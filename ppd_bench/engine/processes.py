"""One engine as an operating-system process: its own process group, its log file, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from ppd_bench.core.errors import LaunchError
from ppd_bench.engine.launch_plan import EngineCommand
from ppd_bench.engine.proc_fs import ProcessGroup, ProcessId, identify, thread_cpu_ticks

TAIL_BYTES = 64 * 1024
TAIL_LINES = 20
GROUP_POLL_S = 0.05

SPIN_WINDOW_S = 1.0
SPIN_SHARE = 0.25
"""Of one core: with more engines than cores a spinning thread gets no more than its fair share."""


class EngineProcess:
    """A started engine. Its group's number is the leader's pid; worker processes of the engine are in the same group."""

    def __init__(self, command: EngineCommand, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.command = command
        self.log_path = log_path
        self._process = process
        leader = identify(process.pid)
        self._known: tuple[ProcessId, ...] = (leader,) if leader else ()  # none: it has ended already
        self._reaped = asyncio.ensure_future(process.wait())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The leader's exit status, negative for a signal; null while it runs."""
        return self._process.returncode

    def group(self) -> ProcessGroup:
        """The group with everybody known to be in it, which outlives a leader that was killed."""
        known = ProcessGroup(group_id=self.pid, known=self._known)
        self._known = known.members() or self._known
        return ProcessGroup(group_id=self.pid, known=self._known)

    async def wait(self) -> int:
        """Wait for the leader's end."""
        return await asyncio.shield(self._reaped)

    def ending(self) -> str:
        """How it ended, in words."""
        status = self.exit_status
        if status is None:
            return "is running"
        if status >= 0:
            return f"ended with exit status {status}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"

    async def stop(self, grace_s: float) -> None:
        """End the whole group: SIGTERM, at most ``grace_s`` seconds, SIGKILL. Cancelled, it kills at once."""
        group = self.group()
        try:
            group.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while group.members() and time.monotonic() < deadline:
                await asyncio.sleep(GROUP_POLL_S)
        finally:
            group.signal(signal.SIGKILL)
            await self.wait()


async def spawn(command: EngineCommand, log_path: Path, environment: Mapping[str, str]) -> EngineProcess:
    """Start an engine; its output is appended to the log.

    Raises:
        LaunchError: the program cannot be executed.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        log.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S')} {command.worker_id}: {command.shell_line()}\n".encode())
        log.flush()
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**environment, **command.env},
                start_new_session=True,  # a Ctrl-C at the terminal must reach the engines through us, in our order
            )
        except OSError as error:
            raise LaunchError(
                f"{command.worker_id}: {command.argv[0]} cannot be started ({error.strerror}); check --engine-python"
            ) from error
    return EngineProcess(command, process, log_path)


def last_lines(log_path: Path, n_lines: int = TAIL_LINES) -> list[str]:
    """The end of a log, as far as it can be read."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return log.read().decode(errors="replace").rstrip().splitlines()[-n_lines:]
    except OSError:
        return []


def log_tail(log_path: Path, n_lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented, with the place of the whole: the end of an error message."""
    shown = "\n".join(f"    {line}" for line in last_lines(log_path, n_lines)) or "    (empty)"
    return f"the last lines of {log_path}:\n{shown}"


async def demote_spinners(
    group: ProcessGroup, window_s: float = SPIN_WINDOW_S, *, skip_pid: int | None = None
) -> list[int]:
    """Give the busiest non-main thread of each process of an idle engine the SCHED_IDLE policy; returns their ids.

    Every NIXL agent keeps one progress thread that spins at 100 % of a core. Where cores are fewer than engines it starves
    the others; with SCHED_IDLE it takes only what nobody wants. Call it while the engine has nothing to do: then what
    computes is the spinner. Engines without one are left alone.
    """
    before = {member.pid: thread_cpu_ticks(member.pid) for member in group.members() if member.pid != skip_pid}
    await asyncio.sleep(window_s)
    threshold = SPIN_SHARE * window_s * os.sysconf("SC_CLK_TCK")
    demoted = []
    for pid, ticks in before.items():
        now = thread_cpu_ticks(pid)
        spent = {tid: now.get(tid, 0) - then for tid, then in ticks.items() if tid != pid}
        busiest = max(spent, key=spent.__getitem__, default=None)
        if busiest is not None and spent[busiest] >= threshold and _make_idle(busiest):
            demoted.append(busiest)
    return demoted


def _make_idle(tid: int) -> bool:
    """Whether the thread has been demoted now; false when it was before."""
    with contextlib.suppress(OSError):  # the thread has just ended
        if os.sched_getscheduler(tid) != os.SCHED_IDLE:
            os.sched_setscheduler(tid, os.SCHED_IDLE, os.sched_param(0))
            return True
    return False
