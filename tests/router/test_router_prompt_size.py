"""How long prompts are taken to be (B25, B26): against a real BPE tokenizer, on Chinese, code, JSON, chats and tool turns."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppd_bench.core.enums import Status
from ppd_bench.core.errors import SpecError
from ppd_bench.engine.stream import StreamOutcome
from ppd_bench.router.chain import AnswerMessage
from ppd_bench.router.identity import Identifier
from ppd_bench.router.prompt_size import PromptSize, PromptSizer, load_tokenizer
from ppd_bench.router.token_model import Piece, TokenModel

tokenizers = pytest.importorskip("tokenizers", reason="compares with a real tokenizer: pip install tokenizers")

CountTokens = Callable[[str], int]
LLAMA_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Llama 3 cuts text before merging."""
WRAP, BEGIN, HEADER = 5, 1, 4
"""Tokens that the tests' chat template puts around a message, before all, and before the answer."""


# -- texts -----------------------------------------------------------------------------------------------------------


class Texts:
    """Texts of four kinds, drawn from a seed. ``code`` is this Python's own library."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self._code = [file.read_text(encoding="utf-8", errors="ignore") for file in files[seed % 2 : 80 : 2]]
        words = random.Random(0)
        letters = [chr(code) for code in range(0x4E00, 0x4E00 + 1500)]
        self._chinese = ["".join(words.choices(letters, k=words.choice((1, 2, 2, 3)))) for _ in range(1500)]
        self._weights = [1.0 / (rank + 3) for rank in range(1500)]

    def chinese(self, n: int) -> str:
        words = self.rng.choices(self._chinese, self._weights, k=n)
        return "".join(word + self.rng.choice(("", "", "", "", "，", "。")) for word in words)

    def code(self, n: int) -> str:
        text = self.rng.choice([code for code in self._code if len(code) > 4 * n])
        start = self.rng.randrange(len(text) - 4 * n)
        return text[start : start + 4 * n]

    def english(self, n: int) -> str:
        """Words of the docstrings in the library, which is as close to prose as a machine without a network has."""
        text = self.code(3 * n)
        return " ".join(word for word in text.split() if word.isalpha())

    def data(self, n: int) -> str:
        rows = [{"id": self.rng.randrange(10**8), "name": self.rng.choice(("ab", "xyz")), "share": self.rng.random()}]
        return json.dumps(rows * max(1, n // 25))


KINDS = ("chinese", "code", "english", "data")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer, trained on texts that the tests do not use."""
    texts = Texts(0)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA_SPLIT), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((getattr(texts, kind)(400) for kind in KINDS for _ in range(60)), trainer)
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def count(tokenizer_file: Path) -> CountTokens:
    return load_tokenizer(tokenizer_file)


# -- a router and an engine, as far as sizes go ----------------------------------------------------------------------


def usage(prompt_tokens: int | None, answer_tokens: int | None) -> StreamOutcome:
    return StreamOutcome(
        status=Status.OK,
        failure=None,
        message=None,
        http_status=200,
        sent_s=0.0,
        first_byte_s=0.0,
        end_s=0.0,
        chunk_times_s=(),
        chunk_tokens=(),
        exact=False,
        n_tokens=answer_tokens or 0,
        token_ids=(),
        text="",
        finish_reason="stop",
        prompt_tokens=prompt_tokens,
        completion_tokens=answer_tokens,
        cached_tokens=None,
        kv_transfer_params=None,
        prompt_token_ids=None,
    )


