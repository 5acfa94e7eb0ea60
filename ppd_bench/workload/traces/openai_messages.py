"""OpenAI-style conversations: ``messages[{role, content}]``, as one JSON array or JSON lines.

Content may be text, null or a list of parts; calls of tools count as generated text.
"""

from __future__ import annotations

from ppd_bench.workload.traces.chats import open_chats
from ppd_bench.workload.traces.reader import TEXT_OPTIONS, Reader, ReadOptions
from ppd_bench.workload.traces.source import Head, Source
from ppd_bench.workload.traces.trace import Trace


def matches(head: Head) -> bool:
    return head.kind != "parquet" and "messages" in head.keys and "turns" not in head.keys


def open_openai_messages(source: Source, options: ReadOptions) -> Trace:
    return open_chats(
        source,
        options,
        name="openai_messages",
        list_key="messages",
        role_key="role",
        text_key="content",
        id_keys=("id", "session_id", "conversation_id"),
    )


OPENAI_MESSAGES = Reader(
    name="openai_messages",
    describes="OpenAI messages JSON: messages[{role, content}]",
    takes=TEXT_OPTIONS,
    matches=matches,
    open=open_openai_messages,
)
