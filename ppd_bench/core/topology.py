"""Topologies as values: a name with a grammar, from which workers, GPUs and layouts follow.

Grammar (canonical, so that ``parse`` and ``Topology.name`` are inverse)::

    name   := part ("_" part)* ["@tp" degree]
    part   := count role          each role at most once, in the order R, P, D, pD
    role   := "R" | "P" | "D" | "pD"
    count  := integer >= 1 without leading zeros;  degree := integer >= 2

P needs at least one D or pD, and D or pD needs at least one P. Examples: ``4R``, ``1P_3D``, ``2P_1D_1pD``,
``1R_1P_1D_1pD``, ``2P_2D@tp2``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ppd_bench.core.enums import Role
from ppd_bench.core.errors import SpecError

ROLE_ORDER = (Role.REPLICA, Role.PREFILL, Role.DECODE, Role.DECODE_LOCAL)
_PART = re.compile(r"([1-9][0-9]*)(R|P|D|pD)")
_DEGREE = re.compile(r"@tp([1-9][0-9]*)")
GRAMMAR_HINT = "parts like 4R, 1P_3D or 1R_1P_1D_1pD in the order R, P, D, pD, then optionally @tp2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One engine. ``worker_id`` names the process (``D0``), so D and pD share the prefix D; ``role`` is the policy's view."""

    worker_id: str
    role: Role
    gpu_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How many workers of each role, and how many GPUs each takes (``tensor_parallel_size``)."""

    n_replica: int = 0
    n_prefill: int = 0
    n_decode: int = 0
    n_decode_local: int = 0
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        counts = self._counts
        if min(counts) < 0 or sum(counts) == 0 or self.tensor_parallel_size < 1:
            raise SpecError(f"topology {counts}: counts must be 0 or more and at least one worker is needed")
        if bool(self.n_prefill) != bool(self.n_decoders):
            missing = "a decode node (D or pD)" if self.n_prefill else "a prefill node (P)"
            raise SpecError(f"topology {self.name!r} lacks {missing}: P and D only work together")

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        return (self.n_replica, self.n_prefill, self.n_decode, self.n_decode_local)

    @property
    def n_decoders(self) -> int:
        """Decode workers of either kind (D and pD)."""
        return self.n_decode + self.n_decode_local

    @property
    def n_workers(self) -> int:
        return sum(self._counts)

    @property
    def n_gpus(self) -> int:
        return self.n_workers * self.tensor_parallel_size

    @cached_property
    def name(self) -> str:
        """The canonical name; ``parse_topology(t.name) == t``."""
        parts = [f"{n}{role}" for n, role in zip(self._counts, ROLE_ORDER, strict=True) if n]
        suffix = f"@tp{self.tensor_parallel_size}" if self.tensor_parallel_size > 1 else ""
        return "_".join(parts) + suffix

    @cached_property
    def layout(self) -> Topology:
        """The processes behind it: pD counted as D. Configurations with one layout share one launch."""
        return Topology(
            n_replica=self.n_replica,
            n_prefill=self.n_prefill,
            n_decode=self.n_decoders,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, R first, then P, D, pD, with consecutive GPU ids."""
        letters = ["R"] * self.n_replica + ["P"] * self.n_prefill + ["D"] * self.n_decode + ["pD"] * self.n_decode_local
        seen: dict[str, int] = {}
        workers = []
        for index, role in enumerate(letters):
            process = role[-1]
            ordinal = seen.get(process, 0)
            seen[process] = ordinal + 1
            first_gpu = index * self.tensor_parallel_size
            gpu_ids = tuple(range(first_gpu, first_gpu + self.tensor_parallel_size))
            workers.append(Worker(worker_id=f"{process}{ordinal}", role=Role(role), gpu_ids=gpu_ids))
        return tuple(workers)

    @property
    def node_x_ratio(self) -> float | None:
        """Node-level x: share of pD among decode nodes; null without decode nodes (GLOSSARY: x)."""
        return self.n_decode_local / self.n_decoders if self.n_decoders else None

    @property
    def category(self) -> str:
        """The paper's class (Table 4): replica, x0, partial, x1, or hybrid when R stands beside P and D."""
        if not self.n_prefill:
            return "replica"
        if self.n_replica:
            return "hybrid"
        if not self.n_decode_local:
            return "x0"
        return "partial" if self.n_decode else "x1"

    @cached_property
    def all_local(self) -> Topology:
        """The x=1 arm of the same layout: every D turned into pD."""
        return Topology(
            n_replica=self.n_replica,
            n_prefill=self.n_prefill,
            n_decode_local=self.n_decoders,
            tensor_parallel_size=self.tensor_parallel_size,
        )


def parse_topology(name: str) -> Topology:
    """Parse a canonical topology name.

    Raises:
        SpecError: the name does not follow the grammar; the message gives the canonical spelling where there is one.
    """
    body, at, _ = name.partition("@")
    degree = _DEGREE.fullmatch(name[len(body) :]) if at else None
    matches = [_PART.fullmatch(part) for part in body.split("_")]
    counts: dict[str, int] = {}
    for match in matches:
        if match is None or match[2] in counts or (at and degree is None):
            raise SpecError(f"topology {name!r} is not understood; allowed: {GRAMMAR_HINT}")
        counts[match[2]] = int(match[1])
    topology = Topology(
        n_replica=counts.get("R", 0),
        n_prefill=counts.get("P", 0),
        n_decode=counts.get("D", 0),
        n_decode_local=counts.get("pD", 0),
        tensor_parallel_size=int(degree[1]) if degree else 1,
    )
    if topology.name != name:
        raise SpecError(f"topology {name!r} is not canonical; write {topology.name!r}")
    return topology


PAPER_TOPOLOGIES = (
    "4R", "1P_3D", "2P_2D", "3P_1D", "1P_3pD", "2P_2pD", "3P_1pD", "1P_2D_1pD", "1P_1D_2pD", "2P_1D_1pD",
    "1R_1P_2D", "1R_1P_1D_1pD", "1R_1P_2pD", "1R_2P_1D", "1R_2P_1pD", "2R_1P_1D", "2R_1P_1pD",
)  # fmt: skip
"""The paper's 17 four-GPU configurations (Table 4 prints three hybrids and 'etc.'; the other four are in its public code)."""
