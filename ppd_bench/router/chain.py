"""What a request says of its conversation, as hashes: no table, no clock, no IO.

A chat is hashed message by message. A follow-up carries its predecessor's messages, the answer and something new, so the
hash before its last answer is the predecessor's own. A completion has no messages: its prompt starts with an earlier prompt
and answer, and is hashed block by block to find where (``PromptHash``).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

DIGEST_BYTES = 12
BLOCK_BYTES = 512
"""Prompts of completions are looked up at multiples of this length: 512 bytes of text, or 128 token ids."""

PREFIX_FIELDS = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs", "cache_salt")
"""Fields that change the rendered prompt or where its KV may be used again: another value is another conversation."""

MAX_LENGTHS = 256
"""Lengths of prompts that are told apart within one block; the oldest leave first."""

UNKNOWN_ANSWER = b"?"

Mark = tuple[bytes, int]
"""Where a completion's next turn is looked for: the hash of its whole blocks, and its length in bytes."""


class AnswerMessage(NamedTuple):
    """An answer in more detail than its text. ``token_ids`` matter only where prompts are token ids."""

    content: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    token_ids: Sequence[int] = ()


class Chat(NamedTuple):
    """A chat request. ``request``: hash of all its messages. ``prior``: hash of those before its last answer, null without one.

    ``answers``: that answer in the forms in which it may be known, the most telling first. ``first``: hash of the messages up to
    and with the first answer. ``n_answers``: assistant messages.
    """

    request: bytes
    prior: bytes | None
    answers: tuple[bytes, ...]
    first: bytes
    n_answers: int


def digest(*parts: bytes) -> bytes:
    """One hash of several parts; where one ends and the next begins counts."""
    joined = b"".join([b"%d:%b" % (len(part), part) for part in parts])
    return hashlib.blake2b(joined, digest_size=DIGEST_BYTES).digest()


def encode(text: str) -> bytes:
    """UTF-8 of any string, lone surrogates included."""
    return text.encode("utf-8", "surrogatepass")


def prefix_fields(body: Mapping[str, Any]) -> bytes:
    """The request's ``PREFIX_FIELDS``, in one form."""
    return b"".join([encode(name) + canonical(body[name]) for name in PREFIX_FIELDS if body.get(name)])


# -- chats -----------------------------------------------------------------------------------------------------------


def read_chat(root: bytes, messages: Sequence[Any], *, continues_last: bool = False) -> Chat:
    """Hash a chat. ``continues_last``: the last message is the beginning of the answer that is asked for, not history."""
    history = messages[:-1] if continues_last else messages
    running = hashlib.blake2b(root, digest_size=DIGEST_BYTES)
    before_last, first, last, n_answers = running, b"", None, 0
    for message in history:
        is_answer = isinstance(message, Mapping) and message.get("role") == "assistant"
        if is_answer:
            before_last, last, n_answers = running.copy(), message, n_answers + 1
        data = message_bytes(message)
        running.update(b"%d:%b" % (len(data), data))
        if is_answer and not first:
            first = running.digest()
    return Chat(
        request=running.digest(),
        prior=None if last is None else before_last.digest(),
        answers=() if last is None else _answer_forms(last),
        first=first,
        n_answers=n_answers,
    )


def continues_last(body: Mapping[str, Any]) -> bool:
    """Whether the last message is an answer's beginning that the engine goes on with (vLLM: continue_final_message)."""
    messages = body.get("messages")
    if not body.get("continue_final_message") or not isinstance(messages, list) or not messages:
        return False
    return isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant"


def chat_answer(body: Mapping[str, Any], answer: str | AnswerMessage | None) -> bytes:
    """An answer of a chat in the form that it has as a message of the next request."""
    message = AnswerMessage(content=answer) if isinstance(answer, str) else answer or AnswerMessage()
    text = message.content or ""
    if continues_last(body):
        text = content_text(body["messages"][-1].get("content")) + text
    if not text and not message.tool_calls:
        return UNKNOWN_ANSWER
    return message_bytes({"role": "assistant", "content": text, "tool_calls": message.tool_calls})


def message_bytes(message: Any) -> bytes:
    """A message in one form, however its client spells it: what never reaches the prompt is left out (ids of answers, reasoning,
    nulls), parts of text are one text, and the space around an answer is dropped, since clients and templates trim it."""
    if not isinstance(message, Mapping):
        return canonical(message)
    role, text = message.get("role"), content_text(message.get("content"))
    if role == "assistant":
        text = text.strip()
        calls = message.get("tool_calls")
        extra = [
            message.get("function_call"),
            [_call(call) for call in calls] if isinstance(calls, (list, tuple)) else calls,
        ]
    else:
        extra = [message.get("name"), message.get("tool_call_id")]
    tail = canonical(extra) if extra[0] or extra[1] else b""
    return b"%b\x1f%b\x1f%b" % (encode(str(role)), encode(text), tail)


