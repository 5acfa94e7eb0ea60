"""What every turn's prompt and answer are made of: block ids of the engine's size, as ranges (``kv.Chain``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ppd_bench.core.errors import SpecError
from ppd_bench.core.workload import Session, Turn
from ppd_bench.sim.kv import Chain

Ints = NDArray[np.int64]


def chains_of(sessions: Sequence[Session], block_size: int) -> list[list[Chain]]:
    """Block ids of every turn's prompt and answer: ``chains[s][k]``.

    A conversation without trace ids is one private run of consecutive ids. Traced prompts share ids where their leading block
    ids are equal, whatever conversation they belong to. An answer has the ids that the next prompt gives it where that prompt
    continues this one, and private ids otherwise. A trace's block of several engine blocks is so many consecutive ids; several
    trace blocks to one engine block are told apart by the last of them, which stands for its whole prefix.

    Raises:
        SpecError: neither the trace's block size nor the engine's is a multiple of the other.
    """
    traced = [session for session in sessions if session[0].block_ids is not None]
    ids = _BlockIds(_Contents(traced, block_size), block_size)
    return [ids.private(s) if s[0].block_ids is None else ids.traced(s) for s in sessions]


class _Content:
    """What is known of one turn's content: numbers of trace blocks, of which the first ``n_tokens`` tokens count."""

    def __init__(self, turn: Turn, following: Turn | None, block_size: int) -> None:
        ids, after = _ids(turn), _ids(following)
        self.block_tokens = turn.block_tokens or block_size
        whole = turn.prompt_tokens + turn.output_tokens
        continued = np.array_equal(after[: len(ids)], ids)
        self.ids = after[: max(len(ids), whole // self.block_tokens)] if continued else ids
        self.n_tokens = min(len(self.ids) * self.block_tokens, whole if continued else turn.prompt_tokens)


def _ids(turn: Turn | None) -> Ints:
    return np.asarray((turn.block_ids or ()) if turn is not None else (), dtype=np.int64)


class _Contents:
    """The traced turns' contents, with block ids numbered by first appearance: equal prefix, equal number."""

    def __init__(self, sessions: Sequence[Session], block_size: int) -> None:
        self._turns = [
            _Content(turn, following, block_size)
            for session in sessions
            for turn, following in zip(session, [*session[1:], None], strict=True)
        ]
        numbers = _numbered([content.ids for content in self._turns])
        self.n_blocks = int(numbers.max()) + 1 if len(numbers) else 0
        self.most_parts = max((_parts(c.block_tokens, block_size)[0] for c in self._turns), default=1)
        first = 0
        for content in self._turns:
            last = first + len(content.ids)
            content.ids = numbers[first:last]
            first = last

    def __iter__(self) -> Iterator[_Content]:
        return iter(self._turns)


def _parts(block_tokens: int, block_size: int) -> tuple[int, int]:
    """Engine blocks per trace block, and trace blocks per engine block; one of them is 1."""
    if block_tokens % block_size == 0:
        return block_tokens // block_size, 1
    if block_size % block_tokens == 0:
        return 1, block_size // block_tokens
    raise SpecError(
        f"engine.block_size {block_size} does not fit a trace of {block_tokens}-token blocks; allowed: a "
        "divisor or a multiple of "
        f"{block_tokens}"
    )


def _numbered(turns: Sequence[Ints]) -> Ints:
    """All ids, turn after turn, as numbers from 0 in order of first appearance; another prefix is another number."""
    if not turns:
        return np.empty(0, dtype=np.int64)
    ids = np.concatenate(turns)
    unique, numbers = _ranked(ids)
    parents = np.roll(numbers, 1)
    starts = np.cumsum([0, *(len(turn) for turn in turns[:-1])])
    parents[starts[starts < len(ids)]] = -1
    parent_of = np.empty(unique, dtype=np.int64)
    parent_of[numbers] = parents
    if np.array_equal(parent_of[numbers], parents):
        return numbers
    return _ranked(_by_prefix(turns))[1]  # ids that do not stand for their whole prefix


def _ranked(ids: Ints) -> tuple[int, Ints]:
    """How many ids there are, and each one's place in order of first appearance."""
    _, firsts, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(firsts), dtype=np.int64)
    rank[np.argsort(firsts, kind="stable")] = np.arange(len(firsts))
    return len(firsts), rank[inverse]


def _by_prefix(turns: Sequence[Ints]) -> Ints:
    known: dict[tuple[int, int], int] = {}
    found: list[int] = []
    for turn in turns:
        parent = -1
        for content in turn.tolist():
            parent = known.setdefault((parent, content), len(known))
            found.append(parent)
    return np.asarray(found, dtype=np.int64)


class _BlockIds:
    """Deals out engine block ids: those of trace content first, private ones behind them."""

    def __init__(self, contents: _Contents, block_size: int) -> None:
        self._contents = iter(contents)
        self._block_size = block_size
        self._stride = contents.most_parts
        self._next = contents.n_blocks * self._stride

    def _take(self, n: int) -> int:
        first = self._next
        self._next += n
        return first

    def private(self, session: Session) -> list[Chain]:
        longest = max(turn.prompt_tokens + turn.output_tokens for turn in session)
        n = -(-longest // self._block_size)
        first = self._take(n)
        return [[(first, first + n)] for _ in session]

    def traced(self, session: Session) -> list[Chain]:
        return [self._turn(turn, next(self._contents)) for turn in session]

    def _turn(self, turn: Turn, content: _Content) -> Chain:
        chain = self._ranges(content)
        n_known = content.n_tokens // self._block_size
        n_tail = -(-(turn.prompt_tokens + turn.output_tokens) // self._block_size) - n_known + 1
        first = self._take(n_tail)
        _append_ids(chain, first, n_tail)
        return chain

    def _ranges(self, content: _Content) -> Chain:
        """The content's full engine blocks. Trace block b is the ids from b * stride on."""
        parts, group = _parts(content.block_tokens, self._block_size)
        numbers = content.ids[group - 1 :: group]
        starts = numbers * self._stride
        n_left = content.n_tokens // self._block_size
        if not len(starts):
            return []
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1 if parts == self._stride else np.arange(1, len(starts))
        chain: Chain = []
        for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(starts)], strict=True):
            n = min((high - low) * parts, n_left)
            if n <= 0:
                break
            _append_ids(chain, int(starts[low]), n)
            n_left -= n
        return chain


def _append_ids(chain: Chain, first: int, n: int) -> None:
    """Consecutive ids are always one range: a run of cached blocks is never cut by a range's end (``KvPool.match``)."""
    if chain and chain[-1][1] == first:
        chain[-1] = (chain[-1][0], first + n)
    else:
        chain.append((first, first + n))
