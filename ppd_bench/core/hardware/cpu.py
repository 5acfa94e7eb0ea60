"""A shared two-core CPU: proves paths, not decisions."""

from ppd_bench.core.profiles import HardwareProfile

PROFILE = HardwareProfile(
    name="cpu",
    peak_flop_per_s=1.0e11,
    memory_bandwidth_bytes_per_s=1.5e10,
    memory_bytes=24_000_000_000,
    compute_efficiency_ratio=0.5,
    weight_bandwidth_ratio=0.5,
    kv_bandwidth_ratio=0.5,
    kv_link_bytes_per_s=1e9,
    source=("rough figures of one small x86-64 virtual machine with AVX2; for path tests only"),
)
