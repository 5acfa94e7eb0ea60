"""One writer per run folder: an advisory lock that vanishes with its process."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ppd_bench.core.errors import StoreError
from ppd_bench.store.atomic import explained, write_bytes
from ppd_bench.store.layout import HOLDER, LOCK


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. The kernel frees it when the process ends, ``kill -9`` included.

    Raises:
        StoreError: another process holds it; names the folder and, where known, the holder.
    """
    lock = FileLock(folder / LOCK)
    with explained(folder / LOCK, "lock the run folder"):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(_held_message(folder)) from None
    try:
        # Beside the lock, not in it: whoever tries the lock may truncate that file.
        write_bytes(folder / HOLDER, json.dumps({"host": platform.node(), "pid": os.getpid()}).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def _held_message(folder: Path) -> str:
    return (
        f"{folder}: {_holder(folder)} is writing to this run folder; wait for it to end (or end it), "
        f"or use another --out or --name"
    )


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / HOLDER).read_bytes())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # absent or just being replaced: the refusal stands without it
        return "another process"
