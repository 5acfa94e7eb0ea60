"""The policy in force, and how a table's new version replaces the old one: whole, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ppd_bench.core.errors import PpdBenchError
from ppd_bench.core.point import PlacementSpec, PolicySpec
from ppd_bench.core.topology import Topology
from ppd_bench.policy.policy import Policy, make_policy
from ppd_bench.policy.table import DecisionTable

LoadTable = Callable[[], str]
"""Reads the table's text, under the weights that the router was started with. It is kept as it is, and its hash with it.

Raises TableError where there is none that can be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """A policy with the table that it obeys, null where the decider needs none."""

    policy: Policy
    table: DecisionTable | None

    @property
    def info(self) -> Mapping[str, str]:
        """What people want to know of the table; empty without one."""
        if self.table is None:
            return {}
        return {
            "hash": self.table.content_hash,
            "evidence": self.table.domain.executor,
            "w_ttft": f"{self.table.weights.w_ttft:g}",
            "w_tpot": f"{self.table.weights.w_tpot:g}",
            "model": self.table.domain.model,
            "gpu": self.table.domain.gpu,
            "layout": self.table.domain.layout,
        }


class PolicyBox:
    """Holds what is in force. Only ``reload`` changes it; conversations are the Ledger's and survive it.

    Raises:
        SpecError: a missing or unusable parameter of the policy.
        TableError: a table that cannot be read, was made for something else, or knows too little (B33).
    """

    def __init__(
        self,
        topology: Topology,
        spec: PolicySpec,
        placement: PlacementSpec,
        *,
        seed: int,
        load: LoadTable | None = None,
        model: str | None = None,
        gpu: str | None = None,
        max_unknown_ratio: float | None = None,
    ) -> None:
        self.n_reloads = 0
        self.n_refusals = 0
        self.problem: str | None = None
        self._topology = topology
        self._spec = spec
        self._placement = placement
        self._seed = seed
        self._load = load
        self._model = model
        self._gpu = gpu
        self._max_unknown_ratio = max_unknown_ratio
        self.now = self._made(load() if load is not None else None)

    @property
    def decider(self) -> str:
        return self._spec.decider

    @property
    def placement(self) -> str:
        return self._placement.decode

    async def reload(self) -> bool:
        """Read the table anew and take it into use; true when it is another one.

        One that cannot be used changes nothing but ``problem``. The reading happens in a thread: checking a table takes longer
        than a token.
        """
        if self._load is None:
            return False
        try:
            new = await asyncio.to_thread(lambda load: self._made(load()), self._load)
        except PpdBenchError as error:
            self.n_refusals += 1
            self.problem = f"the new table was refused, the one before it stays: {error}"
            return False
        self.problem = None
        if new.info == self.now.info:  # its hash is in it
            return False
        self.now = new
        self.n_reloads += 1
        return True

    def _made(self, text: str | None) -> InForce:
        spec, table = self._spec, None
        if text is not None:
            table = DecisionTable.from_json(text)
            self._check(table)
            spec = PolicySpec(decider=spec.decider, params=spec.params, table_json=text)
        return InForce(policy=make_policy(self._topology, spec, self._placement, self._seed), table=table)

    def _check(self, table: DecisionTable) -> None:
        """The first table says what model and GPU it is for, unless the operator did; later ones must agree."""
        domain = table.domain
        table.check_domain(topology=self._topology, model=self._model or domain.model, gpu=self._gpu or domain.gpu)
        table.check_evidence(self._max_unknown_ratio)
        self._model, self._gpu = domain.model, domain.gpu
