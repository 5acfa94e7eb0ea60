"""The writing side of a run: one folder, one writer, resumable after a kill at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ppd_bench.core.errors import Incomplete, StoreError
from ppd_bench.core.point import content_hash
from ppd_bench.core.record import RECORD_FIELDS, Columns
from ppd_bench.store import resume
from ppd_bench.store.atomic import explained, file_digest, make_folder, remove_leftovers
from ppd_bench.store.layout import DERIVED, HOLDER, LOCK, MANIFEST, RECORDS, SEGMENTS, TABLES
from ppd_bench.store.lock import locked
from ppd_bench.store.manifest import Manifest, read_manifest, write_manifest
from ppd_bench.store.merge import merge
from ppd_bench.store.segments import (
    Segment,
    demote,
    next_number,
    points_table,
    remove_segments,
    sound_segments,
    write_segment,
)

FLUSH_INTERVAL_S = 2.0
FLUSH_ROWS = 32_768
"""Rows that are buffered at most before a segment is written (about 40 MB as Python objects)."""


class RunFolder:
    """An open run folder. Use as a context manager; leaving it writes what is buffered and frees the lock.

    Crash safety: points become durable in segments; ``finalise`` writes ``records.parquet``, then says so in the
    manifest, then removes the segments. Between any two of these steps the folder is readable and resumable.
    """

    def __init__(self, path: Path, manifest: Manifest, points_order: Sequence[str], clock: Callable[[], float]) -> None:
        self.path = path
        self.manifest = manifest
        self.finished: frozenset[str] = frozenset()
        """Points that are on disk."""
        self._order = tuple(points_order)
        self._clock = clock
        self._notices: list[str] = []
        self._segments: list[Segment] = []
        self._pending: list[tuple[str, Columns]] = []
        self._n_pending_rows = 0
        self._remaining = set(points_order)
        self._number = 1
        self._stack = contextlib.ExitStack()
        self._flushed_at_s = clock()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        manifest: Manifest,
        points_order: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Create the run in ``path``, or resume the one that is there.

        Args:
            manifest: of the run as asked for now (``new_manifest``), made with the same ``points_order``.
            points_order: all point ids, in the order of the final rows.
            clock: monotonic seconds; decides when ``append`` writes.

        Raises:
            StoreError: locked by another process, another executor, changed spec, not a run folder, damaged, full disk.
            SchemaMismatch: the folder was written with another schema version.
            ValueError: duplicate point ids, or a manifest made for other points.
        """
        if len(set(points_order)) != len(points_order) or manifest.points_hash != content_hash(list(points_order)):
            raise ValueError("points_order must be free of duplicates and the one that the manifest was made with")
        make_folder(path)
        run = cls(path, manifest, points_order, clock)
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(path))
            run._start()
            run._stack = stack.pop_all()
        return run

    @property
    def notice(self) -> str:
        """What the user should know about how this run was opened, one line each; empty when nothing."""
        return "\n".join(self._notices)

    def append(self, point_id: str, columns: Columns) -> None:
        """Add all rows of one point, which may be none.

        Written at once when ``FLUSH_INTERVAL_S`` have passed since the last write or ``FLUSH_ROWS`` are waiting.

        Raises:
            ValueError: unknown or already appended point, or columns that do not belong to it.
            StoreError: the segment cannot be written; the point stays buffered.
        """
        if point_id not in self._remaining:
            raise ValueError(f"point {point_id!r} is not one of this run's points, or was appended before")
        _check_columns(point_id, self.manifest.executor, columns)
        self._remaining.remove(point_id)
        self._pending.append((point_id, columns))
        self._n_pending_rows += len(columns["point_id"])
        if self._n_pending_rows >= FLUSH_ROWS or self._clock() - self._flushed_at_s >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write the buffered points as one segment; a no-op without any.

        Raises:
            StoreError: it cannot be written; the points stay buffered.
            ValueError: a value does not fit the schema.
        """
        if self._pending:
            points = tuple((point_id, len(columns["point_id"])) for point_id, columns in self._pending)
            table = points_table([columns for _, columns in self._pending])
            self._segments.append(write_segment(self.path, self._number, self.manifest.executor, points, table))
            self._number += 1
            self.finished |= {point_id for point_id, _ in self._pending}
            self._pending.clear()
            self._n_pending_rows = 0
        self._flushed_at_s = self._clock()

    def finalise(self) -> None:
        """Merge all points into ``records.parquet`` and mark the run complete; a no-op when it already is.

        Raises:
            Incomplete: points are missing.
            StoreError: a file cannot be read or written; the same command again continues.
        """
        self.flush()
        if self.manifest.state == "complete":
            return
        if self._remaining:
            raise Incomplete(
                f"{self.path}: {len(self._remaining):,} of {self.manifest.points_text} have not run; nothing was merged"
            )
        records = self.path / RECORDS
        merge(self._segments, self._order, self.manifest.executor, records)
        self._save(dataclasses.replace(self.manifest, state="complete", records_digest=file_digest(records)))
        self._segments = [Segment(records, tuple(p for s in self._segments for p in s.points))]
        remove_segments(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._stack:
            # After a StoreError another write would fail too and hide the first message.
            if not isinstance(error, StoreError):
                self.flush()

    def _start(self) -> None:
        for folder in (self.path, self.path / SEGMENTS, self.path / TABLES):
            remove_leftovers(folder)
        if (self.path / MANIFEST).exists():
            self._resume(read_manifest(self.path))
        else:
            _check_unused(self.path)
            self._save(self.manifest)
        if self.manifest.state != "complete":
            make_folder(self.path / SEGMENTS)
        self._number = next_number(self.path)
        self._flushed_at_s = self._clock()

    def _resume(self, stored: Manifest) -> None:
        resume.check_executor(self.path, stored, self.manifest)
        self._segments, damages = sound_segments(self.path, stored)
        self.finished = frozenset(point for segment in self._segments for point, _ in segment.points)
        self._notices = [*damages, *resume.check_points(self.path, stored, self.manifest, self.finished, self._order)]
        self._remaining -= self.finished
        merged = resume.merged(stored, self.manifest)
        is_merged = [segment.path.name for segment in self._segments] == [RECORDS]
        if not is_merged:
            self._continue(merged)
        elif stored.points_hash == merged.points_hash:
            remove_segments(self.path)
            self._save(dataclasses.replace(merged, state="complete", records_digest=stored.records_digest))
        else:
            self._extend(stored, merged)

    def _continue(self, merged: Manifest) -> None:
        """Go on with segments. ``records.parquet`` is at most the trace of a crash before the manifest said so."""
        self._remove(RECORDS, *DERIVED)
        self._save(merged)

    def _extend(self, stored: Manifest, merged: Manifest) -> None:
        """Reopen a finished run for more points, or for another order of the same ones."""
        self._remove(*DERIVED)
        remove_segments(self.path)
        make_folder(self.path / SEGMENTS)
        self._segments = [demote(self.path, stored, self._segments[0])]
        self._save(merged)

    def _remove(self, *names: str) -> None:
        for name in names:
            with explained(self.path / name, "remove"):
                (self.path / name).unlink(missing_ok=True)

    def _save(self, manifest: Manifest) -> None:
        write_manifest(self.path, manifest)
        self.manifest = manifest


def _check_unused(path: Path) -> None:
    """Never adopt a folder that somebody uses for something else."""
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in (LOCK, HOLDER))
    if strangers:
        raise StoreError(
            f"{path}: not a run folder ({MANIFEST} is missing) and not empty (it holds {', '.join(strangers[:5])}); "
            f"use another --out or --name"
        )


def _check_columns(point_id: str, executor: str, columns: Columns) -> None:
    if tuple(sorted(columns)) != tuple(sorted(RECORD_FIELDS)):
        differing = sorted(set(columns) ^ set(RECORD_FIELDS))
        raise ValueError(f"point {point_id}: missing or unknown columns: {', '.join(differing)}")
    if len({len(values) for values in columns.values()}) > 1:
        raise ValueError(f"point {point_id}: columns differ in length")
    if set(columns["point_id"]) - {point_id} or set(columns["executor"]) - {executor}:
        raise ValueError(f"point {point_id}: point_id or executor column names another point or executor")
