"""ShareGPT: conversations of ``{from, value}`` messages, as one JSON array or JSON lines.

Raw dumps hold conversations of a single message, ones that begin with the answer or end with the question, senders in any order,
empty answers and ids that occur twice; each is given or dropped by name (``conversation``).
"""

from __future__ import annotations

from ppd_bench.workload.traces.chats import open_chats
from ppd_bench.workload.traces.reader import TEXT_OPTIONS, Reader, ReadOptions
from ppd_bench.workload.traces.source import Head, Source
from ppd_bench.workload.traces.trace import Trace


def matches(head: Head) -> bool:
    return head.kind != "parquet" and "conversations" in head.keys


def open_sharegpt(source: Source, options: ReadOptions) -> Trace:
    return open_chats(
        source, options, name="sharegpt", list_key="conversations", role_key="from", text_key="value", id_keys=("id",)
    )


SHAREGPT = Reader(
    name="sharegpt",
    describes="ShareGPT JSON: conversations[{from, value}]",
    takes=TEXT_OPTIONS,
    matches=matches,
    open=open_sharegpt,
)
