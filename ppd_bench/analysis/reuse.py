"""How much of a trace's prompts was there before: prefix reuse in a cache without bound.

Five figures are called "hit rate" in the wild, and they differ. Each has its own name here:

    hit_ratio                     sum(min(hit blocks * block size, prompt)) / sum(prompt), hit blocks being the leading run of a
                                  prompt's blocks that earlier requests held; the partial last block counts where it has an id
    full_block_hit_ratio          the same, of full blocks only (what a cache of whole blocks gives)
    mean_request_hit_ratio        mean over requests of min(hit blocks * block size, prompt) / prompt
    mean_request_block_hit_ratio  mean over requests of hit blocks / blocks, a partial last block counting as one
    shared_anywhere_ratio         tokens in blocks that occur more than once anywhere, first occurrences included / sum(prompt);
                                  no cache reaches it, since the first occurrence of a block cannot hit

Requests are taken in order of arrival, each before the next; a request's own blocks are held from the next request on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppd_bench.analysis.trace_blocks import PIECE_IDS, Floats, Ints, Numbers, Piece, TraceBlocks

HOTTEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HotBlock:
    """A block by its id in the source, how many prompts hold it, and its 0-based position in them."""

    block_id: int
    n_requests: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Prefix reuse without bound. Ratios of prompt tokens unless their name says otherwise; the module tells the formulas.

    ``intra_session_ratio``: the leading run that the same session's earlier requests held; ``cross_session_ratio``: the rest of
    ``hit_ratio``, which only other sessions held. Both are null where the trace has no sessions. ``shared_block_ratio``: distinct
    blocks that more than one prompt holds / distinct blocks.
    """

    n_requests: int
    n_sessions: int | None
    prompt_tokens: int
    block_tokens: int
    n_block_uses: int
    n_blocks: int
    hit_ratio: float
    full_block_hit_ratio: float
    mean_request_hit_ratio: float
    mean_request_block_hit_ratio: float
    shared_anywhere_ratio: float
    intra_session_ratio: float | None
    cross_session_ratio: float | None
    shared_block_ratio: float
    hottest: tuple[HotBlock, ...]


def reuse(trace: TraceBlocks) -> Reuse:
    """Every figure of prefix reuse without bound, exact, of a trace with requests. Several passes over it, in pieces."""
    hits = hit_blocks(trace)
    total = int(trace.prompt_tokens.sum())
    uses = block_uses(trace)
    hit_ratio = ratio_of(hit_tokens(trace, hits), total)
    intra = ratio_of(hit_tokens(trace, session_hit_blocks(trace)), total) if trace.has_sessions else None
    return Reuse(
        n_requests=trace.n_requests,
        n_sessions=int(np.unique(trace.session).size) if trace.has_sessions else None,
        prompt_tokens=total,
        block_tokens=trace.block_tokens,
        n_block_uses=trace.blocks.size,
        n_blocks=int((uses > 0).sum()),
        hit_ratio=hit_ratio,
        full_block_hit_ratio=ratio_of(full_block_hit_tokens(trace, hits), total),
        mean_request_hit_ratio=float(request_hit_ratios(trace, hits).mean()),
        mean_request_block_hit_ratio=float((hits / np.maximum(np.diff(trace.offsets), 1)).mean()),
        shared_anywhere_ratio=_shared_tokens(trace, uses) / max(1, total),
        intra_session_ratio=intra,
        cross_session_ratio=None if intra is None else hit_ratio - intra,
        shared_block_ratio=float((uses > 1).sum() / max(1, (uses > 0).sum())),
        hottest=_hottest(trace, uses),
    )


def hit_blocks(trace: TraceBlocks) -> Ints:
    """Per request, the leading run of its blocks that an earlier request held."""
    first = first_requests(trace)
    hits = np.zeros(trace.n_requests, dtype=np.int64)
    for piece in trace.pieces():
        hits[piece.start : piece.end] = piece.leading(first[piece.blocks] < piece.request)
    return hits


def session_hit_blocks(trace: TraceBlocks) -> Ints:
    """Per request, the leading run of its blocks that an earlier request of the same session held."""
    hits = np.zeros(trace.n_requests, dtype=np.int64)
    for requests in _session_groups(trace):
        part = trace.select(requests)
        whole = Piece(start=0, end=requests.size, offsets=part.offsets, blocks=part.blocks)
        request = whole.request
        # Sessions of a group are numbered from 0, so session and block fit one 64-bit key.
        session = np.unique(part.session, return_inverse=True)[1].astype(np.int64)
        keys = session[request] << 32 | part.blocks
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        hits[requests] = whole.leading(request[first[inverse]] < request)
    return hits


