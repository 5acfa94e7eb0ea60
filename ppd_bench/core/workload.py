"""What a workload is (a value inside every Point) and what it yields (Turns)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLengths:
    """Lengths of one turn: new input tokens and generated output tokens."""

    input_tokens: int
    output_tokens: int


Loop = Literal["timestamps", "completion"]
"""``timestamps``: every request at its recorded instant, whatever became of the one before (open loop). ``completion``: a turn
follows the answer before it, after its think time and not before its recorded instant."""

Arrivals = Literal["recorded", "poisson"]
"""``recorded``: conversations begin when they began. ``poisson``: whole conversations, drawn anew, begin at the point's QPS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFigures:
    """What a source amounts to after its caps: enough to estimate a point without its file. Tokens are means per request.

    ``followup``: context, new input and output of turns 2 and later, means in whole tokens; null where there are none.
    """

    n_sessions: int
    n_requests: int
    duration_s: float
    prompt_tokens: float
    output_tokens: float
    longest_tokens: int
    followup: tuple[int, int, int] | None = field(default=None, metadata={"added": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSpec:
    """Recorded traffic and how it is played, by value: whatever changes a turn changes the point that holds this.

    ``source`` is the file's name for people and ``sha256`` its content; where the file lies travels beside the points.
    ``reading`` is how the file was read (format, and for text the tokenizer or estimate); ``sessions`` is the rule that joined
    requests into conversations. ``time_scale`` divides every recorded time: 10 plays an hour in six minutes.

    ``max_request_tokens``: requests whose prompt and answer exceed it are left out. ``max_requests``: whole conversations in
    order of arrival until so many requests. ``max_inflight_sessions``: a conversation (with those that it starts) waits to
    begin while so many are under way. Null means no such limit. ``reuse_ratio`` below 1 leaves that share of the recorded
    prefix reuse (``workload.thinning``).
    """

    source: str
    sha256: str
    reading: str
    sessions: str
    loop: Loop
    figures: TrafficFigures
    arrivals: Arrivals = "recorded"
    time_scale: float = 1.0
    max_request_tokens: int | None = None
    max_requests: int | None = None
    max_inflight_sessions: int | None = None
    reuse_ratio: float = 1.0

    @property
    def window_s(self) -> float:
        """Seconds over which recorded arrivals are played; 1 where all arrive at once."""
        return self.figures.duration_s / self.time_scale or 1.0

    @property
    def sessions_per_s(self) -> float:
        """Conversations per second as recorded and scaled: the QPS of a point with recorded arrivals."""
        return self.figures.n_sessions / self.window_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A multi-turn workload: synthetic with fixed lengths (paper, Section 4.2), or recorded ``traffic`` (then without ``turns``).

    ``category`` is the paper's plot column, ``decode_heavy``, ``balanced`` or ``prefill_heavy``, and ``recorded`` for traffic.
    ``max_output_tokens`` is what clients declare, and all that a policy may know of the output length in advance.
    """

    name: str
    category: str
    turns: tuple[TurnLengths, ...]
    max_output_tokens: int
    traffic: TrafficSpec | None = field(default=None, metadata={"added": True})

    def context_tokens(self, turn: int) -> int:
        """Tokens of history before the given 1-based turn: all earlier inputs and outputs."""
        return sum(t.input_tokens + t.output_tokens for t in self.turns[: turn - 1])

    @property
    def followup(self) -> tuple[int, int, int] | None:
        """Context, new input and output tokens of the follow-up turn that stands for all: turn 2, or, of recorded traffic, the
        mean over turns 2 and later. Null without follow-up turns."""
        if self.traffic is not None:
            return self.traffic.figures.followup
        if len(self.turns) < 2:
            return None
        return self.context_tokens(2), self.turns[1].input_tokens, self.turns[1].output_tokens

    @property
    def has_cell(self) -> bool:
        """Whether it can stand in a decision table: it has follow-up turns, and its conversations come at a rate. Recorded ones
        without arrival times, of which so many are kept under way, do not."""
        traffic = self.traffic
        timeless = traffic is not None and traffic.arrivals == "recorded" and not traffic.figures.duration_s
        return self.followup is not None and not timeless

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest conversation, or of the longest request of recorded traffic, answer included."""
        return self.traffic.figures.longest_tokens if self.traffic else self.context_tokens(len(self.turns) + 1)

    @property
    def turns_per_session(self) -> float:
        """Turns of a conversation; of recorded traffic, their mean."""
        if self.traffic is None:
            return float(len(self.turns))
        figures = self.traffic.figures
        return figures.n_requests / figures.n_sessions if figures.n_sessions else 0.0

    @property
    def output_tokens_per_session(self) -> float:
        """Tokens that a conversation generates; of recorded traffic, their mean."""
        if self.traffic is None:
            return float(sum(turn.output_tokens for turn in self.turns))
        return self.traffic.figures.output_tokens * self.turns_per_session


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation.

    ``scheduled_s`` (seconds since the point's start) alone: sent then, whatever became of the turn before. ``think_time_s``
    alone: sent so long after the last token of the turn before. Both: at the later of the two. Synthetic turns have the first
    for turn 1 and the second afterwards. ``after`` is, for a first turn that a request of another conversation started (a sub-
    agent, a branch), that request's id: it takes the place of the turn before.

    ``output_tokens`` is the truth and is never shown to a policy (I6). ``block_ids`` are content ids of the prompt's blocks of
    ``block_tokens`` tokens (null: the engine's block size) where a trace has them, each standing for its whole prefix, and null
    for private content. The last may stand for a part of a block; without such an id, what is left of the prompt is private.
    """

    request_id: str
    session_id: str
    turn: int
    scheduled_s: float | None
    think_time_s: float | None
    context_tokens: int
    input_tokens: int
    output_tokens: int
    max_output_tokens: int
    block_ids: Sequence[int] | None = None
    block_tokens: int | None = None
    after: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """History plus new input."""
        return self.context_tokens + self.input_tokens


Session = tuple[Turn, ...]
"""The turns of one conversation, in order."""
