"""GPU profiles by name. Adding one costs one file and one line here."""

from __future__ import annotations

from ppd_bench.core.hardware import a100_80g, b200, cpu, h20, h100_80g, h200, rtx_pro_6000
from ppd_bench.core.profiles import HardwareProfile

HARDWARE: dict[str, HardwareProfile] = {
    "h100-80g": h100_80g.PROFILE,
    "h200": h200.PROFILE,
    "h20": h20.PROFILE,
    "a100-80g": a100_80g.PROFILE,
    "b200": b200.PROFILE,
    "rtx-pro-6000": rtx_pro_6000.PROFILE,
    "cpu": cpu.PROFILE,
}
