"""Append-only journals beside the records: one JSON object per line, safe against a kill at any moment.

A line that a crash cut short is dropped on reading. Where two lines speak of one point, the later one counts: a point that was
played but not stored is played again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppd_bench.core.errors import StoreError
from ppd_bench.store.atomic import explained


def append_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Add one line and have it on disk before returning.

    Raises:
        StoreError: it cannot be written.
    """
    line = json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
    with explained(path):
        cut_short = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        with path.open("ab") as file:
            file.write((b"\n" if cut_short else b"") + line.encode())
            file.flush()
            os.fsync(file.fileno())


def read_entries(path: Path) -> list[dict[str, Any]]:
    """All whole lines, in order; none where there is no file.

    Raises:
        StoreError: a line that is neither whole nor the last.
    """
    if not path.exists():
        return []
    with explained(path, "read"):
        lines = path.read_bytes().split(b"\n")
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                entries.append(json.loads(line))
        except ValueError as error:
            # Cut short by a crash: the entry was for a point that is played again.
            if line.startswith(b"{"):
                continue
            raise StoreError(
                f"{path}: line {number} is damaged ({error}); delete the file to go on without it"
            ) from error
    return entries
