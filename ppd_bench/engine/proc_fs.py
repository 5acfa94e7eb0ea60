"""What Linux tells of processes: who a pid is (its start time), who is in a group, and how much each thread has computed.

A pid alone names nobody, because numbers are used again; with its start time it names one process of this boot.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process of this boot: its number and its start, in clock ticks since the boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """A process group by its number and some of its members.

    The kernel gives the number to nobody else while a member lives, so one known member proves that the group is ours.
    """

    group_id: int
    known: tuple[ProcessId, ...]

    def members(self) -> tuple[ProcessId, ...]:
        """Who is in it now; empty when no known member is."""
        members = group_members(self.group_id)
        return members if any(member in self.known for member in members) else ()

    def signal(self, number: signal.Signals) -> bool:
        """Signal all members; false when there are none left."""
        if not self.members():
            return False
        try:
            os.killpg(self.group_id, number)
        except (ProcessLookupError, PermissionError):  # ended meanwhile
            return False
        return True


def _stat_fields(path: Path) -> list[str] | None:
    """Fields of a ``stat`` file from the state on (field 3 of proc(5)); null when the process is gone or a zombie."""
    try:
        text = path.read_text()
    except (OSError, ValueError):  # ended between listing and reading
        return None
    fields = text[text.rindex(")") + 2 :].split()  # a command name may contain spaces and brackets
    return None if fields[0] in "ZXx" else fields


def identify(pid: int) -> ProcessId | None:
    """Who this pid is now; null when nobody alive has it."""
    fields = _stat_fields(PROC / str(pid) / "stat")
    return ProcessId(pid=pid, start_ticks=int(fields[19])) if fields else None


def is_alive(process: ProcessId) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    return identify(process.pid) == process


def group_members(group_id: int) -> tuple[ProcessId, ...]:
    """All live processes of a process group."""
    members = []
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            fields = _stat_fields(entry / "stat")
            if fields and int(fields[2]) == group_id:
                members.append(ProcessId(pid=int(entry.name), start_ticks=int(fields[19])))
    return tuple(members)


def thread_cpu_ticks(pid: int) -> dict[int, int]:
    """Clock ticks of CPU time of every thread of a process, by thread id; empty when it is gone."""
    try:
        entries = list((PROC / str(pid) / "task").iterdir())
    except OSError:
        return {}
    stats = {int(entry.name): _stat_fields(entry / "stat") for entry in entries}
    return {tid: int(fields[11]) + int(fields[12]) for tid, fields in stats.items() if fields}


def machine_id() -> str:
    """This boot and pid namespace: a pid of another boot, machine or container means nothing here."""
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink(PROC / "self/ns/pid").strip("pid:[]")
    return f"{boot}-{namespace}"
