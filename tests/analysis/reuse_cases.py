"""Traces for tests of prefix reuse: tiny ones written by hand, random ones with chained ids, and slow reference answers."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from hypothesis import strategies as st

from ppd_bench.analysis.trace_blocks import TraceBlocks, number_blocks
from ppd_bench.core.trace import TraceRow

B = 4
"""Tokens of a block in these traces."""
Prompt = tuple[str | None, str]
"""Session and prompt; every letter is a block's content, a lower-case last one a partial block of 1 token."""


def chained(text: str) -> list[int]:
    """Ids that stand for their whole prefix."""
    return [hash_of(text[: n + 1]) for n in range(len(text))]


def hash_of(prefix: str) -> int:
    value = 0
    for letter in prefix:
        value = (value * 1_000_003 + ord(letter) + 1) % (1 << 62)
    return value


def rows_of(prompts: Sequence[Prompt], *, step_s: float | None = 1.0) -> list[TraceRow]:
    return [
        TraceRow(k, f"r{k}", session, None, None if step_s is None else k * step_s, None, tokens_of(text), 8,
                 array("q", chained(text)))
        for k, (session, text) in enumerate(prompts)
    ]  # fmt: skip


def tokens_of(text: str) -> int:
    return max(1, B * len(text) - (B - 1 if text[-1:].islower() else 0))


def blocks_of(*prompts: Prompt | str) -> TraceBlocks:
    return number_blocks(rows_of([(None, p) if isinstance(p, str) else p for p in prompts]), block_tokens=B)


@st.composite
def random_traces(draw: st.DrawFn) -> TraceBlocks:
    """Up to 25 prompts over few letters, so that prefixes meet, with and without sessions."""
    text = st.text("ABc", min_size=0, max_size=7).map(lambda t: t[:-1].upper() + t[-1:])
    prompts = draw(st.lists(st.tuples(st.sampled_from([None, "s", "t", "u"]), text), min_size=1, max_size=25))
    return number_blocks(rows_of([*prompts, ("s", "AB")]), block_tokens=B)


def prompts_of(trace: TraceBlocks) -> Iterator[tuple[int, int, list[int]]]:
    """Session, prompt tokens and blocks, request by request."""
    for k in range(trace.n_requests):
        blocks = trace.blocks[trace.offsets[k] : trace.offsets[k + 1]].tolist()
        yield int(trace.session[k]), int(trace.prompt_tokens[k]), blocks


def slow_leading(trace: TraceBlocks, *, per_session: bool = False) -> list[int]:
    """Leading held blocks of every request, with sets."""
    held: dict[int, set[int]] = {}
    hits = []
    for session, _, blocks in prompts_of(trace):
        mine = held.setdefault(session if per_session else 0, set())
        n = 0
        while n < len(blocks) and blocks[n] in mine:
            n += 1
        hits.append(n)
        mine.update(blocks)
    return hits


def slow_lru_tokens(trace: TraceBlocks, capacity_blocks: int) -> int:
    """Hit tokens of an LRU cache, block by block: what a request touched leaves tail first."""
    lru: OrderedDict[int, None] = OrderedDict()
    saved = 0
    for _, prompt, blocks in prompts_of(trace):
        n = 0
        while n < len(blocks) and blocks[n] in lru:
            n += 1
        saved += min(n * trace.block_tokens, prompt)
        for block in reversed(blocks):
            lru.pop(block, None)
            lru[block] = None
        while len(lru) > capacity_blocks:
            lru.popitem(last=False)
    return saved


def mooncake_rows(path: Path) -> Iterator[TraceRow]:
    """The Mooncake conversation trace by a reader of its own, so that these figures rest on nothing else."""
    with open(path, encoding="utf-8") as lines:
        for k, line in enumerate(lines):
            entry = json.loads(line)
            yield TraceRow(
                k, f"r{k}", None, None, entry["timestamp"] / 1000, None, entry["input_length"], entry["output_length"],
                array("q", entry["hash_ids"]),
            )  # fmt: skip
