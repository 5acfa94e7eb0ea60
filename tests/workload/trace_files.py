"""Small traces of every format, made here, each with the rows that real ones trip over; and what a reader must make of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class Made(NamedTuple):
    """A file, and how many rows of it are kept and dropped."""

    path: Path
    n_kept: int
    dropped: dict[str, int]


def lines(path: Path, entries: list[object], *, end: str = "\n", last_end: str = "") -> Path:
    """JSON lines; text entries are written as they are. No last line end, as in many dumps."""
    texts = [e if isinstance(e, str) else json.dumps(e, ensure_ascii=False) for e in entries]
    path.write_text(end.join(texts) + last_end, encoding="utf-8", newline="")
    return path


def mooncake(folder: Path) -> Made:
    def row(ms: object, n: int, ids: object, out: object = 5) -> dict[str, object]:
        return {"timestamp": ms, "input_length": n, "output_length": out, "hash_ids": ids}

    entries: list[object] = [
        row(0, 600, [1, 2]),
        row(0, 1200, [1, 3, 4]),
        row(3000, 100, [2**64 - 1]),
        row(2000, 513, [1, 5]),
        "{broken",
        row(4000, 100, ["a"]),
        row(5000, 512, [1, 2]),
        row(None, 512, [1]),
        row(6000, 512, [1], out=-1),
        [1, 2],
    ]
    dropped = {
        "not valid JSON": 1,
        "hash_ids holds something that is not an integer": 1,
        "number of block ids does not match the prompt's length": 1,
        "timestamp is missing": 1,
        "output_length is not a whole number of at least 0": 1,
        "not a JSON object": 1,
    }
    return Made(lines(folder / "mooncake.jsonl", entries), 4, dropped)


def bailian(folder: Path) -> Made:
    def row(chat: int, parent: int, s: float, n: int, ids: list[int], turn: int) -> dict[str, object]:
        return {
            "chat_id": chat, "parent_chat_id": parent, "timestamp": s, "input_length": n, "output_length": 7,
            "type": "text", "turn": turn, "hash_ids": ids,
        }  # fmt: skip

    entries: list[object] = [
        row(10, -1, 0.5, 20, [1, 2], 1),
        row(11, 10, 1.5, 33, [1, 3, 4], 2),
        row(12, 10, 1.5, 17, [1, 5], 2),
        row(13, 99, 2.0, 16, [6], 4),
        row(14, 11, 2.5, 48, [1, 3, 8], 3),
        row(14, 11, 2.5, 48, [1, 3, 8], 3),
    ]
    return Made(lines(folder / "bailian.jsonl", entries, end="\r\n"), 5, {"chat_id occurs a second time": 1})


def delta(folder: Path) -> Made:
    entries: list[object] = [
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 100, "hash_ids": [1, 2]},
        {"session_id": "b", "timestamp": 500, "input_length": 600, "output_length": 50, "hash_ids": [1, 3]},
        {"session_id": "a", "delay": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]},
        {"session_id": "b", "delay": 10, "input_length": 0, "output_length": 9, "hash_ids": []},
        {"session_id": "b", "delay": 10, "input_length": 4, "output_length": 9, "hash_ids": [6]},
        {"session_id": "a", "delay": 0, "input_length": 50, "output_length": 1},
    ]
    dropped = {
        "input_length is not a whole number of at least 1": 1,
        "an earlier row of its session was dropped": 1,
    }
    return Made(lines(folder / "delta.jsonl", entries), 4, dropped)


def agentic_code(folder: Path) -> Made:
    def request(t: float, n: int, ids: list[int], **more: object) -> dict[str, object]:
        return {"t": t, "type": "n", "in": n, "out": 3, "hash_ids": ids, "api_time": 2.0, "think_time": 1.0, **more}

    helper = {"t": 3.0, "type": "subagent", "agent_id": "agent_001", "requests": [request(0.0, 130, [5, 6])]}
    requests = [request(0.0, 130, [1, 2]), helper, request(9.0, 200, [1, 2, 3]), request(12.0, 200, [1])]
    one = {"id": "s1", "block_size": 64, "hash_id_scope": "local", "requests": requests}
    two = {**one, "id": "s2", "requests": [request(0.0, 64, [1])]}
    empty = {**one, "id": "s3", "requests": []}
    dropped = {"number of block ids does not match the prompt's length": 1, "session without requests": 1}
    return Made(lines(folder / "agentic.jsonl", [one, two, empty]), 4, dropped)


def burstgpt(folder: Path) -> Made:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,230,1317,Conversation log\n"
        "45.5,GPT-4,100,0,100,API log\n"
        "46,GPT-4,100,5,100,API log\n"
        "47,GPT-4,many,5,100,API log\n"
        "48,GPT-4\n"
    )
    path = folder / "burstgpt.csv"
    path.write_text(text, encoding="utf-8")
    dropped = {
        "failed request (0 response tokens)": 1,
        "Total tokens is not the sum of request and response": 1,
        "Request tokens is not a whole number of at least 0": 1,
        "not a CSV row of the header's columns": 1,
    }
    return Made(path, 2, dropped)


def azure(folder: Path) -> Made:
    text = (
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n"
        "2023-11-16 18:17:04.0319601,3180,8\r\n"
        "yesterday,1,1\r\n"
        "2023-11-16 18:17:04.0319601,34,12"
    )
    path = folder / "azure.csv"
    path.write_text(text, encoding="utf-8", newline="")
    return Made(path, 3, {"the time is not a date": 1})


CHATS: list[tuple[str, list[tuple[str, object]]]] = [
    (
        "plain",
        [("human", "Hello there, how are you today?"), ("gpt", "Fine, thanks."), ("human", "Good."), ("gpt", "Yes.")],
    ),
    ("begins-with-answer", [("gpt", "As I said before"), ("human", "go on"), ("gpt", "well")]),
    ("ends-with-question", [("human", "one"), ("gpt", "two"), ("human", "three")]),
    ("single", [("human", "anybody?")]),
    ("doubled", [("human", "a"), ("human", "b"), ("gpt", "c"), ("gpt", "d")]),
    (
        "tools",
        [
            ("system", "be brief"),
            ("human", "time?"),
            ("function_call", "now()"),
            ("observation", "12"),
            ("gpt", "noon"),
        ],
    ),
    ("empty-answer", [("human", "a"), ("gpt", ""), ("human", "b"), ("gpt", "c")]),
    ("plain", [("human", "the same id again\u2028 and a line separator"), ("gpt", "ok")]),
    ("nothing", []),
    ("stranger", [("wizard", "hocus"), ("gpt", "pocus")]),
]
CHATS_KEPT = 2 + 1 + 1 + 0 + 1 + 2 + 1 + 1
CHATS_DROPPED = {
    "answer without a prompt (the conversation begins with it)": 1,
    "input without an answer (the conversation ends with it)": 2,
    "empty answer": 1,
    "conversation without messages": 1,
    "message of the unknown role 'wizard'": 1,
}


def sharegpt(folder: Path) -> Made:
    entries = [{"id": name, "conversations": [{"from": r, "value": v} for r, v in chat]} for name, chat in CHATS]
    path = folder / "sharegpt.json"
    path.write_text("\ufeff" + json.dumps(entries, indent=1, ensure_ascii=False), encoding="utf-8")
    return Made(path, CHATS_KEPT, CHATS_DROPPED)


def openai_messages(folder: Path) -> Made:
    words = {"human": "user", "gpt": "assistant"}
    entries: list[object] = [
        {"id": name, "messages": [{"role": words.get(r, r), "content": v} for r, v in chat]} for name, chat in CHATS
    ]
    entries += [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {}}]},
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "content": "result"},
                {"role": "assistant", "content": "done"},
            ]
        },
        {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "x"}]},
        {"messages": [{"content": "who said this?"}]},
        {"messages": "none"},
    ]
    dropped = CHATS_DROPPED | {
        "message whose content is neither text, null nor a list of parts": 1,
        "message without a role": 1,
        "conversation is not a list of messages": 1,
    }
    return Made(lines(folder / "openai.jsonl", entries), CHATS_KEPT + 2, dropped)


def _wild(entries: list[tuple[str, list[tuple[str, object]]]]) -> list[dict[str, object]]:
    words = {"human": "user", "gpt": "assistant"}
    return [
        {
            "conversation_hash": name,
            "model": "m",
            "conversation": [{"role": words.get(r, r), "content": v, "toxic": False} for r, v in chat],
            "turn": len(chat) // 2,
            "redacted": False,
        }
        for name, chat in entries
    ]


def wildchat_jsonl(folder: Path) -> Made:
    return Made(lines(folder / "wildchat.jsonl", list(_wild(CHATS))), CHATS_KEPT, CHATS_DROPPED)


def wildchat_parquet(folder: Path) -> Made:
    path = folder / "wildchat.parquet"
    pq.write_table(pa.Table.from_pylist(_wild(CHATS)), path, row_group_size=3)
    return Made(path, CHATS_KEPT, CHATS_DROPPED)


def mt_bench(folder: Path) -> Made:
    entries: list[object] = [
        {"question_id": 81, "category": "writing", "turns": ["Write a long story about a horse.", "Now in rhyme."]},
        {"question_id": 82, "turns": []},
        {"question_id": 83, "turns": ["One question only"]},
    ]
    return Made(lines(folder / "mt_bench.jsonl", entries), 3, {"turns is not a list of texts": 1})


def replay_sessions(folder: Path) -> Made:
    said = [
        ("system", "You are an agent."),
        ("user", "go"),
        ("assistant", "ls"),
        ("user", "a b"),
        ("assistant", "done"),
    ]
    messages = [{"role": role, "content": text} for role, text in said]
    turns = [{"prefix_len": 2, "delay_before_s": 0.0}, {"prefix_len": 4, "delay_before_s": 2.5}]
    entries: list[object] = [
        {"session_id": "x", "messages": messages, "turns": turns},
        {"session_id": "y", "messages": messages, "turns": turns[:1]},
    ]
    dropped = {"turns that are not the answers of the messages": 1}
    return Made(lines(folder / "replay.jsonl", entries), 2, dropped)


def flat_sessions(folder: Path) -> Made:
    start = 1_760_428_258_635_837
    task = "Fix the failing test in the parser. " * 20
    entries: list[object] = [
        {
            "timestamp": start + 3_000_000,
            "input": task + "<output>a.py</output>",
            "output": "cat a.py",
            "session_id": "s",
        },
        {"timestamp": start, "input": task, "output": "ls", "session_id": "s"},
        {"timestamp": start + 1, "input": "", "output": "ls", "session_id": "s"},
        {"timestamp": start + 2, "input": ["x"], "output": "ls", "session_id": "s"},
        {"timestamp": start, "input": task, "output": "pwd", "session_id": "t"},
    ]
    dropped = {"empty input": 1, "input or output is not a text": 1}
    return Made(lines(folder / "flat.jsonl", entries), 3, dropped)


MAKERS: dict[str, Callable[[Path], Made]] = {
    "mooncake": mooncake,
    "bailian": bailian,
    "delta": delta,
    "agentic_code": agentic_code,
    "burstgpt": burstgpt,
    "azure": azure,
    "sharegpt": sharegpt,
    "openai_messages": openai_messages,
    "wildchat": wildchat_jsonl,
    "wildchat parquet": wildchat_parquet,
    "mt_bench": mt_bench,
    "replay_sessions": replay_sessions,
    "flat_sessions": flat_sessions,
}
"""By the name of the reader; ``FORMAT ending`` for another form of it."""