class Served:
    """Sizes turns, and plays the engine that counts them."""

    def __init__(self, count: CountTokens, *, exact: bool = False) -> None:
        self.count = count
        self.identifier = Identifier()
        self.sizer = PromptSizer(count=count if exact else None)
        self.errors: list[float] = []
        self.first_errors: list[float] = []
        self.now_s = 0.0

    def turn(
        self, body: dict[str, Any], answer: str | AnswerMessage, *, headers: dict[str, str] | None = None
    ) -> PromptSize:
        self.now_s += 1.0
        identity = self.identifier.identify(headers=headers or {}, body=body, now_s=self.now_s)
        size = self.sizer.size(identity, body)
        actual = self.prompt_tokens(body)
        error = abs(size.context_tokens + size.input_tokens - actual) / actual
        (self.errors if identity.follows else self.first_errors).append(error)
        text = answer if isinstance(answer, str) else (answer.content or "") + json.dumps(answer.tool_calls)
        self.identifier.answered(identity, body=body, answer=answer, now_s=self.now_s)
        self.sizer.answered(identity, body, usage(actual, self.count(text) + 1))
        return size

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        if isinstance(prompt := body.get("prompt"), list):
            return len(prompt)
        if prompt is not None:
            return BEGIN + self.count(prompt)
        n = BEGIN + HEADER + (self.count(json.dumps(body["tools"])) if "tools" in body else 0)
        for message in body["messages"]:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            n += WRAP + self.count((message.get("content") or "") + calls)
        return n


def chat(served: Served, texts: Texts, kinds: Sequence[str], n_turns: int) -> None:
    """One conversation: questions and answers of these kinds and of all lengths."""
    rng, messages = texts.rng, []
    for _ in range(n_turns):
        messages.append({"role": "user", "content": getattr(texts, rng.choice(kinds))(rng.choice((30, 60, 200)))})
        answer = getattr(texts, rng.choice(kinds))(rng.choice((30, 100, 300)))
        served.turn({"model": "m", "messages": list(messages)}, answer)
        messages.append({"role": "assistant", "content": answer})


# -- error ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("chinese",), ("code",), ("english",), ("data",), KINDS], ids=" ".join)
def test_b25_follow_ups_are_within_5_per_cent_by_usage_alone(count: CountTokens, kinds: Sequence[str]) -> None:
    served, texts = Served(count), Texts(1)
    for _ in range(8):
        chat(served, texts, KINDS, 3)  # what the router saw before
    served.errors.clear()
    for _ in range(12):
        chat(served, texts, kinds, 6)
    assert len(served.errors) == 60
    assert np.mean(served.errors) < 0.05
    assert np.quantile(served.errors, 0.9) < 0.1


def test_b25_with_a_tokenizer_every_turn_is_within_5_per_cent(count: CountTokens) -> None:
    served, texts = Served(count, exact=True), Texts(3)
    for _ in range(12):
        chat(served, texts, KINDS, 5)
    assert max(served.errors) < 0.02
    assert max(served.first_errors[3:]) < 0.05  # the template around messages has to be seen once or twice
    assert np.mean(served.first_errors) < 0.05


def test_b25_a_first_turn_without_a_tokenizer_is_far_better_than_characters_over_four(count: CountTokens) -> None:
    served, texts = Served(count), Texts(5)
    naive = []
    for i in range(150):
        text = getattr(texts, KINDS[i % 4])(100)
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        served.turn(body, "ok")
        naive.append(abs(len(text) / 4 - served.prompt_tokens(body)) / served.prompt_tokens(body))
    assert np.mean(served.first_errors[50:]) < 0.5 * np.mean(naive[50:])


