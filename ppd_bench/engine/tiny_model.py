"""A model folder of a few kilobytes, for engines without GPUs and without downloads: paths, not decisions.

A small Llama configuration without weights (served with ``--load-format dummy``) and a byte-level BPE tokenizer. Both are
plain JSON, so that writing them needs no machine-learning package.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppd_bench.core.profiles import ModelProfile, model_from_hf_config
from ppd_bench.engine.launch_plan import ALL_ROLES

NAME = "tiny-llama"
VOCABULARY = 1024
BOS, EOS = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID = VOCABULARY - 2, VOCABULARY - 1

FLAGS = {ALL_ROLES: ("--load-format", "dummy")}
"""What ``launch_plan`` needs as ``extra_flags`` to serve it."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tiny_model(folder: Path) -> ModelProfile:
    """Write the model's files into the folder (made if needed); the same bytes every time. Returns its profile."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {"config.json": CONFIG, "tokenizer.json": tokenizer(), "tokenizer_config.json": tokenizer_config}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return model_from_hf_config(NAME, CONFIG)


def tokenizer() -> dict[str, Any]:
    """A tokenizer file (format 1.0): all bytes, pairs of characters up to the vocabulary's size, two special tokens.

    Every id has a text of its own, so that whatever a model without weights generates can be shown.
    """
    symbols = byte_symbols()
    pairs = list(itertools.islice(_pairs(), VOCABULARY - len(symbols) - 2))
    words = [*symbols, *(first + second for first, second in pairs)]
    special = [
        {"id": number, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, text in ((BOS_ID, BOS), (EOS_ID, EOS))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": [f"{first} {second}" for first, second in pairs],
        },
    }


def byte_symbols() -> list[str]:
    """The printable character that stands for each of the 256 bytes in byte-level BPE (GPT-2's mapping)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = itertools.count(0x100)
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def _pairs() -> Iterator[tuple[str, str]]:
    """Letter pairs, then space + letter (as words begin in text), then digit pairs."""
    letters, digits, space = string.ascii_lowercase, string.digits, byte_symbols()[ord(" ")]
    for firsts, seconds in ((letters, letters), (space, letters), (digits, digits)):
        yield from itertools.product(firsts, seconds)
