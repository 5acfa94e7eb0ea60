"""What an operator can set, beside topology, engines, policy and log."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ppd_bench.engine.dispatch import LegLimits


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Deadlines are seconds; see ``engine.dispatch.LegLimits`` (ROUTER.md B16).

    ``first_byte_s`` and ``idle_s`` count for streamed answers; a plain one comes at once, and has ``answer_s`` for all of it.
    ``local_fallback``: a turn whose P fails may be prefilled on D (B12). ``n_retries``: further P and further D that are tried.
    ``explain``: say in headers of the answer what was decided (B36). ``shed``: refuse turns while every candidate is short of KV
    (B28). ``default_output_tokens``: declared output of requests that declare none.
    """

    connect_s: float = 5.0
    prefill_s: float = 120.0
    first_byte_s: float = 120.0
    idle_s: float = 60.0
    answer_s: float = 600.0
    local_fallback: bool = True
    n_retries: int = 2
    explain: bool = False
    shed: bool = False
    retry_after_s: int = 1
    default_output_tokens: int = 512
    use_cache_key: bool = False
    session_ttl_s: float = 3600.0
    max_sessions: int = 200_000
    ready_cache_s: float = 5.0
    ready_limit_s: float = 30.0
    drain_s: float = 30.0

    @cached_property
    def stream_limits(self) -> LegLimits:
        """The deadlines of a streamed turn, the same for all of them."""
        return LegLimits(
            connect_s=self.connect_s,
            prefill_s=self.prefill_s,
            first_byte_s=self.first_byte_s,
            idle_s=self.idle_s,
        )
