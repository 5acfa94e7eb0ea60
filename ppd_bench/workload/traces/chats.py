"""Readers of conversations that differ only in the names of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppd_bench.core.trace import TraceRow
from ppd_bench.workload.traces.conversation import Conversations, messages_of, text_format
from ppd_bench.workload.traces.reader import ReadOptions
from ppd_bench.workload.traces.source import BadRow, Entry, Source
from ppd_bench.workload.traces.text_tokens import text_tokens
from ppd_bench.workload.traces.trace import Pass, Trace


def open_chats(
    source: Source,
    options: ReadOptions,
    *,
    name: str,
    list_key: str,
    role_key: str,
    text_key: str,
    id_keys: Sequence[str],
    notes: tuple[str, ...] = (),
) -> Trace:
    """A trace of one conversation per entry: ``list_key`` holds its messages, the first of ``id_keys`` that is there its id."""
    tokens = text_tokens(options.tokenizer)
    declared = text_format(name, tokens, options.block_tokens)

    def read(met: Pass) -> Iterator[TraceRow]:
        conversations = Conversations(tokens, declared.block_tokens or 0, met)
        for index, (file, number, entry) in enumerate(source.mappings(met)):
            place = file.place(number)
            try:
                messages = messages_of(entry.get(list_key), role_key, text_key, met, place)
            except BadRow as bad:
                met.drop(str(bad), place)
                continue
            yield from conversations.rows(entry_id(entry, id_keys, index), messages, place)

    return Trace(source=source.shown, format=declared, read=read, standing_notes=(tokens.note, *notes))


def entry_id(entry: Entry, keys: Sequence[str], index: int) -> str:
    """The first id that is there, else the position in the source."""
    return next((str(entry[key]) for key in keys if entry.get(key) not in (None, "")), f"s{index}")
