"""The decision log: one JSON line per turn, written by a thread in batches, rotated by size and count.

A row holds ``RequestRecord``'s columns and the router's own (``ROUTER_COLUMNS``); a null is left out. Every file begins with
a line of what was in force then, and a line is added when a table is taken into use. Nothing of a prompt, an answer or a key is
in it.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import orjson

from ppd_bench.core.errors import StoreError

LOG_SCHEMA = 1
HEADER, TABLE = "router-log", "table"
"""Values of ``kind`` in lines that are no turn."""
FILE_NAME = "decisions-{number:06d}.jsonl"
FILE_PATTERN = re.compile(r"decisions-(\d{6,})\.jsonl")
BATCH_S = 0.1
"""How long rows are collected before they are written. The thread looks by itself: waking it would cost the event loop time."""
MAX_WAITING = 100_000
"""Rows that may wait for a stalled disk; further ones are dropped and counted, for the router must go on."""

ROUTER_COLUMNS: Mapping[str, str] = {
    "time_unix_s": "s; when the request was received, on the wall clock",
    "t_recv_s": "s since the router's start, as all t_: the request was there",
    "t_decided_s": "s; the policy had decided",
    "t_p_sent_s": "s; the P leg whose handle was used was sent; null without one",
    "t_p_done_s": "s; that P leg had answered",
    "t_d_sent_s": "s; the generating leg was sent",
    "t_first_byte_s": "s; the first byte of the body went to the client",
    "t_done_s": "s; the answer had ended",
    "decided_route": "what the policy said; route is what was done",
    "x": "1 where a follow-up turn was prefilled where it decoded, 0 where through P; null for first turns and replicas",
    "table_hash": "of the table that decided",
    "cell": "its cell",
    "evidence": "measured, simulated, extrapolated or insufficient",
    "rule": "of the cell",
    "off_grid": "the request was far from everything that the table's sweep saw",
    "identity": "how the conversation was recognised",
    "client_request_id": "X-Request-Id as the client gave it, or got it",
    "path": "of the request",
    "http_status": "that the client got; 499 where it went away",
    "failure": "kind of what went wrong",
    "counters": "fallbacks on the way",
    "request_bytes": "of the request's body",
    "answer_bytes": "of the answer's body",
}
"""Columns beyond ``RequestRecord``: unit and meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Where the log goes, and how much of it is kept: ``max_files`` of ``max_bytes`` each."""

    folder: Path
    max_bytes: int = 64 * 1024 * 1024
    max_files: int = 16


class DecisionLog:
    """Takes rows from the event loop and has a thread write them. ``open`` begins, ``close`` writes what is left.

    ``add`` takes a function that makes the row, so that the making is the thread's work too.
    """

    def __init__(self, settings: LogSettings, header: Mapping[str, Any]) -> None:
        self.n_written = 0
        self.n_dropped = 0
        self.problem: str | None = None  # the latest one; it stays, for rows are missing
        self._settings = settings
        self._header = header
        self._rows: deque[Callable[[], Mapping[str, Any]]] = deque()
        self._number = max(log_numbers(settings.folder), default=0)
        self._file: IO[bytes] | None = None
        self._n_bytes = 0
        self._closing = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="decision-log")

    @property
    def folder(self) -> Path:
        return self._settings.folder

    @property
    def n_waiting(self) -> int:
        return len(self._rows)

    def open(self) -> None:
        """Begin a file of this process' own and start the thread.

        Raises:
            StoreError: the folder cannot be written to.
        """
        try:
            self._settings.folder.mkdir(parents=True, exist_ok=True)
            self._next_file()
        except OSError as error:
            raise StoreError(
                f"{self._settings.folder}: cannot be written to ({error.strerror}); give another --log"
            ) from error
        self._thread.start()

    def add(self, row: Callable[[], Mapping[str, Any]]) -> None:
        """Have a row written soon. Costs the caller a microsecond."""
        if len(self._rows) >= MAX_WAITING:
            self.n_dropped += 1
        else:
            self._rows.append(row)

    def close(self) -> None:
        """Write what is left and end the thread."""
        if self._thread.is_alive():
            self._closing.set()
            self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(BATCH_S)
            self._empty()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _empty(self) -> None:
        """Write all that waits."""
        lines: list[bytes] = []
        while self._rows:
            self._make(self._rows.popleft(), lines)
        n_before = self.n_written
        try:
            self._write(lines)
        except OSError as error:
            self.n_dropped += len(lines) - (self.n_written - n_before)
            self.problem = f"{self._settings.folder}: {error.strerror}; rows were lost"

    def _make(self, row: Callable[[], Mapping[str, Any]], lines: list[bytes]) -> None:
        try:
            lines.append(_line(row()))
        except Exception as error:  # one row that cannot be written must not end the log
            self.n_dropped += 1
            self.problem = f"a row could not be made: {type(error).__name__}: {error}"

    def _write(self, lines: list[bytes]) -> None:
        batch: list[bytes] = []
        for line in lines:
            if self._file is None or self._n_bytes >= self._settings.max_bytes:
                self._flush(batch)
                self._next_file()
            batch.append(line)
            self._n_bytes += len(line)
        self._flush(batch)

    def _flush(self, batch: list[bytes]) -> None:
        if self._file is not None and batch:
            self._file.write(b"".join(batch))
            self._file.flush()
            self.n_written += len(batch)
            batch.clear()

    def _next_file(self) -> None:
        """Begin the next file; the oldest ones go."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._number += 1
        folder = self._settings.folder
        self._file = (folder / FILE_NAME.format(number=self._number)).open("xb")
        head = _line({"kind": HEADER, "schema": LOG_SCHEMA, **self._header})
        self._file.write(head)
        self._file.flush()
        self._n_bytes = len(head)
        for number in sorted(log_numbers(folder))[: -self._settings.max_files]:
            (folder / FILE_NAME.format(number=number)).unlink(missing_ok=True)


def log_numbers(folder: Path) -> list[int]:
    """Numbers of the log's files that are there; they grow over restarts."""
    if not folder.is_dir():
        return []
    return [int(match[1]) for path in folder.iterdir() if (match := FILE_PATTERN.fullmatch(path.name))]


def _line(row: Mapping[str, Any]) -> bytes:
    return orjson.dumps({key: value for key, value in row.items() if value is not None}) + b"\n"
