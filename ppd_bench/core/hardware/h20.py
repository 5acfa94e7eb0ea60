"""NVIDIA H20, 96 GB HBM3."""

from ppd_bench.core.profiles import HardwareProfile

PROFILE = HardwareProfile(
    name="h20",
    peak_flop_per_s=148e12,
    memory_bandwidth_bytes_per_s=4.0e12,
    memory_bytes=102_600_000_000,
    compute_efficiency_ratio=0.67,
    weight_bandwidth_ratio=0.73,
    kv_bandwidth_ratio=0.90,
    kv_link_bytes_per_s=150e9,
    source=(
        "peaks: COST_MODEL.md (148 TFLOP/s, 4.0 TB/s). Efficiencies: the H100's; no measured kernels were found. "
        "Link: as H100 (same NVLink generation)"
    ),
)
