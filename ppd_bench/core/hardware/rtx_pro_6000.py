"""NVIDIA RTX PRO 6000 Blackwell, 96 GB GDDR7."""

from ppd_bench.core.profiles import HardwareProfile

PROFILE = HardwareProfile(
    name="rtx-pro-6000",
    peak_flop_per_s=503.8e12,
    memory_bandwidth_bytes_per_s=1.792e12,
    memory_bytes=102_600_000_000,
    compute_efficiency_ratio=0.516,
    weight_bandwidth_ratio=0.922,
    kv_bandwidth_ratio=0.638,
    kv_link_bytes_per_s=25e9,
    source=(
        "peaks: vendor data sheet (dense bf16 with fp32 accumulation; 1,792 GB/s). The three efficiencies: fitted on TTFT and "
        "TPOT of the first 150 of 300 requests of a vLLM 0.19 run of Llama-3.1-8B (shared/data/measured), with overheads of "
        "2.0 ms per step and 10 us per sequence; on the second 150, held out, mean TTFT, TPOT and E2E are off by -0.3, -0.4 and "
        "-0.4 %. That run decodes full batches, so it fixes the two bandwidth ratios' joint effect better than each: 0.87 and "
        "0.65 fit as well. Link: assumed 25 GB/s over PCIe 5"
    ),
)
