"""Recorded traffic as values: what a trace or a conversation file says, whatever its format.

Readers (``workload.traces``) yield ``TraceRow``; reuse figures, samples, replays and sweeps on real traffic are made from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TokenCount = Literal["recorded", "tokenizer", "estimated"]
"""Where token counts come from: the trace itself, a tokenizer, or a stated estimate. Every output that shows them says which."""


class TraceRow(NamedTuple):
    """One request of recorded traffic, in file order.

    ``row``: 0-based position in the source. ``session_id``/``turn`` (1-based): null where the source has no sessions.
    ``arrival_s``: seconds since the trace's first request; null where only ``delay_s`` is known, the seconds between the end of
    the request before it in the session and this one. ``prompt_tokens``: the whole prompt, history included.
    ``output_tokens``: what was generated. ``block_ids``: content ids of the prompt's blocks, globally scoped, each standing for
    its whole prefix; empty where the source has none. Under the tail rule ``ceil`` the last id may stand for a partial block.
    Readers give signed 64-bit ids as ``array("q")``, which numpy reads without a copy. ``parent_id``: of a session's first
    request that was started by a request of another session (a sub-agent, a branch): that request's id. Such a request's
    ``delay_s`` counts from the end of that request.
    """

    row: int
    request_id: str
    session_id: str | None
    turn: int | None
    arrival_s: float | None
    delay_s: float | None
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int]
    parent_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """What a format declares of itself; readers check it against the data.

    Of the rows as they are given: ``block_tokens``, null without block ids; ``tail``, whether the partial last block has an id
    (``ceil``) or none (``floor``); ``loop``, requests come at timestamps, or after the answer and a delay. Of the source:
    ``time_unit``, null without times; ``id_scope``, whether equal ids of two sessions were equal content (where they were not,
    what sessions share is not known, and none of their ids are equal); ``row_means``, the full prompt, or only what is new
    (the rows given are full prompts).
    """

    name: str
    time_unit: Literal["s", "ms", "us", "date"] | None
    block_tokens: int | None
    tail: Literal["ceil", "floor"] | None
    id_scope: Literal["global", "local"] | None
    row_means: Literal["full_prompt", "delta"]
    loop: Literal["timestamps", "completion"]
    token_count: TokenCount


@dataclass(slots=True)
class RowCounts:
    """Rows read = kept + dropped, by named reason. Filled while a trace is read."""

    n_read: int = 0
    n_kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, n: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + n

    @property
    def n_dropped(self) -> int:
        return sum(self.dropped.values())
