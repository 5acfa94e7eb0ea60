"""From a Point to what the engines are made of: cost model, KV capacity, link; and the profile's identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ppd_bench.core.errors import SpecError
from ppd_bench.core.hardware import HARDWARE
from ppd_bench.core.models import MODELS
from ppd_bench.core.point import EngineSettings, Point, SimSettings, content_hash
from ppd_bench.core.profiles import HardwareProfile, ModelProfile
from ppd_bench.core.topology import parse_topology
from ppd_bench.sim.cost import RooflineCost, StepCost, TableCost
from ppd_bench.sim.step_tables import STEP_TABLES, StepTable, parse_step_table
from ppd_bench.sim.step_tables.aiconfigurator import kernel_table

SIM_VERSION = "sim-2"
"""Changes whenever the same point would give other numbers."""

ALL_REDUCES_PER_LAYER = 2
"""Tensor parallelism: one all-reduce after attention and one after the MLP of every layer."""
ALL_REDUCE_LATENCY_S = 8e-6
"""Assumed latency of one small all-reduce inside a node; not fitted on anything."""


def find_model(name: str, models: Mapping[str, ModelProfile] = MODELS) -> ModelProfile:
    """The model profile, or SpecError naming those that exist."""
    if name not in models:
        raise SpecError(f"model {name!r} is not known; allowed: {', '.join(models)}, or a path to a config.json")
    return models[name]


def find_hardware(name: str) -> HardwareProfile:
    """The GPU profile, or SpecError naming those that exist."""
    if name not in HARDWARE:
        raise SpecError(f"gpu {name!r} is not known; allowed: {', '.join(HARDWARE)}")
    return HARDWARE[name]


def step_table(
    point_gpu: str,
    model: ModelProfile,
    tensor_parallel_size: int,
    cost_model: str,
    step_table_json: str | None = None,
) -> StepTable | None:
    """The surface to use, or null for the roofline. ``table`` demands one; ``auto`` takes one where there is one.

    ``step_table_json`` is a user's own surface and is used as it is. A built-in surface belongs to one model and one GPU
    without tensor parallelism. ``aiconfigurator`` fits one to that package's measured kernels.
    """
    if step_table_json is not None and cost_model != "roofline":
        return parse_step_table(step_table_json, file="simulator.step_table")
    if cost_model == "aiconfigurator":
        return kernel_table(point_gpu, _known_name(model), tensor_parallel_size)
    found = STEP_TABLES.get((point_gpu, model.name)) if tensor_parallel_size == 1 else None
    if MODELS.get(model.name) != model:
        found = None
    if cost_model == "table" and found is None:
        have = ", ".join(f"{gpu}/{name}" for gpu, name in STEP_TABLES)
        raise SpecError(f"no step table for {point_gpu}/{model.name} at tp {tensor_parallel_size}; there are: {have}")
    return None if cost_model == "roofline" else found


def _known_name(model: ModelProfile) -> str:
    if MODELS.get(model.name) != model:
        raise SpecError(f"cost_model aiconfigurator knows built-in model profiles only; {model.name!r} is not one")
    return model.name


def make_cost(
    hardware: HardwareProfile,
    model: ModelProfile,
    tensor_parallel_size: int,
    cost_model: str,
    step_table_json: str | None = None,
) -> StepCost:
    """The cost model of one engine."""
    table = step_table(hardware.name, model, tensor_parallel_size, cost_model, step_table_json)
    if table is not None:
        return TableCost(list(table.knots), table.decode, table.prefill)
    return roofline(hardware, model, tensor_parallel_size)


def roofline(hardware: HardwareProfile, model: ModelProfile, tensor_parallel_size: int) -> RooflineCost:
    """Roofline of a model sharded over ``tensor_parallel_size`` GPUs; the FLOP and bytes are the model profile's."""
    tp = tensor_parallel_size
    reduces = ALL_REDUCES_PER_LAYER * model.n_layers if tp > 1 else 0
    ring = 2 * (tp - 1) / tp * model.hidden_size * model.dtype_bytes / hardware.kv_link_bytes_per_s
    return RooflineCost(
        flop_per_token=float(model.flop_per_token),
        flop_per_pair=float(model.flop_per_pair),
        flop_per_sample=float(model.flop_per_sample),
        flop_per_s=hardware.peak_flop_per_s * hardware.compute_efficiency_ratio * tp,
        dense_bytes=float(model.always_read_weight_bytes),
        expert_bytes=float(model.expert_weight_bytes),
        n_experts=model.n_experts,
        n_experts_active=model.n_experts_active,
        kv_bytes_per_token=float(model.kv_bytes_per_token),
        weight_bytes_per_s=hardware.memory_bandwidth_bytes_per_s * hardware.weight_bandwidth_ratio * tp,
        kv_bytes_per_s=hardware.memory_bandwidth_bytes_per_s * hardware.kv_bandwidth_ratio * tp,
        reduce_base_s=reduces * ALL_REDUCE_LATENCY_S,
        reduce_s_per_token=reduces * ring,
    )


