"""Text as tokens and blocks: equal beginnings have equal ids, whatever way the text came in; tokenizers and the estimate."""

from __future__ import annotations

import itertools
import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.workload.traces import open_trace
from ppd_bench.workload.traces.hashing import PartBlocks, TokenBlocks
from ppd_bench.workload.traces.source import json_value
from ppd_bench.workload.traces.text_tokens import EstimatedTokens, TextTokens, text_tokens

TOKENS = st.lists(st.integers(0, 3), max_size=60)


@given(TOKENS, st.lists(st.integers(0, 60), max_size=5), st.integers(1, 8))
def test_ids_do_not_depend_on_how_tokens_come_in(tokens: list[int], cuts: list[int], block_tokens: int) -> None:
    whole, pieces = TokenBlocks(block_tokens), TokenBlocks(block_tokens)
    whole.extend(array("I", tokens))
    edges = sorted({0, len(tokens), *(c for c in cuts if c < len(tokens))})
    for low, high in itertools.pairwise(edges):
        part = array("I", tokens[low:high])
        ahead = pieces.peek(part)
        pieces.extend(part)
        assert ahead == pieces.ids
    assert whole.ids == pieces.ids
    assert whole.n_tokens == pieces.n_tokens == len(tokens)
    assert len(whole.ids) == len(tokens) // block_tokens


@given(TOKENS, TOKENS)
def test_two_sequences_share_exactly_the_blocks_of_their_common_beginning(a: list[int], b: list[int]) -> None:
    blocks = []
    for tokens in (a, b):
        one = TokenBlocks(4)
        one.extend(array("I", tokens))
        blocks.append(one.ids)
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    n_same = sum(x == y for x, y in zip(*blocks, strict=False))
    assert n_same == common // 4
    assert blocks[0][:n_same] == blocks[1][:n_same]


def test_content_known_by_name_is_chained_too() -> None:
    one, other = PartBlocks(512), PartBlocks(512)
    for blocks, second in ((one, 2), (other, 3)):
        blocks.extend(0, 1, 512)
        blocks.extend(0, second, 512)
        blocks.extend(0, 7, 600)
    assert one.ids[0] == other.ids[0]
    assert not set(one.ids[1:]) & set(other.ids[1:])
    assert (len(one.ids), one.n_tokens) == (3, 1624)


@given(st.text(max_size=200))
def test_the_estimate_covers_every_text(text: str) -> None:
    (ids,) = EstimatedTokens().encode([text])
    assert (len(ids) > 0) == bool(text)
    assert len(ids) <= len(text)


@pytest.mark.parametrize(
    ("text", "n_tokens"),
    [
        ("Hello there", 2),
        ("internationalisation", 2),
        ("123456", 2),
        ("你好世界", 2),
        ("    \n\n", 1),
        ("a!=b", 3),
        ("é", 1),
    ],
)
def test_the_estimate_counts_as_it_says(text: str, n_tokens: int) -> None:
    assert len(EstimatedTokens().encode([text])[0]) == n_tokens


def test_text_with_lone_surrogates_is_still_text() -> None:
    value = json_value(b'{"value": "\\ud83d broken"}')
    assert isinstance(value, dict)
    assert len(EstimatedTokens().encode([str(value["value"])])[0]) > 1


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of whole words, made here."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "model"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_counts_exactly_and_is_named(tokenizer: Path, tmp_path: Path) -> None:
    chat = [{"from": "human", "value": "hello world hello"}, {"from": "gpt", "value": "world"}]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"id": "a", "conversations": chat}]))
    for given_path in (tokenizer, tokenizer / "tokenizer.json"):
        trace = open_trace(path, tokenizer=given_path)
        (row,) = trace.rows()
        assert (row.prompt_tokens, row.output_tokens) == (3 + 5 + 3, 1)
        assert trace.format.token_count == "tokenizer"
        assert str(given_path) in trace.notes[0]


def test_a_tokenizer_takes_lone_surrogates(tokenizer: Path) -> None:
    coder: TextTokens = text_tokens(tokenizer)
    assert [list(ids) for ids in coder.encode(["hello \ud83d world"])] == [[1, 0, 2]]
