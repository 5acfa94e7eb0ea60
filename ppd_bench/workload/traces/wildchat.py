"""WildChat: ``conversation[{role, content, ...}]``, as Parquet or JSON lines.

Source: allenai/WildChat-1M. Of its instants only those of answers are recorded, to the second; they are neither arrivals nor
think times and are not read. Toxic and redacted conversations are read as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ppd_bench.core.errors import SpecError
from ppd_bench.workload.traces.chats import open_chats
from ppd_bench.workload.traces.reader import TEXT_OPTIONS, Reader, ReadOptions
from ppd_bench.workload.traces.source import Entry, Head, Source, SourceFile
from ppd_bench.workload.traces.trace import Pass, Trace

ID_KEYS = ("conversation_hash", "conversation_id")
BATCH_ROWS = 256


def matches(head: Head) -> bool:
    return "conversation" in head.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParquetSource(Source):
    """Parquet files as entries, a few conversations at a time."""

    def mappings(self, met: Pass) -> Iterator[tuple[SourceFile, int, Entry]]:
        for file in self.files:
            if file.kind != "parquet":
                yield from Source(shown=self.shown, files=(file,)).mappings(met)
                continue
            columns = [name for name in ("conversation", *ID_KEYS) if name in file.schema().names]
            if "conversation" not in columns:
                raise SpecError(f"{file.shown}: no column conversation")
            number = 0
            for batch in file.batches(columns, BATCH_ROWS):
                for entry in batch.to_pylist():
                    number += 1
                    yield file, number, entry


def open_wildchat(source: Source, options: ReadOptions) -> Trace:
    return open_chats(
        _ParquetSource(shown=source.shown, files=source.files),
        options,
        name="wildchat",
        list_key="conversation",
        role_key="role",
        text_key="content",
        id_keys=ID_KEYS,
        notes=(
            "WildChat records when answers were given, not when requests came: there are no arrivals and no think times",
        ),
    )


WILDCHAT = Reader(
    name="wildchat",
    describes="WildChat Parquet or JSON lines: conversation[{role, content}]",
    takes=TEXT_OPTIONS,
    matches=matches,
    open=open_wildchat,
)
