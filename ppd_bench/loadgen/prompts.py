"""Prompts as token ids of exact length, and the requests that carry them.

A conversation's ids depend on the point and on the conversation, so no prompt of one point can hit what another left in a
prefix cache. Turn k's prompt is turn k-1's prompt, the ids that were generated, and new ids: never text, which would be
tokenised anew and lose the prefix. Recorded content with block ids is made from those, so that it shares what the trace shared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from ppd_bench.core.workload import Session, Turn

Words = NDArray[np.uint64]

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


def is_open_loop(session: Session) -> bool:
    """Whether later turns are sent at their instants, whatever became of the turns before."""
    return len(session) > 1 and all(turn.think_time_s is None for turn in session)


def new_ids(session: Session, *, point_id: str, ids: TokenRange) -> list[list[int]]:
    """What every turn of a conversation adds to the prompt of the turn before it: ``[k]`` are turn k+1's new ids.

    That is its ``input_tokens`` ids behind the answer that was generated; in an open loop, where nobody knows the answer yet,
    ids that stand for it come first. Empty for recorded content, whose prompts ``traced_ids`` makes whole.
    """
    if session[0].block_ids is not None:
        return []
    sizes = [turn.input_tokens for turn in session]
    if is_open_loop(session):
        sizes = [turn.prompt_tokens - before for turn, before in zip(session, _before(session), strict=True)]
    seed = hashlib.sha256(f"{point_id}\x1f{session[0].session_id}".encode()).digest()
    numbers = Generator(PCG64(int.from_bytes(seed, "big")))
    drawn = numbers.integers(ids.low, ids.high, size=sum(sizes)).tolist()
    turns = []
    for size in sizes:
        turns.append(drawn[:size])
        drawn = drawn[size:]
    return turns


def _before(session: Session) -> list[int]:
    return [0, *(turn.prompt_tokens for turn in session[:-1])]


def traced_ids(turn: Turn, *, point_id: str, block_size: int, ids: TokenRange) -> list[int]:
    """The whole prompt of a turn with content ids, exactly ``prompt_tokens`` long.

    Equal block ids of one point give equal tokens, and nothing else does: a block's tokens follow from (point, id, place in the
    block), what is left of the prompt behind its last id from (point, request, place). The last id may stand for a part of a
    block: then the block's first tokens. Answers are not in it: what an engine generated is not what the trace's next prompt
    carries.
    """
    block_tokens = turn.block_tokens or block_size
    blocks = np.asarray(turn.block_ids or (), dtype=np.int64).view(np.uint64)
    starts = _mixed(blocks ^ _salt(point_id, "blocks"))
    counters: Words = np.add.outer(starts, np.arange(block_tokens, dtype=np.uint64)).ravel()[: turn.prompt_tokens]
    left: Words = np.arange(turn.prompt_tokens - len(counters), dtype=np.uint64)
    known, rest = _drawn(counters, ids), _drawn(_mixed(left ^ _salt(point_id, turn.request_id)), ids)
    found: list[int] = np.concatenate([known, rest]).tolist()
    return found


def _salt(*parts: str) -> np.uint64:
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "big"))


def _mixed(values: Words) -> Words:
    """SplitMix64's finaliser: near numbers become far ones, and no two become one."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _drawn(counters: Words, ids: TokenRange) -> Words:
    return np.uint64(ids.low) + _mixed(counters) % np.uint64(ids.high - ids.low)


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
