"""A request inside one engine: what it is made of and how far it is."""

from __future__ import annotations

from ppd_bench.sim.kv import Chain, Run
from ppd_bench.sim.link import Transfer

LOCAL = 0
"""Prompt is prefilled here."""
PULL = 1
"""Prompt KV is pulled from P, asynchronously (NIXL)."""
PUSH = 2
"""Prompt KV is pushed by P; the admitting step waits for it (P2P NCCL)."""

WAITING = 0
PULLING = 1
PREFILLING = 2
DECODING = 3
HELD = 4
"""Finished computing; its blocks are still held (a P leg until its KV has been taken)."""
DONE = 5


class Seq:
    """A request inside one engine. ``owner`` is the caller's index of the turn."""

    def __init__(self, owner: int, chain: Chain, prompt_tokens: int, target_tokens: int, remote: int) -> None:
        self.owner = owner
        self.chain = chain
        self.n_tokens = prompt_tokens  # prompt plus generated; for DECODING, see ``join_step``
        self.prompt_tokens = prompt_tokens
        self.target_tokens = target_tokens  # total tokens at which it is finished
        self.remote = remote
        self.transfer: Transfer | None = None
        self.state = WAITING
        self.computed = 0
        self.run: Run | None = None
        self.n_shared = 0
        self.n_private = 0
        self.chunk = 0
        self.join_step = 0
        self.hit_tokens = -1
        self.start_s = -1.0
        self.first_step = -1  # index into the worker's step_end_s of the step that gave the first token
        self.spans: list[int] = []  # flat pairs (first, last) of step indices with a token, one pair per residence
        self.n_preempted = 0
        self.loaded = False  # remote KV is in this engine's blocks
        self.aborted = False
