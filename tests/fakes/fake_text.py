"""Text, chats and tools of a fake engine: prompts as token ids, and what an answer with a tool call looks like."""

from __future__ import annotations

import re
import zlib
from typing import Any

CHARACTERS_PER_TOKEN = 4
ANSWER_TOKEN = re.compile(r" t(\d+)")


def text_ids(text: str) -> list[int]:
    """Tokens of a text. The text of a fake's answer, `` t5 t12``, is read back as the ids that it was made of."""
    ids, end = [], 0
    for match in ANSWER_TOKEN.finditer(text):
        ids += _plain_ids(text[end : match.start()])
        ids.append(int(match[1]))
        end = match.end()
    return ids + _plain_ids(text[end:])


def _plain_ids(text: str) -> list[int]:
    parts = [text[i : i + CHARACTERS_PER_TOKEN] for i in range(0, len(text), CHARACTERS_PER_TOKEN)]
    return [1000 + zlib.crc32(part.encode()) % 100_000 for part in parts]


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    """The prompts of a request, as ids; one for a chat."""
    if "messages" in body:
        return [chat_ids(body)]
    prompt = body.get("prompt") or []
    if isinstance(prompt, str):
        return [text_ids(prompt)]
    if prompt and not isinstance(prompt[0], int):
        return [text_ids(one) if isinstance(one, str) else list(one) for one in prompt]
    return [list(prompt)]


def chat_ids(body: dict[str, Any]) -> list[int]:
    """A chat rendered: tools first, then every message behind a token for its role."""
    ids = text_ids(str(body["tools"])) if body.get("tools") else []
    for message in body["messages"]:
        ids.append(900_000 + zlib.crc32(message["role"].encode()) % 1000)
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        ids += text_ids(content)
        if message.get("tool_calls"):
            ids += text_ids(str([call["function"] for call in message["tool_calls"]]))
    return [*ids, 900_000 + zlib.crc32(b"assistant") % 1000]


def called_tool(body: dict[str, Any]) -> dict[str, Any] | None:
    """The call with which the fake answers: of the first tool that the last message names; null where it answers in words."""
    last = body["messages"][-1]
    if body.get("tool_choice") == "none" or last["role"] != "user" or not isinstance(last.get("content"), str):
        return None
    for tool in body.get("tools") or ():
        name = tool["function"]["name"]
        if name in last["content"]:
            return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": '{"city": "Paris"}'}}
    return None


def pieces_of(call: dict[str, Any]) -> list[dict[str, Any]]:
    """A tool call as a stream brings it: the name, then the arguments bit by bit."""
    function = call["function"]
    arguments = function["arguments"]
    parts = [arguments[i : i + 6] for i in range(0, len(arguments), 6)]
    head = {"index": 0, "id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": ""}}
    return [head, *({"index": 0, "function": {"arguments": part}} for part in parts)]


def opening(request_id: str, *, is_chat: bool, is_chunk: bool = False) -> bytes:
    """What every event and answer begins with. vLLM's id is the request's with a prefix."""
    prefix, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
    kind += ".chunk" if is_chat and is_chunk else ""
    return b'"id":"%b-%b","object":"%b"' % (prefix.encode(), request_id.encode(), kind.encode())
