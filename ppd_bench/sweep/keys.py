"""Every key of a sweep file. A field's description is what an error lists after ``allowed:``.

Sections hold the fields of a core type under friendlier names (the alias); a key that a file does not set takes the
core type's default, so no default is written twice. Names of topologies, workloads, deciders and the like are plain
text here and are resolved in ``names``, because a wrong one must not hide what else is wrong.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Strict

from ppd_bench.sweep.quantity import (
    BANDWIDTH_UNITS,
    DURATION_UNITS,
    SIZE_UNITS,
    parse_bandwidth,
    parse_duration,
    parse_size,
)
from ppd_bench.workload.spec import NAME_ALLOWED, NAME_PATTERN
from ppd_bench.workload.strict_model import StrictKeys

Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Positive = Annotated[int, Strict(), Field(ge=1)]
Ratio = Annotated[float, Strict(), Field(gt=0, le=1, allow_inf_nan=False)]
Duration = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, allow_inf_nan=False)]
PositiveDuration = Annotated[Duration, Field(gt=0)]
Bandwidth = Annotated[float, BeforeValidator(parse_bandwidth), Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, lt=2**63)]

DURATION = f"seconds, or a number with {', '.join(DURATION_UNITS)}"
BANDWIDTH = f"bytes per second, or a number with {', '.join(BANDWIDTH_UNITS)}"
SIZE = f"bytes, or a number with {', '.join(SIZE_UNITS)}"
COUNT = "a whole number, 1 or more"
SHARE = "a number above 0 and at most 1"
TRUTH = "true, false"


def _key(allowed: str, *, alias: str | None = None, default: Any = None) -> Any:
    return Field(default=default, alias=alias, description=allowed)


class PolicyKeys(StrictKeys):
    """``policy``: the route decider; other keys are its parameters."""

    model_config = ConfigDict(extra="allow")

    decider: Text = _key("the name of a decider")
    table: Text = _key("the path of a table.json, for decider 'table' only")


class PlacementKeys(StrictKeys):
    """``placement``: how workers are chosen; other keys are parameters of the placements."""

    model_config = ConfigDict(extra="allow")

    prefill: Text = _key("the name of a placement")
    decode: Text = _key("the name of a placement")
    replica: Text = _key("the name of a placement")
    sticky: Flag = _key(TRUTH)


class EngineKeys(StrictKeys):
    """``engine``: core.point.EngineSettings."""

    max_num_batched_tokens: Positive = _key(COUNT)
    max_num_seqs: Positive = _key(COUNT)
    block_size: Positive = _key(COUNT)
    gpu_memory_utilization_ratio: Ratio = _key(SHARE, alias="gpu_memory_utilization")
    max_model_len: Positive = _key(COUNT)
    prefix_caching: Flag = _key(TRUTH)
    kv_connector: Annotated[Text, Field(min_length=1)] = _key("the name of a vLLM KV connector, such as NixlConnector")
    handoff: Literal["push_blocking", "pull_async"] = _key("push_blocking, pull_async")
    dispatch: Literal["await", "fire_and_forget"] = _key("await, fire_and_forget")
    kv_link_bytes_per_s: Bandwidth | None = _key(f"null (the GPU's), {BANDWIDTH}", alias="kv_link_bandwidth")
    kv_link_latency_s: Duration = _key(DURATION, alias="kv_link_latency")
    emulated_link_bytes_per_s: Bandwidth | None = _key(f"null (none), {BANDWIDTH}", alias="emulated_link_bandwidth")
    kv_lease_s: PositiveDuration = _key(DURATION, alias="kv_lease")


class SimulatorKeys(StrictKeys):
    """``simulator``: core.point.SimSettings, but for hashes; ``step_table`` and ``profile`` are read from their files."""

    profile: Text | None = _key("null, or the path of a profile that calibrate wrote")
    cost_model: Literal["auto", "roofline", "table", "aiconfigurator"] = _key("auto, roofline, table, aiconfigurator")
    step_table: Text | None = _key("null, or the path of a step table (JSON; see ppd_bench/sim/step_tables)")
    step_overhead_s: Duration = _key(DURATION, alias="step_overhead")
    sequence_overhead_s: Duration = _key(DURATION, alias="sequence_overhead")
    visit_overhead_s: Duration = _key(DURATION, alias="visit_overhead")
    router_overhead_s: Duration = _key(DURATION, alias="router_overhead")
    receiver_cost_s: Duration = _key(DURATION, alias="receiver_cost")
    transfer_base_s: Duration | None = _key(f"null (kv_link_latency), {DURATION}", alias="transfer_base")
    transfer_bytes_per_s: Bandwidth | None = _key(f"null (the link's), {BANDWIDTH}", alias="transfer_bandwidth")
    kv_capacity_tokens: Positive | None = _key(f"null (what memory leaves), {COUNT}")
    activation_reserve_bytes: Size = _key(SIZE, alias="activation_reserve")
    snapshot_interval_s: PositiveDuration = _key(DURATION, alias="snapshot_interval")
    snapshot_delay_s: Duration = _key(DURATION, alias="snapshot_delay")


class SloKeys(StrictKeys):
    """``slo``: core.slo.SLO."""

    ttft_s: PositiveDuration | None = _key(f"null (not stated), {DURATION}", alias="ttft")
    tpot_s: PositiveDuration | None = _key(f"null (not stated), {DURATION}", alias="tpot")
    e2e_s: PositiveDuration | None = _key(f"null (not stated), {DURATION}", alias="e2e")


class SweepKeys(StrictKeys):
    """The whole file. All may be absent here, so that a file with one bad key can be checked further; see REQUIRED."""

    name: Annotated[Text, Field(pattern=NAME_PATTERN)] | None = _key(NAME_ALLOWED)
    description: Text = _key("text", default="")
    gpus: Positive | None = _key(COUNT)
    gpu: Text | None = _key("the name of a GPU profile")
    model: Text | None = _key("the name of a model profile, or the path of a Hugging Face config.json")
    topologies: Any = _key("'paper', or a list of names like 4R, 1P_3D, 1R_1P_1D_1pD")
    workloads: Any = _key("'paper', or a list of workload names, paths, and mappings {dataset: PATH, ...}")
    qps: Any = _key("a list of numbers above 0 (conversations per second)")
    duration: PositiveDuration = _key(DURATION, default=10.0)
    timeout: PositiveDuration = _key(DURATION, default=30.0)
    think_time: Duration = _key(DURATION, default=0.0)
    seed: Annotated[Whole, Field(ge=0)] = _key("a whole number, 0 or more", default=0)
    repeats: Positive = _key(COUNT, default=1)
    executor: Literal["auto", "sim", "live"] = _key("auto, sim, live", default="auto")
    policy: PolicyKeys | None = _key("")
    placement: PlacementKeys | None = _key("")
    engine: EngineKeys | None = _key("")
    simulator: SimulatorKeys | None = _key("")
    slo: SloKeys | None = _key("")
    success_bound: Ratio = _key(SHARE, default=0.95)
    token_gaps: Flag = _key(TRUTH, default=False)


REQUIRED = ("name", "gpus", "gpu", "model", "topologies", "workloads", "qps")
"""Keys that every sweep must set."""
