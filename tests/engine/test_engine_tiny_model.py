"""The tiny model's files, as far as they can be read without a machine-learning package."""

from __future__ import annotations

import json
from pathlib import Path

from ppd_bench.engine.tiny_model import BOS, EOS, byte_symbols, tokenizer, write_tiny_model


def test_the_model_is_the_one_that_was_measured(tmp_path: Path) -> None:
    profile = write_tiny_model(tmp_path / "new" / "model")
    assert (profile.hidden_size, profile.n_layers, profile.n_heads, profile.n_kv_heads) == (256, 4, 4, 2)
    assert (profile.head_dim, profile.vocab_size) == (64, 1024)
    assert profile.kv_bytes_per_token == 4096  # 2 x 4 layers x 2 heads x 64 x 4 bytes
    assert json.loads((tmp_path / "new/model/config.json").read_text())["bos_token_id"] == 1022


def test_the_same_bytes_are_written_every_time(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "a")
    write_tiny_model(tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def test_every_id_below_the_vocabulary_has_exactly_one_word() -> None:
    content = tokenizer()
    vocab = content["model"]["vocab"]
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    assert special == {BOS: 1022, EOS: 1023}
    assert sorted(vocab.values()) == list(range(1022))


def test_every_merge_makes_a_word_of_two_words() -> None:
    model = tokenizer()["model"]
    merges = [merge.split(" ") for merge in model["merges"]]
    assert len(merges) == 1022 - 256
    assert all(a in model["vocab"] and b in model["vocab"] and a + b in model["vocab"] for a, b in merges)


def test_bytes_are_shown_as_in_gpt2() -> None:
    symbols = byte_symbols()
    assert (symbols[ord("A")], symbols[ord(" ")], symbols[0], symbols[ord("\n")]) == ("A", "\u0120", "\u0100", "\u010a")
    assert len(set(symbols)) == 256