def _answer_forms(message: Mapping[str, Any]) -> tuple[bytes, ...]:
    whole = message_bytes(message)
    if not message.get("tool_calls"):
        return (whole, UNKNOWN_ANSWER)
    return (whole, message_bytes({"role": "assistant", "content": message.get("content")}), UNKNOWN_ANSWER)


def content_text(content: Any) -> str:
    """The text of a message's content: a string, null, or parts; parts that are not text stand for themselves."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join([_part(part) for part in content])
    return canonical(content).decode("utf-8", "replace")


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else canonical(part).decode("utf-8", "replace")


def _call(call: Any) -> Any:
    """A tool call by id, name and arguments; arguments by their value, for clients parse and print them again."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def canonical(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError, RecursionError):  # what orjson did not read itself: nothing that comes as JSON
        return encode(ascii(type(value)))


# -- completions -----------------------------------------------------------------------------------------------------


def prompt_bytes(prompt: Any) -> bytes | None:
    """A prompt of text or of token ids as bytes; null for a list of prompts, which is no conversation."""
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, list):
        return ids_bytes(prompt[0] if len(prompt) == 1 and isinstance(prompt[0], list) else prompt)
    return None


def ids_bytes(ids: Sequence[Any]) -> bytes | None:
    """Token ids, four bytes each; null where something is no token id."""
    try:
        return array("I", ids).tobytes()
    except (TypeError, OverflowError, ValueError):
        return None


def completion_answer(body: Mapping[str, Any], answer: str | AnswerMessage | None) -> bytes | None:
    """What the next prompt has after this one: the answer's text, or its ids where the prompt is ids. Null where unknown."""
    if body.get("echo"):
        return None
    message = AnswerMessage(content=answer) if isinstance(answer, str) else answer or AnswerMessage()
    if isinstance(body.get("prompt"), str):
        return encode(message.content) if message.content else None
    return ids_bytes(message.token_ids) if message.token_ids else None


class Lengths:
    """Lengths of known prompts by the hash of their whole blocks. Nearly every block has one, which then takes no set."""

    def __init__(self) -> None:
        self._by_block: dict[bytes, int | dict[int, int]] = {}

    @property
    def n_blocks(self) -> int:
        return len(self._by_block)

    def at(self, block: bytes) -> Collection[int]:
        """Known lengths of prompts that begin with these blocks and end in the next."""
        held = self._by_block.get(block)
        return () if held is None else (held,) if isinstance(held, int) else held

    def add(self, block: bytes, length: int) -> None:
        held = self._by_block.get(block)
        if held is None:
            self._by_block[block] = length
            return
        counts = self._by_block[block] = {held: 1} if isinstance(held, int) else held
        counts[length] = counts.pop(length, 0) + 1
        if len(counts) > MAX_LENGTHS:
            del counts[next(iter(counts))]

    def discard(self, block: bytes, length: int) -> None:
        held = self._by_block.get(block)
        if isinstance(held, dict):
            count = held.pop(length, 0) - 1
            if count > 0:
                held[length] = count
        if held == length or held == {}:
            del self._by_block[block]


class PromptHash:
    """Hashes of a prompt's beginnings."""

    def __init__(self, root: bytes, data: bytes) -> None:
        self._root = root
        self._data = memoryview(data)

    def whole(self) -> bytes:
        """The hash of all of it."""
        return self._state(len(self._data)).digest()

    def block(self) -> bytes:
        """The hash of its last whole number of blocks."""
        return self._state(len(self._data) // BLOCK_BYTES * BLOCK_BYTES).digest()

    def known(self, known: Lengths) -> Iterator[tuple[int, bytes]]:
        """Beginnings that may be known, as (bytes, hash), the longest first."""
        found = []
        running = hashlib.blake2b(self._root, digest_size=DIGEST_BYTES)
        for start in range(0, len(self._data) + 1, BLOCK_BYTES):
            lengths = known.at(running.digest())
            if lengths:
                found.append((start, running.copy(), lengths))
            running.update(self._data[start : start + BLOCK_BYTES])
        for start, state, lengths in reversed(found):
            yield from self._beginnings(start, state, lengths)

    def _beginnings(self, start: int, state: hashlib.blake2b, lengths: Collection[int]) -> list[tuple[int, bytes]]:
        at, hashes = start, []
        for length in sorted(lengths):
            if length > len(self._data):
                break
            state.update(self._data[at:length])
            at = length
            hashes.append((length, state.digest()))
        return hashes[::-1]

    def _state(self, n_bytes: int) -> hashlib.blake2b:
        state = hashlib.blake2b(self._root, digest_size=DIGEST_BYTES)
        state.update(self._data[:n_bytes])
        return state
