"""What a workload is (a value inside every Point) and what it yields (Turns)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLengths:
    """Lengths of one turn: new input tokens and generated output tokens."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A synthetic multi-turn workload with fixed lengths (paper, Section 4.2).

    ``category`` is the paper's plot column: ``decode_heavy``, ``balanced`` or ``prefill_heavy``.
    ``max_output_tokens`` is what clients declare, and all that a policy may know of the output length in advance.
    """

    name: str
    category: str
    turns: tuple[TurnLengths, ...]
    max_output_tokens: int

    def context_tokens(self, turn: int) -> int:
        """Tokens of history before the given 1-based turn: all earlier inputs and outputs."""
        return sum(t.input_tokens + t.output_tokens for t in self.turns[: turn - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation.

    Exactly one of ``scheduled_s`` (turn 1, seconds since the point's start) and ``think_time_s`` (later turns, seconds
    after the previous turn's last token) is set. ``output_tokens`` is the truth and is never shown to a policy (I6).
    ``block_ids`` are content ids of the prompt's full blocks where a trace has them, else null (private content).
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
    block_ids: tuple[int, ...] | None = None

    @property
    def prompt_tokens(self) -> int:
        """History plus new input."""
        return self.context_tokens + self.input_tokens


Session = tuple[Turn, ...]
"""The turns of one conversation, in order."""