@pytest.mark.parametrize("exact", [False, True])
def test_b25_tool_turns(count: CountTokens, exact: bool) -> None:
    served, texts = Served(count, exact=exact), Texts(7)
    tools = [{"type": "function", "function": {"name": "run", "description": texts.english(60)}}]
    for i in range(12):
        messages: list[dict[str, Any]] = [{"role": "user", "content": texts.english(100)}]
        for turn in range(5):
            function = {"name": "run", "arguments": json.dumps({"cmd": texts.code(30)})}
            call = {"id": f"c{i}.{turn}", "type": "function", "function": function}
            answer = AnswerMessage(content=None, tool_calls=[call])
            served.turn({"model": "m", "messages": list(messages), "tools": tools}, answer)
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            kind = texts.rng.choice(("code", "data"))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": getattr(texts, kind)(100)})
    late = served.errors[len(served.errors) // 3 :]
    assert np.mean(late) < (0.02 if exact else 0.05)


def test_b25_token_ids_are_counted(count: CountTokens) -> None:
    served = Served(count)
    ids = list(range(700))
    answer = AnswerMessage(content="text", token_ids=[1, 2, 3])
    assert served.turn({"prompt": ids}, answer) == PromptSize(0, 700, "ids")
    # The engine of this test says that "text" and an end are some tokens: the history as usage has it.
    n_answer = count("text[]") + 1
    size = served.turn({"prompt": [*ids, 1, 2, 3, *range(40)]}, answer)
    assert size == PromptSize(700 + n_answer, 43 - n_answer, "ids")
    assert served.turn({"prompt": [ids]}, "x").input_tokens == 700
    assert served.turn({"prompt": [[1, 2], [3]]}, "x").input_tokens == 3


@pytest.mark.parametrize("collected", [True, False], ids=["answer read", "answer not read"])
@pytest.mark.parametrize("exact", [False, True])
def test_b25_completions_of_text(count: CountTokens, exact: bool, collected: bool) -> None:
    served, texts = Served(count, exact=exact), Texts(9)
    for i in range(15):
        prompt = texts.chinese(150)
        for _ in range(5):
            answer = texts.chinese(60)
            headers = {} if collected else {"x-session-id": f"s{i}"}
            served.now_s += 1.0
            body = {"model": "m", "prompt": prompt}
            identity = served.identifier.identify(headers=headers, body=body, now_s=served.now_s)
            size = served.sizer.size(identity, body)
            actual = served.prompt_tokens(body)
            if identity.follows:
                served.errors.append(abs(size.context_tokens + size.input_tokens - actual) / actual)
            served.identifier.answered(identity, body=body, answer=answer if collected else None, now_s=served.now_s)
            served.sizer.answered(identity, body, usage(actual, count(answer)))
            prompt += answer + texts.chinese(40)
    assert len(served.errors) == 60
    assert np.mean(served.errors[10:]) < (0.02 if exact else 0.05)


# -- what is held ----------------------------------------------------------------------------------------------------


def test_b26_what_came_after_the_last_answer_is_new_and_the_history_is_what_usage_said(count: CountTokens) -> None:
    served = Served(count, exact=True)
    messages = [{"role": "user", "content": "hello there"}]
    first = served.turn({"model": "m", "messages": list(messages)}, "a word")
    assert first.context_tokens == 0
    history = served.prompt_tokens({"messages": messages}) + count("a word") + 1
    messages += [{"role": "assistant", "content": "a word"}, {"role": "user", "content": "go on"}]
    second = served.turn({"model": "m", "messages": list(messages)}, "more")
    assert (second.context_tokens, second.source) == (history, "usage")
    assert second.input_tokens >= count("go on")


def test_b26_an_edited_history_and_a_fork_hold_nothing(count: CountTokens) -> None:
    served = Served(count)
    start = [{"role": "user", "content": "hello there " * 50}, {"role": "assistant", "content": "a word"}]
    served.turn({"messages": start[:1]}, "a word")
    assert served.turn({"messages": [*start, {"role": "user", "content": "this"}]}, "x").context_tokens > 100
    fork = served.turn({"messages": [*start, {"role": "user", "content": "that"}]}, "x")
    edited = served.turn({"messages": [{**start[0], "content": "hi"}, start[1], {"role": "user", "content": "s"}]}, "x")
    assert (fork.context_tokens, edited.context_tokens) == (0, 0)
    assert fork.input_tokens > 100


def test_a_retry_of_an_answered_turn_is_known_to_the_token(count: CountTokens) -> None:
    served = Served(count)
    messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "a word"}]
    served.turn({"messages": messages[:1]}, "a word")
    body = {"messages": [*messages, {"role": "user", "content": "go on"}]}
    served.turn(body, "x")
    size = served.turn(body, "y")
    assert size.context_tokens + size.input_tokens == served.prompt_tokens(body)
    assert size.input_tokens == 1


