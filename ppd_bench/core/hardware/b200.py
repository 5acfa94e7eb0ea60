"""NVIDIA B200 SXM, 180 GB HBM3e."""

from ppd_bench.core.profiles import HardwareProfile

PROFILE = HardwareProfile(
    name="b200",
    peak_flop_per_s=2250e12,
    memory_bandwidth_bytes_per_s=8.0e12,
    memory_bytes=192_300_000_000,
    compute_efficiency_ratio=0.67,
    weight_bandwidth_ratio=0.73,
    kv_bandwidth_ratio=0.90,
    kv_link_bytes_per_s=300e9,
    source=(
        "peaks: vendor data sheet (dense bf16). Efficiencies: the H100's, assumed. Link: assumed twice the H100's as its "
        "NVLink is"
    ),
)
