"""MT-Bench questions: ``turns`` of texts that a user asks one after another, without answers.

``output_tokens`` is 0, and the history of turn 2 holds turn 1's question alone: an answer's length is known only when a model
is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppd_bench.core.trace import TraceRow
from ppd_bench.workload.traces.chats import entry_id
from ppd_bench.workload.traces.conversation import Conversations, Message, text_format
from ppd_bench.workload.traces.reader import TEXT_OPTIONS, Reader, ReadOptions
from ppd_bench.workload.traces.source import Head, Source
from ppd_bench.workload.traces.text_tokens import text_tokens
from ppd_bench.workload.traces.trace import Pass, Trace

NO_TURNS = "turns is not a list of texts"
NO_ANSWERS_NOTE = "questions without answers: output_tokens is 0, and a later turn's prompt lacks the answers before it"


def matches(head: Head) -> bool:
    turns = head.first.get("turns")
    return "messages" not in head.keys and isinstance(turns, list) and all(isinstance(t, str) for t in turns)


def open_mt_bench(source: Source, options: ReadOptions) -> Trace:
    tokens = text_tokens(options.tokenizer)
    declared = text_format("mt_bench", tokens, options.block_tokens)

    def read(met: Pass) -> Iterator[TraceRow]:
        conversations = Conversations(tokens, declared.block_tokens or 0, met)
        for index, (file, number, entry) in enumerate(source.mappings(met)):
            turns = entry.get("turns")
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
                met.drop(NO_TURNS, file.place(number))
                continue
            name = entry_id(entry, ("question_id", "id"), index)
            yield from conversations.questions(name, [Message("user", turn) for turn in turns], file.place(number))

    return Trace(source=source.shown, format=declared, read=read, standing_notes=(tokens.note, NO_ANSWERS_NOTE))


MT_BENCH = Reader(
    name="mt_bench",
    describes="MT-Bench JSON lines: turns[text], no answers",
    takes=TEXT_OPTIONS,
    matches=matches,
    open=open_mt_bench,
)
