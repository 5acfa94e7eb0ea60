"""Prompts as token ids of exact length, and the requests that carry them.

A conversation's ids depend on the point and on the conversation, so no prompt of one point can hit what another left in a
prefix cache. Turn k's prompt is turn k-1's prompt, the ids that were generated, and new ids: never text, which would be
tokenised anew and lose the prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.random import PCG64, Generator

from ppd_bench.core.errors import SpecError
from ppd_bench.core.workload import Session, Turn

_MARGIN = 64
"""One part in this many of the vocabulary is left out at either end, where tokenizers keep their special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Ids that prompts are drawn from: low (included) to high (excluded)."""

    low: int
    high: int


def token_range(vocab_size: int) -> TokenRange:
    """The ids of a vocabulary that are safe to send."""
    margin = -(-vocab_size // _MARGIN)
    return TokenRange(low=margin, high=vocab_size - margin)


def new_ids(session: Session, *, point_id: str, ids: TokenRange) -> list[list[int]]:
    """The new prompt tokens of every turn of a conversation: ``[k]`` has turn k+1's ``input_tokens`` ids.

    Raises:
        SpecError: the conversation comes from a trace with block ids, whose shared prefixes are not made yet.
    """
    if any(turn.block_ids is not None for turn in session):
        raise SpecError(
            f"conversation {session[0].session_id!r} comes from a trace with block ids, which cannot be played on "
            "engines yet; run it with --executor sim"
        )
    seed = hashlib.sha256(f"{point_id}\x1f{session[0].session_id}".encode()).digest()
    numbers = Generator(PCG64(int.from_bytes(seed, "big")))
    drawn = numbers.integers(ids.low, ids.high, size=sum(turn.input_tokens for turn in session)).tolist()
    turns = []
    for turn in session:
        turns.append(drawn[: turn.input_tokens])
        drawn = drawn[turn.input_tokens :]
    return turns


def completion_body(turn: Turn, prompt: Sequence[int], *, model: str, seed: int) -> dict[str, Any]:
    """A streamed completions request that generates exactly ``turn.output_tokens`` tokens, and says which."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": turn.output_tokens,
        "min_tokens": turn.output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