@pytest.mark.parametrize("exact", [False, True])
def test_reasoning_that_is_not_part_of_the_next_prompt_is_not_counted_into_it(count: CountTokens, exact: bool) -> None:
    texts = Texts(13)
    served = Served(count, exact=exact)
    for _ in range(6):
        chat(served, texts, ("english",), 3)
    errors = []
    for _ in range(10):
        messages: list[dict[str, Any]] = []
        last = 0
        for _ in range(4):
            messages.append({"role": "user", "content": texts.english(40)})
            body = {"model": "m", "messages": list(messages)}
            served.now_s += 1.0
            identity = served.identifier.identify(headers={}, body=body, now_s=served.now_s)
            size, actual = served.sizer.size(identity, body), served.prompt_tokens(body)
            answer = texts.english(60)
            if identity.follows:
                errors.append(abs(size.context_tokens + size.input_tokens - actual) / actual)
                assert size.context_tokens <= last  # what follows the reasoning cannot be used again
            last = actual
            served.identifier.answered(identity, body=body, answer=answer, now_s=served.now_s)
            served.sizer.answered(identity, body, usage(actual, count(answer) + 1500))
            messages.append({"role": "assistant", "content": answer})
    assert len(errors) == 30
    assert np.mean(errors) < (0.05 if exact else 0.12)


def test_a_turns_text_is_counted_once_though_it_is_wanted_when_it_comes_and_when_it_is_answered() -> None:
    counted: list[str] = []
    identifier, sizer = Identifier(), PromptSizer(count=lambda text: counted.append(text) or len(text))
    messages = [{"role": "user", "content": "hello"}]
    for n_turns, said in enumerate(("hello", "and again"), start=1):
        body = {"messages": list(messages)}
        identity = identifier.identify(headers={"x-session-id": "s"}, body=body, now_s=0.0)
        sizer.size(identity, body)
        identifier.answered(identity, body=body, answer="yes", now_s=0.0)
        sizer.answered(identity, body, usage(10 * n_turns, 3))
        assert counted.count(said) == 1
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and again"}]


def test_sums_over_several_answers_or_prompts_teach_nothing(count: CountTokens) -> None:
    served = Served(count)
    body = {"messages": [{"role": "user", "content": "hello"}], "n": 4}
    before = served.sizer.size(served.identifier.identify(headers={}, body=body, now_s=0.0), body)
    identity = served.identifier.identify(headers={"x-session-id": "s"}, body=body, now_s=0.0)
    served.sizer.answered(identity, body, usage(99_999, 99_999))
    assert served.sizer.size(identity, body) == before


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": [None, 3, {"content": {"a": 1}}, {"content": [None, {"type": "image_url"}]}], "tools": 7},
        {"messages": [{"role": "assistant", "tool_calls": 7}], "model": ["m"]},
        {"prompt": None},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a", 3]},
        {"prompt": "\ud800"},
        {"prompt": [1, "x"]},
    ],
)
def test_any_json_object_gets_a_size_and_may_be_answered(body: dict[str, Any]) -> None:
    served = Served(len)
    for told in (usage(7, 3), usage(7, None), usage(None, None)):
        identity = served.identifier.identify(headers={"x-session-id": "s"}, body=body, now_s=0.0)
        size = served.sizer.size(identity, body)
        assert size.context_tokens >= 0
        assert size.input_tokens >= 1
        served.identifier.answered(identity, body=body, answer=None, now_s=0.0)
        served.sizer.answered(identity, body, told)


def test_an_odd_count_does_not_spoil_the_model() -> None:
    model = TokenModel()
    piece = model.features(Piece("some words of plain text " * 40, 1, is_first=True))
    for _ in range(20):
        model.learn(piece, 205)
    model.learn(piece, 100_000)
    assert abs(model.predict(piece) - 205) < 100


def test_a_long_text_is_sampled_and_still_within_a_few_per_cent(count: CountTokens) -> None:
    text = Texts(11).english(200) * 1000
    body = {"prompt": text}
    exact = PromptSizer(count=count)
    identity = Identifier().identify(headers={}, body=body, now_s=0.0)
    actual = count(text)
    assert abs(exact.size(identity, body).input_tokens - actual) < 0.03 * actual
    whole, part = (TokenModel().features(Piece(t)) for t in (text, text[: len(text) // 1000 * 20]))
    assert np.allclose(whole, part * (len(text) / (len(text) // 1000 * 20)), rtol=0.1, atol=50.0)


def test_a_tokenizer_that_cannot_be_used_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    for given in (path, tmp_path):
        with pytest.raises(SpecError, match=r"tokenizer.json: not a tokenizer .*give the model's tokenizer.json"):
            load_tokenizer(given)
