"""Conversations as rows: each answer is a request whose prompt is everything before it, earlier answers included.

Messages are framed as a ChatML template does: three tokens before the text (start, role, line end) and two behind it, and a
prompt ends with the three that open the answer. Llama 3's template costs the same five. Recorded tools and default system
prompts are not in the text and are not counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

import orjson

from ppd_bench.core.trace import TraceFormat, TraceRow
from ppd_bench.workload.traces.hashing import TokenBlocks
from ppd_bench.workload.traces.source import BadRow
from ppd_bench.workload.traces.text_tokens import TextTokens
from ppd_bench.workload.traces.trace import Pass

Role = Literal["system", "user", "tool", "assistant"]
TEXT_BLOCK_TOKENS = 16
"""vLLM's default block size."""

ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
    "assistant": "assistant", "gpt": "assistant", "function_call": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
}  # fmt: skip
"""Who a sender is. ``function_call`` is generated, what answers it (``observation``, ``tool``) is input."""

_LAST = 0xFFFFFFFF
_OPEN: dict[Role, array[int]] = {
    "system": array("I", [_LAST, _LAST - 2, _LAST - 1]),
    "user": array("I", [_LAST, _LAST - 3, _LAST - 1]),
    "tool": array("I", [_LAST, _LAST - 4, _LAST - 1]),
    "assistant": array("I", [_LAST, _LAST - 5, _LAST - 1]),
}
_CLOSE = array("I", [_LAST - 16, _LAST - 1])
"""Ids that neither a tokenizer nor a checksum is likely to give."""

EMPTY_CONVERSATION = "conversation without messages"
NO_ANSWER = "input without an answer (the conversation ends with it)"
NO_PROMPT = "answer without a prompt (the conversation begins with it)"
EMPTY_ANSWER = "empty answer"
JOINED = "several answers in a row, counted as one"
EMPTY_INPUT = "input whose messages are all empty"
NOT_TEXT = "message part that is not text and is not counted"
DUPLICATE = "conversation id occurs again; given a number"


class Message(NamedTuple):
    role: Role
    text: str


def text_format(name: str, tokens: TextTokens, block_tokens: int | None) -> TraceFormat:
    """What formats of conversations have in common."""
    return TraceFormat(
        name=name,
        time_unit=None,
        block_tokens=block_tokens or TEXT_BLOCK_TOKENS,
        tail="floor",
        id_scope="global",
        row_means="full_prompt",
        loop="completion",
        token_count=tokens.kind,
    )


def messages_of(entries: object, role_key: str, text_key: str, met: Pass, place: str) -> list[Message]:
    """The messages of a conversation, whatever their content is.

    Raises:
        BadRow: not a list of messages, a message without a role or with an unknown one, or content of an unknown kind.
    """
    if not isinstance(entries, list):
        raise BadRow("conversation is not a list of messages")
    found = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise BadRow("message is not an object")
        sender = entry.get(role_key)
        if not isinstance(sender, str):
            raise BadRow("message without a role")
        role = ROLES.get(sender.strip().lower())
        if role is None:
            raise BadRow(f"message of the unknown role {sender[:40]!r}")
        found.append(Message(role, content_text(entry, text_key, met, place)))
    return found


def content_text(entry: dict[str, object], key: str, met: Pass, place: str) -> str:
    """Text, a list of parts, or null; calls of tools count as the JSON that is generated for them.

    Raises:
        BadRow: content of another kind.
    """
    content = entry.get(key)
    calls = entry.get("tool_calls") or entry.get("function_call")
    called = orjson.dumps(calls).decode() if calls else ""
    if content is None or isinstance(content, str):
        return (content or "") + called
    if not isinstance(content, list):
        raise BadRow("message whose content is neither text, null nor a list of parts")
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            parts.append(text)
        else:
            met.remark(NOT_TEXT, place)
    return "".join(parts) + called


@dataclass(slots=True)
class Conversations:
    """Makes the rows of one pass; remembers which ids were there."""

    tokens: TextTokens
    block_tokens: int
    met: Pass
    seen: dict[str, int] = field(default_factory=dict)

    def rows(
        self, name: str, messages: Sequence[Message], place: str, delays_s: Sequence[float | None] = ()
    ) -> Iterator[TraceRow]:
        """One row per answer; ``delays_s`` are those of the answers in order, where a source has them."""
        if not messages:
            self.met.drop(EMPTY_CONVERSATION, place)
            return
        session_id = self.unique(name, place)
        encoded = iter(self.tokens.encode([m.text for m in messages]))
        history, turn, prompted, nothing = TokenBlocks(self.block_tokens), 0, False, True
        runs = [(by_model, list(run)) for by_model, run in groupby(messages, lambda m: m.role == "assistant")]
        for index, (by_model, run) in enumerate(runs):
            texts = [next(encoded) for _ in run]
            if not by_model:
                prompted, nothing = True, not any(map(len, texts))
                if index == len(runs) - 1:
                    self.met.drop(NO_ANSWER, place)
            elif not prompted:
                self.met.drop(NO_PROMPT, place)
            elif not any(map(len, texts)):
                self.met.drop(EMPTY_ANSWER, place)
                continue
            else:
                turn += 1
                delay_s = delays_s[turn - 1] if turn <= len(delays_s) and turn > 1 else None
                self._remark(len(run), nothing, place)
                yield self._row(session_id, turn, history, sum(map(len, texts)), delay_s)
            for message, ids in zip(run, texts, strict=True):
                for part in (_OPEN[message.role], ids, _CLOSE):
                    history.extend(part)

    def questions(self, name: str, messages: Sequence[Message], place: str) -> Iterator[TraceRow]:
        """One row per message, for conversations of which only the questions are known; nothing is generated."""
        session_id = self.unique(name, place)
        history = TokenBlocks(self.block_tokens)
        for turn, (message, ids) in enumerate(
            zip(messages, self.tokens.encode([m.text for m in messages]), strict=True), 1
        ):
            for part in (_OPEN[message.role], ids, _CLOSE):
                history.extend(part)
            yield self._row(session_id, turn, history, 0, None)

    def unique(self, name: str, place: str) -> str:
        """The name, with a number where it was there before."""
        self.seen[name] = self.seen.get(name, 0) + 1
        if self.seen[name] == 1:
            return name
        self.met.remark(DUPLICATE, place)
        return f"{name}#{self.seen[name]}"

    def _remark(self, n_answers: int, nothing_asked: bool, place: str) -> None:
        if n_answers > 1:
            self.met.remark(JOINED, place)
        if nothing_asked:
            self.met.remark(EMPTY_INPUT, place)

    def _row(self, session_id: str, turn: int, history: TokenBlocks, n_output: int, delay_s: float | None) -> TraceRow:
        # The opening of the answer is part of the prompt and, with the answer behind it, of every later one.
        n_prompt = history.n_tokens + len(_OPEN["assistant"])
        ids = history.peek(_OPEN["assistant"])
        row = self.met.counts.n_read
        self.met.keep()
        return TraceRow(row, f"{session_id}.t{turn}", session_id, turn, None, delay_s, n_prompt, n_output, ids)
