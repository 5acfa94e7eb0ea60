"""Recorded agent sessions with text: ``messages`` and, per answer, ``turns[{prefix_len, delay_before_s, ...}]``, one session a
line.

Lengths are those of the text: the recorded counts (``rec_input_tokens``, ``rec_output_tokens``) include tools that are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppd_bench.core.trace import TraceRow
from ppd_bench.workload.traces.chats import entry_id
from ppd_bench.workload.traces.conversation import Conversations, Message, messages_of, text_format
from ppd_bench.workload.traces.reader import TEXT_OPTIONS, Reader, ReadOptions
from ppd_bench.workload.traces.source import BadRow, Head, Source
from ppd_bench.workload.traces.text_tokens import text_tokens
from ppd_bench.workload.traces.trace import Pass, Trace
from ppd_bench.workload.traces.values import seconds, tokens

RECORDED_NOTE = (
    "lengths are those of the text; recorded token counts, which include tools that are not in the text, are not used"
)
UNLIKE = "turns that are not the answers of the messages"


def matches(head: Head) -> bool:
    return head.keys >= {"session_id", "messages", "turns"}


def open_replay_sessions(source: Source, options: ReadOptions) -> Trace:
    coder = text_tokens(options.tokenizer)
    declared = text_format("replay_sessions", coder, options.block_tokens)

    def read(met: Pass) -> Iterator[TraceRow]:
        conversations = Conversations(coder, declared.block_tokens or 0, met)
        for index, (file, number, entry) in enumerate(source.mappings(met)):
            place = file.place(number)
            try:
                messages = messages_of(entry.get("messages"), "role", "content", met, place)
                delays_s = _delays(entry.get("turns"), messages)
            except BadRow as bad:
                met.drop(str(bad), place)
                continue
            yield from conversations.rows(entry_id(entry, ("session_id",), index), messages, place, delays_s)

    return Trace(source=source.shown, format=declared, read=read, standing_notes=(coder.note, RECORDED_NOTE))


def _delays(turns: object, messages: Sequence[Message]) -> list[float | None]:
    """
    Raises:
        BadRow: the turns are not, in order, the answers of the messages.
    """
    answers = [n for n, message in enumerate(messages) if message.role == "assistant"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("turns is not a list of objects")
    if [tokens(turn, "prefix_len") for turn in turns] != answers:
        raise BadRow(UNLIKE)
    return [seconds(turn, "delay_before_s") for turn in turns]


REPLAY_SESSIONS = Reader(
    name="replay_sessions",
    describes="recorded agent sessions, JSON lines: messages[{role, content}], turns[{prefix_len, delay_before_s}]",
    takes=TEXT_OPTIONS,
    matches=matches,
    open=open_replay_sessions,
)
