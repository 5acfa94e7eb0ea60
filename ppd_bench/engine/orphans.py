"""Engines that outlived their ppd-bench (``kill -9``, out of memory): remembered in a file, found by the next start.

Every supervisor keeps one file while it has engines. A file whose owner is gone lists orphans. Owner and engines are named by
pid and start time, never by what they are called, so nobody else's process is ever ended.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppd_bench.core.errors import LaunchError
from ppd_bench.engine.proc_fs import ProcessGroup, ProcessId, identify, is_alive, machine_id

POLL_S = 0.05
SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredEngine:
    """What a start after a crash must know of an engine."""

    worker_id: str
    port: int
    log: str
    group: ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """An engine that runs and whose ppd-bench does not. ``owner_pid`` is who started it."""

    owner_pid: int
    engine: RegisteredEngine


def default_state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where state files go: ``$XDG_STATE_HOME/ppd-bench/engines``, by default under ``~/.local/state``."""
    root = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "ppd-bench" / "engines"


class EngineRegister:
    """This process' state file. ``write`` replaces it, ``remove`` deletes it."""

    def __init__(self, folder: Path) -> None:
        owner = identify(os.getpid())
        if owner is None:
            raise LaunchError(
                "processes cannot be told apart here: /proc is missing; ppd-bench starts engines on Linux only"
            )
        self._owner = owner
        self._path = folder / f"{machine_id()}-{owner.pid}-{owner.start_ticks}-{id(self):x}{SUFFIX}"

    def write(self, engines: Iterable[RegisteredEngine]) -> None:
        """Remember these engines, atomically.

        Raises:
            LaunchError: the file cannot be written; without it engines would be lost after a crash.
        """
        content = {"owner": _plain(self._owner), "engines": [_engine_content(engine) for engine in engines]}
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(content))
            new.replace(self._path)
        except OSError as error:
            raise LaunchError(
                f"{self._path}: the list of started engines cannot be written ({error.strerror}); "
                f"make the folder writable, or set XDG_STATE_HOME to one that is"
            ) from error

    def remove(self) -> None:
        """Forget: nothing runs any more."""
        self._path.unlink(missing_ok=True)


def find_orphans(folder: Path) -> tuple[Orphan, ...]:
    """Engines of earlier starts on this machine that still run although their owner does not. Changes nothing."""
    return tuple(orphan for _, orphans in _abandoned(folder) for orphan in orphans)


def clean_orphans(folder: Path, *, grace_s: float = 20.0) -> tuple[Orphan, ...]:
    """End all orphans (SIGTERM, ``grace_s`` seconds, SIGKILL) and forget them. Returns those that were ended."""
    found = list(_abandoned(folder))
    orphans = tuple(orphan for _, some in found for orphan in some)
    groups = [orphan.engine.group for orphan in orphans]
    for group in groups:
        group.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(group.members() for group in groups) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for group in groups:
        group.signal(signal.SIGKILL)
    for path, _ in found:
        path.unlink(missing_ok=True)
    return orphans


def _abandoned(folder: Path) -> Iterator[tuple[Path, list[Orphan]]]:
    """State files of this boot whose owner is gone, and which of their engines live."""
    for path in sorted(folder.glob(f"{machine_id()}-*{SUFFIX}")):
        try:
            content = json.loads(path.read_text())
            owner = ProcessId(**content["owner"])
            engines = [_engine(entry) for entry in content["engines"]]
        except (OSError, ValueError, KeyError, TypeError):  # just removed by its owner, or not ours: nothing to end
            continue
        if not is_alive(owner):
            yield path, [Orphan(owner_pid=owner.pid, engine=engine) for engine in engines if engine.group.members()]


def _plain(process: ProcessId) -> dict[str, int]:
    return {"pid": process.pid, "start_ticks": process.start_ticks}


def _engine_content(engine: RegisteredEngine) -> dict[str, Any]:
    return {
        "worker_id": engine.worker_id,
        "port": engine.port,
        "log": engine.log,
        "group_id": engine.group.group_id,
        "known": [_plain(process) for process in engine.group.known],
    }


def _engine(entry: dict[str, Any]) -> RegisteredEngine:
    known = tuple(ProcessId(**process) for process in entry["known"])
    return RegisteredEngine(
        worker_id=entry["worker_id"],
        port=entry["port"],
        log=entry["log"],
        group=ProcessGroup(group_id=entry["group_id"], known=known),
    )
