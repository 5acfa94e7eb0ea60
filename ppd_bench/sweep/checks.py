"""What one key says against another: sizes that must fit into each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppd_bench.core.point import EngineSettings
from ppd_bench.core.profiles import ModelProfile
from ppd_bench.core.topology import Topology
from ppd_bench.core.workload import WorkloadSpec
from ppd_bench.workload.strict_yaml import Loc

Finding = tuple[Loc, str, str]
"""Where, what is wrong, and what is allowed."""


def topology_findings(
    topologies: Sequence[Topology | None], n_gpus: int | None, model: ModelProfile | None
) -> Iterator[Finding]:
    """Topologies that need more GPUs than there are, or that split the model's heads unevenly (vLLM refuses that)."""
    for index, topology in enumerate(topologies):
        if topology is None:
            continue
        loc = ("topologies", index)
        if n_gpus is not None and topology.n_gpus > n_gpus:
            yield loc, f"{topology.name} needs {topology.n_gpus} GPUs, gpus is {n_gpus}", f"at most {n_gpus} GPUs"
        degree = topology.tensor_parallel_size
        if model is not None and model.n_heads % degree:
            yield loc, f"@tp{degree} does not divide {model.name}'s {model.n_heads} heads", "a divisor of the heads"


def engine_findings(
    engine: EngineSettings, workloads: Sequence[WorkloadSpec | None], model: ModelProfile | None
) -> Iterator[Finding]:
    """Engine limits that contradict each other, the model, or the longest conversation."""
    batch, length = ("engine", "max_num_batched_tokens"), ("engine", "max_model_len")
    for name, lower_bound in (("block_size", engine.block_size), ("max_num_seqs", engine.max_num_seqs)):
        if engine.max_num_batched_tokens < lower_bound:
            what = f"{engine.max_num_batched_tokens} is less than {name} ({lower_bound})"
            yield batch, what, f"at least {lower_bound}"
    if model is not None and engine.max_model_len > model.max_model_len:
        what = f"{engine.max_model_len} is more than {model.name} can hold"
        yield length, what, f"at most {model.max_model_len}"
    if engine.dispatch == "fire_and_forget" and engine.handoff != "pull_async":
        what = "fire_and_forget tells D before there is anything to push"
        yield ("engine", "dispatch"), what, "await, or handoff: pull_async"
    needs = {w.name: w.longest_tokens for w in workloads if w is not None}
    longest = max(needs, key=lambda name: needs[name], default=None)
    if longest is not None and needs[longest] > engine.max_model_len:
        what = f"{engine.max_model_len} is too small for workload {longest}, which needs {needs[longest]} tokens"
        yield length, what, f"at least {needs[longest]}"