def hit_tokens(trace: TraceBlocks, hits: Ints) -> Ints:
    """Tokens per request that ``hits`` leading blocks hold: min(hit blocks * block size, prompt)."""
    return np.minimum(hits * trace.block_tokens, trace.prompt_tokens)


def full_block_hit_tokens(trace: TraceBlocks, hits: Ints) -> Ints:
    """The same of full blocks only."""
    return np.minimum(hits, trace.prompt_tokens // trace.block_tokens) * trace.block_tokens


def request_hit_ratios(trace: TraceBlocks, hits: Ints) -> Floats:
    """Hit tokens / prompt tokens per request; 0 for an empty prompt."""
    return hit_tokens(trace, hits) / np.maximum(trace.prompt_tokens, 1)


def ratio_of(tokens: Ints, total: int) -> float:
    """Sum of tokens / all prompt tokens; 0 where there are none."""
    return float(tokens.sum() / total) if total else 0.0


def block_uses(trace: TraceBlocks) -> Ints:
    """How many prompts hold each block (a block that a prompt names twice counts twice)."""
    uses = np.zeros(trace.n_blocks, dtype=np.int64)
    for start in range(0, trace.blocks.size, 4 * PIECE_IDS):
        counted = np.bincount(trace.blocks[start : start + 4 * PIECE_IDS])
        uses[: counted.size] += counted
    return uses


def block_weights(trace: TraceBlocks, piece: Piece) -> Ints:
    """Tokens of every block of a piece: the block size, and what is left of the prompt for a partial last block."""
    weights = np.full(piece.blocks.size, trace.block_tokens, dtype=np.int64)
    n_blocks = np.diff(piece.offsets)
    some = n_blocks > 0
    over = n_blocks * trace.block_tokens - trace.prompt_tokens[piece.start : piece.end]
    weights[piece.offsets[1:][some] - 1] -= np.clip(over[some], 0, trace.block_tokens)
    return weights


def first_requests(trace: TraceBlocks) -> Numbers:
    """The first request that holds each block; the number of requests for blocks that none holds."""
    first = np.full(trace.n_blocks, trace.n_requests, dtype=np.int32)
    for piece in reversed(list(trace.pieces())):
        # Of a repeated index the last value stays: going backwards, the earliest request.
        first[piece.blocks[::-1]] = piece.request[::-1]
    return first


def _session_groups(trace: TraceBlocks) -> list[Ints]:
    """Requests of sessions with more than one, whole sessions together, in groups of a few million blocks."""
    order = np.argsort(trace.session, kind="stable")
    _, starts, counts = np.unique(trace.session[order], return_index=True, return_counts=True)
    n_blocks = np.diff(trace.offsets)[order]
    per_session = np.add.reduceat(n_blocks, starts) if starts.size else starts
    many = counts > 1
    group = np.cumsum(per_session[many]) // PIECE_IDS
    of_group = np.repeat(group, counts[many])
    requests = order[np.repeat(many, counts)]
    return np.split(requests, np.flatnonzero(np.diff(of_group)) + 1) if requests.size else []


def _shared_tokens(trace: TraceBlocks, uses: Ints) -> float:
    return float(sum(int(block_weights(trace, p)[uses[p.blocks] > 1].sum()) for p in trace.pieces()))


def _hottest(trace: TraceBlocks, uses: Ints) -> tuple[HotBlock, ...]:
    """The blocks that most prompts hold; of equally hot ones those that come first in the trace's numbering."""
    n = min(HOTTEST, uses.size)
    bound = np.partition(uses, -n)[-n]
    hot = np.flatnonzero(uses >= max(1, bound))
    hot = hot[np.argsort(-uses[hot], kind="stable")][:n]
    return tuple(
        HotBlock(
            block_id=int(trace.block_ids[block]), n_requests=int(uses[block]), position=_position(trace, int(block))
        )
        for block in hot
    )


def _position(trace: TraceBlocks, block: int) -> int:
    for piece in trace.pieces():
        at = np.flatnonzero(piece.blocks == block)
        if at.size:
            return int(at[0] - piece.offsets[np.searchsorted(piece.offsets, at[0], side="right") - 1])
    return 0
