"""Sessions of traces that name none, derived from block ids by a named rule.

Rule ``chain``: a request goes on with the session of its parent, the latest earlier request whose whole chain of full blocks
it holds, of the longest such chain; the chain has at least two blocks, and the parent's prompt is shorter. Two, because a
first block that everybody shares (a system prompt) says nothing: with one, a conversation trace of 12,031 requests falls into
733 sessions of 16. Derived is not recorded: regenerated answers and equal documents look like follow-ups.
"""

from __future__ import annotations

from array import array
from typing import Literal

from ppd_bench.core.trace import TraceRow

Rule = Literal["chain", "none"]
RULES: tuple[Rule, ...] = ("chain", "none")
MIN_BLOCKS = 2


class ChainSessions:
    """Reads rows in order and numbers their sessions. Keeps one entry per distinct chain: about 200 bytes a request."""

    def __init__(self, block_tokens: int, min_blocks: int = MIN_BLOCKS) -> None:
        self._block_tokens = block_tokens
        self._min_blocks = min_blocks
        self._latest: dict[int, int] = {}
        """By the last full block of a chain, which stands for all of it: the latest request that has this chain."""
        self._prompt = array("q")
        self.session = array("q")
        self.parent = array("q")
        """Position of the request that each goes on from, -1 for the first of a session."""
        self.n_sessions = 0

    def add(self, row: TraceRow) -> int:
        """The session's number: a new one, or that of the request's parent."""
        ids = row.block_ids
        parent = None if self._latest.keys().isdisjoint(ids) else self._parent(row)
        if parent is None:
            session = self.n_sessions
            self.n_sessions += 1
        else:
            session = self.session[parent]
        n_full = min(row.prompt_tokens // self._block_tokens, len(ids))
        if n_full >= self._min_blocks:
            self._latest[ids[n_full - 1]] = len(self.session)
        self.session.append(session)
        self.parent.append(-1 if parent is None else parent)
        self._prompt.append(row.prompt_tokens)
        return session

    def _parent(self, row: TraceRow) -> int | None:
        for block_id in reversed(row.block_ids):
            found = self._latest.get(block_id)
            if found is not None and self._prompt[found] < row.prompt_tokens:
                return found
        return None
