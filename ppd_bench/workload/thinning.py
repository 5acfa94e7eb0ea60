"""Traffic with less prefix reuse than was recorded, for studies of what reuse is worth: same requests, same lengths, other
contents."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence

from ppd_bench.core.trace import TraceRow


class Thinning:
    """Gives rows in order; each keeps ``reuse_ratio`` of the leading blocks that an infinite cache would hold by then.

    What follows in the prompt becomes content of its own, under which the conversation's next prompt and all others find it: so
    the share of reuse that is left is near ``reuse_ratio`` whatever the number of turns. Contents are numbered anew, from 1.
    """

    def __init__(self, reuse_ratio: float) -> None:
        self._reuse_ratio = reuse_ratio
        self._stored: dict[int, int] = {}  # recorded id -> the number under which its content was seen last
        self._parent: dict[int, int] = {}
        self._last: dict[
            str, tuple[Sequence[int], array[int]]
        ] = {}  # a conversation's last prompt: recorded ids, numbers
        self._next = 1

    def rows(self, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
        for row in rows:
            session_id = row.session_id if row.session_id is not None else row.request_id
            found = max(self._of_session(session_id, row.block_ids), self._leading(row.block_ids), key=len)
            numbers = self._renumbered(row.block_ids, found[: math.ceil(len(found) * self._reuse_ratio)])
            self._last[session_id] = (row.block_ids, numbers)
            yield row._replace(block_ids=numbers)

    def _renumbered(self, block_ids: Sequence[int], kept: array[int]) -> array[int]:
        parent = kept[-1] if kept else 0
        for block_id in block_ids[len(kept) :]:
            number = self._next
            self._next += 1
            self._stored[block_id] = number
            self._parent[number] = parent
            kept.append(number)
            parent = number
        return kept

    def _of_session(self, session_id: str, block_ids: Sequence[int]) -> array[int]:
        """The numbers of what the prompt has in common with the conversation's last one."""
        before, numbers = self._last.get(session_id, ((), array("q")))
        n = 0
        for one, other in zip(before, block_ids, strict=False):
            if one != other:
                break
            n += 1
        return numbers[:n]

    def _leading(self, block_ids: Sequence[int]) -> array[int]:
        """The numbers of the blocks that are stored as one prefix."""
        found = array("q")
        parent = 0
        for block_id in block_ids:
            number = self._stored.get(block_id)
            if number is None or self._parent[number] != parent:
                break
            found.append(number)
            parent = number
        return found
