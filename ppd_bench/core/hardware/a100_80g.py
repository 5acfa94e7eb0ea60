"""NVIDIA A100 SXM, 80 GB HBM2e."""

from ppd_bench.core.profiles import HardwareProfile

PROFILE = HardwareProfile(
    name="a100-80g",
    peak_flop_per_s=312e12,
    memory_bandwidth_bytes_per_s=2.039e12,
    memory_bytes=85_900_000_000,
    compute_efficiency_ratio=0.67,
    weight_bandwidth_ratio=0.73,
    kv_bandwidth_ratio=0.90,
    kv_link_bytes_per_s=100e9,
    source=(
        "peaks: vendor data sheet (dense bf16). Efficiencies: the H100's, assumed. Link: assumed 100 GB/s effective, "
        "two thirds of the H100's as its NVLink is"
    ),
)
