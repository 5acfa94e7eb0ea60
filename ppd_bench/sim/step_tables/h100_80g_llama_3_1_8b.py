"""H100 80 GB SXM, Llama-3.1-8B bf16, kernels only.

Source: COST_MODEL.md, 'Kernels': about 25 numbers fitted on aiconfigurator-core 0.12.0's measured vLLM kernels (2.3 % median,
8 % worst error over 2,927 random mixed steps). No published figure of the PPD paper was used.
"""

from ppd_bench.sim.step_tables.surface import StepTable

_KNOTS_MS = (
    (2, 5.95), (16, 6.35), (64, 6.52), (128, 6.70), (192, 7.31), (256, 7.74), (320, 8.82), (384, 9.54), (512, 10.9),
    (640, 13.4), (768, 15.3), (1024, 20.6), (1536, 29.8), (2048, 40.2), (3072, 60.1), (4096, 81.2), (6144, 126.6),
    (8192, 170.1),
)  # fmt: skip

TABLE = StepTable(
    name="h100-80g/llama-3.1-8b",
    source="derived from aiconfigurator-core 0.12.0 (COST_MODEL.md, Kernels)",
    knots=tuple((float(tokens), milliseconds / 1e3) for tokens, milliseconds in _KNOTS_MS),
    decode=(0.336e-3, 0.00389e-3, 4.273e-8),
    prefill=(0.64e-3, 8.84e-10),
)
