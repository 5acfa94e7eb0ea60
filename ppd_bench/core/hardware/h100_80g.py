"""NVIDIA H100 SXM, 80 GB HBM3."""

from ppd_bench.core.profiles import HardwareProfile

PROFILE = HardwareProfile(
    name="h100-80g",
    peak_flop_per_s=989e12,
    memory_bandwidth_bytes_per_s=3.35e12,
    memory_bytes=85_520_000_000,
    compute_efficiency_ratio=0.67,
    weight_bandwidth_ratio=0.73,
    kv_bandwidth_ratio=0.90,
    kv_link_bytes_per_s=150e9,
    source=(
        "peaks: vendor data sheet (dense bf16). Efficiencies: COST_MODEL.md (MFU 0.65-0.69, weights 0.73, KV about 0.9). "
        "Link: 150 GB/s effective NVLink, PPD paper Figure 5"
    ),
)
