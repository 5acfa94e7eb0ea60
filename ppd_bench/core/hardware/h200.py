"""NVIDIA H200 SXM, 141 GB HBM3e."""

from ppd_bench.core.profiles import HardwareProfile

PROFILE = HardwareProfile(
    name="h200",
    peak_flop_per_s=989e12,
    memory_bandwidth_bytes_per_s=4.8e12,
    memory_bytes=150_750_000_000,
    compute_efficiency_ratio=0.67,
    weight_bandwidth_ratio=0.73,
    kv_bandwidth_ratio=0.90,
    kv_link_bytes_per_s=150e9,
    source=(
        "peaks: vendor data sheet (dense bf16). Efficiencies: those of the H100 (COST_MODEL.md), same chip with faster "
        "memory. Link: as H100"
    ),
)