def kv_capacity_blocks(
    hardware: HardwareProfile, model: ModelProfile, engine: EngineSettings, sim: SimSettings, tensor_parallel_size: int
) -> int:
    """KV blocks of one engine: (memory * utilisation - weights - reserve) / bytes per block, or what ``sim`` states.

    Raises:
        SpecError: the model does not fit, or not even one sequence of ``max_model_len`` does.
    """
    usable = hardware.memory_bytes * engine.gpu_memory_utilization_ratio * tensor_parallel_size
    usable -= model.weight_bytes + sim.activation_reserve_bytes * tensor_parallel_size
    blocks = int(usable // (model.kv_bytes_per_token * engine.block_size))
    if sim.kv_capacity_tokens is not None:
        blocks = sim.kv_capacity_tokens // engine.block_size
    if blocks * engine.block_size < engine.max_model_len:
        raise SpecError(
            f"{model.name} on {tensor_parallel_size} x {hardware.name} leaves room for {max(0, blocks * engine.block_size)} KV "
            f"tokens, fewer than engine.max_model_len {engine.max_model_len}; use more GPUs per engine (@tp2), a smaller "
            "max_model_len or a higher gpu_memory_utilization"
        )
    return blocks


def check_fits(
    gpu: str, model: ModelProfile, engine: EngineSettings, sim: SimSettings, topologies: Iterable[str]
) -> None:
    """Refuse a sweep whose model does not fit, before anything runs.

    Raises:
        SpecError: one line per tensor parallel size that does not fit, and for a step table that is not there.
    """
    problems: list[str] = []
    for degree in sorted({parse_topology(name).tensor_parallel_size for name in topologies}):
        try:
            kv_capacity_blocks(find_hardware(gpu), model, engine, sim, degree)
            step_table(gpu, model, degree, sim.cost_model, sim.step_table_json)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)


def profile_hash(gpu: str, model: ModelProfile, sim: SimSettings) -> str:
    """Identity of everything but the point's own fields that a simulated number depends on."""
    table = step_table(gpu, model, 1, sim.cost_model if sim.cost_model != "table" else "auto", sim.step_table_json)
    content = {
        "version": SIM_VERSION,
        "hardware": dataclasses.asdict(find_hardware(gpu)),
        "model": dataclasses.asdict(model),
        "table": dataclasses.asdict(table) if table else None,
    }
    if sim.fitted_profile:
        content["fitted"] = sim.fitted_profile
    return content_hash(content)


def link_bytes_per_s(point: Point, hardware: HardwareProfile) -> float:
    """The KV link's rate: a fitted one, else the spec's, else the GPU profile's."""
    fitted = point.sim.transfer_bytes_per_s if point.sim is not None else None
    return fitted or point.engine.kv_link_bytes_per_s or hardware.kv_link_bytes_per_s


def link_latency_s(point: Point) -> float:
    """What every transfer takes beside its bytes: a fitted time, else the spec's."""
    fitted = point.sim.transfer_base_s if point.sim is not None else None
    return point.engine.kv_link_latency_s if fitted is None else fitted
