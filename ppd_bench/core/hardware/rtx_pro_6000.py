"""NVIDIA RTX PRO 6000 Blackwell, 96 GB GDDR7."""

from ppd_bench.core.profiles import HardwareProfile

PROFILE = HardwareProfile(
    name="rtx-pro-6000",
    peak_flop_per_s=503.8e12,
    memory_bandwidth_bytes_per_s=1.792e12,
    memory_bytes=102_600_000_000,
    compute_efficiency_ratio=0.67,
    weight_bandwidth_ratio=0.73,
    kv_bandwidth_ratio=0.90,
    kv_link_bytes_per_s=25e9,
    source=(
        "peaks: vendor data sheet (dense bf16 with fp32 accumulation; 1,792 GB/s). Efficiencies: the H100's, assumed until "
        "fitted. Link: assumed 25 GB/s over PCIe 5"
    ),
)
